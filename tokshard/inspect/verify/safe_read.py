"""Reading files that may be damaged, truncated meanwhile, or not files at all.

Nothing is mapped: access beyond the end of a mapped file that was truncated would kill the process.
"""

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
from tokshard.inspect.progress import OnProgress

CHUNK_BYTES = 1 << 20
"""Bytes that are read, hashed and checked at once, while they are in the processor's cache. A multiple of 8."""

_FOOTER_TAIL = 10
"""An Arrow file ends with 4 bytes for the length of its footer and 6 bytes of magic."""
_MAX_FOOTER = 16 << 20

OnChunk = Callable[[int, memoryview], None]
"""Called with a position in a file and the bytes there, which are valid until it returns."""


class StoppedError(Exception):
    """Another thread failed or was interrupted, so this one can stop reading."""


class UnreadableError(Exception):
    """A file cannot be read; the message continues its name."""


class ByteCounter:
    """Counts bytes over many threads, reports progress, and can stop all threads."""

    def __init__(self, to_check: int, on_progress: OnProgress) -> None:
        self.checked_bytes = 0
        self._done = 0
        self._to_check = to_check
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._is_stopped = False

    def read(self, num_bytes: int) -> None:
        """Count bytes that were read.

        Raises:
            StoppedError: `stop` was called.
        """
        if self._is_stopped:
            raise StoppedError
        with self._lock:
            self.checked_bytes += num_bytes

    def settle(self, num_bytes: int) -> None:
        """Report that the check of some bytes is complete."""
        with self._lock:
            self._done += num_bytes
            self._on_progress(self._done, self._to_check)

    def stop(self) -> None:
        """Raise `StoppedError` in every thread that reads."""
        self._is_stopped = True


@contextmanager
def opened(path: Path, num_bytes: int) -> Iterator[int]:
    """A descriptor of a regular file of this size.

    Raises:
        UnreadableError: there is no such file, or its size has changed when the context ends.
    """
    try:
        # without O_NONBLOCK, opening a pipe would block
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UnreadableError("is missing") from None
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from error
    try:
        with _errors_of_file():
            found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableError("is not a regular file")
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
    """Only for calls that read the file: errors of anything else are not damage."""
    try:
        yield
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from error


def hash_chunks(descriptor: int, num_bytes: int, counter: ByteCounter, on_chunk: OnChunk | None = None) -> str:
    """SHA-256 of a whole file in hexadecimal; reads the file once.

    Raises:
        UnreadableError: the file became shorter or longer meanwhile.
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


class SparseImage:
    """Memory as large as a file: holds the parts that were loaded, at their positions, and zeros elsewhere.

    Costs memory only for the loaded pages, and address space for the whole file.

    Args:
        on_read: called with the number of bytes that were read.

    Raises:
        TokshardError: the process may not reserve that much address space.
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
        """Read the part of the file between two positions, which may lie outside of it.

        Raises:
            UnreadableError: the file became shorter meanwhile.
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
        """Read the footer of an Arrow file, whose length is in the last bytes."""
        self.load(self._num_bytes - _FOOTER_TAIL, self._num_bytes)
        tail = self._memory[max(0, self._num_bytes - _FOOTER_TAIL) :]
        length = int.from_bytes(tail[:4], "little")
        self.load(self._num_bytes - _FOOTER_TAIL - min(length, _MAX_FOOTER), self._num_bytes - _FOOTER_TAIL)

    def unload(self, start: int, stop: int) -> None:
        """Free the memory of a part, except for pages that it shares with other parts."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def _fill(descriptor: int, view: memoryview, position: int) -> int:
    """Read until a view is full or the file ends; returns the number of bytes."""
    filled = 0
    with _errors_of_file():
        while filled < len(view) and (count := os.preadv(descriptor, [view[filled:]], position + filled)):
            filled += count
    return filled
