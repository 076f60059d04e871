"""Lines of a stream, cut into chunks on a fixed grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tokshard.pipeline.sources.decompress import open_bytes, plain_bytes
from tokshard.pipeline.sources.division import CHUNK_BYTES, ByteRange, Span
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.opening import open_file
from tokshard.pipeline.sources.records import LineChunk


def line_chunks(
    read: Callable[[int], bytes],
    *,
    start: int,
    stop: int | None,
    max_line_bytes: int,
    position: Callable[[], int] = lambda: 0,
) -> Iterator[tuple[int, LineChunk]]:
    """Cut a stream into chunks of whole lines. A line belongs to the chunk and the range that hold its first byte.

    Memory is two chunks and the longest line, of which at most `max_line_bytes` are held.

    Args:
        read: returns the next bytes. They begin at ``start - 1``, or at 0 if `start` is 0.
        start, stop: range of the stream in bytes, multiples of `CHUNK_BYTES`; with `stop` None, to its end.
        position: returns the bytes of the file that were read so far.

    Yields:
        Index of the chunk in the stream, and the chunk; chunks in which no line starts are left out.
    """
    tail = _Tail(max_line_bytes)
    skipping = bool(start) and read(1) != b"\n"  # a line that began before `start` belongs to the range before
    index, reported = start // CHUNK_BYTES, position()
    while True:
        past_stop = stop is not None and index * CHUNK_BYTES >= stop
        if past_stop and not tail.is_open:
            return
        data = read(CHUNK_BYTES)
        if not data:
            break
        start_of_rest = 0
        if skipping or tail.is_open:
            newline = data.find(b"\n")
            start_of_rest = newline + 1 if newline >= 0 else len(data)
            if skipping:
                skipping = newline < 0
            else:
                tail.add(data, start_of_rest)
                if newline >= 0:
                    here = position()
                    yield tail.index, tail.close(here - reported)
                    reported = here
        if start_of_rest < len(data) and not past_stop:
            tail.open(index, data, start_of_rest)
            if data.endswith(b"\n"):
                here = position()
                yield tail.index, tail.close(here - reported)
                reported = here
        index += 1
    if tail.is_open:
        yield tail.index, tail.close(position() - reported)


class _Tail:
    """A chunk whose last line has not ended yet. Its bytes are copied once, when it is closed."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._parts: list[bytes | memoryview] = []
        self._line_start = 0
        self._line_bytes = 0
        self.index = 0
        self.is_open = False

    def open(self, index: int, data: bytes, start: int) -> None:
        """Begin with ``data[start:]``, which is not empty."""
        stop = len(data) - 1 if data.endswith(b"\n") else len(data)
        last_line = max(start, data.rfind(b"\n", start, stop) + 1)
        self._parts = [memoryview(data)[start:] if start else data]
        self._line_start = last_line - start
        self._line_bytes = len(data) - last_line
        self.index = index
        self.is_open = True

    def add(self, data: bytes, stop: int) -> None:
        """Append ``data[:stop]``, which belongs to the last line."""
        if self._line_bytes <= self._max_line_bytes:
            self._parts.append(memoryview(data)[:stop])
        self._line_bytes += stop

    def close(self, input_bytes: int) -> LineChunk:
        self.is_open = False
        data = b"".join(self._parts)
        self._parts = []
        if self._line_bytes <= self._max_line_bytes:
            return LineChunk(data, 0, input_bytes)
        return LineChunk(data[: self._line_start], self._line_bytes, input_bytes)


def line_range_chunks(input_: Input, span: Span, max_line_bytes: int) -> Iterator[tuple[int, LineChunk]]:
    start, stop = (span.start, span.stop) if isinstance(span, ByteRange) else (0, None)
    with open_file(input_) as file:
        file.seek(max(0, start - 1))
        stream = plain_bytes(input_, file)

        def position() -> int:
            # the last line may end in the next range, which counts those bytes
            here = stream.file_position()
            return here if stop is None else min(here, stop)

        yield from line_chunks(stream.read, start=start, stop=stop, max_line_bytes=max_line_bytes, position=position)


def line_stream_chunks(input_: Input, max_line_bytes: int) -> Iterator[tuple[int, LineChunk]]:
    with open_bytes(input_) as stream:
        yield from line_chunks(
            stream.read, start=0, stop=None, max_line_bytes=max_line_bytes, position=stream.file_position
        )
