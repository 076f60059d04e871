"""What was read of corpora that are not mapped: in memory, up to a limit, and read ahead of need.

The corpora of a plan share one cache: its memory, its threads and its counts.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.runtime.bytes.copying import copy_pieces
from tokshard.runtime.bytes.fetchers import Fetchers, Task
from tokshard.runtime.bytes.strides import Parts, Run, Strides
from tokshard.runtime.bytes.token_memory import TokenMemory
from tokshard.runtime.options import integer
from tokshard.store import is_uri, without_secrets
from tokshard.store.record_cache import RecordCache

MEMORY_BYTES = 2 << 30
"""Enough for the windows of five corpora, of 64M tokens of 16 bits each, that are read and fetched at a time."""

CACHE_BYTES = 100 << 30

CONNECTIONS = 64
"""Requests at once: with 150 KB each and 40 ms of latency, 240 MB/s."""

_MOST_CONNECTIONS = 1_024

_RUN_STRIDES = 32
"""Strides of one request: 256k tokens."""

_CORPUS = 1 << 44
"""Strides of a corpus, to number those of several corpora in one sequence."""


@dataclass(slots=True)
class ReadCounts:
    """What was read through a cache since it was made, by this process.

    Args:
        hits: parts of documents that were in memory when they were needed.
        misses: those that had to be waited for.
        requests: to stores.
        fetched_bytes: from stores, hashes included.
        disk_bytes: from the directory of the cache.
        wrong_strides: strides of wrong bytes, which were fetched again.
        wait_seconds: time that readers waited.
    """

    hits: int = 0
    misses: int = 0
    requests: int = 0
    fetched_bytes: int = 0
    disk_bytes: int = 0
    wrong_strides: int = 0
    wait_seconds: float = 0.0


def fetched(sources: Iterable[object]) -> dict[str, float]:
    """What this process has read of sources that are not mapped: sums of `ReadCounts` over their caches, by name."""
    caches = {id(cache): cache for source in sources if isinstance(cache := getattr(source, "cache", None), Cache)}
    found = [dataclasses.asdict(cache.counts) for cache in caches.values()]
    return {item.name: sum(each[item.name] for each in found) for item in dataclasses.fields(ReadCounts)}


@dataclass(frozen=True, slots=True)
class _Fetch:
    """Strides that are on their way."""

    run: Run
    task: Task[NDArray[Any]]


class Cache:
    """Memory and threads for reading corpora that are not mapped.

    Pickles as its arguments: each process has its own memory and threads, a forked child too. The directory is shared
    by all processes of a machine, also by those of other jobs and other plans.

    Args:
        memory_bytes: how much is kept in memory. 2.5 windows of each corpus should fit; if they do not, strides are
            fetched again.
        cache_dir: a directory on a disk of this machine where strides are kept, too; default: nowhere.
        cache_bytes: how much is kept there.
        connections: requests at once.

    Attributes:
        counts: what was read so far, in this process.
        disk: what is kept in the directory.

    Raises:
        PlanError: a number is out of range.
        UsageError: the directory is a URI, or cannot be written.
    """

    def __init__(
        self,
        *,
        memory_bytes: int = MEMORY_BYTES,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = CACHE_BYTES,
        connections: int = CONNECTIONS,
    ) -> None:
        self.memory_bytes = integer("memory_bytes", memory_bytes, least=0)
        self.connections = integer("connections", connections, least=1, most=_MOST_CONNECTIONS)
        cache_bytes = integer("cache_bytes", cache_bytes, least=1)
        if cache_dir is not None and is_uri(os.fspath(cache_dir)):
            raise UsageError(
                f"cache_dir is {without_secrets(os.fspath(cache_dir))}, and strides are kept on a disk of this machine",
                hint="give a directory",
            )
        directory = None if cache_dir is None else os.path.abspath(cache_dir)
        self._arguments: dict[str, Any] = {
            "memory_bytes": self.memory_bytes,
            "cache_dir": directory,
            "cache_bytes": cache_bytes,
            "connections": self.connections,
        }
        self.disk = None if directory is None else RecordCache(directory, cache_bytes)
        self._num_corpora = 0
        self.renew()
        _caches.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (partial(Cache, **self._arguments), ())

    def renew(self) -> None:
        """Begin with nothing."""
        self.counts = ReadCounts()
        self.lock = threading.Lock()
        self.fetchers = Fetchers(self.connections)
        self.hash_fetchers = Fetchers(self.connections)
        self.running: dict[int, _Fetch] = {}
        self._memories: dict[np.dtype[Any], TokenMemory] = {}

    def count(self, **amounts: float) -> None:
        """Add to the counts."""
        with self.lock:
            for name, amount in amounts.items():
                setattr(self.counts, name, getattr(self.counts, name) + amount)

    def memory(self, dtype: np.dtype[Any], stride_tokens: int) -> TokenMemory:
        """The memory for tokens of a type, allocated when it is first asked for. To be used under the lock."""
        found = self._memories.get(dtype)
        if found is None:
            num_slots = self.memory_bytes // (stride_tokens * dtype.itemsize)
            found = self._memories[dtype] = TokenMemory(num_slots, stride_tokens, dtype)
        return found

    def next_base(self) -> int:
        """The number of the first stride of another corpus."""
        with self.lock:
            self._num_corpora += 1
            return (self._num_corpora - 1) * _CORPUS


_caches: weakref.WeakSet[Cache] = weakref.WeakSet()


def _renew_all() -> None:
    for cache in list(_caches):
        cache.renew()


os.register_at_fork(after_in_child=_renew_all)


class CachedStrides:
    """The strides of one corpus, read through a cache. Threads may share it.

    Args:
        fetch: reads and checks a run of strides; called in threads of the cache.
        touch: called with the number of a shard before it is waited for.
    """

    def __init__(
        self,
        cache: Cache,
        strides: Strides,
        dtype: np.dtype[Any],
        fetch: Callable[[Run], NDArray[Any]],
        touch: Callable[[int], None],
    ) -> None:
        self._cache, self._strides, self._dtype = cache, strides, dtype
        self._fetch, self._touch = fetch, touch
        self._base = cache.next_base()
        self._released: deque[NDArray[np.int64]] = deque()

    def read(self, parts: Parts, out: NDArray[Any]) -> None:
        """Copy tokens; what is not in memory is fetched, together.

        Raises:
            DamagedCorpusError: bytes are missing or wrong.
            StoreError: the store does not answer.
        """
        cache = self._cache
        with cache.lock:
            memory = self._memory()
            slots = memory.slots((parts.strides + self._base).tolist())
            is_here = slots >= 0
            num_here = int(np.count_nonzero(is_here))
            cache.counts.hits += num_here
            cache.counts.misses += len(slots) - num_here
            if num_here:  # under the lock, because a slot may be used again after it
                here, elements = parts, slots * memory.stride_tokens + parts.starts
                if num_here < len(slots):
                    here, elements = parts[is_here], elements[is_here]
                copy_pieces(memory.tokens, elements, here.lengths, out, here.at)
            if num_here == len(slots):
                return
            rest = parts[~is_here]
            fetches = self._fetches(np.unique(rest.strides), is_urgent=True)
        tokens = self._wait(fetches)
        for number, start, length, place in zip(
            rest.strides.tolist(), rest.starts.tolist(), rest.lengths.tolist(), rest.at.tolist(), strict=True
        ):
            first, found = tokens[number]
            begin = (number - first) * self._strides.tokens + start
            out[place : place + length] = found[begin : begin + length]

    def announce(self, strides: NDArray[np.int64]) -> None:
        """Fetch strides that will be read, as far as there is room, and keep them.

        Args:
            strides: int64 [n], in the order in which they are needed.
        """
        cache = self._cache
        with cache.lock:
            memory, keys = self._memory(), (strides + self._base).tolist()
            memory.announce(keys)
            missing = [index for index, key in enumerate(keys) if key not in memory and key not in cache.running]
            room = max(0, memory.room - len(cache.running))
            self._fetches(strides[missing[:room]], is_urgent=False)

    def release(self, strides: NDArray[np.int64]) -> None:
        """Strides that were announced are not needed any more."""
        # without the lock: readers that are freed call this, perhaps while this thread has it
        self._released.append(strides)

    def _memory(self) -> TokenMemory:
        """The memory of the cache, without what was released. Under the lock."""
        memory = self._cache.memory(self._dtype, self._strides.tokens)
        while self._released:
            memory.release((self._released.popleft() + self._base).tolist())
        return memory

    def _fetches(self, strides: NDArray[np.int64], *, is_urgent: bool) -> list[_Fetch]:
        """What brings some strides: fetches that are under way, and new ones. Under the lock."""
        running, fetchers = self._cache.running, self._cache.fetchers
        keys = (strides + self._base).tolist()
        found = {id(fetch): fetch for key in keys if (fetch := running.get(key)) is not None}
        if is_urgent:
            for fetch in found.values():
                fetchers.hurry(fetch.task)
        is_new = np.array([key not in running for key in keys], np.bool_)
        for run in self._strides.runs(strides[is_new], _RUN_STRIDES):
            fetch = _Fetch(run, fetchers.start(partial(self._bring, run), is_urgent=is_urgent))
            found[id(fetch)] = fetch
            for key in self._keys(run):
                running[key] = fetch
        return list(found.values())

    def _bring(self, run: Run) -> NDArray[Any]:
        """Fetch strides, and keep them in memory; in a thread of the cache."""
        cache, keys, size = self._cache, self._keys(run), self._strides.tokens
        try:
            tokens = self._fetch(run)
            with cache.lock:
                memory = self._memory()
                reserved = memory.reserve(keys)
            for key, slot in reserved:  # without the lock: readers go on meanwhile
                start = (key - keys.start) * size
                memory.fill(slot, tokens[start : start + size])
            with cache.lock:
                memory.publish(reserved)
        finally:
            with cache.lock:
                for key in keys:
                    cache.running.pop(key, None)
        return tokens

    def _wait(self, fetches: list[_Fetch]) -> dict[int, tuple[int, NDArray[Any]]]:
        """The first stride of each run and its tokens, by the number of each stride."""
        started = time.perf_counter()
        found: dict[int, tuple[int, NDArray[Any]]] = {}
        try:
            for fetch in fetches:
                self._touch(fetch.run.shard)
                tokens = fetch.task.result()
                first = fetch.run.number
                found.update(dict.fromkeys(range(first, first + fetch.run.stop - fetch.run.first), (first, tokens)))
        finally:
            self._cache.count(wait_seconds=time.perf_counter() - started)
        return found

    def _keys(self, run: Run) -> range:
        first = self._base + run.number
        return range(first, first + run.stop - run.first)
