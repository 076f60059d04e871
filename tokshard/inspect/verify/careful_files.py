"""Reading what may be damaged, cut meanwhile or no file at all; a memory map of a cut file would end the process."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from tokshard.errors import TokshardError

CHUNK_BYTES = 1 << 20
"""What is read, hashed and looked at in one go, while it is in the cache of the processor. A multiple of 8."""

_FOOTER_TAIL = 10
"""An Arrow file ends with the length of its footer in 4 bytes, and 6 of magic."""
_MAX_FOOTER = 16 << 20

OnProgress = Callable[[int, int], None]
"""Is called with the bytes checked so far and the bytes to check."""

OnChunk = Callable[[int, memoryview], None]
"""Is called with a position in a file and the bytes there, valid until it returns."""


class StoppedError(Exception):
    """Another thread failed or was interrupted, so nothing needs to be read any more."""


class UnreadableError(Exception):
    """A file is not what can be read; the message continues its name."""


class ByteCounter:
    """Counts bytes for many threads, tells one listener, and stops them all."""

    def __init__(self, to_check: int, on_progress: OnProgress | None) -> None:
        self.checked_bytes = 0
        self._done = 0
        self._to_check = to_check
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._is_stopped = False

    def read(self, num_bytes: int) -> None:
        """So many bytes were read.

        Raises:
            StoppedError: `stop` was called.
        """
        if self._is_stopped:
            raise StoppedError
        with self._lock:
            self.checked_bytes += num_bytes

    def settle(self, num_bytes: int) -> None:
        """So many bytes of those to check need nothing more."""
        with self._lock:
            self._done += num_bytes
            if self._on_progress is not None:
                self._on_progress(self._done, self._to_check)

    def stop(self) -> None:
        """Every thread that reads gets a `StoppedError`."""
        self._is_stopped = True


@contextmanager
def opened(path: Path, num_bytes: int) -> Iterator[int]:
    """A descriptor of a regular file of this size.

    Raises:
        UnreadableError: there is no such file, or not any more when the context ends.
    """
    try:
        # a pipe would block whoever opens it
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UnreadableError("is missing") from None
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from error
    try:
        with _errors_of_file():
            found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableError("is no regular file")
        if found.st_size != num_bytes:
            raise UnreadableError(f"has {found.st_size} bytes, expected {num_bytes}")
        yield descriptor
        with _errors_of_file():
            size = os.fstat(descriptor).st_size
        if size != num_bytes:
            raise UnreadableError(f"changed while it was read: it had {num_bytes} bytes and has {size}")
    finally:
        os.close(descriptor)


@contextmanager
def _errors_of_file() -> Iterator[None]:
    """For calls that read the file and nothing else: an error of anything else is not damage."""
    try:
        yield
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from error


def hash_chunks(descriptor: int, num_bytes: int, counter: ByteCounter, on_chunk: OnChunk | None = None) -> str:
    """SHA-256 in hexadecimal of a whole file, read once.

    Raises:
        UnreadableError: the file got shorter or longer meanwhile.
    """
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(min(CHUNK_BYTES, num_bytes + 1)))
    position = 0
    while True:
        filled = _fill(descriptor, chunk, position)
        if not filled:
            break
        digest.update(chunk[:filled])
        if on_chunk is not None:
            on_chunk(position, chunk[:filled])
        position += filled
        counter.read(filled)
        counter.settle(filled)
        if position > num_bytes:
            break
    if position != num_bytes:
        raise UnreadableError(f"changed while it was read: it had {num_bytes} bytes, {position} could be read")
    return digest.hexdigest()


class Skeleton:
    """Memory that looks like a map of a file, as far as the file was loaded into it; zeros elsewhere.

    It costs the pages that were loaded, and address space for the rest.

    Args:
        on_read: is called with the number of bytes that were read.

    Raises:
        TokshardError: the process may not have so much address space.
    """

    def __init__(self, descriptor: int, num_bytes: int, on_read: Callable[[int], None]) -> None:
        self._descriptor = descriptor
        self._num_bytes = num_bytes
        self._on_read = on_read
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._memory = mmap.mmap(-1, num_bytes, flags=flags)
        except OSError as error:
            raise TokshardError(
                f"no address space for a file of {num_bytes:,} bytes: {error.strerror}",
                hint="give fewer --workers, or raise the limit (ulimit -v)",
            ) from error
        self.buffer = pa.py_buffer(self._memory)

    def load(self, start: int, stop: int) -> None:
        """Read a part of the file; what lies outside of it is left out.

        Raises:
            UnreadableError: the file got shorter meanwhile.
        """
        start, stop = max(0, start), min(stop, self._num_bytes)
        view = memoryview(self._memory)
        while start < stop:
            wanted = min(CHUNK_BYTES, stop - start)
            if _fill(self._descriptor, view[start : start + wanted], start) != wanted:
                raise UnreadableError(f"changed while it was read: it had {self._num_bytes} bytes")
            start += wanted
            self._on_read(wanted)

    def load_footer(self) -> None:
        """Read what an Arrow file ends with, as long as its last bytes say."""
        self.load(self._num_bytes - _FOOTER_TAIL, self._num_bytes)
        tail = self._memory[max(0, self._num_bytes - _FOOTER_TAIL) :]
        length = int.from_bytes(tail[:4], "little")
        self.load(self._num_bytes - _FOOTER_TAIL - min(length, _MAX_FOOTER), self._num_bytes - _FOOTER_TAIL)

    def unload(self, start: int, stop: int) -> None:
        """Give the memory of a part back; it is zeros again, but for the rest of its first and last page."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def _fill(descriptor: int, view: memoryview, position: int) -> int:
    """Read until a view is full or the file ends; the bytes read."""
    filled = 0
    with _errors_of_file():
        while filled < len(view) and (count := os.preadv(descriptor, [view[filled:]], position + filled)):
            filled += count
    return filled
