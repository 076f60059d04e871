"""A cache in memory for corpora that are not mapped. It has a size limit, and is filled ahead of need.

The corpora of a plan share one cache: its memory, its threads and its counts. A cache knows neither corpora nor tokens:
it keeps *chunks* of one size, which their readers number.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.runtime.bytes.copying import copy_pieces
from tokshard.runtime.bytes.fetchers import Fetchers
from tokshard.runtime.bytes.source import ReadCounts
from tokshard.runtime.options import integer
from tokshard.store import is_uri, without_secrets
from tokshard.store.record_cache import RecordCache

MEMORY_BYTES = 2 << 30
"""Enough for the current and next windows of five corpora, with 64M tokens of 16 bits in a window."""

CACHE_BYTES = 100 << 30

CONNECTIONS = 64
"""Concurrent requests: with 150 KB each and 40 ms of latency, 240 MB/s."""

_MOST_CONNECTIONS = 1_024

_CORPUS = 1 << 44
"""The range of chunk numbers of a corpus, so that several corpora share one sequence of numbers."""


@dataclass(frozen=True, slots=True)
class Request:
    """Chunks that are fetched together.

    Args:
        chunks: their numbers.
        path: the shard that holds them.
        work: returns their tokens, checked, chunk after chunk; the last one may be short.
    """

    chunks: range
    path: str
    work: Callable[[], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Parts:
    """Pieces cut at the start of chunks; int64 [n] each.

    Args:
        chunks: the chunk that holds each part.
        starts: its first token in the chunk.
        lengths: its tokens.
        at: its place in the output.
    """

    chunks: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    at: NDArray[np.int64]

    def __getitem__(self, chosen: NDArray[np.bool_]) -> Parts:
        return Parts(self.chunks[chosen], self.starts[chosen], self.lengths[chosen], self.at[chosen])


class Chunks(Protocol):
    """The chunks of one corpus."""

    def requests(self, chunks: NDArray[np.int64]) -> Iterable[Request]:
        """The requests for some chunks, and perhaps more; int64 [n], each once. Called under the lock of the cache."""

    def waits_for(self, path: str) -> None:
        """Note that a reader waits for a shard."""


class Memory:
    """Chunks in memory: slots of one array that is allocated once and filled as chunks come. Needs a lock around it.

    Chunks that a reader has announced stay until the reader releases them. Others are dropped when a slot is needed,
    least recently used first. So memory grows to what readers announce at a time, and up to the limit.

    Attributes:
        content: uint8 [slots * chunk_bytes]; slots without a chunk are not backed by memory.
    """

    def __init__(self, num_slots: int, chunk_bytes: int) -> None:
        self.content: NDArray[np.uint8] = np.empty(num_slots * chunk_bytes, np.uint8)
        self.chunk_bytes = chunk_bytes
        self._num_slots, self._num_used = num_slots, 0
        self._free: list[int] = []
        self._slots: dict[int, int] = {}
        self._readers: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._slots

    @property
    def room(self) -> int:
        """Slots that are free or hold a chunk that no reader has announced."""
        return self._num_slots - len(self._slots) + len(self._idle)

    def slots(self, chunks: Sequence[int]) -> NDArray[np.int64]:
        """The slot of each chunk, int64 [n]; -1 if it is absent."""
        find, idle = self._slots.get, self._idle
        if idle:
            for chunk in chunks:
                if chunk in idle:
                    idle.move_to_end(chunk)
        return np.fromiter((find(chunk, -1) for chunk in chunks), np.int64, len(chunks))

    def announce(self, chunks: Iterable[int]) -> None:
        """A reader will read these: keep them."""
        for chunk in chunks:
            self._readers[chunk] = self._readers.get(chunk, 0) + 1
            self._idle.pop(chunk, None)

    def release(self, chunks: Iterable[int]) -> None:
        """A reader that announced these is done with them."""
        for chunk in chunks:
            left = self._readers.pop(chunk, 0) - 1
            if left > 0:
                self._readers[chunk] = left
            elif chunk in self._slots:
                self._idle[chunk] = None

    def reserve(self, chunks: Iterable[int]) -> list[tuple[int, int]]:
        """Pairs of an absent chunk and a slot, as far as there is room. The caller owns the slots until `publish`."""
        return [(chunk, slot) for chunk in chunks if chunk not in self._slots and (slot := self._slot()) is not None]

    def fill(self, slot: int, content: NDArray[np.uint8]) -> None:
        """Write chunks into slots that were reserved, from one of them on. Needs no lock."""
        start = slot * self.chunk_bytes
        self.content[start : start + len(content)] = content

    def publish(self, reserved: Iterable[tuple[int, int]]) -> None:
        """Make the chunks of filled slots visible to all readers."""
        for chunk, slot in reserved:
            if chunk in self._slots:  # of another fetch
                self._free.append(slot)
                continue
            self._slots[chunk] = slot
            if chunk not in self._readers:
                self._idle[chunk] = None

    def _slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._idle:  # before new memory is touched
            return self._slots.pop(self._idle.popitem(last=False)[0])
        if self._num_used == self._num_slots:
            return None
        self._num_used += 1
        return self._num_used - 1


class Cache:
    """Memory and threads for reading corpora that are not mapped.

    Pickles as its arguments: each process has its own memory and threads, a forked child too. All processes of a
    machine share the directory, also across jobs and plans.

    Args:
        memory_bytes: limit in memory. 2.5 windows of each corpus should fit; otherwise strides are fetched again.
        cache_dir: a directory on a local disk, where strides are kept, too; default: none.
        cache_bytes: limit of the directory.
        connections: concurrent requests.

    Attributes:
        counts: reads of this process so far.
        disk: the records in the directory.

    Raises:
        PlanError: a number is out of range.
        UsageError: the directory is a URI, lies in a corpus, or cannot be written.
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
                f"cache_dir is {without_secrets(os.fspath(cache_dir))}, expected a directory of this machine",
                hint="give a directory on a local disk",
            )
        directory = None if cache_dir is None else os.path.abspath(cache_dir)
        self._arguments: dict[str, Any] = {
            "memory_bytes": self.memory_bytes,
            "cache_dir": directory,
            "cache_bytes": cache_bytes,
            "connections": self.connections,
        }
        if directory is not None:
            from tokshard.format.opening import check_outside_corpora  # imports pyarrow, which an order does not need

            check_outside_corpora(directory, key="cache_dir")
        self.disk = None if directory is None else RecordCache(directory, cache_bytes)
        self._begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return (partial(Cache, **self._arguments), ())

    def _begin(self) -> None:
        self._pid = os.getpid()
        self.counts = ReadCounts()
        self.fetchers = Fetchers(self.connections)
        self.hash_fetchers = Fetchers(self.connections)  # apart from the others: the first batch comes 0.3 s earlier
        self._lock = threading.Lock()
        self._running: dict[int, tuple[Request, Future[NDArray[Any]]]] = {}
        self._released: deque[NDArray[np.int64]] = deque()
        self._memory: Memory | None = None
        self._num_corpora = 0

    def join(self, chunk_bytes: int) -> int:
        """Add a corpus; returns the number of its first chunk. A forked process begins with an empty cache.

        Args:
            chunk_bytes: the same for all corpora.
        """
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            if self._memory is None:
                self._memory = Memory(self.memory_bytes // chunk_bytes, chunk_bytes)
            self._num_corpora += 1
            return (self._num_corpora - 1) * _CORPUS

    def count(self, **amounts: float) -> None:
        """Add to the counts."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self.counts, name, getattr(self.counts, name) + amount)

    def read(self, parts: Parts, out: NDArray[Any], corpus: Chunks) -> None:
        """Copy tokens. Chunks that are not in memory are fetched together.

        Raises:
            DamagedCorpusError: bytes are missing or wrong.
            StoreError: the store does not answer.
        """
        with self._lock:
            memory = self._current()
            slots = memory.slots(parts.chunks.tolist())
            is_here = slots >= 0
            num_here = int(np.count_nonzero(is_here))
            self.counts.hits += num_here
            self.counts.misses += len(slots) - num_here
            chunk_tokens = memory.chunk_bytes // out.itemsize
            if num_here:  # under the lock, because a slot may be used again after it
                here, elements = parts, slots * chunk_tokens + parts.starts
                if num_here < len(slots):
                    here, elements = parts[is_here], elements[is_here]
                copy_pieces(memory.content.view(out.dtype), elements, here.lengths, out, here.at)
            if num_here == len(slots):
                return
            rest = parts[~is_here]
            fetches = self._fetches(np.unique(rest.chunks), corpus, is_urgent=True)
        tokens = self._wait(fetches, corpus)
        for chunk, start, length, place in zip(
            rest.chunks.tolist(), rest.starts.tolist(), rest.lengths.tolist(), rest.at.tolist(), strict=True
        ):
            first, found = tokens[chunk]
            begin = (chunk - first) * chunk_tokens + start
            out[place : place + length] = found[begin : begin + length]

    def announce(self, chunks: NDArray[np.int64], corpus: Chunks) -> None:
        """Fetch chunks that will be read, as far as there is room, and keep them until they are released.

        Args:
            chunks: int64 [n], in the order in which they are needed. One that is given several times has to be
                released as often.
        """
        with self._lock:
            memory, numbers = self._current(), chunks.tolist()
            memory.announce(numbers)
            missing = [one for one in dict.fromkeys(numbers) if one not in memory and one not in self._running]
            room = max(0, memory.room - len(self._running))
            self._fetches(np.array(missing[:room], np.int64), corpus, is_urgent=False)

    def release(self, chunks: NDArray[np.int64]) -> None:
        """Release announced chunks, each as often as it is given."""
        # without the lock: readers that are freed call this, perhaps while this thread has it
        self._released.append(chunks)

    def _current(self) -> Memory:
        """The memory, after pending releases. Called under the lock."""
        memory = self._memory
        assert memory is not None, "a corpus joined"
        while self._released:
            memory.release(self._released.popleft().tolist())
        return memory

    def _fetches(
        self, chunks: NDArray[np.int64], corpus: Chunks, *, is_urgent: bool
    ) -> list[tuple[Request, Future[NDArray[Any]]]]:
        """The fetches that bring some chunks: running ones and new ones. Called under the lock."""
        running = self._running
        numbers = chunks.tolist()
        found = {id(fetch): fetch for number in numbers if (fetch := running.get(number)) is not None}
        if is_urgent:
            for _, future in found.values():
                self.fetchers.hurry(future)
        is_new = np.array([number not in running for number in numbers], np.bool_)
        for request in corpus.requests(chunks[is_new]):
            fetch = request, self.fetchers.start(partial(self._bring, request), is_urgent=is_urgent)
            found[id(fetch)] = fetch
            running.update(dict.fromkeys(request.chunks, fetch))
        return list(found.values())

    def _bring(self, request: Request) -> NDArray[Any]:
        """Fetch chunks, and keep them in memory; in a thread of the cache."""
        try:
            tokens = request.work()
            with self._lock:
                memory = self._current()
                reserved = memory.reserve(request.chunks)
            content = tokens.view(np.uint8)
            size, low = memory.chunk_bytes, 0
            while low < len(reserved):  # without the lock: readers go on meanwhile
                (chunk, slot), high = reserved[low], low + 1
                while high < len(reserved) and reserved[high] == (chunk + high - low, slot + high - low):
                    high += 1
                start = (chunk - request.chunks.start) * size
                memory.fill(slot, content[start : start + (high - low) * size])
                low = high
            with self._lock:
                memory.publish(reserved)
        finally:
            with self._lock:
                for chunk in request.chunks:
                    self._running.pop(chunk, None)
        return tokens

    def _wait(
        self, fetches: Iterable[tuple[Request, Future[NDArray[Any]]]], corpus: Chunks
    ) -> dict[int, tuple[int, NDArray[Any]]]:
        """The first chunk of each request and its tokens, by the number of each chunk."""
        started = time.perf_counter()
        found: dict[int, tuple[int, NDArray[Any]]] = {}
        try:
            for request, future in fetches:
                corpus.waits_for(request.path)
                found.update(dict.fromkeys(request.chunks, (request.chunks.start, future.result())))
        finally:
            self.count(wait_seconds=time.perf_counter() - started)
        return found
