"""Whole files of a store as Arrow buffers, and their hashes."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import IO, Any

import pyarrow as pa

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format.manifest import FileFacts
from tokshard.format.schema import ARROW_ERRORS
from tokshard.store import Store

LoadFile = Callable[[Store, str], pa.Buffer]
"""From a store and a name to the bytes of the file: `map_file` or `read_file`."""

_HASH_CHUNK_BYTES = 4 << 20
_WRITTEN_AT_ONCE = 1 << 18
"""Bytes that are hashed and then written: they are in the processor's cache, from which the system copies them in half
the time of 16 MiB."""


@contextlib.contextmanager
def readable(path: str, problem: str = " cannot be read") -> Iterator[None]:
    """Report that a file of a corpus is missing, or why it cannot be read.

    Args:
        problem: the words between the path and the reason.

    Raises:
        DamagedCorpusError: names the file.
    """
    try:
        yield
    except FileNotFoundError:
        raise DamagedCorpusError(f"{path} is missing") from None
    except ARROW_ERRORS as error:
        reason = getattr(error, "strerror", None) or error
        hint = "check its permissions" if isinstance(error, PermissionError) else RESTORE
        raise DamagedCorpusError(f"{path}{problem}: {reason}", hint=hint) from error


def map_file(store: Store, name: str) -> pa.Buffer:
    """A whole file: a read-only memory map if it is on this machine, otherwise its bytes.

    A map costs no file descriptor and lives as long as a view of it.

    Raises:
        OSError: the file cannot be opened.
    """
    path = store.local_path(name)
    if path is None:
        return read_file(store, name)
    if store.stat(name).size == 0:
        return pa.py_buffer(b"")
    return map_path(path)


def map_path(path: str) -> pa.Buffer:
    """`map_file` for a file of this machine that is not empty."""
    with pa.memory_map(os.fsencode(path), "r") as mapped:  # Arrow takes text for UTF-8, which a path need not be
        # a buffer of the whole file would have all of it read ahead, and a window of training needs little of it
        first = mapped.read_buffer(1)
        return pa.foreign_buffer(first.address, mapped.size(), base=first)


def read_file(store: Store, name: str) -> pa.Buffer:
    """A whole file in memory. If a mapped file were truncated meanwhile, SIGBUS would end the process.

    Raises:
        OSError: the file cannot be read.
    """
    return pa.py_buffer(store.get(name))


def file_sha256(store: Store, name: str) -> str:
    """SHA-256 of a file in hexadecimal; about 1 to 2 GB per second, constant memory."""
    digest = hashlib.sha256()
    with store.open(name) as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


class HashingFile:
    """A file for Arrow to write to, hashed on the way. Not thread-safe."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._position = 0
        self._is_abandoned = False
        self.closed = False

    def write(self, data: Any) -> int:
        """Write and hash any buffer."""
        view = memoryview(data).cast("B")
        if self._is_abandoned:
            return len(view)
        for start in range(0, len(view), _WRITTEN_AT_ONCE):
            piece = view[start : start + _WRITTEN_AT_ONCE]
            self._digest.update(piece)
            while piece:  # on a full disk, a raw file takes less than it is given
                piece = piece[self._file.write(piece) :]
        self._position += len(view)
        return len(view)

    def buffered(self) -> pa.BufferedOutputStream:
        """A stream for an Arrow writer, which writes each buffer of each column by itself, many of them tiny."""
        return pa.BufferedOutputStream(pa.PythonFile(self, "w"), _WRITTEN_AT_ONCE)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._position

    def flush(self) -> None:
        """Pass the buffer to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Mark as closed. The underlying file stays open: its owner closes it."""
        self.closed = True

    @property
    def facts(self) -> FileFacts:
        """The facts that a manifest lists about the file, for everything written so far."""
        return FileFacts(num_bytes=self._position, sha256=self._digest.hexdigest())

    def abandon(self) -> None:
        """Drop further writes. A stream of Arrow writes its buffer when it is released."""
        self._is_abandoned = True
