"""How fast this machine reads a plan in each loader mode, compared with memory and with what stores give."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.corpus import Corpus
from tokshard.format.opening import open_corpus
from tokshard.inspect.plan.store_speed import StoreSpeed, is_elsewhere, measure_store
from tokshard.jobs.plan_file import Mix
from tokshard.runtime.cache import fetched

DOCUMENT_TOKENS = 1_000
"""Length of the documents that the gather speed is measured with."""

CACHED_TOKENS = 16 << 20
"""Fewer tokens than this may fit into the processor's caches."""

_BATCH_TOKENS = 8 * 4_096
_ENOUGH_TOKENS = 64 << 20
_MEMORY_SECONDS = 0.25
_RANK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpeed:
    """Tokens per second of one core, from mapped shards, or what was read of a store, to new int64 arrays.

    No loader can be faster.

    Args:
        contiguous: reading one shard after another.
        gather: reading slices of `document_tokens` tokens from random places.
    """

    contiguous: float
    gather: float
    document_tokens: int


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
class ModeSpeed:
    """The speed of one loader mode.

    Args:
        num_workers: None: in the calling process; 0: with the prefetch thread; otherwise worker processes.
        first_batch_seconds: time to the first batch, including opening the corpora.
        steps: the batches after the first.
        cpu_seconds: CPU time of this process for these batches, without workers.
        fetched: what was read by range for these batches, as `ReadCounts` has it; None: in workers, or all is mapped.
    """

    num_workers: int | None
    first_batch_seconds: float
    steps: Steps
    cpu_seconds: float
    fetched: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedReport:
    """The result of ``tokshard bench``.

    Args:
        shares: corpus to its share of the samples at the start.
        mean_document_tokens: over all corpora, weighted by `shares`.
        num_tokens: tokens in the corpora.
        stores: what the stores of those give that are not on this machine.
        memory: medians of one measurement before each mode.
        memory_tokens: tokens that `memory` was measured on.
        rank_cpu_seconds: CPU time per token of a rank that reads one row of each step with the prefetch thread; a
            token costs more the fewer rows a rank has.
        load: share of the CPUs that was busy before the measurement, averaged over a minute.
    """

    mix: Mix
    fingerprint: str
    shares: dict[str, float]
    mean_document_tokens: float
    num_tokens: int
    stores: Sequence[StoreSpeed]
    memory: MemorySpeed
    memory_tokens: int
    modes: Sequence[ModeSpeed]
    rank_cpu_seconds: float
    load: float


def measure_speed(
    mix: Mix, *, seconds: float, workers: Sequence[int], on_mode: Callable[[str], None] = lambda _: None
) -> SpeedReport:
    """Read a mix in every mode.

    Args:
        seconds: time per mode, after its first batch.
        workers: numbers of worker processes; 0 is the prefetch thread. In process is always measured.
        on_mode: receives a name for what is measured next.

    Raises:
        UsageError: torch is missing, or the mix is not a valid plan.
        CorpusError: a corpus cannot be read.
    """
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    _require_torch()
    plan = mix.plan()  # refuses a wrong mix before anything is measured
    corpora = [open_corpus(location, generation=mix.generations.get(name)) for name, location in mix.corpora.items()]
    stores, arrays = [], mapped_tokens([corpus for corpus in corpora if not is_elsewhere(corpus)])
    for corpus in filter(is_elsewhere, corpora):
        on_mode(f"store of {corpus.location}")
        speed, read = measure_store(corpus, block_tokens=plan.shape.block_tokens, seconds=seconds)
        stores.append(speed)
        arrays += read
    reader = MemoryReader(arrays)
    memory, modes = [], []
    for num_workers in (None, *workers):
        on_mode("memory")
        memory.append(reader.measure(_MEMORY_SECONDS))
        on_mode("in process" if num_workers is None else f"num_workers={num_workers}")
        modes.append(measure_mode(mix, num_workers, seconds=seconds))
    on_mode("one rank of many")
    rank = measure_mode(mix, 0, seconds=min(_RANK_SECONDS, seconds), world_size=mix.global_batch_size)
    weights = plan.cursor().segments[0].weights
    shares = [weight / sum(weights) for weight in weights]
    documents = sum(share * each.num_documents / each.num_tokens for share, each in zip(shares, corpora, strict=True))
    return SpeedReport(
        mix=mix,
        fingerprint=plan.fingerprint,
        shares=dict(zip(plan.names, shares, strict=True)),
        mean_document_tokens=1 / documents,
        num_tokens=sum(corpus.num_tokens for corpus in corpora),
        stores=stores,
        memory=MemorySpeed(
            contiguous=statistics.median(each.contiguous for each in memory),
            gather=statistics.median(each.gather for each in memory),
            document_tokens=reader.document_tokens,
        ),
        memory_tokens=reader.num_tokens,
        modes=modes,
        rank_cpu_seconds=rank.cpu_seconds / rank.steps.num_tokens,
        load=load,
    )


def measure_mode(mix: Mix, num_workers: int | None, *, seconds: float, world_size: int = 1) -> ModeSpeed:
    """Read a mix in one mode, as the first of `world_size` data-parallel ranks.

    Args:
        num_workers: see `ModeSpeed`.
        seconds: time after the first batch.
    """
    from tokshard.runtime.tensors import StreamingLoader

    started = time.perf_counter()
    plan, size = mix.plan(), mix.global_batch_size
    loader = StreamingLoader(
        plan,
        global_batch_size=size,
        dp_rank=0,
        dp_world_size=world_size,
        num_workers=num_workers or 0,
        prefetch_factor=0 if num_workers is None else 4,
    )
    with loader:
        batches = endless(loader)
        next(batches)
        first_batch_seconds = time.perf_counter() - started
        cpu, before = time.process_time(), fetched(plan.sources)
        steps = take_steps(batches, seconds=seconds)
        counts = {name: count - before[name] for name, count in fetched(plan.sources).items()}
        is_counted = not num_workers and not all(source.is_in_memory for source in plan.sources)
        return ModeSpeed(
            num_workers=num_workers,
            first_batch_seconds=first_batch_seconds,
            steps=steps,
            cpu_seconds=time.process_time() - cpu,
            fetched=counts if is_counted else None,
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


class MemoryReader:
    """Reads mapped tokens in the two ways of `MemorySpeed`.

    Reads all arrays once when it is made, so that memory is measured and not the disk.

    Args:
        arrays: token ids, such as `mapped_tokens` returns; together at least one token.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self.num_tokens = sum(map(len, arrays))
        self.document_tokens = min(DOCUMENT_TOKENS, max(map(len, arrays)))
        for array in arrays:
            array.max()
        self._batches = itertools.cycle(
            array[start : start + _BATCH_TOKENS] for array in arrays for start in range(0, len(array), _BATCH_TOKENS)
        )
        self._documents = itertools.cycle(_random_slices(arrays, self.document_tokens))

    def measure(self, seconds: float) -> MemorySpeed:
        """Measure both ways, each for `seconds`."""
        num_documents = -(-_BATCH_TOKENS // self.document_tokens)
        return MemorySpeed(
            contiguous=_throughput(seconds, lambda: next(self._batches)),
            gather=_throughput(seconds, lambda: np.concatenate(list(itertools.islice(self._documents, num_documents)))),
            document_tokens=self.document_tokens,
        )


def mapped_tokens(corpora: Sequence[Corpus], *, num_tokens: int = _ENOUGH_TOKENS) -> list[NDArray[Any]]:
    """Token ids of record batches, from all corpora in turn, until there are enough: read-only memory maps.

    Raises:
        DamagedCorpusError: a shard is missing or does not match its manifest.
    """
    found: list[NDArray[Any]] = []
    for arrays in itertools.zip_longest(*map(_batches, corpora)):
        for array in arrays:
            if array is not None:
                found.append(array)
                num_tokens -= len(array)
            if num_tokens <= 0:
                return found
    return found


def _batches(corpus: Corpus) -> Iterator[NDArray[Any]]:
    for index in range(len(corpus.shards)):
        shard = corpus.shard(index)
        for batch in range(len(shard.places)):
            yield shard.batch(batch)[1]


def _random_slices(arrays: Sequence[NDArray[Any]], length: int) -> list[NDArray[Any]]:
    """Slices from random places; together about as many tokens as there are."""
    long_enough = [array for array in arrays if len(array) >= length]
    rooms = np.array([len(array) - length + 1 for array in long_enough], np.int64)
    stops = np.cumsum(rooms)
    places = np.random.default_rng(0).integers(0, stops[-1], max(1_000, int(stops[-1]) // length))
    chosen = np.searchsorted(stops, places, "right")
    starts = places - (stops - rooms)[chosen]
    return [
        long_enough[number][start : start + length]
        for number, start in zip(chosen.tolist(), starts.tolist(), strict=True)
    ]


def _throughput(seconds: float, read: Callable[[], NDArray[Any]]) -> float:
    num_tokens = 0
    started = time.perf_counter()
    while (passed := time.perf_counter() - started) < seconds or not num_tokens:
        num_tokens += len(read().astype(np.int64))
    return num_tokens / passed


def _require_torch() -> None:
    try:
        import tokshard.runtime.tensors  # noqa: F401 - also so that no mode pays for the import
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(
            "batches are tensors, and torch is not installed", hint="pip install 'tokshard[torch]'"
        ) from error
