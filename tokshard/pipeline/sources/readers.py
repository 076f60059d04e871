"""One reader per format: how an input can be cut, and its chunks.

Arrow and parquet come as columns, csv as rows, JSON lines as raw lines that the encoding process parses.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
from pyarrow import ipc

from tokshard.errors import SourceError, UsageError
from tokshard.pipeline.sources import discover as sources
from tokshard.pipeline.sources.discover import Input, vanished
from tokshard.pipeline.sources.iterables import record_chunks
from tokshard.pipeline.sources.plain_text import line_documents, max_text_line_bytes, paragraphs, whole_text
from tokshard.pipeline.sources.records import (
    FILE,
    LINE,
    MALFORMED,
    TOO_LONG,
    Chunk,
    LineChunk,
    Records,
    RecordSpec,
    admit_rows,
)
from tokshard.pipeline.sources.streams import (
    CHUNK_BYTES,
    ByteSource,
    PlainBytes,
    damaged,
    line_chunks,
    open_bytes,
    open_file,
)
from tokshard.pipeline.sources.tar import tar_chunks
from tokshard.pipeline.tasks.planning import ByteRange, Grouped, Groups, Lines, Span, Split, Stream, Unit

if TYPE_CHECKING:
    import pyarrow.parquet as pq

# `pyarrow.parquet` and `pyarrow.compute` take a process 60 ms to import, so they are where they are needed

_ROWS_PER_BATCH = 1_024
_BYTES_PER_RECORD = 128
"""What a record counts for at least, be it empty or bad: a worker may hold a whole segment. Decides shards."""
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def split_of(source: Input, text_mode: str = FILE) -> Split:
    """How an input can be cut. Reads the footer of parquet and Arrow files; a damaged one is left to its reader."""
    if source.is_read_once:
        return Stream(is_here=True)
    if source.format == sources.TXT and text_mode == FILE:
        return Unit()
    if source.format in (sources.PARQUET, sources.ARROW):
        try:
            return Grouped(tuple(_group_sizes(source)))
        except SourceError:
            return Unit()
    has_lines = source.format == sources.JSONL or (source.format == sources.TXT and text_mode == LINE)
    return Lines() if has_lines and source.compression is None else Stream()


def read_span(source: Input, span: Span, spec: RecordSpec) -> Iterator[Chunk]:
    """The chunks of a part of an input.

    Raises:
        SourceError: the input is gone or damaged.
        UsageError: the input has no such field.
    """
    if source.format == sources.PARQUET:
        return _parquet_chunks(source, span, spec)
    if source.format == sources.ARROW:
        return _arrow_file_chunks(source, span, spec)
    if source.compression is None and not source.is_read_once:
        if source.format == sources.JSONL:
            return (chunk for _, chunk in _line_range_chunks(source, span, spec.max_line_bytes))
        if source.format == sources.TXT and spec.text_mode == LINE:
            lines = _line_range_chunks(source, span, max_text_line_bytes(spec))
            return (line_documents(index, chunk, spec) for index, chunk in lines)
    return (chunk for _, chunk in read_stream(source, spec, task_bytes=CHUNK_BYTES))


def read_stream(source: Input, spec: RecordSpec, *, task_bytes: int) -> Iterator[tuple[int, Chunk]]:
    """All chunks of an input that is read from its start, each with its segment.

    A segment is `task_bytes` of decompressed lines, or of what is held for csv and Arrow streams. Segments ascend; one
    in which no record starts is left out.

    Raises:
        SourceError, UsageError: as `read_span`.
    """
    if source.format == sources.RECORDS:
        return _by_held_bytes(record_chunks(source, spec), task_bytes)
    if source.format == sources.JSONL:
        lines = _line_stream_chunks(source, spec.max_line_bytes)
        return ((index * CHUNK_BYTES // task_bytes, chunk) for index, chunk in lines)
    if source.format == sources.TXT:
        return _text_stream_chunks(source, spec, task_bytes)
    if source.format == sources.TAR:
        return tar_chunks(source, spec, task_bytes)
    reader = _arrow_stream_chunks if source.format == sources.ARROW_STREAM else _csv_chunks
    return _by_held_bytes(reader(source, spec), task_bytes)


# JSON lines and plain text


def _line_range_chunks(source: Input, span: Span, max_line_bytes: int) -> Iterator[tuple[int, LineChunk]]:
    start, stop = (span.start, span.stop) if isinstance(span, ByteRange) else (0, None)
    with open_file(source) as file:
        file.seek(max(0, start - 1))
        stream = PlainBytes(source, file)

        def position() -> int:
            # the end of the last line lies in the next range, which counts it
            here = stream.file_position()
            return here if stop is None else min(here, stop)

        yield from line_chunks(stream.read, start=start, stop=stop, max_line_bytes=max_line_bytes, position=position)


def _line_stream_chunks(source: Input, max_line_bytes: int) -> Iterator[tuple[int, LineChunk]]:
    with open_bytes(source) as stream:
        yield from line_chunks(
            stream.read, start=0, stop=None, max_line_bytes=max_line_bytes, position=stream.file_position
        )


def _text_stream_chunks(source: Input, spec: RecordSpec, task_bytes: int) -> Iterator[tuple[int, Records]]:
    if spec.text_mode == LINE:
        for index, chunk in _line_stream_chunks(source, max_text_line_bytes(spec)):
            yield index * CHUNK_BYTES // task_bytes, line_documents(index, chunk, spec)
        return
    with open_bytes(source) as stream:
        if spec.text_mode == FILE:
            yield 0, whole_text(stream.read, spec, input_bytes=source.num_bytes)
            return
        for index, records in paragraphs(stream.read, spec, position=stream.file_position):
            yield index * CHUNK_BYTES // task_bytes, records


# parquet and Arrow


def _group_sizes(source: Input) -> Iterator[int]:
    if source.format == sources.PARQUET:
        with _open_parquet(source) as file:
            metadata = file.metadata
            for index in range(metadata.num_row_groups):
                group = metadata.row_group(index)
                yield sum(group.column(column).total_compressed_size for column in range(group.num_columns))
    else:
        with _open_arrow(source) as file, _naming(source):
            count = ipc.open_file(file).num_record_batches
        yield from [source.num_bytes // max(1, count)] * count


def _open_parquet(source: Input) -> pq.ParquetFile:
    import pyarrow.parquet as pq

    with _naming(source):
        return pq.ParquetFile(source.location)


def _parquet_chunks(source: Input, span: Span, spec: RecordSpec) -> Iterator[Chunk]:
    with _open_parquet(source) as file:
        fields = _Fields(source, file.schema_arrow, spec)
        groups = range(file.metadata.num_row_groups)
        chosen = list(groups[span.start : span.stop] if isinstance(span, Groups) else groups)
        rows = sum(file.metadata.row_group(group).num_rows for group in chosen)
        share = source.num_bytes * len(chosen) / max(1, len(groups)) / max(1, rows)
        try:
            batches = file.iter_batches(
                batch_size=_ROWS_PER_BATCH, row_groups=chosen, columns=fields.paths, use_threads=False
            )
            for batch in batches:
                yield from fields.chunks(batch, int(share * batch.num_rows))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(source, str(error)) from error


@contextlib.contextmanager
def _naming(source: Input, place: str = "") -> Iterator[None]:
    """Errors of Arrow, said of the input.

    Raises:
        BadSourceError: the file is gone or damaged.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise vanished(source, error) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(source, f"{place}{error}") from error


def _open_arrow(source: Input) -> pa.NativeFile:
    """An Arrow input. It is never mapped: a mapped file that is cut ends the process with SIGBUS."""
    with _naming(source):
        return pa.OSFile(source.location)


def _arrow_file_chunks(source: Input, span: Span, spec: RecordSpec) -> Iterator[Chunk]:
    with _open_arrow(source) as file:
        with _naming(source):
            schema = ipc.open_file(file).schema
        fields = _Fields(source, schema, spec)
        with _naming(source):
            reader = ipc.open_file(file, options=fields.read_options)
        batches = range(reader.num_record_batches)
        for index in batches[span.start : span.stop] if isinstance(span, Groups) else batches:
            with _naming(source, f"batch {index}: "):
                batch = reader.get_batch(index)
                batch.validate()
            yield from fields.chunks(batch, source.num_bytes // len(batches))


def _arrow_stream_chunks(source: Input, spec: RecordSpec) -> Iterator[Records]:
    with _open_arrow(source) as file:
        with _naming(source):
            schema = ipc.open_stream(file).schema
        fields = _Fields(source, schema, spec)
        with _naming(source):
            file.seek(0)
            reader = ipc.open_stream(file, options=fields.read_options)
        reported = 0
        while True:
            with _naming(source):
                batch = next(reader, None)
                if batch is None:
                    break
                batch.validate()
                here = file.tell()
            yield from fields.chunks(batch, here - reported)
            reported = here
        # Arrow takes a missing end for the end, so a stream cut between two batches has to be noticed here
        with _naming(source):
            file.seek(max(0, file.size() - len(_END_OF_STREAM)))
            end = file.read()
        if end != _END_OF_STREAM:
            raise damaged(source, "the stream has no end-of-stream marker: it was cut off between two batches")


class _Fields:
    """The columns of a table that a `RecordSpec` asks for.

    Raises:
        UsageError: a field is missing, or the text is not a string column.
    """

    def __init__(self, source: Input, schema: pa.Schema, spec: RecordSpec) -> None:
        self._source, self._spec = source, spec
        try:
            names = schema.names
        except UnicodeDecodeError as error:
            raise damaged(source, f"a field has a name that is not UTF-8: {error}") from error
        self._indices = {name: index for index, name in enumerate(names)}
        wanted = {name: path for name, (path, _) in spec.columns.items()}
        self.paths = list(dict.fromkeys([spec.text_field, *wanted.values()]))
        self._parts: dict[str, tuple[str, list[str]]] = {}
        """Of each path the column, and the fields of structs below it."""
        for path in self.paths:
            kind, self._parts[path] = _resolve(source, schema, path, spec)
            if path == spec.text_field and not _is_text(kind):
                raise UsageError(
                    f"{source.location}: field {path!r} has type {kind}, expected a string",
                    hint=f"give the field that holds the text with --text-field; fields: {', '.join(names)}",
                )

    @property
    def read_options(self) -> ipc.IpcReadOptions:
        """For Arrow: the other columns of a batch are neither read nor held."""
        return ipc.IpcReadOptions(included_fields=sorted({self._indices[root] for root, _ in self._parts.values()}))

    def chunks(self, batch: pa.RecordBatch, input_bytes: int) -> Iterator[Records]:
        """The batch in chunks of at most `_ROWS_PER_BATCH` records.

        Raises:
            SourceError: the batch points outside of itself.
        """
        try:
            arrays = {path: _sound(self._array(batch, path)) for path in self.paths}
        except pa.ArrowException as error:
            raise damaged(self._source, str(error)) from error
        for start in range(0, batch.num_rows, _ROWS_PER_BATCH):
            rows = min(_ROWS_PER_BATCH, batch.num_rows - start)
            slices = {path: array.slice(start, rows) for path, array in arrays.items()}
            values = {path: self._values(path, part) for path, part in slices.items()}
            is_small = all(map(_holds_little, slices.values()))
            for first, stop in [(0, rows)] if is_small else _runs(list(values.values()), rows):
                texts = values[self._spec.text_field][first:stop]
                columns = {name: values[path][first:stop] for name, (path, _) in self._spec.columns.items()}
                share = input_bytes * (start + stop) // batch.num_rows - input_bytes * (start + first) // batch.num_rows
                yield admit_rows(self._spec, texts, columns, input_bytes=share)

    def _values(self, path: str, array: pa.Array) -> Sequence[Any]:
        if pa.types.is_dictionary(array.type):
            # one object for each value, however many rows have it: decoded, 4 KB of rows could fill any memory
            indices = array.indices
            used = indices.unique().drop_null()
            known = dict(zip(used.to_pylist(), self._values(path, array.dictionary.take(used)), strict=True))
            return [known.get(index) for index in indices.to_pylist()]
        if pa.types.is_temporal(array.type):
            array = array.cast(pa.string())  # Python has no nanoseconds, and no years above 9999
        try:
            values: Sequence[Any] = array.to_pylist()
        except (ValueError, OverflowError) as error:  # such values inside of a struct or list
            raise SourceError(
                f"{self._source.location}: field {path!r} cannot be read: {error}", hint="leave it out of --keep"
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


def _holds_little(array: pa.Array) -> bool:
    """Whether the values of a column are surely no more than a chunk should hold."""
    return not pa.types.is_dictionary(array.type) and array.nbytes < CHUNK_BYTES


def _runs(columns: Sequence[Sequence[Any]], num_rows: int) -> Iterator[tuple[int, int]]:
    """Rows as half-open ranges of `CHUNK_BYTES` of values, or of one row: encoding costs a multiple of its texts."""
    start = size = 0
    for row in range(num_rows):
        size += sum(_value_bytes(values[row]) for values in columns)
        if size >= CHUNK_BYTES:
            yield start, row + 1
            start, size = row + 1, 0
    if start < num_rows:
        yield start, num_rows


def _field_hint(path: str, spec: RecordSpec, what: str = "field") -> str:
    """Which option asks for a field that is not there."""
    if path == spec.text_field:
        return f"give the {what} that holds the text with --text-field"
    is_id = path == spec.columns.get("id", ("",))[0]
    return (
        f"give the name of a {what} that is there with {'--id-field' if is_id else '--keep'}, or leave the option out"
    )


def _resolve(
    source: Input, schema: pa.Schema, path: str, spec: RecordSpec
) -> tuple[pa.DataType, tuple[str, list[str]]]:
    root, *rest = path.split(".")
    for name in (path, root):
        if schema.names.count(name) > 1:
            raise UsageError(
                f"{source.location} has {schema.names.count(name)} fields {name!r}",
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
        f"{source.location} has no field {path!r}; it has {', '.join(schema.names)}",
        hint=_field_hint(path, spec),
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


def _sound(array: pa.Array) -> pa.Array:
    """The array, safe to read: no offset, view or index leaves it. Costs little beside reading the values.

    Strings that hold invalid UTF-8 come back as binary, so that each value can be looked at.

    Raises:
        pa.ArrowException: it is not what it says.
    """
    if pa.types.is_dictionary(array.type):
        array = pa.DictionaryArray.from_arrays(array.indices, _sound(array.dictionary))
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        if array.type not in _BINARY_OF:
            raise
        array = array.view(_BINARY_OF[array.type])
        array.validate(full=True)
    return array


_BINARY_OF = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


# csv


def _csv_chunks(source: Input, spec: RecordSpec) -> Iterator[Records]:
    # a field longer than this raises; the largest the type allows is far above what memory should hold
    csv.field_size_limit(spec.max_line_bytes)
    with open_bytes(source) as stream:
        text = io.TextIOWrapper(
            io.BufferedReader(_Raw(stream), CHUNK_BYTES), encoding="utf-8", errors="surrogateescape", newline=""
        )
        lines = _CsvLines(text, spec.max_line_bytes)
        rows = csv.reader(lines, strict=True, delimiter="\t" if source.format == sources.TSV else ",")
        try:
            header = next(rows)
        except StopIteration:
            raise damaged(source, "the file is empty, expected a header line") from None
        except csv.Error as error:
            raise damaged(source, f"line {lines.count}: {error}") from error
        places = _csv_places(source, header, spec)
        records = _csv_records(_csv_rows(rows, lines, len(header), spec.max_line_bytes), places, spec, stream)
        for chunk in records:
            chunk.num_marks, lines.num_marks = lines.num_marks, 0
            yield chunk


class _CsvLines:
    """The lines of a csv file; of one that is too long to be held comes a `csv.Error`.

    Args:
        max_chars: of a line.
    """

    def __init__(self, text: io.TextIOWrapper, max_chars: int) -> None:
        self._text, self._max_chars = text, max_chars
        self.count = 0
        self.num_quotes = 0
        """Since it was last set to 0."""
        self.num_marks = 0
        """Byte order marks that were dropped: 1 at most."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        line = part = self._text.readline(self._max_chars)
        if not line:
            raise StopIteration
        self.count += 1
        self.num_quotes += line.count('"')
        while len(part) == self._max_chars and not part.endswith("\n"):
            part = self._text.readline(self._max_chars)
            self.num_quotes += part.count('"')
        if part is not line:
            raise csv.Error(_FIELD_TOO_LARGE)
        if self.count == 1 and line.startswith("\ufeff"):
            self.num_marks, line = 1, line[1:]
        return line

    def skip_record(self) -> None:
        """Pass over the lines of a record whose first ones were read: its quotes are even at its end."""
        while self.num_quotes % 2:
            with contextlib.suppress(csv.Error):
                if next(self, None) is None:
                    return


_FIELD_TOO_LARGE = "field larger than field limit"
"""What the csv module says too."""


def _csv_places(source: Input, header: Sequence[str], spec: RecordSpec) -> Mapping[str, int]:
    wanted = [spec.text_field, *(path for path, _ in spec.columns.values())]
    for path in wanted:
        if header.count(path) != 1:
            problem = f"{source.location} has {header.count(path)} columns {path!r}; its header is {', '.join(header)}"
            if len(header) == 1 and (found := [mark for mark in ";\t|," if mark in header[0]]):
                known = "tabs" if source.format == sources.TSV else "commas"
                raise UsageError(
                    f"{problem}: its fields seem to be divided by {found[0]!r}, not by {known}",
                    hint="write it again with commas as .csv, or with tabs as .tsv",
                )
            raise UsageError(problem, hint=_field_hint(path, spec, "column"))
    return {path: header.index(path) for path in wanted}


def _csv_rows(
    rows: Iterator[list[str]], lines: _CsvLines, num_fields: int, max_chars: int
) -> Iterator[tuple[list[str], tuple[str, str] | None]]:
    """The fields of each row, and reason and detail of what is wrong with it."""
    while True:
        lines.num_quotes = 0
        row: list[str] = []
        reason, problem = MALFORMED, ""
        try:
            row = next(rows) or [""] * num_fields  # an empty line is an empty record
        except StopIteration:
            return
        except csv.Error as error:
            problem = str(error)
        else:
            if len(row) != num_fields:
                problem = f"{len(row)} fields, the header has {num_fields}"
        line = lines.count
        if problem.startswith(_FIELD_TOO_LARGE):
            reason, problem = TOO_LONG, f"a field has more than {max_chars:,} characters"
            lines.skip_record()  # what is left of the field would be taken for rows
        yield row, (reason, f"line {line}: {problem}") if problem else None


def _csv_records(
    rows: Iterator[tuple[list[str], tuple[str, str] | None]],
    places: Mapping[str, int],
    spec: RecordSpec,
    stream: ByteSource,
) -> Iterator[Records]:
    texts: list[Any] = []
    columns: dict[str, list[Any]] = {name: [] for name in spec.columns}
    broken: dict[int, tuple[str, str]] = {}
    size, reported = 0, 0

    def flush() -> Records:
        nonlocal texts, columns, broken, size, reported
        here = stream.file_position()
        records = admit_rows(spec, texts, columns, input_bytes=here - reported, broken=broken)
        reported = here
        texts, columns, broken, size = [], {name: [] for name in spec.columns}, {}, 0
        return records

    for row, problem in rows:
        if problem:
            broken[len(texts)] = problem
        texts.append(None if problem else _escaped(row[places[spec.text_field]]))
        size += _value_bytes(texts[-1])
        for name, (path, kind) in spec.columns.items():
            value = None if problem else row[places[path]]
            columns[name].append(None if kind != "string" and not value else value)
            size += _value_bytes(value)
        if size >= CHUNK_BYTES or len(texts) >= _ROWS_PER_BATCH:
            yield flush()
    if texts:
        yield flush()


def _escaped(text: str) -> str | bytes:
    """Bytes where the text holds what was not UTF-8, so that it is reported as that."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape")


class _Raw(io.RawIOBase):
    """A `ByteSource` as a raw file."""

    def __init__(self, stream: ByteSource) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _by_held_bytes(chunks: Iterator[Records], task_bytes: int) -> Iterator[tuple[int, Chunk]]:
    """Number the segments of an input without lines: a chunk belongs to the one in which what it holds starts."""
    seen = 0
    for chunk in chunks:
        yield seen // task_bytes, chunk
        seen += _held_bytes(chunk)


def _held_bytes(chunk: Records) -> int:
    """About what a chunk holds in memory: texts, kept values, and what is wrong with its bad records."""
    kept = sum(_value_bytes(value) for values in chunk.columns.values() for value in values)
    problems = sum(len(bad.detail) for bad in chunk.bad)
    return sum(map(len, chunk.texts)) + kept + problems + _BYTES_PER_RECORD * chunk.count


def _value_bytes(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes) else 0
