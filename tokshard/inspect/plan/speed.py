"""How fast this machine reads a plan: in the training process, behind a thread, behind worker processes."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from tokshard.errors import UsageError
from tokshard.format.opening import open_corpus
from tokshard.inspect.plan.limits import LimitReader, Limits, mapped_tokens
from tokshard.jobs.plan_file import Mix
from tokshard.wording import counted

_LIMIT_SECONDS = 0.25
_RANK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Batches that were taken one after another.

    Args:
        num_tokens: of all batches, padding included.
        wall_seconds: from before the first to after the last.
        median_seconds, longest_seconds: of one step.
    """

    num_tokens: int
    wall_seconds: float
    median_seconds: float
    longest_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of the whole run."""
        return self.num_tokens / self.wall_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeSpeed:
    """One way to read a plan.

    Args:
        num_workers: None: in the process that asks, 0: behind the prefetch thread, else behind worker processes.
        first_batch_seconds: from nothing but imports and the names of the corpora.
        steps: those after the first.
        cpu_seconds: of this process during these steps; without what workers took.
    """

    num_workers: int | None
    first_batch_seconds: float
    steps: Steps
    cpu_seconds: float

    @property
    def name(self) -> str:
        """As it is called in a table."""
        if self.num_workers is None:
            return "in process"
        if self.num_workers == 0:
            return "thread"
        return counted(self.num_workers, "worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedReport:
    """What ``tokshard bench`` found.

    Args:
        shares: corpus to its share of the samples at the start.
        mean_document_tokens: over all corpora, weighted by `shares`.
        num_tokens: in the corpora.
        limits: medians of those that were measured before each mode.
        limit_tokens: what they were measured on.
        rank_cpu_seconds: per token, of a rank that gets one row of a step, behind the prefetch thread: the fewer rows,
            the more a token costs.
        load: part of the CPUs that was in use before the measurement, in the mean of a minute.
    """

    mix: Mix
    fingerprint: str
    shares: dict[str, float]
    mean_document_tokens: float
    num_tokens: int
    limits: Limits
    limit_tokens: int
    modes: Sequence[ModeSpeed]
    rank_cpu_seconds: float
    load: float


def measure_speed(
    mix: Mix,
    *,
    seconds: float,
    workers: Sequence[int],
    on_mode: Callable[[str], None] = lambda _: None,
) -> SpeedReport:
    """Read a mix in every mode, and the limits beside each.

    Args:
        seconds: per mode, after its first batch.
        workers: numbers of worker processes to measure; 0 is the prefetch thread. In process is always measured.
        on_mode: is told what is measured next.

    Raises:
        UsageError: torch is missing, or the mix makes no plan.
        CorpusError: a corpus cannot be read.
    """
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    _require_torch()
    plan = mix.plan()  # what is wrong with the mix shows before anything is measured
    corpora = [open_corpus(location) for location in mix.corpora.values()]
    reader = LimitReader(mapped_tokens(corpora))
    limits, modes = [], []
    for num_workers in (None, *workers):
        on_mode("the limits")
        limits.append(reader.measure(_LIMIT_SECONDS))
        on_mode("in process" if num_workers is None else f"num_workers={num_workers}")
        modes.append(measure_mode(mix, num_workers, seconds=seconds))
    on_mode("one rank of many")
    rank = measure_mode(mix, 0, seconds=min(_RANK_SECONDS, seconds), world_size=mix.global_batch_size)
    weights = plan.cursor().segments[0].weights
    shares = {name: weight / sum(weights) for name, weight in zip(plan.names, weights, strict=True)}
    documents = sum(
        share * corpus.num_documents / corpus.num_tokens for share, corpus in zip(shares.values(), corpora, strict=True)
    )
    return SpeedReport(
        mix=mix,
        fingerprint=plan.fingerprint,
        shares=shares,
        mean_document_tokens=1 / documents,
        num_tokens=sum(corpus.num_tokens for corpus in corpora),
        limits=Limits(
            contiguous=statistics.median(each.contiguous for each in limits),
            gather=statistics.median(each.gather for each in limits),
            document_tokens=reader.document_tokens,
        ),
        limit_tokens=reader.num_tokens,
        modes=modes,
        rank_cpu_seconds=rank.cpu_seconds / rank.steps.num_tokens,
        load=load,
    )


def measure_mode(mix: Mix, num_workers: int | None, *, seconds: float, world_size: int = 1) -> ModeSpeed:
    """Start to read a mix in one way, and go on for so long.

    Args:
        num_workers: None: in this process.
        world_size: read as the first of so many data-parallel ranks.
    """
    from tokshard.runtime.loader import StreamDataset, StreamingLoader

    started = time.perf_counter()
    plan = mix.plan()
    if num_workers is None:
        batches = endless(
            StreamDataset(plan, global_batch_size=mix.global_batch_size, dp_rank=0, dp_world_size=world_size)
        )
        next(batches)
        first_batch_seconds = time.perf_counter() - started
        cpu = time.process_time()
        steps = take_steps(batches, seconds=seconds)
        cpu = time.process_time() - cpu
    else:
        loader = StreamingLoader(
            plan, global_batch_size=mix.global_batch_size, dp_rank=0, dp_world_size=world_size, num_workers=num_workers
        )
        with closing(loader):
            batches = endless(loader)
            next(batches)
            first_batch_seconds = time.perf_counter() - started
            cpu = time.process_time()
            steps = take_steps(batches, seconds=seconds)
            cpu = time.process_time() - cpu
    return ModeSpeed(num_workers=num_workers, first_batch_seconds=first_batch_seconds, steps=steps, cpu_seconds=cpu)


def endless(batches: Iterable[Any]) -> Iterator[Any]:
    """Batch after batch; a finite pass is read again and again."""
    return itertools.chain.from_iterable(itertools.repeat(batches))


def take_steps(batches: Iterator[Any], *, seconds: float = 0.0, num_steps: int = 1) -> Steps:
    """Take at least `num_steps` batches, for at least so many seconds, and do nothing with them."""
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


def _require_torch() -> None:
    try:
        import tokshard.runtime.loader  # noqa: F401 - also so that no mode pays for the import
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(
            "batches are tensors, and torch is not installed", hint="pip install 'tokshard[torch]'"
        ) from error
