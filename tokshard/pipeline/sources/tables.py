"""parquet and Arrow: record batches with the requested columns, and records of texts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyarrow import ipc

from tokshard.errors import UNDECODABLE, BadSourceError, SourceError, UsageError
from tokshard.pipeline.sources.chats import CHAT_FIELDS, NO_CHAT, chat_text, is_chat
from tokshard.pipeline.sources.columns import Columns
from tokshard.pipeline.sources.division import INDIVISIBLE, Divisibility, Span
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.opening import check_not_cut, damaged, open_for_arrow
from tokshard.pipeline.sources.protocol import Format
from tokshard.pipeline.sources.records import ROWS_PER_CHUNK, TOO_LONG, Problem, Records, RecordSpec, admit_rows
from tokshard.store import Entry, Store

if TYPE_CHECKING:
    import pyarrow.parquet as pq

# importing `pyarrow.parquet` and `pyarrow.compute` takes 60 ms, so only the functions that need them do

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_ARROW_MAGIC, _FEATHER_1_MAGIC = b"ARROW1", b"FEA1"

_JSON_NAME = "arrow.json"

Batches = Callable[[Columns], Iterator[tuple[pa.RecordBatch, int]]]


@contextlib.contextmanager
def open_table(
    input_: Input, span: Span, *, rows: int = ROWS_PER_CHUNK, buffer_bytes: int = 0
) -> Iterator[tuple[pa.Schema, Batches]]:
    """The schema of a table, and a function that yields batches of some columns, each with its bytes of the file.

    Args:
        rows: rows of a batch of parquet; Arrow files contain batches.
        buffer_bytes: read a column of parquet in pieces of so many bytes, which suits a single column; default: the
            requested columns of a row group at once.

    Raises:
        BadSourceError: the file is missing or damaged (also later, from the batches).
    """
    if input_.format == PARQUET.name:
        with _open_parquet(input_, buffer_bytes) as parquet:
            yield parquet.schema_arrow, partial(_parquet_batches, input_, parquet, span, rows)
        return
    with _errors_of(input_), open_for_arrow(input_) as file:
        if input_.format == ARROW.name:
            yield ipc.open_file(file).schema, partial(_file_batches, input_, file, span)
        else:
            yield ipc.open_stream(file).schema, partial(_stream_batches, input_, file)


def _parquet_batches(
    input_: Input, file: pq.ParquetFile, span: Span, rows: int, columns: Columns
) -> Iterator[tuple[pa.RecordBatch, int]]:
    groups = range(file.metadata.num_row_groups)
    chosen = list(groups[span.start : span.stop])
    num_rows = sum(file.metadata.row_group(group).num_rows for group in chosen)
    share = input_.num_bytes * len(chosen) / max(1, len(groups)) / max(1, num_rows)
    for batch in file.iter_batches(batch_size=rows, row_groups=chosen, columns=columns.paths, use_threads=False):
        yield batch, int(share * batch.num_rows)


def _file_batches(
    input_: Input, file: pa.NativeFile, span: Span, columns: Columns
) -> Iterator[tuple[pa.RecordBatch, int]]:
    reader = ipc.open_file(file, options=columns.read_options)
    batches = range(reader.num_record_batches)
    for index in batches[span.start : span.stop]:
        with _errors_of(input_, f"batch {index}: "):
            batch = reader.get_batch(index)
            batch.validate()
        check_not_cut(input_)
        yield batch, input_.num_bytes // len(batches)


def _stream_batches(input_: Input, file: pa.NativeFile, columns: Columns) -> Iterator[tuple[pa.RecordBatch, int]]:
    file.seek(0)
    reader = ipc.open_stream(file, options=columns.read_options)
    reported = 0
    while (batch := next(reader, None)) is not None:
        batch.validate()
        here = file.tell()
        yield batch, here - reported
        reported = here
    # Arrow accepts a missing end marker, so a stream that was cut off between two batches is only noticed here
    file.seek(max(0, file.size() - len(_END_OF_STREAM)))
    if file.read() != _END_OF_STREAM:
        raise damaged(input_, "the stream lacks its end-of-stream marker: it was cut off between two batches")


@contextlib.contextmanager
def _errors_of(input_: Input, place: str = "") -> Iterator[None]:
    """Turn errors of Arrow into errors about the input."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        if "crypt" in str(error).replace(input_.location, ""):  # parquet knows encrypted files, and columns
            raise BadSourceError(
                f"{input_.location} is encrypted, which is not read: {error}",
                hint="write it without encryption, or leave it out with --on-bad-source skip",
            ) from error
        raise damaged(input_, f"{place}{error}") from error


@contextlib.contextmanager
def _open_parquet(input_: Input, buffer_bytes: int = 0) -> Iterator[pq.ParquetFile]:
    """A file that checks the checksums of its pages, if they have any."""
    import pyarrow.parquet as pq

    with _errors_of(input_), open_for_arrow(input_) as file:
        yield pq.ParquetFile(
            file, buffer_size=buffer_bytes, pre_buffer=not buffer_bytes, page_checksum_verification=True
        )


def group_sizes(input_: Input) -> list[int]:
    """Bytes of each row group of a parquet file, or of each batch of an Arrow file.

    Raises:
        BadSourceError: the file is damaged.
    """
    if input_.format == PARQUET.name:
        with _open_parquet(input_) as parquet:
            groups = map(parquet.metadata.row_group, range(parquet.metadata.num_row_groups))
            return [sum(group.column(n).total_compressed_size for n in range(group.num_columns)) for group in groups]
    with _errors_of(input_), open_for_arrow(input_) as file:
        count = ipc.open_file(file).num_record_batches
        return [input_.num_bytes // max(1, count)] * count


def _groups_of(input_: Input, _: str) -> Divisibility:
    try:
        return tuple(group_sizes(input_))
    except SourceError:  # its reader will report it
        return INDIVISIBLE


def is_arrow_file(store: Store, entry: Entry) -> bool:
    """Whether a file is an Arrow file, not an Arrow stream, by its first bytes.

    Raises:
        UsageError: it is Feather of version 1.
    """
    (magic,) = store.read(entry.name, [(0, min(len(_ARROW_MAGIC), entry.size))])
    if magic.startswith(_FEATHER_1_MAGIC):
        raise UsageError(
            f"{store.where(entry.name)} is Feather of version 1, which pyarrow cannot read in parts",
            hint="write it again with pyarrow.feather.write_feather, as version 2",
        )
    return bytes(magic) == _ARROW_MAGIC


def _chunks(input_: Input, span: Span, spec: RecordSpec) -> Iterator[tuple[None, Records]]:
    with open_table(input_, span) as (schema, batches):
        texts = [name for name in CHAT_FIELDS if name in schema.names] if spec.is_chat else [spec.text_field]
        if spec.is_chat and not is_chat(texts):
            raise UsageError(
                f"{input_.location} has {NO_CHAT}; it has {', '.join(schema.names)}",
                hint="rename the field of the conversations, or leave out --chat",
            )
        columns = Columns(input_, schema, spec, [*texts, *spec.kept_paths])
        named = {field.name for field in schema if not pa.types.is_null(field.type)}
        unread = named - {*texts, *(path.split(".")[0] for path in spec.kept_paths), *spec.kept_paths}
        plain = [_json_decoder(schema.field(name)) for name in texts] if spec.is_chat else []
        for batch, input_bytes in batches(columns):
            for start, stop, found in columns.rows(batch, columns.paths):
                if isinstance(found, float):
                    records = admit_rows(spec, [None], [[None]] * len(spec.columns), {0: row_too_long(spec, found)})
                else:
                    held = found[spec.text_field] if not spec.is_chat else _conversations(texts, found, plain)
                    records = admit_rows(spec, held, [found[path] for path in spec.kept_paths])
                    for position in records.positions if spec.is_chat else ():
                        records.note_unread(position, unread)
                records.input_bytes = input_bytes * stop // batch.num_rows - input_bytes * start // batch.num_rows
                yield None, records


def _conversations(
    names: Sequence[str], found: Mapping[str, Sequence[Any]], plain: Sequence[Callable[[Any], Any] | None]
) -> list[str | None]:
    """The conversation of each row as JSON; None for a row that has none."""
    columns = (
        found[name] if decode is None else map(decode, found[name]) for name, decode in zip(names, plain, strict=True)
    )
    return [chat_text(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def _json_decoder(field: pa.Field) -> Callable[[Any], Any] | None:
    """A decoder of values of Arrow's JSON type in a column, at any depth; None if the column has none.

    `datasets` stores values of mixed types like this.
    """
    kind = field.type
    named = (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()  # by a pyarrow that lacks the type
    if _JSON_NAME in {getattr(kind, "extension_name", None), named}:
        return _json_value
    if pa.types.is_struct(kind):
        inner = {one.name: decode for one in kind if (decode := _json_decoder(one)) is not None}
        return None if not inner else lambda value: value and {**value, **{k: inner[k](value[k]) for k in inner}}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        decode = _json_decoder(kind.value_field)
        return None if decode is None else lambda value: value and [decode(item) for item in value]
    return None


def _json_value(value: Any) -> Any:
    try:
        return None if value is None else msgspec.json.decode(value)
    except UNDECODABLE:
        return value  # the reader of the conversation reports the problem


def row_too_long(spec: RecordSpec, num_bytes: float) -> Problem:
    """The problem of a row whose values take too much memory."""
    return TOO_LONG, f"values take {num_bytes:,.0f} bytes, at most {spec.max_line_bytes:,} are allowed"


PARQUET = Format(name="parquet", read=_chunks, divide=_groups_of, suffixes=(".parquet",), is_streamed=False)
ARROW_STREAM = Format(name="arrow-stream", read=_chunks, is_streamed=False)
ARROW: Format = Format(
    name="arrow",
    read=_chunks,
    divide=_groups_of,
    suffixes=(".arrow", ".ipc", ".feather"),
    is_streamed=False,
    examine=lambda store, entry: ARROW if is_arrow_file(store, entry) else ARROW_STREAM,
)
