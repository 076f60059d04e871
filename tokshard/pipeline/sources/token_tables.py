"""parquet and Arrow: the column of token ids."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyarrow import ipc

from tokshard.interop.tokens.batches import BATCH_BYTES, TokenBatch
from tokshard.interop.tokens.lists import find_field, ids_of, is_flat, join, list_batches
from tokshard.pipeline.sources.division import Groups, Span, Whole
from tokshard.pipeline.sources.fms_counts import check_counts
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.records import RecordSpec
from tokshard.pipeline.sources.tables import (
    arrow_file_batches,
    arrow_stream_batches,
    naming,
    open_arrow,
    open_parquet,
    sound,
)

_ROWS_AT_ONCE = 256


def parquet_tokens(input_: Input, span: Span, spec: RecordSpec) -> Iterator[TokenBatch]:
    with open_parquet(input_, buffer_bytes=BATCH_BYTES) as file:
        field = _field(input_, file.schema_arrow, spec)
        groups = range(file.metadata.num_row_groups)
        chosen = list(groups[span.start : span.stop] if isinstance(span, Groups) else groups)
        rows = sum(file.metadata.row_group(group).num_rows for group in chosen)
        share = input_.num_bytes * len(chosen) / max(1, len(groups)) / max(1, rows)
        with naming(input_):
            batches = file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=chosen, columns=[field], use_threads=False)
            for batch in batches:
                yield from list_batches(sound(batch.column(0)), int(share * batch.num_rows))


def arrow_file_tokens(input_: Input, span: Span, spec: RecordSpec) -> Iterator[TokenBatch]:
    with open_arrow(input_) as file:
        with naming(input_):
            schema = ipc.open_file(file).schema
        field = _field(input_, schema, spec)
        with naming(input_):
            reader = ipc.open_file(file, options=_only(schema, field))
        found = _documents(input_, field, schema, arrow_file_batches(input_, reader, span))
        if not is_flat(schema.field(field).type):
            yield from found
            return
        num_tokens = 0
        for batch in found:
            num_tokens += len(batch.tokens)
            yield batch
        check_counts(input_, reader.num_record_batches, num_tokens if isinstance(span, Whole) else None)


def arrow_stream_tokens(input_: Input, spec: RecordSpec) -> Iterator[TokenBatch]:
    with open_arrow(input_) as file:
        with naming(input_):
            schema = ipc.open_stream(file).schema
        field = _field(input_, schema, spec)
        yield from _documents(input_, field, schema, arrow_stream_batches(input_, file, _only(schema, field)))


def _field(input_: Input, schema: pa.Schema, spec: RecordSpec) -> str:
    assert spec.tokens is not None
    with naming(input_):
        return find_field(input_.location, schema, spec.tokens.field)


def _only(schema: pa.Schema, field: str) -> ipc.IpcReadOptions:
    return ipc.IpcReadOptions(included_fields=[schema.get_field_index(field)])


def _documents(
    input_: Input, field: str, schema: pa.Schema, batches: Iterator[tuple[pa.RecordBatch, int]]
) -> Iterator[TokenBatch]:
    """The documents in record batches, each given with its bytes of the file."""
    if not is_flat(schema.field(field).type):
        for batch, num_bytes in batches:
            with naming(input_):
                array = sound(batch.column(0))
            yield from _naming_each(input_, list_batches(array, num_bytes))
        return
    held, held_bytes, input_bytes = [], 0, 0
    for batch, num_bytes in batches:
        with naming(input_):
            held.append(ids_of(sound(batch.column(0))))
        held_bytes, input_bytes = held_bytes + held[-1].nbytes, input_bytes + num_bytes
        if held_bytes >= BATCH_BYTES:
            yield join(held, input_bytes)
            held, held_bytes, input_bytes = [], 0, 0
    if held:
        yield join(held, input_bytes)


def _naming_each(input_: Input, batches: Iterator[TokenBatch]) -> Iterator[TokenBatch]:
    while True:
        with naming(input_):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
