"""Bytes of inputs: opening and decompressing them, and cutting lines into chunks on a fixed grid."""

from __future__ import annotations

import bz2
import contextlib
import io
import lzma
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pyarrow as pa
import zstandard

from tokshard.errors import BadSourceError
from tokshard.pipeline.sources.discover import STDIN, Input, vanished
from tokshard.pipeline.sources.records import LineChunk

CHUNK_BYTES = 1 << 20
"""Chunk j of an input holds the lines whose first byte is in ``[j, j + 1) * CHUNK_BYTES``. Decides shard bounds."""

_MAX_WINDOW_BYTES = 1 << 31
_XZ_MEMORY_BYTES = 1 << 30
"""An xz stream whose dictionary needs more is refused; ``xz -9`` needs 65 MiB."""
_COMPRESSED_BYTES = 1 << 16
_WIDE_BYTES = 1 << 8
"""Taken at once of a wide zstd frame: what comes out is held, up to 128 KiB for each 4 bytes of a hostile frame."""
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
        elif source.compression in _STREAM_DECOMPRESSORS:
            yield _Streams(source, file)
        else:
            yield _Compressed(source, file)


def open_file(source: Input) -> io.FileIO:
    """The raw bytes of an input, not buffered.

    Raises:
        BadSourceError: the file is gone.
    """
    try:
        if source.location == STDIN:
            return open(0, "rb", buffering=0, closefd=False)
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

    def __init__(self, source: Input, file: io.FileIO) -> None:
        self._source, self._file = source, file
        self._position = file.tell() if file.seekable() else 0

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
        self._position += len(data)
        return data

    def file_position(self) -> int:
        return self._position


class _Compressed:
    """gzip and zstd through Arrow: concatenated members and frames, truncation and checksums are its business.

    At a zstd frame whose window Arrow does not take, `_WideZstd` goes on, once it has read again what came before.
    """

    def __init__(self, source: Input, file: io.FileIO) -> None:
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


class _StreamDecompressor(Protocol):
    """What `bz2` and `lzma` have in common."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


_STREAM_DECOMPRESSORS: dict[str, Callable[[], _StreamDecompressor]] = {
    "bz2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES),
}


class _Streams:
    """bz2 and xz through the standard library: streams one after another, never more output than is asked for.

    Between and after xz streams there may be zeros, in fours; after bz2 streams nothing.
    """

    def __init__(self, source: Input, file: io.FileIO) -> None:
        assert source.compression is not None
        self._source, self._file = source, file
        self._make = _STREAM_DECOMPRESSORS[source.compression]
        self._may_be_padded = source.compression == "xz"
        self._stream: _StreamDecompressor | None = self._make()
        self._input = b""

    def read(self, size: int) -> bytes:
        parts: list[bytes] = []
        try:
            while size and (self._stream is not None or self._next_stream()):
                data = self._some(size)
                parts.append(data)
                size -= len(data)
        except (OSError, lzma.LZMAError, EOFError) as error:
            raise damaged(self._source, str(error)) from error
        return b"".join(parts)

    def file_position(self) -> int:
        return self._file.tell()

    def _some(self, size: int) -> bytes:
        stream = self._stream
        assert stream is not None
        if stream.needs_input and not self._input:
            self._input = self._file.read(_COMPRESSED_BYTES)
            if not self._input:
                raise damaged(self._source, f"truncated {self._source.compression} stream")
        data = stream.decompress(self._input, size)
        self._input = b""
        if stream.eof:
            self._input, self._stream = stream.unused_data, None
        return data

    def _next_stream(self) -> bool:
        """Begin the stream that follows; False at the end of the file."""
        padding = 0
        while True:
            self._input = self._input or self._file.read(_COMPRESSED_BYTES)
            rest = self._input.lstrip(b"\0") if self._may_be_padded else self._input
            padding += len(self._input) - len(rest)
            if rest or not self._input:
                break
            self._input = b""
        if padding % 4:
            raise damaged(self._source, f"{padding} zeros behind an xz stream, expected a multiple of 4")
        if rest:
            self._input, self._stream = rest, self._make()
        return bool(rest)


class _WideZstd:
    """zstd frames with windows over 128 MiB (``zstd --long=28`` and more).

    Memory is the window that the frame asks for, up to 2 GiB, as far as it is filled.
    """

    def __init__(self, source: Input, file: io.FileIO) -> None:
        self._source, self._file = source, io.BufferedReader(file, _COMPRESSED_BYTES)
        self._context = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self._frame: Any = None
        self._pending = bytearray()

    def read(self, size: int) -> bytes:
        try:
            while len(self._pending) < size:
                compressed = b"" if self._frame is None else self._frame.unused_data
                if self._frame is None or self._frame.eof:
                    compressed = compressed or self._file.read(_WIDE_BYTES)
                    if not compressed:
                        break
                    self._frame = self._context.decompressobj()
                else:
                    compressed = self._file.read(_WIDE_BYTES)
                    if not compressed:
                        raise damaged(self._source, "truncated zstd frame")
                self._pending += self._frame.decompress(compressed)
        except (zstandard.ZstdError, OSError) as error:
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
    """A chunk that waits for the end of its last line; its bytes are copied once, when it is closed."""

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
        """Go on with ``data[:stop]``, which belongs to the last line."""
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
