"""Bytes of inputs: opening and decompressing them, and cutting lines into chunks on a fixed grid."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import IO, Any, Protocol

import pyarrow as pa
import zstandard

from tokshard.build.records import LineChunk
from tokshard.build.sources import Input, vanished
from tokshard.errors import BadSourceError

CHUNK_BYTES = 1 << 20
"""Chunk j of an input holds the lines whose first byte is in ``[j, j + 1) * CHUNK_BYTES``. Decides shard bounds."""

_MAX_WINDOW_BYTES = 1 << 31
_COMPRESSED_BYTES = 1 << 16
"""Taken at once of a wide zstd frame: what comes out of it is held, and may be a hundred times as much."""
_WINDOW_TOO_LARGE = "requires too much memory"
"""libzstd's words for a frame whose window is over 128 MiB, the most that Arrow lets it take."""


class ByteSource(Protocol):
    """Decompressed bytes, and how far into the file they came from."""

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer only at the end."""

    def file_position(self) -> int:
        """Bytes of the file read so far, for the progress bar."""


@contextlib.contextmanager
def open_bytes(source: Input) -> Iterator[ByteSource]:
    """The decompressed bytes of an input.

    Raises:
        BadSourceError: the file is gone, or its compression is truncated or corrupt (also later, from ``read``).
    """
    with open_file(source) as file:
        if source.compression is None:
            yield PlainBytes(source, file)
        elif source.num_bytes == 0:
            raise damaged(source, f"the file is empty, which {source.compression} never is")
        else:
            yield _Compressed(source, file)


def open_file(source: Input) -> IO[bytes]:
    """The raw bytes of an input, not buffered.

    Raises:
        BadSourceError: the file is gone.
    """
    try:
        return open(source.location, "rb", buffering=0)
    except OSError as error:
        raise vanished(source, error) from error


def damaged(source: Input, reason: str) -> BadSourceError:
    """The error for an input whose container is broken."""
    return BadSourceError(
        f"{source.location} is damaged: {reason}",
        hint="fetch the file again and start over with --force, or leave it out with --on-bad-source skip",
    )


class PlainBytes:
    """The bytes of a file as they are, from where it stands."""

    def __init__(self, source: Input, file: IO[bytes]) -> None:
        self._source, self._file = source, file

    def read(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
            while 0 < len(data) < size:
                more = self._file.read(size - len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise vanished(self._source, error) from error
        return data

    def file_position(self) -> int:
        return self._file.tell()


class _Compressed:
    """gzip and zstd through Arrow: concatenated members and frames, truncation and checksums are its business.

    At a zstd frame whose window Arrow does not take, `_WideZstd` goes on, once it has read again what came before.
    """

    def __init__(self, source: Input, file: IO[bytes]) -> None:
        self._source, self._file = source, file
        self._compressed = pa.OSFile(source.location)
        self._stream = pa.CompressedInputStream(self._compressed, source.compression)
        self._num_read = 0
        self._wide: _WideZstd | None = None

    def read(self, size: int) -> bytes:
        if self._wide is not None:
            return self._wide.read(size)
        try:
            data: bytes = self._stream.read(size)
        except (pa.ArrowException, OSError) as error:
            if _WINDOW_TOO_LARGE not in str(error):
                raise damaged(self._source, str(error)) from error
            self._wide = self._read_again()
            return self._wide.read(size)
        self._num_read += len(data)
        return data

    def file_position(self) -> int:
        position: int = self._compressed.tell() if self._wide is None else self._wide.file_position()
        return position

    def _read_again(self) -> _WideZstd:
        wide = _WideZstd(self._source, self._file)
        left = self._num_read
        while left and (data := wide.read(min(left, CHUNK_BYTES))):
            left -= len(data)
        return wide


class _WideZstd:
    """zstd frames with windows over 128 MiB (``zstd --long=28`` and more)."""

    def __init__(self, source: Input, file: IO[bytes]) -> None:
        self._source, self._file = source, file
        self._context = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self._frame: Any = None
        self._pending = bytearray()

    def read(self, size: int) -> bytes:
        try:
            while len(self._pending) < size:
                compressed = b"" if self._frame is None else self._frame.unused_data
                if self._frame is None or self._frame.eof:
                    compressed = compressed or self._file.read(_COMPRESSED_BYTES)
                    if not compressed:
                        break
                    self._frame = self._context.decompressobj()
                else:
                    compressed = self._file.read(_COMPRESSED_BYTES)
                    if not compressed:
                        raise damaged(self._source, "truncated zstd frame")
                self._pending += self._frame.decompress(compressed)
        except zstandard.ZstdError as error:
            raise damaged(self._source, str(error)) from error
        data = bytes(self._pending[:size])
        del self._pending[:size]
        return data

    def file_position(self) -> int:
        return self._file.tell()


def line_chunks(
    read: Callable[[int], bytes],
    *,
    start: int,
    stop: int | None,
    max_line_bytes: int,
    position: Callable[[], int] = lambda: 0,
) -> Iterator[tuple[int, LineChunk]]:
    """Cut a stream into chunks of whole lines. A line belongs to the chunk and range that hold its first byte.

    Memory is two chunks and the longest line, at most `max_line_bytes`.

    Args:
        read: gives the next bytes; its first byte is the one at ``start - 1`` if `start` is not 0, else at 0.
        start, stop: the range of the stream, in bytes, multiples of `CHUNK_BYTES`; None: to its end.
        position: bytes of the file read so far.

    Yields:
        Index of the chunk in the stream, and the chunk; chunks in which no line starts are left out.
    """
    tail = _Tail(max_line_bytes)
    skipping = bool(start) and read(1) != b"\n"  # the line under way at `start` belongs to the range before
    index, reported = start // CHUNK_BYTES, position()
    while True:
        past_stop = stop is not None and index * CHUNK_BYTES >= stop
        if past_stop and not tail.is_open:
            return
        data = read(CHUNK_BYTES)
        if not data:
            break
        if skipping or tail.is_open:
            newline = data.find(b"\n")
            head, rest = (data[: newline + 1], data[newline + 1 :]) if newline >= 0 else (data, b"")
            if skipping:
                skipping = newline < 0
            else:
                tail.add(head)
                if newline >= 0:
                    here = position()
                    yield tail.index, tail.close(here - reported)
                    reported = here
            data = rest
        if data and not past_stop:
            tail.open(index, data)
            if data.endswith(b"\n"):
                here = position()
                yield tail.index, tail.close(here - reported)
                reported = here
        index += 1
    if tail.is_open:
        yield tail.index, tail.close(position() - reported)


class _Tail:
    """A chunk that waits for the end of its last line."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._buffer = io.BytesIO()
        self._line_start = 0
        self._line_bytes = 0
        self.index = 0
        self.is_open = False

    def open(self, index: int, data: bytes) -> None:
        self._buffer = io.BytesIO()
        self._buffer.write(data)
        self._line_start = data.rfind(b"\n", 0, len(data) - 1) + 1 if data.endswith(b"\n") else data.rfind(b"\n") + 1
        self._line_bytes = len(data) - self._line_start
        self.index = index
        self.is_open = True

    def add(self, data: bytes) -> None:
        if self._line_bytes <= self._max_line_bytes:
            self._buffer.write(data)
        self._line_bytes += len(data)

    def close(self, input_bytes: int) -> LineChunk:
        self.is_open = False
        data = self._buffer.getvalue()
        self._buffer = io.BytesIO()
        if self._line_bytes <= self._max_line_bytes:
            return LineChunk(data, 0, input_bytes)
        return LineChunk(data[: self._line_start], self._line_bytes, input_bytes)
