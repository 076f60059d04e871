"""A check for tests of training programs: a job that stops and resumes must read the same as one that never stops."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import lcm
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.loader import NumpyLoader
from tokshard.runtime.plan import StreamPlan

_OF_BATCHES = ("cu_seqlens", "max_seqlen", "sample_index")
_MAX_WORLD = 4

Row = dict[str, NDArray[Any]]


class Job(NamedTuple):
    """A job between two stops: its steps, its batch size and its ranks."""

    num_steps: int
    global_batch_size: int
    dp_world_size: int = 1


class Loader(Protocol):
    """The loader under test. Its batches have `sample_index`, like the batches of tokshard's loaders."""

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class MakeLoader(Protocol):
    """Makes the loader of a rank, as `NumpyLoader` and `StreamingLoader` do."""

    def __call__(self, plan: StreamPlan, /, *, global_batch_size: int, dp_rank: int, dp_world_size: int) -> Loader: ...


def assert_exact_resume(
    plan: StreamPlan,
    make_loader: MakeLoader = NumpyLoader,
    *,
    jobs: Sequence[Job] | None = None,
    num_steps: int = 12,
    seed: int = 0,
) -> None:
    """Check that a job which stops and resumes reads the same samples, with the same values, as one that never stops.

    One loader reads without a stop. Then all ranks read, stop, pass their state on through JSON, and resume with
    another world size and batch size. In each step the ranks together must have the next samples, each once, and all
    values of a sample (every array with a row per sample: tokens, labels, weights) must equal those of the first
    loader. All ranks must save the same state.

    ::

        from functools import partial

        from tokshard.runtime import StreamingLoader
        from tokshard.testing import assert_exact_resume


        def test_resume():
            plan = make_plan(transforms=[my_transform])  # the transform is tested, too
            assert_exact_resume(plan)
            assert_exact_resume(plan, partial(StreamingLoader, uneven="pad"))
            assert_exact_resume(plan, make_my_loader)

    Args:
        plan: the plan to read, at most to the end of its pass. It should be small: each sample is read about four
            times.
        make_loader: called for each rank of each job, with the keywords `global_batch_size`, `dp_rank` and
            `dp_world_size`.
        jobs: the jobs, in order. None: some histories are drawn, the first of which stops after every step. World sizes
            go up to 4; they and the number of streams divide the batch size.
        num_steps: steps of each drawn history.
        seed: seed of the drawn histories.

    Raises:
        AssertionError: names the step, the rank, the row and the difference.
    """
    histories = [jobs] if jobs is not None else _drawn(plan.num_streams, num_steps, np.random.default_rng(seed))
    num_samples = max(sum(job.num_steps * job.global_batch_size for job in history) for history in histories)
    undisturbed, is_whole = _undisturbed(plan, make_loader, num_samples)
    for history in histories:
        _check(history, plan, make_loader, undisturbed, is_whole)


def _drawn(num_streams: int, num_steps: int, rng: np.random.Generator) -> list[list[Job]]:
    """Histories: one that stops after every step, and two that stop sometimes."""
    histories = []
    for most in (1, 4, 4):
        history: list[Job] = []
        while left := num_steps - sum(job.num_steps for job in history):
            steps, world, times = (int(rng.integers(1, last, endpoint=True)) for last in (most, _MAX_WORLD, 3))
            history.append(Job(min(left, steps), lcm(num_streams, world) * times, world))
        histories.append(history)
    return histories


def _undisturbed(plan: StreamPlan, make_loader: MakeLoader, num_samples: int) -> tuple[dict[int, Row], bool]:
    """The rows of the first samples, as one loader reads them, and whether the pass has no more."""
    found: dict[int, Row] = {}
    with ExitStack() as stack:
        loader = _made(stack, make_loader, plan, Job(0, 4 * plan.num_streams), 0)
        is_whole = True
        for batch in loader:
            for _, sample, row in _rows_of(batch):
                if sample in found:
                    raise AssertionError(f"sample {sample} is read twice without a stop")
                found[sample] = row
            if len(found) >= num_samples:
                is_whole = False
                break
    if not found:
        raise AssertionError("the loader has no batch")
    if missing := set(range(min(found), max(found))) - found.keys():
        raise AssertionError(f"sample {min(missing)} is not read without a stop")
    return found, is_whole


def _made(stack: ExitStack, make_loader: MakeLoader, plan: StreamPlan, job: Job, rank: int) -> Loader:
    loader = make_loader(plan, global_batch_size=job.global_batch_size, dp_rank=rank, dp_world_size=job.dp_world_size)
    if hasattr(loader, "close"):
        stack.callback(loader.close)
    return loader


def _rows_of(batch: Mapping[str, Any]) -> Iterator[tuple[int, int, Row]]:
    """Number, sample and values of each row that is not padding."""
    samples = np.asarray(batch["sample_index"]).tolist()
    values = {key: np.asarray(value) for key, value in batch.items() if key not in _OF_BATCHES}
    values = {key: value for key, value in values.items() if value.shape[:1] == (len(samples),)}
    for row, sample in enumerate(samples):
        if sample >= 0:
            yield row, sample, {key: value[row].copy() for key, value in values.items()}


def _check(
    jobs: Sequence[Job], plan: StreamPlan, make_loader: MakeLoader, undisturbed: Mapping[int, Row], is_whole: bool
) -> None:
    """Run several jobs, one after another, and compare their rows with those of a loader that never stopped."""
    sample, end, step, state = min(undisturbed), max(undisturbed) + 1, 0, ""
    for job in jobs:
        with ExitStack() as stack:
            loaders = [_made(stack, make_loader, plan, job, rank) for rank in range(job.dp_world_size)]
            for loader in loaders if state else ():
                loader.load_state_dict(json.loads(state))
            since = f"resumed at sample {sample}" if state else "before any stop"
            loops = [iter(loader) for loader in loaders]
            for _ in range(job.num_steps):
                if is_whole and sample >= end:
                    break
                stop = sample + job.global_batch_size
                samples = range(sample, min(stop, end) if is_whole else stop)
                where = f"step {step} ({since}, {job.global_batch_size} samples per step)"
                _check_step(loops, samples, undisturbed, where)
                sample, step = stop, step + 1
            if is_whole and sample >= end:
                _check_over(loops, f"after step {step - 1} ({since}), the last of the pass")
                return
            state = _state_of(loaders, f"after step {step - 1}")


def _check_step(
    loops: Sequence[Iterator[Mapping[str, Any]]], samples: range, undisturbed: Mapping[int, Row], where: str
) -> None:
    """Compare the batches of all ranks."""
    missing = set(samples)
    for rank, loop in enumerate(loops):
        here = f"{where}, rank {rank} of {len(loops)}"
        batch = next(loop, None)
        if batch is None:
            raise AssertionError(f"{here}: no batch, but sample {samples.start} is still to come")
        for row, sample, values in _rows_of(batch):
            there = f"{here}, row {row}: sample {sample}"
            if sample not in missing:
                raise AssertionError(f"{there} is not of this step, or was read before")
            missing.remove(sample)
            _compare(values, undisturbed[sample], there)
    if missing:
        raise AssertionError(f"{where}: no rank has sample {min(missing)}")


def _check_over(loops: Sequence[Iterator[Mapping[str, Any]]], where: str) -> None:
    for rank, loop in enumerate(loops):
        for _, sample, _ in _rows_of(next(loop, {"sample_index": []})):
            raise AssertionError(f"{where}, rank {rank} of {len(loops)} has another batch, with sample {sample}")


def _compare(found: Row, expected: Row, where: str) -> None:
    if found.keys() != expected.keys():
        raise AssertionError(f"{where} has {sorted(found)}, without a stop {sorted(expected)}")
    for key, value in found.items():
        other = expected[key]
        if value.shape != other.shape:
            raise AssertionError(f"{where}: {key} has the shape {value.shape}, without a stop {other.shape}")
        for place in map(tuple, np.argwhere(value != other)[:1].tolist()):
            index = "".join(f"[{at}]" for at in place)
            raise AssertionError(f"{where}: {key}{index} is {value[place]}, without a stop {other[place]}")


def _state_of(loaders: Sequence[Loader], where: str) -> str:
    """The state of all ranks, as JSON."""
    states = [loader.state_dict() for loader in loaders]
    try:
        first, *others = (json.dumps(state) for state in states)
    except TypeError as error:
        raise AssertionError(f"the state {where} is not plain JSON: {error}") from None
    for rank, other in enumerate(others, 1):
        if other != first:
            raise AssertionError(f"the state of rank {rank} {where} is {other}, that of rank 0 {first}")
    return first
