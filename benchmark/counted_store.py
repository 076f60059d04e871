"""A store of this machine that counts requests as an object store would get them, and can be as slow as one."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO

from tokshard.store import Attempt, Entry, Spool
from tokshard.store.posix import PosixStore

SCHEME = "counted"
PAGE = 1_000
"""Names that one request lists or deletes, as of S3."""

REQUESTS: Counter[str] = Counter()
"""Requests of this process by kind; the requests of other threads are in it too."""

_state = threading.local()
_LOCK = threading.Lock()
_seconds = 0.0


def be_slow(seconds: float) -> None:
    """Let each request take so long from now on, on top of what the disk takes."""
    global _seconds  # noqa: PLW0603 - stores come and go, and each has to be as slow
    _seconds = seconds


def set_uncounted(*, is_uncounted: bool) -> None:
    """Whether what this thread asks for is work of a task, and neither counted nor slow."""
    _state.is_uncounted = is_uncounted


def _requested(kind: str, count: int = 1) -> None:
    if getattr(_state, "is_uncounted", False):
        return
    with _LOCK:
        REQUESTS[kind] += count
    time.sleep(_seconds * count)


def _pages(names: int) -> int:
    return max(1, -(-names // PAGE))


@dataclass(frozen=True, slots=True)
class CountedStore:
    """A directory without paths, so that its files are asked for and put as those of a bucket are."""

    location: str

    @property
    def _files(self) -> PosixStore:
        return PosixStore(self.location.removeprefix(f"{SCHEME}://"))

    def where(self, name: str) -> str:
        return f"{self.location}/{name}" if name else self.location

    def below(self, folder: str) -> CountedStore:
        return CountedStore(self.where(folder))

    def list(self, folder: str = "") -> Iterator[Entry]:
        found = list(self._files.list(folder))
        _requested("list", _pages(len(found)))
        yield from found

    def names(self, folder: str = "") -> Sequence[str]:
        found = self._files.names(folder)
        _requested("list", _pages(len(found)))
        return found

    def stat(self, name: str) -> Entry:
        _requested("stat")
        return self._files.stat(name)

    def open(self, name: str) -> IO[bytes]:
        _requested("get")
        return self._files.open(name)

    def read(self, name: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None) -> Sequence[bytes]:
        _requested("get", len(ranges))
        return self._files.read(name, ranges, version=version)

    def get(self, name: str) -> bytes:
        _requested("get")
        return self._files.get(name)

    def put(self, name: str, content: bytes) -> None:
        _requested("put")
        self._files.put(name, content)

    def delete(self, *names: str) -> None:
        below = [self._files.where(name) for name in names if name.endswith("/")]
        inside = sum(len(files) for folder in below for _, _, files in os.walk(folder))
        if below:
            _requested("list", _pages(inside))
        if inside or len(names) > len(below):
            _requested("delete", _pages(inside + len(names) - len(below)))
        self._files.delete(*names)

    def local_path(self, name: str) -> str | None:
        return None

    def spool(self, name: str) -> Spool:
        _requested("put")
        return self._files.spool(name)

    def attempt(self, folder: str, token: str) -> Attempt:
        return _Attempt(self)

    def hold(self, name: str, holder: str) -> AbstractContextManager[bool]:
        _requested("lease")
        return self._files.hold(name, holder)

    def holder(self, name: str) -> str | None:
        _requested("lease")
        return self._files.holder(name)


@dataclass(frozen=True, slots=True)
class _Attempt:
    store: CountedStore

    def take_over(self) -> None: ...

    def discard_spooled(self) -> None: ...

    def end(self) -> None: ...
