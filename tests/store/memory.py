"""A store in the memory of this process: what an object store can do, and nothing that only a directory can.

It has no paths, no folders without files, no renames, no locks of the system, and its versions are counters. Stores of
one location share their files, pickled ones in the same process too.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import IO

from tokshard.store import Entry, Spool

SCHEME = "memory"


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    version: str


_FILES: dict[str, _File] = {}
"""By URI."""
_HOLDERS: dict[str, str] = {}
_VERSIONS = count(1)
_LOCK = threading.RLock()


REQUESTS: Counter[str] = Counter()
"""How often stores in memory were asked for something, by the name of the method."""

READS: list[tuple[str, int, int]] = []
"""The ranges that were read: name, first byte and length. Cleared by the tests that look at it."""

CHANGES: dict[str, Callable[[bytes], bytes]] = {}
"""By name, what happens to the ranges of a file on their way."""


@dataclass(frozen=True, slots=True)
class MemoryStore:
    """Files under one URI."""

    location: str

    def where(self, name: str) -> str:
        return f"{self.location.rstrip('/')}/{name}" if name else self.location

    def below(self, folder: str) -> MemoryStore:
        return MemoryStore(self.where(folder))

    def list(self, folder: str = "") -> Iterator[Entry]:
        REQUESTS["list"] += 1
        for name in self._inside(folder):
            path = f"{folder}/{name}" if folder else name
            yield Entry(path) if name.endswith("/") else self._entry(path)

    def names(self, folder: str = "") -> Sequence[str]:
        REQUESTS["names"] += 1
        if folder and self.where(folder) in _FILES:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.where(folder))
        return self._inside(folder)

    def stat(self, name: str) -> Entry:
        REQUESTS["stat"] += 1
        return self._entry(name)

    def open(self, name: str) -> IO[bytes]:
        return io.BytesIO(self._file(name).content)

    def read(self, name: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None) -> Sequence[bytes]:
        file = self._file(name)
        if version not in (None, file.version):
            raise OSError(errno.ESTALE, "the file was replaced", self.where(name))
        for start, length in ranges:
            if start + length > len(file.content):
                raise OSError(errno.EIO, f"the file ends before byte {start + length}", self.where(name))
        READS.extend((name, start, length) for start, length in ranges)
        changed = CHANGES.get(name, bytes)
        return [changed(file.content[start : start + length]) for start, length in ranges]

    def get(self, name: str) -> bytes:
        REQUESTS["get"] += 1
        return self._file(name).content

    def put(self, name: str, content: bytes) -> None:
        with _LOCK:
            _FILES[self.where(name)] = _File(bytes(content), f"v{next(_VERSIONS)}")

    def delete(self, *names: str) -> None:
        with _LOCK:
            for name in names:
                prefix = self.where(name)
                found = [uri for uri in _FILES if uri.startswith(prefix)] if name.endswith("/") else [prefix]
                for uri in found:
                    _FILES.pop(uri, None)

    def local_path(self, name: str) -> str | None:
        return None

    def spool(self, name: str) -> Spool:
        """A temporary file of this machine until it is put."""
        descriptor, path = tempfile.mkstemp(prefix="memory-store-")
        file = os.fdopen(descriptor, "wb")

        def publish() -> None:
            file.close()
            with open(path, "rb") as written:
                self.put(name, written.read())
            os.unlink(path)

        return Spool(file=file, path=path, publish=publish)

    def attempt(self, folder: str, token: str) -> MemoryAttempt:
        return MemoryAttempt(self)

    @contextlib.contextmanager
    def hold(self, name: str, holder: str) -> Iterator[bool]:
        """A lease among the threads of this process; its file shows that it was taken."""
        uri = self.where(name)
        with _LOCK:
            if uri in _HOLDERS:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), uri)
            _HOLDERS[uri] = holder
            self.put(name, holder.encode())
        try:
            yield True
        finally:
            del _HOLDERS[uri]

    def holder(self, name: str) -> str | None:
        return _HOLDERS.get(self.where(name))

    def _file(self, name: str) -> _File:
        try:
            return _FILES[self.where(name)]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.where(name)) from None

    def _entry(self, name: str) -> Entry:
        file = self._file(name)
        return Entry(name, len(file.content), file.version, self.where(name))

    def _inside(self, folder: str) -> list[str]:
        prefix = self.where(folder).rstrip("/") + "/"
        with _LOCK:
            rests = [uri.removeprefix(prefix) for uri in _FILES if uri.startswith(prefix)]
        found = {first + slash for first, slash, _ in (rest.partition("/") for rest in rests)}
        return sorted(found, key=os.fsencode)


@dataclass(frozen=True, slots=True)
class MemoryAttempt:
    """An attempt without traces in the store: spools are files of this machine."""

    store: MemoryStore

    def take_over(self) -> None: ...

    def join(self) -> None: ...

    def discard_spooled(self) -> None: ...

    def end(self) -> None: ...
