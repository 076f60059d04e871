"""What a store gives to one process that reads it as a loader does: blocks from random places, many at once."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format import names
from tokshard.format.corpus import Corpus
from tokshard.format.schema import HASH_STRIDE
from tokshard.runtime.cache import CONNECTIONS

_ALONE = 9
_ENOUGH_TOKENS = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpeed:
    """What a store gives.

    Args:
        location: of the corpus.
        request_bytes: asked for at a time: a block and the stride after it.
        connections: requests at once.
        latency_seconds: the median time of a request when there is no other.
        bytes_per_second, requests_per_second: with so many requests at once.
    """

    location: str
    request_bytes: int
    connections: int
    latency_seconds: float
    bytes_per_second: float
    requests_per_second: float


def is_elsewhere(corpus: Corpus) -> bool:
    """Whether a corpus is not on this machine."""
    return corpus.store.local_path(names.MANIFEST) is None


def measure_store(corpus: Corpus, *, block_tokens: int, seconds: float) -> tuple[StoreSpeed, list[NDArray[Any]]]:
    """Read blocks from random places of a corpus.

    Args:
        seconds: time to read many at once.

    Returns:
        The speed, and what was read of up to 64M tokens: arrays of token ids, unchecked.

    Raises:
        DamagedCorpusError: a shard is missing or too short.
        StoreError: the store does not answer.
    """
    size = (block_tokens + HASH_STRIDE) * corpus.dtype.itemsize
    places = _places(corpus, size)
    alone = []
    for name, position, length in itertools.islice(places, _ALONE):
        started = time.perf_counter()
        _read(corpus, name, position, length)
        alone.append(time.perf_counter() - started)
    kept: list[NDArray[Any]] = []
    lock = threading.Lock()
    most_kept = max(1, _ENOUGH_TOKENS * corpus.dtype.itemsize // size)
    started = time.perf_counter()

    def read_on() -> tuple[int, int]:
        num_requests = num_bytes = 0
        while time.perf_counter() - started < seconds or not num_requests:
            with lock:
                place = next(places)
            content = _read(corpus, *place)
            num_requests, num_bytes = num_requests + 1, num_bytes + len(content)
            if len(kept) < most_kept:
                kept.append(np.frombuffer(content, corpus.dtype))
        return num_requests, num_bytes

    with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="tokshard-bench") as pool:
        counts = [task.result() for task in [pool.submit(read_on) for _ in range(CONNECTIONS)]]
    passed = time.perf_counter() - started
    speed = StoreSpeed(
        location=corpus.location,
        request_bytes=size,
        connections=CONNECTIONS,
        latency_seconds=statistics.median(alone),
        bytes_per_second=sum(num_bytes for _, num_bytes in counts) / passed,
        requests_per_second=sum(num_requests for num_requests, _ in counts) / passed,
    )
    return speed, kept


def _read(corpus: Corpus, name: str, position: int, length: int) -> bytes:
    try:
        (content,) = corpus.store.read(name, [(position, length)])
    except OSError as error:
        raise DamagedCorpusError(
            f"{corpus.store.where(name)} cannot be read: {error.strerror or error}", hint=RESTORE
        ) from error
    return content


def _places(corpus: Corpus, num_bytes: int) -> Iterator[tuple[str, int, int]]:
    """Random places of tokens: name of a shard, first byte and length; shorter where a record batch is."""
    rng, size = np.random.default_rng(0), corpus.dtype.itemsize
    while True:
        index = int(corpus.shards.first_tokens.searchsorted(rng.integers(corpus.num_tokens), "right")) - 1
        batches = corpus.shards.batch_places(index)
        place = batches[int(rng.integers(len(batches)))]
        tokens = min(num_bytes // size, place.num_tokens)
        start = int(rng.integers(place.num_tokens - tokens + 1))
        yield corpus.shards[index].name, place.values_position + start * size, tokens * size
