"""Reading files that may be damaged, truncated meanwhile, or not files at all.

Nothing is mapped: access beyond the end of a mapped file that was truncated would kill the process.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from tokshard.errors import TokshardError
from tokshard.inspect import OnProgress
from tokshard.numbers import ceil_div
from tokshard.store import NotRegularFileError, Store

CHUNK_BYTES = 1 << 20
"""Bytes that are read, hashed and checked at once, while they are in the processor's cache. A multiple of 8."""

_FOOTER_TAIL = 10
"""An Arrow file ends with 4 bytes for the length of its footer and 6 bytes of magic."""
_MAX_FOOTER = 16 << 20

OnChunk = Callable[[int, memoryview], None]
"""Called with a position in a file and the bytes there, which are valid until it returns."""


class UnreadableError(Exception):
    """A file cannot be read; the first argument continues its name, the second, if any, is a hint."""


class ByteCounter:
    """Counts bytes over many threads, reports progress, and can stop all threads.

    Attributes:
        is_stopped: if set, because a thread failed or was interrupted, every thread that reads gets a `CancelledError`.
    """

    def __init__(self, to_check: int, on_progress: OnProgress) -> None:
        self.checked_bytes, self._done, self._to_check = 0, 0, to_check
        self._on_progress, self._lock = on_progress, threading.Lock()
        self.is_stopped = False

    def add(self, *, read: int = 0, done: int = 0) -> None:
        """Count bytes that were read, and report those of which the check is complete.

        Raises:
            CancelledError: `is_stopped` was set.
        """
        if self.is_stopped:
            raise CancelledError
        with self._lock:
            self.checked_bytes += read
            self._done += done
            if done:
                self._on_progress(self._done, self._to_check)


class SafeFile:
    """A file of a store, read without maps. For one thread.

    Args:
        file: unbuffered: a buffer would hide bytes that are changed or cut meanwhile.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def check_size(self, num_bytes: int, problem: str) -> None:
        """Refuse another size, which replaces the braces in `problem`."""
        with _errors_of_file():
            found = self._file.seek(0, 2)
        if found != num_bytes:
            raise UnreadableError(problem.format(found))

    def fill(self, view: memoryview, position: int) -> int:
        """Read until a view is full or the file ends; returns the number of bytes."""
        filled = 0
        with _errors_of_file():
            self._file.seek(position)
            while filled < len(view) and (count := self._file.readinto(view[filled:])):
                filled += count
        return filled


@contextmanager
def opened(store: Store, name: str, num_bytes: int) -> Iterator[SafeFile]:
    """A regular file of this size.

    Raises:
        UnreadableError: the file is missing, of another kind or size, or its size has changed when the context ends.
        StoreError: the store does not answer.
    """
    with _errors_of_file():
        store.stat(name)  # opening a pipe would block
        file = store.open(name)
    with file:
        safe = SafeFile(getattr(file, "raw", file))
        safe.check_size(num_bytes, f"has {{}} bytes, expected {num_bytes}")
        yield safe
        safe.check_size(num_bytes, f"changed while it was read: it had {num_bytes} bytes and has {{}}")


@contextmanager
def _errors_of_file() -> Iterator[None]:
    """Only for calls that open or read the file: errors of anything else are not damage."""
    try:
        yield
    except FileNotFoundError:
        raise UnreadableError("is missing") from None
    except (NotRegularFileError, IsADirectoryError):
        raise UnreadableError("is not a regular file") from None
    except PermissionError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}", "check its permissions") from error
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror or error}") from error


def hash_chunks(file: SafeFile, num_bytes: int, counter: ByteCounter, on_chunk: OnChunk | None = None) -> str:
    """SHA-256 of a whole file in hexadecimal; reads the file once. `opened` notices if its size changes meanwhile."""
    digest, position = hashlib.sha256(), 0
    chunk = memoryview(bytearray(min(CHUNK_BYTES, num_bytes + 1)))
    while position <= num_bytes and (filled := file.fill(chunk, position)):
        digest.update(chunk[:filled])
        if filled < min(len(chunk), num_bytes - position):
            on_chunk = None  # it was cut off; if it grows again, the rest begins inside a token
        if on_chunk is not None:
            on_chunk(position, chunk[:filled])
        position += filled
        counter.add(read=filled, done=filled)
    return digest.hexdigest()


class SparseImage:
    """Memory as large as a file: holds the parts that were loaded, at their positions, and zeros elsewhere.

    Costs memory only for the loaded pages, and address space for the whole file.

    Args:
        on_read: called with the number of bytes that were read.

    Raises:
        TokshardError: the process may not reserve that much address space.
    """

    def __init__(self, file: SafeFile, num_bytes: int, on_read: Callable[[int], None]) -> None:
        self._file, self._num_bytes, self._on_read = file, num_bytes, on_read
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._memory = mmap.mmap(-1, num_bytes, flags=flags)
        except OSError as error:
            raise TokshardError(
                f"no address space for a file of {num_bytes:,} bytes: {error.strerror or error}",
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
            if self._file.fill(view[start : start + wanted], start) != wanted:
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
        """Free the memory of a part, which may lie outside of the file, but for pages that other parts share."""
        start, stop = max(0, start), min(stop, self._num_bytes)
        first, last = ceil_div(start, mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
