"""The bytes of shards by range: through open files of this machine, or by requests to a store, made together."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

from tokshard.errors import RESTORE, CorpusError, DamagedCorpusError
from tokshard.format import names
from tokshard.store import Store

_MAX_DESCRIPTORS = 1_024
"""Shards kept open in a process, if half of its limit of open files (``ulimit -n``) allows that."""

_SHARDS_AT_ONCE = 32
"""Shards of a store that are read at the same time."""

_GAP_BYTES = 32 << 10
"""Ranges of a shard that are nearer to each other are asked for as one: bytes for a millisecond, a request for tens."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A shard as its corpus knows it.

    Args:
        name: in the store.
        path: for messages.
        num_bytes: as the shard table says.
    """

    name: str
    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Part of a shard."""

    shard: ShardFile
    position: int
    length: int

    def check(self) -> None:
        """Refuse what lies outside of the shard, before memory is allocated for it.

        Raises:
            DamagedCorpusError: it does.
        """
        if not 0 <= self.position <= self.position + self.length <= self.shard.num_bytes:
            raise DamagedCorpusError(
                f"{self.shard.path} has {self.shard.num_bytes} bytes, the shard table names {self.length} at "
                f"{self.position}",
                hint=RESTORE,
            )


class ShardBytes(Protocol):
    """Reads parts of shards."""

    def read(self, ranges: Sequence[ByteRange]) -> Iterator[bytes]:
        """The bytes of each range, in order.

        Raises:
            DamagedCorpusError: a shard is missing, was replaced, or is not what the manifest says.
            StoreError: the store does not answer.
        """


def shard_bytes(store: Store, touch: Callable[[str], None]) -> ShardBytes:
    """The way to read the shards of a store.

    Args:
        touch: called with the path of a shard before it is waited for.
    """
    is_local = store.local_path(names.MANIFEST) is not None
    return OpenFiles(store, touch) if is_local else RequestedRanges(store, touch)


class _OpenFile:
    """An open file, closed when its last user is gone: that may be a thread that still reads while others open."""

    def __init__(self, store: Store, name: str) -> None:
        file = store.open(name)
        weakref.finalize(self, file.close)
        self._file = getattr(file, "raw", file)  # a buffer would hide what was changed or cut meanwhile
        self._lock = threading.Lock()  # a file has one position
        self.num_bytes: int = self._file.seek(0, 2)

    def read(self, position: int, length: int) -> bytes:
        """Bytes from a position on; fewer at the end of the file."""
        with self._lock:
            self._file.seek(position)
            data: bytes = self._file.read(length)
            while 0 < len(data) < length and (more := self._file.read(length - len(data))):
                data += more
        return data


class OpenFiles:
    """The files of a corpus that were used last. All corpora of a process share the descriptors that it may have."""

    _all: ClassVar[weakref.WeakSet[OpenFiles]] = weakref.WeakSet()

    def __init__(self, store: Store, touch: Callable[[str], None]) -> None:
        self._store, self._touch = store, touch
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._pid = os.getpid()
        self._all.add(self)

    def read(self, ranges: Sequence[ByteRange]) -> Iterator[bytes]:
        """The bytes of each range, read when it is its turn."""
        for wanted in ranges:
            wanted.check()
            self._touch(wanted.shard.path)
            yield self._read(wanted)

    def _read(self, wanted: ByteRange) -> bytes:
        path = wanted.shard.path
        file = self._open_shard(wanted.shard)
        try:
            data = file.read(wanted.position, wanted.length)
        except OSError as error:
            raise DamagedCorpusError(f"{path} cannot be read: {error.strerror}", hint=RESTORE) from error
        if len(data) != wanted.length:
            raise DamagedCorpusError(
                f"{path} ends at byte {wanted.position + len(data)}, expected {wanted.length} bytes at "
                f"{wanted.position}: it was cut under the running job",
                hint=RESTORE,
            )
        return data

    def _open_shard(self, shard: ShardFile) -> _OpenFile:
        try:
            file = self._open(shard.name)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise CorpusError(
                    f"{shard.path} cannot be opened: {error.strerror}",
                    hint="raise the limit of open files: 'ulimit -n'",
                ) from error
            raise DamagedCorpusError(f"{shard.path} cannot be opened: {error.strerror}", hint=RESTORE) from error
        _check_size(shard, file.num_bytes)
        return file

    def _open(self, name: str) -> _OpenFile:
        if self._pid != os.getpid():  # a fork shares the positions of open files, and may have copied a held lock
            self._files, self._pid = OrderedDict(), os.getpid()
        # every step is atomic: threads that race for a file may open it twice, which is harmless
        file = self._files.get(name)
        if file is not None:
            with contextlib.suppress(KeyError):
                self._files.move_to_end(name)
            return file
        try:
            file = _OpenFile(self._store, name)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._files:
                raise
            self._files.clear()  # others of the process have more open than was expected
            file = _OpenFile(self._store, name)
        self._files[name] = file
        most = self._most()
        while len(self._files) > most:
            with contextlib.suppress(KeyError):
                self._files.popitem(last=False)
        return file

    def _most(self) -> int:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MAX_DESCRIPTORS if limit == resource.RLIM_INFINITY else min(_MAX_DESCRIPTORS, limit // 2)
        return max(1, most // len(self._all))


class RequestedRanges:
    """Shards of a store that is elsewhere. What one call asks for is requested together.

    The version that a shard has when it is first read is the only one that is read from then on.
    """

    def __init__(self, store: Store, touch: Callable[[str], None]) -> None:
        self._store, self._touch = store, touch
        self._versions: dict[str, str] = {}

    def read(self, ranges: Sequence[ByteRange]) -> Iterator[bytes]:
        """The bytes of each range, once all of its shard have come."""
        ranges_of: dict[ShardFile, list[tuple[int, int]]] = {}
        for wanted in ranges:
            wanted.check()
            ranges_of.setdefault(wanted.shard, []).append((wanted.position, wanted.length))
        running = {shard: self._pool.submit(self._fetch, shard, places) for shard, places in ranges_of.items()}
        try:
            yield from self._in_order(ranges, running)
        finally:
            for task in running.values():
                task.cancel()

    def _in_order(self, ranges: Sequence[ByteRange], running: dict[ShardFile, Future[list[bytes]]]) -> Iterator[bytes]:
        turns = dict.fromkeys(running, 0)
        for wanted in ranges:
            shard = wanted.shard
            self._touch(shard.path)
            yield running[shard].result()[turns[shard]]
            turns[shard] += 1

    def _fetch(self, shard: ShardFile, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Parts of one shard."""
        joined = joined_ranges(places)
        try:
            version = self._version(shard)
            parts = self._store.read(shard.name, joined, version=version)
        except FileNotFoundError:
            raise DamagedCorpusError(f"{shard.path} is missing", hint=RESTORE) from None
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise DamagedCorpusError(
                    f"{shard.path} was replaced under the running job",
                    hint="start the job again from its last checkpoint; 'tokshard verify' tells whether the shard is "
                    "the same as before",
                ) from error
            raise DamagedCorpusError(f"{shard.path} cannot be read: {error.strerror}", hint=RESTORE) from error
        return list(_cut_out(places, joined, parts))

    def _version(self, shard: ShardFile) -> str:
        version = self._versions.get(shard.name)
        if version is None:
            found = self._store.stat(shard.name)
            _check_size(shard, found.size)
            version = self._versions.setdefault(shard.name, found.version)
        return version

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_SHARDS_AT_ONCE, thread_name_prefix="tokshard-shards")


def joined_ranges(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first byte and the length of ranges that cover some others, ascending, with no short gap between two."""
    found: list[tuple[int, int]] = []
    for position, length in sorted(places):
        if found and position <= sum(found[-1]) + _GAP_BYTES:
            start, known = found[-1]
            found[-1] = start, max(known, position + length - start)
        else:
            found.append((position, length))
    return found


def _cut_out(
    places: Sequence[tuple[int, int]], joined: Sequence[tuple[int, int]], parts: Sequence[bytes]
) -> Iterator[bytes]:
    starts = [start for start, _ in joined]
    for position, length in places:
        part = bisect_right(starts, position) - 1
        within = position - starts[part]
        yield parts[part][within : within + length]


def _check_size(shard: ShardFile, num_bytes: int) -> None:
    if num_bytes != shard.num_bytes:
        raise DamagedCorpusError(f"{shard.path} has {num_bytes} bytes, expected {shard.num_bytes}", hint=RESTORE)
