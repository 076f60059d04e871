"""The bytes of an input, decompressed."""

from __future__ import annotations

import bz2
import contextlib
import lzma
from collections.abc import Callable, Iterator
from typing import IO, Any, Protocol

import pyarrow as pa
import zstandard

from tokshard.pipeline.sources.division import CHUNK_BYTES
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.opening import damaged, open_file, open_for_arrow, vanished

_MAX_WINDOW_BYTES = 1 << 31

_XZ_MEMORY_BYTES = 1 << 30
"""An xz stream whose dictionary needs more is refused; ``xz -9`` needs 65 MiB."""

_COMPRESSED_BYTES = 1 << 16

_MORE_BYTES = 1 << 16
"""Read at once after a read that gave less than was asked for: as much as a pipe holds."""

_WIDE_BYTES = 1 << 8
"""Compressed bytes of a wide zstd frame that are taken at once: each 4 of a hostile frame become up to 128 KiB."""

_WINDOW_TOO_LARGE = "requires too much memory"
"""Part of libzstd's message about a frame whose window exceeds 128 MiB, the limit that Arrow sets."""


class ByteSource(Protocol):
    """Decompressed bytes, and the position in the file that they came from."""

    def read(self, size: int) -> bytes:
        """Read `size` bytes; fewer only at the end."""

    def file_position(self) -> int:
        """Bytes of the file that were read so far, for progress."""


@contextlib.contextmanager
def open_bytes(input_: Input) -> Iterator[ByteSource]:
    """The decompressed bytes of an input.

    Raises:
        BadSourceError: the file is gone, or its compression is truncated or corrupt (also later, from ``read``).
    """
    with open_file(input_) as file:
        if input_.compression is None:
            yield PlainBytes(input_, file)
        elif input_.num_bytes == 0:
            raise damaged(input_, f"the file is empty, and {input_.compression} data never is")
        elif input_.compression in _STREAM_DECOMPRESSORS:
            yield _Streams(input_, file)
        else:
            yield _Compressed(input_, file)


class PlainBytes:
    """The bytes of an uncompressed file, from its current position."""

    def __init__(self, input_: Input, file: IO[bytes]) -> None:
        self._input, self._file = input_, file
        self._position = file.tell() if file.seekable() else 0

    def read(self, size: int) -> bytes:
        try:
            # a read takes the memory that it asks for, so of a small file it asks for little
            left = self._input.num_bytes - self._position
            data = self._file.read(min(size, left + 1) if left > 0 else size)
            while 0 < len(data) < size:
                more = self._file.read(min(size - len(data), _MORE_BYTES))
                if not more:
                    break
                data += more
        except OSError as error:
            raise vanished(self._input, error) from error
        self._position += len(data)
        return data

    def file_position(self) -> int:
        return self._position


class _Compressed:
    """gzip and zstd through Arrow, which handles concatenated members and frames, truncation and checksums.

    From a zstd frame on whose window Arrow refuses, `_WideZstd` reads, after it has read all that came before again.
    """

    def __init__(self, input_: Input, file: IO[bytes]) -> None:
        self._input, self._file = input_, file
        self._compressed = open_for_arrow(input_)
        self._stream = pa.CompressedInputStream(self._compressed, input_.compression)
        self._num_read = 0
        self._wide: _WideZstd | None = None

    def read(self, size: int) -> bytes:
        if self._wide is not None:
            return self._wide.read(size)
        try:
            data: bytes = self._stream.read(size)
        except (pa.ArrowException, OSError) as error:
            if _WINDOW_TOO_LARGE not in str(error):
                raise damaged(self._input, str(error)) from error
            self._wide = self._read_again()
            return self._wide.read(size)
        self._num_read += len(data)
        return data

    def file_position(self) -> int:
        position: int = self._compressed.tell() if self._wide is None else self._wide.file_position()
        return position

    def _read_again(self) -> _WideZstd:
        wide = _WideZstd(self._input, self._file)
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
    """bz2 and xz through the standard library: one stream after another, never more output than is asked for.

    Between and after xz streams there may be multiples of 4 zeros; after bz2 streams nothing may follow.
    """

    def __init__(self, input_: Input, file: IO[bytes]) -> None:
        assert input_.compression is not None
        self._input, self._file = input_, file
        self._make = _STREAM_DECOMPRESSORS[input_.compression]
        self._may_be_padded = input_.compression == "xz"
        self._stream: _StreamDecompressor | None = self._make()
        self._compressed = b""

    def read(self, size: int) -> bytes:
        parts: list[bytes] = []
        try:
            while size and (self._stream is not None or self._next_stream()):
                data = self._some(size)
                parts.append(data)
                size -= len(data)
        except (OSError, lzma.LZMAError, EOFError) as error:
            raise damaged(self._input, str(error)) from error
        return b"".join(parts)

    def file_position(self) -> int:
        return self._file.tell()

    def _some(self, size: int) -> bytes:
        stream = self._stream
        assert stream is not None
        if stream.needs_input and not self._compressed:
            self._compressed = self._file.read(_COMPRESSED_BYTES)
            if not self._compressed:
                raise damaged(self._input, f"truncated {self._input.compression} stream")
        data = stream.decompress(self._compressed, size)
        self._compressed = b""
        if stream.eof:
            self._compressed, self._stream = stream.unused_data, None
        return data

    def _next_stream(self) -> bool:
        """Begin the next stream; False at the end of the file."""
        padding = 0
        while True:
            self._compressed = self._compressed or self._file.read(_COMPRESSED_BYTES)
            rest = self._compressed.lstrip(b"\0") if self._may_be_padded else self._compressed
            padding += len(self._compressed) - len(rest)
            if rest or not self._compressed:
                break
            self._compressed = b""
        if padding % 4:
            raise damaged(self._input, f"{padding} zeros after an xz stream, expected a multiple of 4")
        if rest:
            self._compressed, self._stream = rest, self._make()
        return bool(rest)


class _WideZstd:
    """zstd frames with windows over 128 MiB (``zstd --long=28`` and more).

    Memory grows up to the window that the frame asks for, at most 2 GiB.
    """

    def __init__(self, input_: Input, file: IO[bytes]) -> None:
        self._input, self._file = input_, file
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
                        raise damaged(self._input, "truncated zstd frame")
                self._pending += self._frame.decompress(compressed)
        except (zstandard.ZstdError, OSError) as error:
            raise damaged(self._input, str(error)) from error
        data = bytes(self._pending[:size])
        del self._pending[:size]
        return data

    def file_position(self) -> int:
        return self._file.tell()
