"""parquet and Arrow: the columns that are asked for, in chunks of records."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import ipc

from tokshard.errors import SourceError, UsageError
from tokshard.pipeline.sources.division import CHUNK_BYTES, Groups, Span
from tokshard.pipeline.sources.inputs import PARQUET, Input
from tokshard.pipeline.sources.opening import check_not_cut, damaged, open_for_arrow, vanished
from tokshard.pipeline.sources.records import (
    ROWS_PER_CHUNK,
    TOO_LONG,
    Chunk,
    Records,
    RecordSpec,
    admit_rows,
    field_hint,
    value_bytes,
)
from tokshard.pipeline.sources.shared_values import can_be_read, is_view, row_ranges

if TYPE_CHECKING:
    import pyarrow.parquet as pq

# importing `pyarrow.parquet` and `pyarrow.compute` takes 60 ms, so only the functions that need them do


_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def group_sizes(input_: Input) -> Iterator[int]:
    if input_.format == PARQUET:
        with open_parquet(input_) as file:
            metadata = file.metadata
            for index in range(metadata.num_row_groups):
                group = metadata.row_group(index)
                yield sum(group.column(column).total_compressed_size for column in range(group.num_columns))
    else:
        with open_arrow(input_) as file, naming(input_):
            count = ipc.open_file(file).num_record_batches
        yield from [input_.num_bytes // max(1, count)] * count


@contextlib.contextmanager
def open_parquet(input_: Input, *, buffer_bytes: int = 0) -> Iterator[pq.ParquetFile]:
    """A file whose pages are compared with their checksums, if they have any.

    Args:
        buffer_bytes: read a column in pieces of so many bytes, which suits a single one; default: all that is wanted of
            the row groups at once.
    """
    import pyarrow.parquet as pq

    with open_arrow(input_) as file:
        with naming(input_):
            parquet = pq.ParquetFile(
                file, buffer_size=buffer_bytes, pre_buffer=not buffer_bytes, page_checksum_verification=True
            )
        yield parquet


def parquet_chunks(input_: Input, span: Span, spec: RecordSpec) -> Iterator[Chunk]:
    with open_parquet(input_) as file:
        fields = _Fields(input_, file.schema_arrow, spec)
        groups = range(file.metadata.num_row_groups)
        chosen = list(groups[span.start : span.stop] if isinstance(span, Groups) else groups)
        rows = sum(file.metadata.row_group(group).num_rows for group in chosen)
        share = input_.num_bytes * len(chosen) / max(1, len(groups)) / max(1, rows)
        try:
            batches = file.iter_batches(
                batch_size=ROWS_PER_CHUNK, row_groups=chosen, columns=fields.paths, use_threads=False
            )
            for batch in batches:
                yield from fields.chunks(batch, int(share * batch.num_rows))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(input_, str(error)) from error


@contextlib.contextmanager
def naming(input_: Input, place: str = "") -> Iterator[None]:
    """Turn errors of Arrow into errors about the input.

    Raises:
        BadSourceError: the file is gone or damaged.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise vanished(input_, error) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(input_, f"{place}{error}") from error


def open_arrow(input_: Input) -> pa.NativeFile:
    with naming(input_):
        return open_for_arrow(input_)


def arrow_file_chunks(input_: Input, span: Span, spec: RecordSpec) -> Iterator[Chunk]:
    with open_arrow(input_) as file:
        with naming(input_):
            schema = ipc.open_file(file).schema
        fields = _Fields(input_, schema, spec)
        with naming(input_):
            reader = ipc.open_file(file, options=fields.read_options)
        for batch, input_bytes in arrow_file_batches(input_, reader, span):
            yield from fields.chunks(batch, input_bytes)


def arrow_file_batches(
    input_: Input, reader: ipc.RecordBatchFileReader, span: Span
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The record batches of a span, each with the bytes of the file that it stands for.

    Raises:
        SourceError: one is damaged.
    """
    batches = range(reader.num_record_batches)
    for index in batches[span.start : span.stop] if isinstance(span, Groups) else batches:
        with naming(input_, f"batch {index}: "):
            batch = reader.get_batch(index)
            batch.validate()
        check_not_cut(input_)
        yield batch, input_.num_bytes // len(batches)


def arrow_stream_chunks(input_: Input, spec: RecordSpec) -> Iterator[Records]:
    with open_arrow(input_) as file:
        with naming(input_):
            schema = ipc.open_stream(file).schema
        fields = _Fields(input_, schema, spec)
        for batch, input_bytes in arrow_stream_batches(input_, file, fields.read_options):
            yield from fields.chunks(batch, input_bytes)


def arrow_stream_batches(
    input_: Input, file: pa.NativeFile, options: ipc.IpcReadOptions
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The record batches of a stream, each with the bytes of the file that it stands for.

    Raises:
        SourceError: the stream is damaged or cut.
    """
    with naming(input_):
        file.seek(0)
        reader = ipc.open_stream(file, options=options)
    reported = 0
    while True:
        with naming(input_):
            batch = next(reader, None)
            if batch is None:
                break
            batch.validate()
            here = file.tell()
        yield batch, here - reported
        reported = here
    # Arrow accepts a missing end marker, so a stream that was cut off between two batches is only noticed here
    with naming(input_):
        file.seek(max(0, file.size() - len(_END_OF_STREAM)))
        end = file.read()
    if end != _END_OF_STREAM:
        raise damaged(input_, "the stream lacks its end-of-stream marker: it was cut off between two batches")


class _Fields:
    """The columns of a table that a `RecordSpec` asks for.

    Raises:
        UsageError: a field is missing, the text is not a string column, or a kept column cannot be counted.
    """

    def __init__(self, input_: Input, schema: pa.Schema, spec: RecordSpec) -> None:
        self._input, self._spec = input_, spec
        try:
            names = schema.names
        except UnicodeDecodeError as error:
            raise damaged(input_, f"a field has a name that is not UTF-8: {error}") from error
        self._indices = {name: index for index, name in enumerate(names)}
        wanted = {name: path for name, (path, _) in spec.columns.items()}
        self.paths = list(dict.fromkeys([spec.text_field, *wanted.values()]))
        self._parts: dict[str, tuple[str, list[str]]] = {}
        """For each path: its column, and the struct fields below that column."""
        for path in self.paths:
            kind, self._parts[path] = _resolve(input_, schema, path, spec)
            if path == spec.text_field and not _is_text(kind):
                raise UsageError(
                    f"{input_.location}: field {path!r} has type {kind}, expected a string",
                    hint=f"give the field that holds the text with --text-field; fields: {', '.join(names)}",
                )
            if not can_be_read(kind):
                raise UsageError(
                    f"{input_.location}: field {path!r} has type {kind}, which a build cannot keep",
                    hint="cast it to strings, numbers, lists or structs in the source, or leave it out of --keep",
                )

    @property
    def read_options(self) -> ipc.IpcReadOptions:
        """With these options Arrow neither reads nor holds the other columns of a batch."""
        return ipc.IpcReadOptions(included_fields=sorted({self._indices[root] for root, _ in self._parts.values()}))

    def chunks(self, batch: pa.RecordBatch, input_bytes: int) -> Iterator[Records]:
        """The batch in chunks of at most `ROWS_PER_CHUNK` records and about `CHUNK_BYTES` of values.

        Raises:
            SourceError: the batch is damaged.
        """
        try:
            arrays = {path: sound(self._array(batch, path)) for path in self.paths}
        except pa.ArrowException as error:
            raise damaged(self._input, str(error)) from error
        num_rows: int = batch.num_rows

        def share(start: int, stop: int) -> int:
            return input_bytes * stop // num_rows - input_bytes * start // num_rows

        for start, end, shared_bytes in row_ranges(list(arrays.values()), num_rows):
            if shared_bytes > self._spec.max_line_bytes:
                yield self._too_long_row(shared_bytes, share(start, end))
                continue
            slices = {path: array.slice(start, end - start) for path, array in arrays.items()}
            values = {path: self._values(path, part) for path, part in slices.items()}
            is_small = all(map(_holds_little, slices.values()))
            for first, stop in [(0, end - start)] if is_small else _runs(list(values.values()), end - start):
                texts = values[self._spec.text_field][first:stop]
                columns = {name: values[path][first:stop] for name, (path, _) in self._spec.columns.items()}
                yield admit_rows(self._spec, texts, columns, input_bytes=share(start + first, start + stop))

    def _too_long_row(self, num_bytes: float, input_bytes: int) -> Records:
        detail = f"values take {num_bytes:,.0f} bytes, at most {self._spec.max_line_bytes:,} are allowed"
        columns = {name: [None] for name in self._spec.columns}
        return admit_rows(self._spec, [None], columns, input_bytes=input_bytes, broken={0: (TOO_LONG, detail)})

    def _values(self, path: str, array: pa.Array) -> Sequence[Any]:
        if pa.types.is_dictionary(array.type):
            # one Python object per value, however many rows share it: decoded row by row, 4 KB could fill any memory
            indices = array.indices
            used = indices.unique().drop_null()
            if is_view(array.type.value_type):  # which `take` does not support
                found: Sequence[Any] = [array.dictionary[index].as_py() for index in used.to_pylist()]
            else:
                found = self._values(path, array.dictionary.take(used))
            known = dict(zip(used.to_pylist(), found, strict=True))
            return [known.get(index) for index in indices.to_pylist()]
        if pa.types.is_temporal(array.type):
            array = array.cast(pa.string())  # Python lacks nanoseconds and years above 9999
        try:
            # with pandas installed, nested nanoseconds become types of pandas, which would be kept as other text
            if (kind := _in_microseconds(array.type)) != array.type:
                array = array.cast(kind)
            values: Sequence[Any] = array.to_pylist()
        except (ValueError, OverflowError, pa.ArrowNotImplementedError) as error:  # inside of a struct or list
            problem = f"Nanoseconds in it: {error}" if isinstance(error, pa.ArrowInvalid) else str(error)
            raise SourceError(
                f"{self._input.location}: field {path!r} cannot be read: {problem}", hint="leave it out of --keep"
            ) from error
        return values

    def _array(self, batch: pa.RecordBatch, path: str) -> pa.Array:
        root, rest = self._parts[path]
        array = batch.column(batch.schema.get_field_index(root))
        if rest:
            import pyarrow.compute as pc

            for name in rest:
                # a null struct has null children, which field() alone would not show
                array = pc.struct_field(array, name)
        return array


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    """The nested type with its times in microseconds, the finest unit of Python's own types."""

    def inner() -> pa.Field:
        return kind.value_field.with_type(_in_microseconds(kind.value_type))

    if pa.types.is_timestamp(kind):
        kind = pa.timestamp("us", kind.tz) if kind.unit == "ns" else kind
    elif pa.types.is_struct(kind):
        kind = pa.struct([field.with_type(_in_microseconds(field.type)) for field in kind])
    elif pa.types.is_list(kind):
        kind = pa.list_(inner())
    elif pa.types.is_large_list(kind):
        kind = pa.large_list(inner())
    elif pa.types.is_fixed_size_list(kind):
        kind = pa.list_(inner(), kind.list_size)
    elif pa.types.is_map(kind):
        kind = pa.map_(_in_microseconds(kind.key_type), _in_microseconds(kind.item_type))
    return _MICROSECONDS.get(kind, kind)


_MICROSECONDS = {pa.duration("ns"): pa.duration("us"), pa.time64("ns"): pa.time64("us")}


def _holds_little(array: pa.Array) -> bool:
    """Whether the values of a column certainly fit into a chunk.

    Dictionaries and views never count as small: their rows may share one value.
    """
    return any(is_type(array.type) for is_type in _WITH_OWN_VALUES) and array.nbytes < CHUNK_BYTES


_WITH_OWN_VALUES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_primitive,
    pa.types.is_null,
)


def _runs(columns: Sequence[Sequence[Any]], num_rows: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of rows with about `CHUNK_BYTES` of values: encoding takes several times as much memory."""
    start = size = 0
    for row in range(num_rows):
        size += sum(value_bytes(values[row]) for values in columns)
        if size >= CHUNK_BYTES:
            yield start, row + 1
            start, size = row + 1, 0
    if start < num_rows:
        yield start, num_rows


def _resolve(
    input_: Input, schema: pa.Schema, path: str, spec: RecordSpec
) -> tuple[pa.DataType, tuple[str, list[str]]]:
    root, *rest = path.split(".")
    for name in (path, root):
        if schema.names.count(name) > 1:
            raise UsageError(
                f"{input_.location} has {schema.names.count(name)} fields {name!r}",
                hint="rename one of them in the source",
            )
    if path in schema.names:
        return schema.field(path).type, (path, [])
    if root in schema.names:
        kind = schema.field(root).type
        for name in rest:
            if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
                break
            kind = kind.field(name).type
        else:
            return kind, (root, rest)
    raise UsageError(
        f"{input_.location} has no field {path!r}; it has {', '.join(schema.names)}",
        hint=field_hint(path, spec),
    )


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    names = (
        "is_string",
        "is_large_string",
        "is_string_view",
        "is_binary",
        "is_large_binary",
        "is_binary_view",
        "is_null",
    )
    return any(getattr(pa.types, name)(kind) for name in names)


def sound(array: pa.Array) -> pa.Array:
    """Check that no offset, view or index of the array points outside it; costs little next to reading its values.

    Returns:
        The array. Strings with invalid UTF-8 become binary, so that each value can be checked by itself.

    Raises:
        pa.ArrowException: the array is damaged.
    """
    if pa.types.is_dictionary(array.type):
        array = pa.DictionaryArray.from_arrays(array.indices, sound(array.dictionary))
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        if array.type not in _BINARY_OF:
            raise
        array = array.view(_BINARY_OF[array.type])
        array.validate(full=True)
    return array


_BINARY_OF = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
