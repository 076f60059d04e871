"""How inputs of each format can be divided, and which reader reads them."""

from __future__ import annotations

from collections.abc import Iterator

from tokshard.errors import SourceError
from tokshard.interop.tokens.batches import TokenBatch
from tokshard.pipeline.sources import token_files
from tokshard.pipeline.sources.decompress import open_bytes
from tokshard.pipeline.sources.delimited import delimited_chunks
from tokshard.pipeline.sources.division import CHUNK_BYTES, Divisibility, Grouped, Indivisible, Lines, Span, Stream
from tokshard.pipeline.sources.inputs import ARROW, ARROW_STREAM, JSONL, PARQUET, RECORDS, TAR, TXT, Input
from tokshard.pipeline.sources.iterables import record_chunks
from tokshard.pipeline.sources.lines import line_range_chunks, line_stream_chunks
from tokshard.pipeline.sources.plain_text import line_documents, max_text_line_bytes, paragraphs, whole_text
from tokshard.pipeline.sources.records import FILE, LINE, Chunk, Records, RecordSpec, value_bytes
from tokshard.pipeline.sources.tables import arrow_file_chunks, arrow_stream_chunks, group_sizes, parquet_chunks
from tokshard.pipeline.sources.tar import tar_chunks
from tokshard.pipeline.sources.token_tables import arrow_file_tokens, arrow_stream_tokens, parquet_tokens

_BYTES_PER_RECORD = 128
"""The least that a record counts for, even if it is empty or bad: a worker may hold a whole segment. Decides shards."""


def divisibility_of(input_: Input, text_mode: str = FILE) -> Divisibility:
    """How an input can be divided. Reads the footer of parquet and Arrow files, and leaves damage to the readers."""
    if input_.is_read_once:
        return Stream(is_here=True)
    if input_.format in token_files.FORMATS:
        return token_files.FORMATS[input_.format].divisibility
    if input_.format == TXT and text_mode == FILE:
        return Indivisible()
    if input_.format in (PARQUET, ARROW):
        try:
            return Grouped(tuple(group_sizes(input_)))
        except SourceError:
            return Indivisible()
    has_lines = input_.format == JSONL or (input_.format == TXT and text_mode == LINE)
    return Lines() if has_lines and input_.compression is None else Stream()


def read_span(input_: Input, span: Span, spec: RecordSpec) -> Iterator[Chunk]:
    """The chunks of a part of an input.

    Raises:
        SourceError: the input is gone or damaged.
        UsageError: the input has no such field.
    """
    if spec.tokens is not None:
        return _token_chunks(input_, span, spec)
    if input_.format == PARQUET:
        return parquet_chunks(input_, span, spec)
    if input_.format == ARROW:
        return arrow_file_chunks(input_, span, spec)
    if input_.compression is None and not input_.is_read_once:
        if input_.format == JSONL:
            return (chunk for _, chunk in line_range_chunks(input_, span, spec.max_line_bytes))
        if input_.format == TXT and spec.text_mode == LINE:
            lines = line_range_chunks(input_, span, max_text_line_bytes(spec))
            return (line_documents(index, chunk, spec) for index, chunk in lines)
    return (chunk for _, chunk in read_stream(input_, spec, task_bytes=CHUNK_BYTES))


def read_stream(input_: Input, spec: RecordSpec, *, task_bytes: int) -> Iterator[tuple[int, Chunk]]:
    """All chunks of an input that is read from its start, each with the index of its segment.

    A segment is `task_bytes` of decompressed lines, or for csv and Arrow streams of the values that are held. Indices
    ascend; a segment in which no record starts is left out.

    Raises:
        SourceError, UsageError: as `read_span`.
    """
    if spec.tokens is not None:
        return _by_held_bytes(arrow_stream_tokens(input_, spec), task_bytes)
    if input_.format == RECORDS:
        return _by_held_bytes(record_chunks(input_, spec), task_bytes)
    if input_.format == JSONL:
        lines = line_stream_chunks(input_, spec.max_line_bytes)
        return ((index * CHUNK_BYTES // task_bytes, chunk) for index, chunk in lines)
    if input_.format == TXT:
        return _text_chunks(input_, spec, task_bytes)
    if input_.format == TAR:
        return tar_chunks(input_, spec, task_bytes)
    reader = arrow_stream_chunks if input_.format == ARROW_STREAM else delimited_chunks
    return _by_held_bytes(reader(input_, spec), task_bytes)


def _token_chunks(input_: Input, span: Span, spec: RecordSpec) -> Iterator[TokenBatch]:
    if input_.format in token_files.FORMATS:
        return token_files.token_chunks(input_, span, spec)
    if input_.format == PARQUET:
        return parquet_tokens(input_, span, spec)
    return arrow_file_tokens(input_, span, spec) if input_.format == ARROW else arrow_stream_tokens(input_, spec)


def _text_chunks(input_: Input, spec: RecordSpec, task_bytes: int) -> Iterator[tuple[int, Records]]:
    if spec.text_mode == LINE:
        for index, chunk in line_stream_chunks(input_, max_text_line_bytes(spec)):
            yield index * CHUNK_BYTES // task_bytes, line_documents(index, chunk, spec)
        return
    with open_bytes(input_) as stream:
        if spec.text_mode == FILE:
            yield 0, whole_text(stream.read, spec, input_bytes=input_.num_bytes)
            return
        for index, records in paragraphs(stream.read, spec, position=stream.file_position):
            yield index * CHUNK_BYTES // task_bytes, records


def _by_held_bytes(chunks: Iterator[Records] | Iterator[TokenBatch], task_bytes: int) -> Iterator[tuple[int, Chunk]]:
    """Number the segments of an input without lines. A chunk belongs to the segment in which its first byte lies."""
    seen = 0
    for chunk in chunks:
        yield seen // task_bytes, chunk
        seen += _held_bytes(chunk)


def _held_bytes(chunk: Records | TokenBatch) -> int:
    """About how many bytes a chunk holds in memory: texts, kept values, and details of its bad records."""
    if isinstance(chunk, TokenBatch):
        return int(chunk.tokens.nbytes)
    kept = sum(value_bytes(value) for values in chunk.columns.values() for value in values)
    problems = sum(len(bad.detail) for bad in chunk.bad)
    return sum(map(len, chunk.texts)) + kept + problems + _BYTES_PER_RECORD * chunk.count
