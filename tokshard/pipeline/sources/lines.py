"""Lines of an input, cut into chunks on a fixed grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tokshard.pipeline.sources.decompress import open_bytes
from tokshard.pipeline.sources.division import CHUNK_BYTES, Span
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.records import LineChunk

START_BYTES = 80
"""Bytes that are kept of a line that is too long to be held, to say what it is."""


def lines_of(input_: Input, span: Span, max_line_bytes: int) -> Iterator[tuple[int, LineChunk]]:
    """The lines whose first byte is in a span, in chunks, each with its place in the stream."""
    start, stop = span.start, span.stop
    reported = start
    with open_bytes(input_, start=max(0, start - 1)) as stream:
        for place, chunk in line_chunks(stream.read, max_line_bytes, start, stop):
            here = stream.file_position(chunk.stop)
            # the last line may end in the next range, which counts those bytes
            here = here if stop is None else min(here, stop)
            chunk.input_bytes, reported = here - reported, here
            yield place, chunk


def line_chunks(
    read: Callable[[int], bytes], max_line_bytes: int, start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, LineChunk]]:
    """Cut a stream into chunks of whole lines. A line belongs to the chunk and the range that hold its first byte.

    Memory is two chunks and the longest line, of which at most `max_line_bytes` are held.

    Args:
        read: returns the next bytes. They begin at ``start - 1``, or at 0 if `start` is 0.
        start, stop: range of the stream in bytes, multiples of `CHUNK_BYTES`; with `stop` None, to the end.

    Yields:
        The place of the chunk in the stream, and the chunk. Chunks in which no line starts are left out.
    """
    is_skipping = bool(start) and read(1) != b"\n"  # a line that began before `start` belongs to the range before
    parts: list[bytes | memoryview] = []  # of a chunk whose last line has not ended yet; copied once, when it has
    place = here = start
    num_whole = num_last = 0  # bytes before the last line of that chunk, and in it
    end = here  # of the bytes read so far

    def finished(stop: int) -> tuple[int, LineChunk]:
        data = b"".join(parts)
        parts.clear()
        chunk = _held(data, num_whole, num_last, max_line_bytes)
        chunk.stop = stop
        return place, chunk

    while True:
        is_past = stop is not None and here >= stop
        if is_past and not parts:
            return
        data = read(CHUNK_BYTES)
        if not data:
            break
        end = here + len(data)
        rest = data.find(b"\n") + 1 or len(data) if is_skipping or parts else 0
        is_ended = data[rest - 1 : rest] == b"\n"
        if parts:
            parts += [memoryview(data)[:rest]] if num_last <= max_line_bytes else []
            num_last += rest
            if is_ended:
                yield finished(here + rest)
        is_skipping = is_skipping and not is_ended
        if rest < len(data) and not is_past:
            last_line = max(rest, data.rfind(b"\n", rest, -1) + 1)
            parts.append(memoryview(data)[rest:] if rest else data)
            place, num_whole, num_last = here, last_line - rest, len(data) - last_line
            if data.endswith(b"\n"):
                yield finished(end)
        here += CHUNK_BYTES
    if parts:
        yield finished(end)


def _held(data: bytes, num_whole: int, num_last: int, max_line_bytes: int) -> LineChunk:
    """The lines of a chunk, whose last line has `num_last` bytes and begins at `num_whole`."""
    if num_last <= max_line_bytes:
        return LineChunk(data)
    return LineChunk(data[:num_whole], num_last, oversized_start=data[num_whole : num_whole + START_BYTES])
