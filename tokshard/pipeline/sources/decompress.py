"""The bytes of an input, decompressed."""

from __future__ import annotations

import bz2
import contextlib
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import IO, Any, NamedTuple

import zstandard

from tokshard.errors import CutSourceError, SourceError
from tokshard.pipeline.sources.division import CHUNK_BYTES
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.opening import damaged, open_file, vanished
from tokshard.wording import counted

_MAX_WINDOW_BYTES = 1 << 31
"""The largest window of a zstd frame; ``zstd --long=31`` requests as much."""

_XZ_MEMORY_BYTES = 1 << 30
"""The most memory for the dictionary of an xz stream; ``xz -9`` needs 65 MiB."""

_COMPRESSED_BYTES = 1 << 16

_AHEAD_BYTES = 8 << 20
"""A block of zstd refers back to the window of its frame. Encoding the text in between evicts that from the processor's
cache."""

_FRAME_HEADER_BYTES = 18
"""The longest header of a zstd frame."""

_SKIPPABLE = b"\x2a\x4d\x18"
"""The rest of the magic number of a zstd frame without data, after a byte from 0x50 to 0x5f."""

_ONE_BYTE_REPEATED = 1
"""Type of a zstd block that stores one byte, whatever its stated size."""

_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


class ByteSource(NamedTuple):
    """Decompressed bytes, and their position in the file.

    Args:
        read: returns the requested number of bytes; fewer only at the end.
        file_position: returns the bytes of the file that stand for so many decompressed bytes, or for all that were
            read. Bytes that were decompressed ahead do not count. For spooled inputs, the decompressed bytes count.
    """

    read: Callable[[int], bytes]
    file_position: Callable[[int | None], int]


@contextlib.contextmanager
def open_bytes(input_: Input, *, start: int = 0) -> Iterator[ByteSource]:
    """The decompressed bytes of an input.

    Args:
        start: the first byte to read; only for an uncompressed file.

    Raises:
        BadSourceError: the file is gone, or its compression is truncated or corrupt (also later, from ``read``).
        CutSourceError: from ``read``: the spool has only the beginning, and was read to its end.
    """
    if input_.compression is not None and input_.num_bytes == 0 and input_.place is None:
        raise damaged(input_, f"the file is empty, and {input_.compression} data never is")
    with open_file(input_) as file:
        if input_.compression is None:
            if start:
                file.seek(start)
            yield _plain_bytes(input_, file)
        else:
            pieces = _PIECES[input_.compression](file)
            yield _decompressed(_naming(input_, pieces), file.tell if input_.place is None else None)


def _plain_bytes(input_: Input, file: IO[bytes]) -> ByteSource:
    """The bytes of an uncompressed file, from its current position."""
    position = file.tell()

    def read(size: int) -> bytes:
        nonlocal position
        left = input_.num_bytes - position
        try:
            # a read allocates what it asks for, so it asks for little of a small file
            data = file.read(min(size, left + 1) if left > 0 else size)
        except OSError as error:
            raise vanished(input_, error) from error
        position += len(data)
        return data

    return ByteSource(read, lambda stop: position if stop is None else min(stop, position))


def _decompressed(pieces: Iterator[bytes], tell: Callable[[], int] | None) -> ByteSource:
    """The bytes of a compressed file, from their start.

    Args:
        tell: the position in the file; None to count the bytes themselves.
    """
    made = given = reported = 0

    def counted_pieces() -> Iterator[bytes]:
        nonlocal made
        for piece in pieces:
            made += len(piece)
            yield piece

    read_pieces = _reads_of_any_size(_ahead(counted_pieces()))

    def read(size: int) -> bytes:
        nonlocal given
        data = read_pieces(size)
        given += len(data)
        return data

    def file_position(stop: int | None) -> int:
        nonlocal reported
        place = given if stop is None else min(stop, given)
        # never backwards, as after a part that compresses better
        here = made if tell is None else tell()
        reported = max(reported, here * place // made if place < made else here)
        return reported

    return ByteSource(read, file_position)


def _naming(input_: Input, pieces: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from pieces
    except _ERRORS as error:
        raise damaged(input_, str(error)) from error
    if input_.is_cut:
        raise CutSourceError(f"{input_.location} was read in part only", hint="run the same command again")


def _ahead(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same pieces, `_AHEAD_BYTES` decompressed at a time. Those before an error come before it."""
    while True:
        some, num_bytes = list[bytes](), 0
        try:
            for piece in pieces:
                some.append(piece)
                num_bytes += len(piece)
                if num_bytes >= _AHEAD_BYTES:
                    break
        except SourceError:
            yield from some
            raise
        if not some:
            return
        yield from some


def _reads_of_any_size(pieces: Iterator[bytes]) -> Callable[[int], bytes]:
    rest = memoryview(b"")

    def read(size: int) -> bytes:
        nonlocal rest
        parts: list[memoryview] = []
        while size:
            if not rest:
                piece = next(pieces, None)
                if piece is None:
                    break
                if len(piece) == size and not parts:
                    return piece
                rest = memoryview(piece)
            parts.append(rest[:size])
            rest = rest[size:]
            size -= len(parts[-1])
        return b"".join(parts)

    return read


class _GzipMember:
    """A decompressor of one member, with the methods of those of bz2 and lzma."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(16 + zlib.MAX_WBITS)
        self._has_more = False

    def decompress(self, data: bytes, max_length: int) -> bytes:
        found = self._member.decompress(self._member.unconsumed_tail + data, max_length)
        self._has_more = len(found) == max_length
        return found

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def needs_input(self) -> bool:
        return not self._has_more and not self._member.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data


def _streams(file: IO[bytes], kind: str, make: Callable[[], Any]) -> Iterator[bytes]:
    """gzip, bz2 and xz: one stream after another, in pieces of at most `CHUNK_BYTES`.

    The file objects of the standard library ignore any bytes after a stream. Here only another stream may follow, or
    zeros: any number after gzip members, as on tapes and in blocks of a fixed size, multiples of 4 after xz streams.

    Args:
        make: returns a decompressor for a stream.
    """
    data, num_streams = file.read(_COMPRESSED_BYTES), 0
    while data:
        stream, has_begun = make(), False
        while not stream.eof:
            try:
                piece = stream.decompress(data, CHUNK_BYTES)
            except _ERRORS as error:
                if num_streams and not has_begun:
                    raise EOFError(
                        f"the bytes after {counted(num_streams, f'whole {kind} stream')} are not {kind}"
                    ) from error
                raise
            has_begun = True
            yield piece
            data = b""
            if stream.needs_input and not stream.eof and not (data := file.read(_COMPRESSED_BYTES)):
                raise EOFError(f"truncated {kind} stream")
        num_streams += 1
        data = stream.unused_data or file.read(_COMPRESSED_BYTES)
        if kind != "bz2":
            data = _without_padding(file, data, 4 if kind == "xz" else 1)


def _without_padding(file: IO[bytes], data: bytes, unit: int) -> bytes:
    padding = 0
    while data and not (rest := data.lstrip(b"\0")):
        padding += len(data)
        data = file.read(_COMPRESSED_BYTES)
    if data:
        padding += len(data) - len(rest)
    if padding % unit:
        raise EOFError(f"{padding} zeros after an xz stream, expected a multiple of {unit}")
    return rest if data else b""


def _zstd_frames(file: IO[bytes]) -> Iterator[bytes]:
    """zstd: one frame after another, block by block.

    A block expands to at most 128 KiB, so a hostile frame never expands at once. A truncated frame is an error; the
    readers of `zstandard` do not notice it. Memory grows up to the window that a frame requests.
    """
    context = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    while head := file.read(_FRAME_HEADER_BYTES):
        if head[1:4] == _SKIPPABLE and head[0] >> 4 == 5:
            size = 8 + int.from_bytes(_exactly(head[4:8], 4), "little")
            file.seek(size - 1 - len(head), os.SEEK_CUR)
            _exactly(file.read(1), 1)
            continue
        size = zstandard.frame_header_size(head)
        has_checksum = zstandard.get_frame_parameters(head).has_checksum
        file.seek(size - len(head), os.SEEK_CUR)
        frame = context.decompressobj()
        frame.decompress(head[:size])
        is_last = False
        while not is_last:
            block = _exactly(file.read(3), 3)
            number = int.from_bytes(block, "little")
            is_last = bool(number & 1)
            size = 1 if number >> 1 & 3 == _ONE_BYTE_REPEATED else number >> 3
            yield frame.decompress(block + _exactly(file.read(size), size))
        if has_checksum:
            frame.decompress(_exactly(file.read(4), 4))


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) < size:
        raise EOFError("truncated zstd frame")
    return data


_PIECES: Mapping[str, Callable[[IO[bytes]], Iterator[bytes]]] = {
    "gzip": partial(_streams, kind="gzip", make=_GzipMember),
    "bz2": partial(_streams, kind="bz2", make=bz2.BZ2Decompressor),
    "xz": partial(_streams, kind="xz", make=lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)),
    "zstd": _zstd_frames,
}
