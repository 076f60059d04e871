"""parquet and Arrow with a column of token ids, and the tables of counts that fms-fsdp keeps beside its Arrow files."""

from __future__ import annotations

import csv
import functools
import io
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import SourceError, UsageError
from tokshard.interop.tokens.batches import BATCH_BYTES, TokenBatch, damaged
from tokshard.interop.tokens.lists import (
    find_field,
    ids_of,
    is_flat,
    join,
    list_batches,
    loss_field,
    row_fields,
    unpacked,
)
from tokshard.interop.tokens.loss import STARTS, LossField, check_loss
from tokshard.pipeline.options import TOKENS
from tokshard.pipeline.sources import tables
from tokshard.pipeline.sources.columns import Columns
from tokshard.pipeline.sources.division import Span
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.opening import store_of
from tokshard.pipeline.sources.protocol import Format
from tokshard.pipeline.sources.records import RecordSpec
from tokshard.pipeline.sources.token_files import with_columns
from tokshard.store import look_at, open_store, present

_ROWS_AT_ONCE = 256

_COUNT_COLUMNS = ["dataset/filename", "documents", "tokens"]


def _chunks(input_: Input, span: Span, spec: RecordSpec) -> Iterator[tuple[None, TokenBatch]]:
    """The documents of a table with a column of ids. If the column holds no lists, each record batch is a document."""
    with tables.open_table(input_, span, rows=_ROWS_AT_ONCE, buffer_bytes=BATCH_BYTES) as (schema, batches):
        columns, loss, of_rows = _columns(input_, schema, spec)
        assert spec.tokens is not None
        is_wanted, wanted = spec.tokens.has_loss, spec.tokens.loss_field
        check_loss(input_.location, has_loss=loss is not None, is_wanted=is_wanted, wanted=wanted)
        if loss is not None:
            loss = replace(loss, is_weighted=spec.tokens.has_weights)
        found = batches(columns)
        if is_flat(columns.kinds[columns.paths[0]]):
            documents = _joined(input_, span, columns, found)
        else:
            documents = itertools.chain.from_iterable(
                _lists(spec, columns, *one, loss=loss, row_columns=of_rows) for one in found
            )
        yield from ((None, batch) for batch in documents)


def _columns(input_: Input, schema: pa.Schema, spec: RecordSpec) -> tuple[Columns, LossField | None, Sequence[str]]:
    """The columns that an import reads of a table.

    Returns:
        The columns: of ids, those of the next two, and the kept ones; the mask or labels, if there are any; and the
        columns that mark padding, or the starts of documents in a row.
    """
    assert spec.tokens is not None
    field = find_field(input_.location, schema, spec.tokens.field)
    kind = schema.field(field).type
    if is_flat(kind) and (spec.columns or input_.format == tables.PARQUET.name):
        reason = ": other columns have a value for each id, and not for each document" if spec.columns else ""
        raise UsageError(
            f"{input_.location}: column {field!r} has type {kind}, expected lists of integers{reason}",
            hint="give another column with --token-field, or keep no columns",
        )
    loss = None if is_flat(kind) else loss_field(input_.location, schema, spec.tokens.loss_field)
    of_rows = row_fields(input_.location, schema, field)
    if STARTS in of_rows and spec.columns:
        raise UsageError(
            f"{input_.location} has packs of documents ({STARTS}): other columns have a value for each pack",
            hint="keep no columns",
        )
    paths = [*([] if loss is None else [loss.name]), *([] if is_flat(kind) else of_rows)]
    columns = Columns(input_, schema, spec, [field, *paths, *spec.kept_paths])
    return columns, loss, of_rows


def _other_columns(input_: Input, spec: RecordSpec) -> Sequence[str]:
    """The names of the columns besides the column of ids."""
    with tables.open_table(input_, Span()) as (schema, _):
        used = set(_columns(input_, schema, spec)[0].paths)
        return [name for name in schema.names if name not in used]


def _loss_field(input_: Input, wanted: str | None) -> LossField | None:
    with tables.open_table(input_, Span()) as (schema, _):
        return loss_field(input_.location, schema, wanted)


def _lists(
    spec: RecordSpec,
    columns: Columns,
    batch: pa.RecordBatch,
    input_bytes: int,
    *,
    loss: LossField | None,
    row_columns: Sequence[str],
) -> Iterator[TokenBatch]:
    """The documents of a record batch with a list of ids in each row."""
    array = columns.array(batch, columns.paths[0])
    values = None if loss is None else columns.array(batch, loss.name)
    of_rows = {name: columns.array(batch, name) for name in row_columns}
    if (starts := of_rows.pop(STARTS, None)) is not None:
        array, values = unpacked(array, starts), None if values is None else unpacked(values, starts)
        of_rows = {name: unpacked(lists, starts) for name, lists in of_rows.items()}
    assert spec.tokens is not None
    delimiters = spec.tokens.delimiters

    def part(start: int, stop: int, share: int) -> Iterator[TokenBatch]:
        of_loss = None if loss is None or values is None else (loss, values.slice(start, stop - start))
        here = {name: lists.slice(start, stop - start) for name, lists in of_rows.items()}
        return list_batches(array.slice(start, stop - start), share, of_loss, here, delimiters)

    if not spec.columns:
        yield from part(0, len(array), input_bytes)
        return
    for start, stop, kept in columns.rows(batch, spec.kept_paths):
        share = input_bytes * stop // batch.num_rows - input_bytes * start // batch.num_rows
        first = 0
        for documents in part(start, stop, share):
            if isinstance(kept, float):
                problems = {0: tables.row_too_long(spec, kept)}
                yield replace(documents, columns={name: [None] for name in spec.columns}, problems=problems)
                continue
            last = first + len(documents.ends)
            yield with_columns(documents, spec, {path: found[first:last] for path, found in kept.items()})
            first = last


def _joined(
    input_: Input, span: Span, columns: Columns, batches: Iterable[tuple[pa.RecordBatch, int]]
) -> Iterator[TokenBatch]:
    """Documents from arrays of ids, in batches. Documents and tokens of a file are counted."""
    held: list[NDArray[Any]] = []
    held_bytes = input_bytes = num_documents = num_tokens = 0
    for batch, num_bytes in batches:
        held.append(ids_of(columns.array(batch, columns.paths[0])))
        held_bytes, input_bytes = held_bytes + held[-1].nbytes, input_bytes + num_bytes
        num_documents, num_tokens = num_documents + 1, num_tokens + len(held[-1])
        if held_bytes >= BATCH_BYTES:
            yield join(held, input_bytes)
            held, held_bytes, input_bytes = [], 0, 0
    if held:
        yield join(held, input_bytes)
    if input_.format == tables.ARROW.name:
        is_whole = span == Span()
        found = num_documents if is_whole else len(tables.group_sizes(input_))
        _check_counts(input_, found, num_tokens if is_whole else None)


def _check_counts(input_: Input, num_documents: int, num_tokens: int | None) -> None:
    """Refuse a file that contradicts its line in a table of counts, or lacks one, if there is a table above it.

    fms-fsdp keeps such tables as ``meta/*counts*.csv``, with a line for each file. The file of the next line, if it
    belongs to the same folder, must be there: so of the files that are lost, each import of a folder names one.

    Args:
        num_tokens: tokens of the file; None if this task did not read all.

    Raises:
        BadSourceError: the numbers differ, and it names both; or there is no line.
        SourceError: the file of the next line is not there.
    """
    root, others = input_.location, ""
    for _ in range(input_.path.count("/") + 2):  # up to the folder above the argument
        if (root := os.path.dirname(root)).endswith(":"):  # of s3://bucket
            break
        counts = _counts(os.path.join(root, "meta"))
        said = counts.get(input_.location.removeprefix(root).lstrip("/"))
        if said is None:
            others = others or (f"{root}/meta" if counts else "")
            continue
        found = (num_documents, said[1] if num_tokens is None else num_tokens)
        if found != said[:2]:
            raise damaged(
                *store_of(input_.location),
                f"it holds {found[0]:,} documents and {found[1]:,} tokens; "
                f"{root}/meta says {said[0]:,} and {said[1]:,}",
            )
        if look_at(following := os.path.join(root, said[2])) is None:
            raise SourceError(
                f"{following} is missing; {root}/meta counts it",
                hint="fetch the file, or remove its line from the table of counts",
            )
        return
    if others:
        raise damaged(*store_of(input_.location), f"{others} counts other files and has no line for this one")


def _counts(folder: str) -> Mapping[str, tuple[int, int, str]]:
    """File to its documents, its tokens and the file after it in its folder; the last has the first.

    From all tables of a folder; tables with other columns are ignored.
    """
    store = open_store(folder)
    found = (name for name in sorted(present(store)) if "counts" in name and name.endswith(".csv"))
    return _read_counts(folder, tuple((name, store.stat(name).version) for name in found))


@functools.lru_cache(maxsize=4)
def _read_counts(folder: str, versions: Sequence[tuple[str, str]]) -> Mapping[str, tuple[int, int, str]]:
    """The content of the tables of a folder, each with its version: a later import may find others there."""
    store = open_store(folder)
    found = dict[str, tuple[int, int]]()
    for name, _ in versions:
        try:
            rows = csv.reader(io.StringIO(store.get(name).decode("utf-8", "replace")))
            if next(rows, None) == _COUNT_COLUMNS:
                found.update({row[0].lstrip("/"): (int(row[1]), int(row[2])) for row in rows if row})
        except (csv.Error, ValueError, IndexError) as error:
            raise damaged(store, name, f"a line is not a file and two numbers: {error}") from error
    of_folder = dict[str, list[str]]()
    for path in found:
        of_folder.setdefault(os.path.dirname(path), []).append(path)
    following = {one: other for paths in of_folder.values() for one, other in pairwise([*paths, paths[0]])}
    return {path: (*counts, following[path]) for path, counts in found.items()}


def _of_tokens(form: Format, **more: Any) -> Format:
    return replace(form, reads=TOKENS, read=_chunks, columns=_other_columns, loss=_loss_field, **more)


PARQUET = _of_tokens(tables.PARQUET)
ARROW_STREAM = _of_tokens(tables.ARROW_STREAM)
ARROW: Format = _of_tokens(
    tables.ARROW,
    helpers=("*/meta/*counts*.csv",),
    examine=lambda store, entry: ARROW if tables.is_arrow_file(store, entry) else ARROW_STREAM,
)
