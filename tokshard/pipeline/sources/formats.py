"""All formats, and the way from an input to its chunks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tokshard.errors import SourceError
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS
from tokshard.interop.tokens.batches import TokenBatch
from tokshard.pipeline.options import TOKENS
from tokshard.pipeline.sources import (
    delimited,
    iterables,
    json_lines,
    plain_text,
    tables,
    token_files,
    token_lines,
    token_tables,
)
from tokshard.pipeline.sources.division import STREAM, Divisibility, Span
from tokshard.pipeline.sources.inputs import Input, InputTable
from tokshard.pipeline.sources.protocol import Format
from tokshard.pipeline.sources.records import Chunk, Records, RecordSpec, value_bytes

FORMATS: tuple[Format, ...] = (
    json_lines.FORMAT,
    tables.PARQUET,
    tables.ARROW,
    tables.ARROW_STREAM,
    plain_text.FORMAT,
    delimited.CSV,
    delimited.TSV,
    iterables.FORMAT,
    *token_files.FORMATS,
    token_tables.PARQUET,
    token_tables.ARROW,
    token_tables.ARROW_STREAM,
    token_lines.FORMAT,
)
"""All formats, in the order in which they are tried."""

_BY_NAME = {(form.reads, form.name): form for form in FORMATS}

_BYTES_PER_RECORD = 128
"""The least that a record counts for, even an empty or bad one: a worker may hold a whole segment. Decides shards."""


def formats_of(reads: str) -> tuple[Format, ...]:
    """The formats for the kind of records that a build reads."""
    return tuple(form for form in FORMATS if form.reads == reads)


def divisibility_of(input_: Input, text_unit: str) -> Divisibility:
    """How an input can be divided. Reads the footer of parquet and Arrow files; the readers report damage."""
    if input_.is_read_once:
        return STREAM
    form = next(form for form in FORMATS if form.name == input_.format)
    return form.divide(input_, text_unit)


def notes_on_columns(inputs: InputTable, spec: RecordSpec) -> list[str]:
    """Notes on the columns that an import leaves out. Opens one input of each kind.

    Raises:
        UsageError: a requested column is missing.
    """
    notes = []
    for input_ in inputs.first_of_each_kind():
        form = _BY_NAME[spec.reads, input_.format]
        with contextlib.suppress(SourceError, OSError):  # the reader will say so
            found = form.columns(input_, spec) if form.columns is not None else ()
            used = {name for path in spec.kept_paths for name in (path, path.split(".")[0])}
            if others := [name for name in found if name not in used]:
                notes.append(
                    f"columns of {os.path.basename(input_.location)} that are left out: {', '.join(others)}; "
                    "--keep-field NAME keeps one, with a value for each document"
                )
    return notes


def loss_columns(inputs: InputTable, wanted: str | None) -> tuple[dict[str, str], list[str]]:
    """The columns of loss spans of an import, and notes on their origin. Opens one input of each kind.

    Args:
        wanted: the column that the user gave.

    Raises:
        UsageError: it is missing, or several columns may be meant.
    """
    columns, notes = set[str](), []
    for input_ in inputs.first_of_each_kind():
        form, found = _BY_NAME[TOKENS, input_.format], None
        with contextlib.suppress(SourceError, OSError):  # the reader will say so
            found = form.loss(input_, wanted) if form.loss is not None else None
        if found is None:
            continue
        columns |= {LOSS, WEIGHTS} if found.is_weighted else {LOSS}
        shifted = ", shifted by one as in packs of Megatron-Bridge" if found.is_shifted else ""
        name = os.path.basename(found.name)
        notes.append(f"{name} of {os.path.basename(input_.location)} says which tokens are trained{shifted}")
    return {name: kind for name, kind in LOSS_COLUMNS.items() if name in columns}, notes


def read_span(input_: Input, span: Span, spec: RecordSpec) -> Iterator[Chunk]:
    """The chunks of a part of an input.

    Raises:
        SourceError: the input is gone or damaged.
        UsageError: the input has no such field.
    """
    return (chunk for _, chunk in _BY_NAME[spec.reads, input_.format].read(input_, span, spec))


def read_stream(input_: Input, spec: RecordSpec, *, task_bytes: int) -> Iterator[tuple[int, Chunk]]:
    """All chunks of an input that is read from its start, each with the index of its segment.

    A segment is `task_bytes` of decompressed lines, or of values in memory for csv and Arrow streams. A chunk belongs
    to the segment that holds its first byte. Indices ascend; a segment without the start of a record is left out.

    Raises:
        SourceError, UsageError: as `read_span`.
    """
    held = 0
    for place, chunk in _BY_NAME[spec.reads, input_.format].read(input_, Span(), spec):
        yield (held if place is None else place) // task_bytes, chunk
        if place is None:
            held += _held_bytes(chunk)


def _held_bytes(chunk: Chunk) -> int:
    """The approximate bytes of a chunk in memory: texts, kept values, and details of its bad records."""
    if isinstance(chunk, TokenBatch):
        return int(chunk.tokens.nbytes)
    assert isinstance(chunk, Records), "lines have a place in their stream"
    kept = sum(value_bytes(value) for values in chunk.columns.values() for value in values)
    problems = sum(len(bad.detail) for bad in chunk.bad)
    return sum(map(len, chunk.texts)) + kept + problems + _BYTES_PER_RECORD * chunk.count
