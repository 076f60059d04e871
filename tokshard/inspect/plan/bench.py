"""How fast this machine reads a plan, compared with the speed of its memory."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from tokshard.extras import extra_module
from tokshard.run_files.plan_file import Mix
from tokshard.run_files.recipe import corpora_of, plan_of
from tokshard.runtime.plan import StreamPlan

DOCUMENT_TOKENS = 1_000
"""Length of the documents that the speed of memory is measured with."""

CACHED_TOKENS = 16 << 20
"""Fewer tokens than this may fit into the processor's caches, which raises speeds."""

_BUSY = 0.5
_BATCH_DOCUMENTS = 32
_MEMORY_TOKENS = 64 << 20
_MEMORY_SECONDS = 0.25

_READINGS = ("full", "compact", "one row")
"""The ways to read that are measured, see `Reading`."""


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


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of one way to read.

    Args:
        batches: ``"full"``, ``"compact"``, or ``"one row"``: full batches of a rank that has one row of each step.
        of_limit: the speed as a share of the limit.
        first_batch_seconds: time to the first batch, including opening the corpora; the other figures are without it.
        fetched: the ranged reads for these batches, as in `StreamingLoader.stats`.
    """

    batches: str
    tokens_per_second: float
    of_limit: float = 0.0
    first_batch_seconds: float
    median_step_seconds: float
    longest_step_seconds: float
    fetched: Mapping[str, float]


class SpeedReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``tokshard bench``.

    Args:
        shares: corpus to its share of the samples at the start.
        plan: its fingerprint.
        tokens: in the corpora.
        mean_document_tokens: over all corpora, weighted by `shares`.
        limit_tokens_per_second: no loader in one process can be faster: from `memory_speed`, the median of one
            measurement before each reading.
        load: that a CPU had before the measurement, averaged over a minute.
        notes: reasons to distrust the figures, one sentence each.
    """

    corpora: Mapping[str, str]
    shares: Mapping[str, float]
    seq_len: int
    global_batch_size: int
    seed: int
    plan: str
    tokens: int
    mean_document_tokens: float
    limit_tokens_per_second: float
    readings: Sequence[Reading]
    load: float
    notes: Sequence[str]


def measure_speed(mix: Mix, *, seconds: float, on_stage: Callable[[str], None] = lambda _: None) -> SpeedReport:
    """Read a mix with the prefetch thread, in every form of its batches.

    Args:
        seconds: time per reading, after its first batch.
        on_stage: receives the name of the next measurement.

    Raises:
        UsageError: torch is missing, or the mix is not a valid plan.
        CorpusError: a corpus cannot be read.
    """
    load = os.getloadavg()[0] / (os.cpu_count() or 1)  # the load is that of the machine
    extra_module("torch", "batches are tensors, and torch is not installed", extra="torch")
    import_module("tokshard.runtime.tensors")  # so that no reading pays for it
    plan = plan_of(mix)  # refuses a wrong mix before anything is measured
    weights = plan.cursor().segments[0].weights
    shares = {name: weight / sum(weights) for name, weight in zip(plan.names, weights, strict=True)}
    corpora = {corpus: shares[name] for name, corpus in corpora_of(plan).items()}
    speeds, readings = [], []
    for batches in _READINGS:
        on_stage("memory")
        speeds.append(memory_speed(_MEMORY_SECONDS))
        on_stage(f"batches: {batches}")
        readings.append(_reading(mix, batches, seconds=seconds))
    documents = sum(share * each.num_documents / each.num_tokens for each, share in corpora.items())
    limit = statistics.median(speeds)
    num_tokens = sum(corpus.num_tokens for corpus in corpora)
    return SpeedReport(
        corpora=mix.corpora,
        shares=shares,
        seq_len=mix.seq_len,
        global_batch_size=mix.global_batch_size,
        seed=mix.seed,
        plan=plan.fingerprint,
        tokens=num_tokens,
        mean_document_tokens=1 / documents,
        limit_tokens_per_second=limit,
        readings=[replace(reading, of_limit=reading.tokens_per_second / limit) for reading in readings],
        load=load,
        notes=list(_notes(load, num_tokens)),
    )


def _notes(load: float, num_tokens: int) -> Iterator[str]:
    if load >= _BUSY:
        yield f"the load was {load:.2g} per CPU before the measurement, so the speeds may be too low"
    if num_tokens < CACHED_TOKENS:
        yield (
            f"{num_tokens:,} tokens are few: they may fit into the processor's caches, which raises the speeds; and "
            "epochs end often, which lowers them"
        )


def _reading(mix: Mix, batches: str, *, seconds: float) -> Reading:
    """A reading that does not know the limit yet."""
    from tokshard.runtime.tensors import StreamingLoader

    started, size = time.perf_counter(), mix.global_batch_size
    world_size = size if batches == "one row" else 1
    with StreamingLoader(
        StreamPlan(**mix.arguments() | {"max_epochs": None}),  # which would end the reading early, and for good
        global_batch_size=size,
        dp_rank=0,
        dp_world_size=world_size,
        compact=batches == "compact",
    ) as loader:
        taken = endless(loader)
        next(taken)
        first_batch_seconds = time.perf_counter() - started
        before = loader.stats()["fetched"]
        steps = take_steps(taken, seconds=seconds)
        return Reading(
            batches=batches,
            tokens_per_second=steps.tokens_per_second,
            first_batch_seconds=first_batch_seconds,
            median_step_seconds=steps.median_seconds,
            longest_step_seconds=steps.longest_seconds,
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
