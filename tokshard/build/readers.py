"""One reader per format: how an input can be cut, and its chunks.

Arrow and parquet come as columns, csv as rows, JSON lines as raw lines that the encoding process parses.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
from pyarrow import ipc

from tokshard.build import sources
from tokshard.build.iterables import record_chunks
from tokshard.build.plaintext import line_documents, max_text_line_bytes, paragraphs, whole_text
from tokshard.build.records import FILE, LINE, MALFORMED, TOO_LONG, Chunk, LineChunk, Records, RecordSpec, admit_rows
from tokshard.build.sources import Input, vanished
from tokshard.build.streams import CHUNK_BYTES, ByteSource, PlainBytes, damaged, line_chunks, open_bytes, open_file
from tokshard.build.tar import tar_chunks
from tokshard.build.tasks import ByteRange, Grouped, Groups, Lines, Span, Split, Stream, Unit
from tokshard.errors import SourceError, UsageError
from tokshard.format.storage import map_file

if TYPE_CHECKING:
    import pyarrow.parquet as pq

# `pyarrow.parquet` and `pyarrow.compute` take a process 60 ms to import, so they are where they are needed

_ROWS_PER_BATCH = 1_024
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
            return _line_range_chunks(source, span, spec.max_line_bytes)
        if source.format == sources.TXT and spec.text_mode == LINE:
            lines = _line_range_chunks(source, span, max_text_line_bytes(spec))
            return (line_documents(chunk, spec) for chunk in lines)
    return (chunk for _, chunk in read_stream(source, spec, task_bytes=CHUNK_BYTES))


def read_stream(source: Input, spec: RecordSpec, *, task_bytes: int) -> Iterator[tuple[int, Chunk]]:
    """All chunks of an input that is read from its start, each with its segment.

    A segment is `task_bytes` of decompressed lines, or of text for csv and Arrow streams. Segments ascend; one in
    which no record starts is left out.

    Raises:
        SourceError, UsageError: as `read_span`.
    """
    if source.format == sources.RECORDS:
        return _by_text_bytes(record_chunks(source, spec), task_bytes)
    if source.format == sources.JSONL:
        return _line_stream_chunks(source, spec.max_line_bytes, task_bytes)
    if source.format == sources.TXT:
        return _text_stream_chunks(source, spec, task_bytes)
    if source.format == sources.TAR:
        return tar_chunks(source, spec, task_bytes)
    reader = _arrow_stream_chunks if source.format == sources.ARROW_STREAM else _csv_chunks
    return _by_text_bytes(reader(source, spec), task_bytes)


# JSON lines and plain text


def _line_range_chunks(source: Input, span: Span, max_line_bytes: int) -> Iterator[LineChunk]:
    start, stop = (span.start, span.stop) if isinstance(span, ByteRange) else (0, None)
    with open_file(source) as file:
        file.seek(max(0, start - 1))
        stream = PlainBytes(source, file)

        def position() -> int:
            # the end of the last line lies in the next range, which counts it
            here = stream.file_position()
            return here if stop is None else min(here, stop)

        chunks = line_chunks(stream.read, start=start, stop=stop, max_line_bytes=max_line_bytes, position=position)
        yield from (chunk for _, chunk in chunks)


def _line_stream_chunks(source: Input, max_line_bytes: int, task_bytes: int) -> Iterator[tuple[int, LineChunk]]:
    with open_bytes(source) as stream:
        chunks = line_chunks(
            stream.read, start=0, stop=None, max_line_bytes=max_line_bytes, position=stream.file_position
        )
        for index, chunk in chunks:
            yield index * CHUNK_BYTES // task_bytes, chunk


def _text_stream_chunks(source: Input, spec: RecordSpec, task_bytes: int) -> Iterator[tuple[int, Records]]:
    if spec.text_mode == LINE:
        for segment, chunk in _line_stream_chunks(source, max_text_line_bytes(spec), task_bytes):
            yield segment, line_documents(chunk, spec)
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
        count = _open_arrow_file(source).num_record_batches
        yield from [source.num_bytes // max(1, count)] * count


def _open_parquet(source: Input) -> pq.ParquetFile:
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(source.location)
    except FileNotFoundError as error:
        raise vanished(source, error) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(source, str(error)) from error


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


def _open_arrow_file(source: Input) -> ipc.RecordBatchFileReader:
    try:
        return ipc.open_file(map_file(Path(source.location)))
    except FileNotFoundError as error:
        raise vanished(source, error) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(source, str(error)) from error


def _arrow_file_chunks(source: Input, span: Span, spec: RecordSpec) -> Iterator[Chunk]:
    reader = _open_arrow_file(source)
    fields = _Fields(source, reader.schema, spec)
    batches = range(reader.num_record_batches)
    for index in batches[span.start : span.stop] if isinstance(span, Groups) else batches:
        try:
            batch = reader.get_batch(index)
            batch.validate()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(source, f"batch {index}: {error}") from error
        yield from fields.chunks(batch, source.num_bytes // len(batches))


def _arrow_stream_chunks(source: Input, spec: RecordSpec) -> Iterator[Records]:
    try:
        mapped = map_file(Path(source.location))
        file = pa.BufferReader(mapped)
        reader = ipc.open_stream(file)
    except FileNotFoundError as error:
        raise vanished(source, error) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged(source, str(error)) from error
    fields = _Fields(source, reader.schema, spec)
    reported = 0
    while True:
        try:
            batch = reader.read_next_batch()
            batch.validate()
        except StopIteration:
            break
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(source, str(error)) from error
        here = file.tell()
        yield from fields.chunks(batch, here - reported)
        reported = here
    # Arrow takes a missing end for the end, so a stream cut between two batches has to be noticed here
    if bytes(mapped[-8:]) != _END_OF_STREAM:
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
        wanted = {name: path for name, (path, _) in spec.columns.items()}
        self.paths = list(dict.fromkeys([spec.text_field, *wanted.values()]))
        self._parts: dict[str, tuple[str, list[str]]] = {}
        for path in self.paths:
            kind, self._parts[path] = _resolve(source, schema, path)
            if path == spec.text_field and not _is_text(kind):
                raise UsageError(
                    f"{source.location}: field {path!r} has type {kind}, expected a string",
                    hint=f"give the field that holds the text with --text-field; fields: {', '.join(names)}",
                )

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
            values = {path: self._values(path, array.slice(start, rows)) for path, array in arrays.items()}
            texts = values[self._spec.text_field]
            columns = {name: values[path] for name, (path, _) in self._spec.columns.items()}
            yield admit_rows(self._spec, texts, columns, input_bytes=input_bytes * rows // batch.num_rows)

    def _values(self, path: str, array: pa.Array) -> Sequence[Any]:
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
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


def _resolve(source: Input, schema: pa.Schema, path: str) -> tuple[pa.DataType, tuple[str, list[str]]]:
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
        hint="give the field that holds the text with --text-field",
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
            io.BufferedReader(_Raw(stream), CHUNK_BYTES), encoding="utf-8-sig", errors="surrogateescape", newline=""
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
        yield from _csv_records(_csv_rows(rows, lines, len(header), spec.max_line_bytes), places, spec, stream)


class _CsvLines:
    """The lines of a csv file; of one that is too long to be held comes a `csv.Error`.

    Args:
        max_chars: of a line.
    """

    def __init__(self, text: io.TextIOWrapper, max_chars: int) -> None:
        self._text, self._max_chars = text, max_chars
        self.count = 0
        self.num_quotes = 0
        """Since somebody set it to 0."""

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
            raise UsageError(
                f"{source.location} has {header.count(path)} columns {path!r}; its header is {', '.join(header)}",
                hint="give the column that holds the text with --text-field",
            )
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
        for name, (path, kind) in spec.columns.items():
            value = None if problem else row[places[path]]
            columns[name].append(None if kind != "string" and not value else value)
        size += len(texts[-1] or "")
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


def _by_text_bytes(chunks: Iterator[Records], task_bytes: int) -> Iterator[tuple[int, Chunk]]:
    """Number the segments of an input without lines: a chunk belongs to the segment in which its text starts."""
    seen = 0
    for chunk in chunks:
        yield seen // task_bytes, chunk
        seen += sum(map(len, chunk.texts))
