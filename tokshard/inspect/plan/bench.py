"""How fast this machine reads a plan, compared with the limit of its memory or of the corpora's stores."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.extras import extra_module
from tokshard.format import names
from tokshard.format.corpus import Corpus
from tokshard.format.schema import HASH_STRIDE
from tokshard.run_files.plan_file import Mix
from tokshard.run_files.recipe import corpora_of
from tokshard.runtime.bytes.cache import CONNECTIONS
from tokshard.runtime.plan import StreamPlan

DOCUMENT_TOKENS = 1_000
"""Length of the documents that the speed of memory is measured with."""

CACHED_TOKENS = 16 << 20
"""Fewer tokens than this may fit into the processor's caches, which raises speeds."""

_BATCH_DOCUMENTS = 32
_MEMORY_TOKENS = 64 << 20
_MEMORY_SECONDS = 0.25

_READINGS = ("full", "compact", "one row")
"""What is measured, see `Reading`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The time that a series of batches took.

    Args:
        num_tokens: tokens of all batches, padding included.
        wall_seconds: time for all batches.
        median_seconds, longest_seconds: time for one batch.
    """

    num_tokens: int
    wall_seconds: float
    median_seconds: float
    longest_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Throughput over all batches."""
        return self.num_tokens / self.wall_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The speed of one way to read.

    Args:
        batches: ``"full"``, ``"compact"``, or ``"one row"``: full batches of a rank that has one row of each step.
        first_batch_seconds: time to the first batch, including opening the corpora.
        steps: the batches after the first.
        cpu_seconds: CPU time of this process for these batches.
        fetched: the ranged reads for these batches, as in `StreamingLoader.stats`.
    """

    batches: str
    first_batch_seconds: float
    steps: Steps
    cpu_seconds: float
    fetched: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedReport:
    """The result of ``tokshard bench``.

    Args:
        shares: corpus to its share of the samples at the start.
        mean_document_tokens: over all corpora, weighted by `shares`.
        num_tokens: tokens in the corpora.
        memory: from `memory_speed`, the median of one measurement before each reading.
        store_bytes_per_second: speed of the stores of remote corpora; None: all corpora are on this machine.
        store: tokens per second of the whole mix at this speed; infinite: all corpora are on this machine.
        load: share of the CPUs that was busy before the measurement, averaged over a minute.
    """

    mix: Mix
    fingerprint: str
    shares: dict[str, float]
    mean_document_tokens: float
    num_tokens: int
    memory: float
    store_bytes_per_second: float | None
    store: float
    readings: Sequence[Reading]
    load: float

    @property
    def limit(self) -> float:
        """Tokens per second that no loader in one process can exceed."""
        return min(self.memory, self.store)

    @property
    def rank_cpu_seconds(self) -> float:
        """CPU time per token of a rank that reads one row of each step; with fewer rows a token costs more."""
        return self.readings[-1].cpu_seconds / self.readings[-1].steps.num_tokens


def measure_speed(mix: Mix, *, seconds: float, on_stage: Callable[[str], None] = lambda _: None) -> SpeedReport:
    """Read a mix with the prefetch thread, in every form of its batches.

    Args:
        seconds: time per reading, after its first batch.
        on_stage: receives the name of the next measurement.

    Raises:
        UsageError: torch is missing, or the mix is not a valid plan.
        CorpusError: a corpus cannot be read.
    """
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    extra_module("torch", "batches are tensors, and torch is not installed", extra="torch")
    import_module("tokshard.runtime.tensors")  # so that no reading pays for it
    plan = StreamPlan(**mix.arguments())  # refuses a wrong mix before anything is measured
    weights = plan.cursor().segments[0].weights
    shares = {name: weight / sum(weights) for name, weight in zip(plan.names, weights, strict=True)}
    corpora = {corpus: shares[name] for name, corpus in corpora_of(plan).items()}
    elsewhere = {
        corpus: share for corpus, share in corpora.items() if share and corpus.store.local_path(names.MANIFEST) is None
    }
    store_bytes, store = None, math.inf
    if elsewhere:
        on_stage("stores")
        store_bytes = store_speed(elsewhere, block_tokens=plan.shape.block_tokens, seconds=seconds)
        store = store_bytes / plan.sources[0].dtype.itemsize / sum(elsewhere.values())
    speeds, readings = [], []
    for batches in _READINGS:
        on_stage("memory")
        speeds.append(memory_speed(_MEMORY_SECONDS))
        on_stage(f"batches: {batches}")
        readings.append(_measure_reading(mix, batches, seconds=seconds))
    documents = sum(share * each.num_documents / each.num_tokens for each, share in corpora.items())
    return SpeedReport(
        mix=mix,
        fingerprint=plan.fingerprint,
        shares=shares,
        mean_document_tokens=1 / documents,
        num_tokens=sum(corpus.num_tokens for corpus in corpora),
        memory=statistics.median(speeds),
        store_bytes_per_second=store_bytes,
        store=store,
        readings=readings,
        load=load,
    )


def _measure_reading(mix: Mix, batches: str, *, seconds: float) -> Reading:
    from tokshard.runtime.tensors import StreamingLoader

    started, size = time.perf_counter(), mix.global_batch_size
    world_size = size if batches == "one row" else 1
    with StreamingLoader(
        StreamPlan(**mix.arguments()),
        global_batch_size=size,
        dp_rank=0,
        dp_world_size=world_size,
        compact=batches == "compact",
    ) as loader:
        taken = endless(loader)
        next(taken)
        first_batch_seconds = time.perf_counter() - started
        cpu, before = time.process_time(), loader.stats()["fetched"]
        steps = take_steps(taken, seconds=seconds)
        return Reading(
            batches=batches,
            first_batch_seconds=first_batch_seconds,
            steps=steps,
            cpu_seconds=time.process_time() - cpu,
            fetched={name: count - before[name] for name, count in loader.stats()["fetched"].items()},
        )


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Batch after batch; a finite pass starts again when it is over."""
    return itertools.chain.from_iterable(itertools.repeat(batches))


def take_steps(batches: Iterator[Any], *, seconds: float = 0.0, num_steps: int = 1) -> Steps:
    """Take batches until at least `num_steps` were taken and `seconds` have passed, and drop them."""
    times = [time.perf_counter()]
    num_tokens = 0
    while len(times) <= num_steps or times[-1] - times[0] < seconds:
        num_tokens += next(batches)["input_ids"].numel()
        times.append(time.perf_counter())
    durations = [stop - start for start, stop in itertools.pairwise(times)]
    return Steps(
        num_tokens=num_tokens,
        wall_seconds=times[-1] - times[0],
        median_seconds=statistics.median(durations),
        longest_seconds=max(durations),
    )


def memory_speed(seconds: float) -> float:
    """Tokens per second that one core copies, as documents of uint16 from random places of memory, to int64 arrays."""
    tokens, num_tokens = np.ones(_MEMORY_TOKENS, np.uint16), 0  # far more than fit into the processor's caches
    starts = np.random.default_rng(0).integers(0, len(tokens) - DOCUMENT_TOKENS, len(tokens) // DOCUMENT_TOKENS)
    places = itertools.cycle(starts.tolist())
    started = time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds or not num_tokens:
        batch = [tokens[start : start + DOCUMENT_TOKENS] for start in itertools.islice(places, _BATCH_DOCUMENTS)]
        num_tokens += len(np.concatenate(batch).astype(np.int64))
    return num_tokens / passed


def store_speed(shares: Mapping[Corpus, float], *, block_tokens: int, seconds: float) -> float:
    """Bytes per second from random blocks of corpora, by their shares, `CONNECTIONS` at once.

    Raises:
        DamagedCorpusError: a shard is missing or too short.
        StoreError: the store does not answer.
    """
    places, lock = _random_places(shares, block_tokens + HASH_STRIDE), threading.Lock()
    started = time.perf_counter()

    def read_on() -> int:
        num_bytes = 0
        while time.perf_counter() - started < seconds or not num_bytes:
            with lock:
                place = next(places)
            num_bytes += _read(*place)
        return num_bytes

    with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="tokshard-bench") as pool:
        num_bytes = sum(task.result() for task in [pool.submit(read_on) for _ in range(CONNECTIONS)])
    return num_bytes / (time.perf_counter() - started)


def _read(corpus: Corpus, name: str, position: int, num_bytes: int) -> int:
    try:
        (content,) = corpus.store.read(name, [(position, num_bytes)])
    except OSError as error:
        raise DamagedCorpusError(
            f"{corpus.store.where(name)} cannot be read: {error.strerror or error}", hint=RESTORE
        ) from error
    return len(content)


def _random_places(shares: Mapping[Corpus, float], num_tokens: int) -> Iterator[tuple[Corpus, str, int, int]]:
    """Random places of tokens: corpus, name of a shard, first byte and length; shorter in a short record batch."""
    rng, corpora = np.random.default_rng(0), list(shares)
    chances = np.array(list(shares.values())) / sum(shares.values())
    while True:
        corpus = corpora[rng.choice(len(corpora), p=chances)]
        index = int(corpus.shards.first_tokens.searchsorted(rng.integers(corpus.num_tokens), "right")) - 1
        batches, size = corpus.shards.batch_places(index), corpus.dtype.itemsize
        place = batches[int(rng.integers(len(batches)))]
        tokens = min(num_tokens, place.num_tokens)
        start = int(rng.integers(place.num_tokens - tokens + 1))
        yield corpus, corpus.shards[index].name, place.values_position + start * size, tokens * size
