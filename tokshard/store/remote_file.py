"""A file of a remote store, opened for reading."""

from __future__ import annotations

import io
import os
import threading
from concurrent.futures import Future
from typing import IO

from tokshard.store.bucket import REQUEST_BYTES, Bucket

_FIRST_WINDOW = 64 << 10
_BUFFER = 64 << 10


def open_remote(bucket: Bucket, key: str) -> IO[bytes]:
    """An object as a seekable, buffered file, of its current version.

    For sequential reads it fetches ever longer ranges, the next one ahead of time; for random reads, little more than
    requested. It takes at most twice 4 MiB of memory.

    Raises:
        FileNotFoundError: there is no such object.
    """
    found = bucket.entry(key)
    return io.BufferedReader(_RemoteFile(bucket, key, found.size, found.version), _BUFFER)


class _RemoteFile(io.RawIOBase):
    def __init__(self, bucket: Bucket, key: str, size: int, version: str) -> None:
        self._bucket, self._key, self._size, self._version = bucket, key, size, version
        self.name = bucket.where(key)
        self._position = 0
        self._window, self._window_start = b"", 0
        self._ahead: tuple[int, Future[tuple[bytes, str]]] | None = None
        self._abandoned = threading.Event()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill a buffer, or a part of it."""
        wanted = min(len(buffer), self._size - self._position)
        if wanted <= 0:
            return 0
        at = self._position - self._window_start
        if not 0 <= at < len(self._window):
            self._fetch(wanted)
            at = 0
        part = memoryview(self._window)[at : at + wanted]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def close(self) -> None:
        """Drop what was fetched ahead."""
        self._abandoned.set()
        self._ahead, self._window = None, b""
        super().close()

    def _fetch(self, wanted: int) -> None:
        """Make the window begin at the position."""
        start = self._position
        is_next = bool(self._window) and start == self._window_start + len(self._window)
        length = max(wanted, 2 * len(self._window) if is_next else _FIRST_WINDOW)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == start:
            content, _ = ahead[1].result()
        else:
            length = min(length, REQUEST_BYTES, self._size - start)
            content, _ = self._bucket.range(self._key, start, length, version=self._version, abandoned=self._abandoned)
        self._window, self._window_start = content, start
        following = start + len(content)
        if is_next and following < self._size:
            length = min(max(2 * len(content), _FIRST_WINDOW), REQUEST_BYTES, self._size - following)
            task = self._bucket.pool.submit(
                self._bucket.range, self._key, following, length, version=self._version, abandoned=self._abandoned
            )
            self._ahead = (following, task)
