"""Files of a corpus: mapping them, and writing them so that a reader sees the whole file or none."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from tokshard.errors import UsageError

_HASH_CHUNK_BYTES = 4 << 20


def local_directory(location: str | os.PathLike[str]) -> Path:
    """The local path of a corpus.

    Raises:
        UsageError: the location is a URI, which this version does not read.
    """
    text = os.fspath(location)
    if "://" in text:
        raise UsageError(
            f"{text} is a URI; this version of tokshard reads and writes local directories only",
            hint="copy or mount it, and give the local path",
        )
    return Path(text)


def map_file(path: Path) -> pa.Buffer:
    """A read-only memory map of a whole file. It costs no file descriptor and lives as long as a view of it.

    Raises:
        OSError: the file cannot be opened.
    """
    if path.stat().st_size == 0:
        return pa.py_buffer(b"")
    with pa.memory_map(str(path), "r") as mapped:
        return mapped.read_buffer()


def read_file(path: Path) -> pa.Buffer:
    """A whole file in memory: where a map of a file that is cut meanwhile would end the process with SIGBUS.

    Raises:
        OSError: the file cannot be read.
    """
    return pa.py_buffer(path.read_bytes())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the file system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # some network file systems do not open directories
        return
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_file(final: Path, *, partial_directory: Path | None = None) -> Iterator[IO[bytes]]:
    """Write a file that appears under `final` whole, durable and at once, or not at all.

    Args:
        final: where the file goes.
        partial_directory: a directory on the same file system for the unfinished file; default: beside `final`.
    """
    directory = final.parent if partial_directory is None else partial_directory
    # the process id keeps two attempts at the same file apart
    partial = directory / f".{final.name}.{os.getpid()}.partial"
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, final)  # readers see the whole file or none
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync_directory(final.parent)


def atomic_write(final: Path, content: bytes, *, partial_directory: Path | None = None) -> None:
    """`atomic_file` for content that is in memory."""
    with atomic_file(final, partial_directory=partial_directory) as file:
        file.write(content)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hexadecimal; about 1 to 2 GB per second, constant memory."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


class HashingFile:
    """A file for Arrow to write to, hashed on the way. Not thread-safe."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._position = 0
        self.closed = False

    def write(self, data: Any) -> int:
        """Write and hash any buffer."""
        view = memoryview(data).cast("B")
        self._digest.update(view)
        written = 0
        while written < len(view):  # a raw file takes less than it is given on a full disk, and above 2 GiB
            written += self._file.write(view[written:])
        self._position += written
        return written

    def tell(self) -> int:
        """Bytes written so far."""
        return self._position

    def flush(self) -> None:
        """Pass what is buffered to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Mark as closed; the file below stays open, for whoever opened it."""
        self.closed = True

    def digest(self) -> bytes:
        """SHA-256 of everything written so far."""
        return self._digest.digest()
