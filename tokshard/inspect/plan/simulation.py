"""The next samples of a run, looked at without reading a token: how well they are mixed and shuffled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.inspect.plan.run import Run
from tokshard.runtime.order.mixture import Segment

UNIFORM_DISTANCE = 1 - 0.5**0.5
"""Median distance of two places drawn at random, as a part of the corpus."""

_SAMPLES_AT_ONCE = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSimulation:
    """What the samples of one corpus are like.

    Args:
        num_samples: of this corpus.
        worst_error: most samples that it was ever away from its exact share.
        median_distance: between the places in the corpus where successive samples start, as a part of the corpus;
            None for fewer than two samples.
    """

    name: str
    num_samples: int
    worst_error: float
    median_distance: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What the next samples are like.

    Args:
        first, num_samples: which.
        blocks_per_step: fewest, median and most blocks that a step draws from, of all corpora.
    """

    first: int
    num_samples: int
    corpora: Sequence[CorpusSimulation]
    blocks_per_step: tuple[int, float, int]


def simulate(run: Run, num_samples: int) -> Simulation:
    """Measure the next samples from a run's cursor on: their positions, no token.

    Costs the tables of the windows that they lie in, and about a microsecond per piece.

    Raises:
        UsageError: nothing is left to read.
        CorpusError: a corpus cannot be read.
    """
    plan, size, first = run.plan, run.global_batch_size, run.cursor.sample
    stops = [first + num_samples]
    if plan.num_samples is not None:
        stops.append(plan.num_samples)
    if run.limit is not None:
        stops.append(run.limit.sample)
    stop = min(stops)
    if stop <= first:
        raise UsageError(f"no sample is left to simulate from sample {first} on", hint="leave out --simulate")
    mixture = plan.mixture(run.cursor)
    positions: list[list[NDArray[np.int64]]] = [[] for _ in plan.names]
    places: list[list[NDArray[np.int64]]] = [[] for _ in plan.names]
    blocks = []
    at_once = max(1, _SAMPLES_AT_ONCE // size) * size
    first_blocks = np.cumsum([0, *(source.num_tokens // plan.shape.block_tokens + 1 for source in plan.sources)])
    for start in range(first, stop, at_once):
        samples = np.arange(start, min(start + at_once, stop))
        located, ordinals = mixture.locate(samples)
        hit = []
        for number in np.unique(located).tolist():
            mine = np.flatnonzero(located == number)
            counts, pieces = plan.streams[number].pieces_of(ordinals[mine], is_sequential=True)
            positions[number].append(samples[mine])
            places[number].append(pieces.starts[np.cumsum(counts) - counts])
            steps = np.repeat(mine // size, counts)
            block = first_blocks[number] + pieces.starts // plan.shape.block_tokens
            hit.append(np.unique(steps * first_blocks[-1] + block))
        blocks.append(np.bincount(np.concatenate(hit) // first_blocks[-1]))
    per_step = np.concatenate(blocks)
    whole = per_step[: (stop - first) // size] if stop - first >= size else per_step
    return Simulation(
        first=first,
        num_samples=stop - first,
        corpora=[
            _corpus(run, number, np.concatenate(positions[number]), np.concatenate(places[number]), first, stop)
            if positions[number]
            else CorpusSimulation(name=name, num_samples=0, worst_error=0.0, median_distance=None)
            for number, name in enumerate(plan.names)
        ],
        blocks_per_step=(int(whole.min()), float(np.median(whole)), int(whole.max())),
    )


def _corpus(  # noqa: PLR0917
    run: Run, number: int, positions: NDArray[np.int64], places: NDArray[np.int64], first: int, stop: int
) -> CorpusSimulation:
    distances = np.abs(np.diff(places)) / run.plan.sources[number].num_tokens
    return CorpusSimulation(
        name=run.plan.names[number],
        num_samples=len(positions),
        worst_error=worst_error(run.cursor.segments, number, positions, first, stop),
        median_distance=float(np.median(distances)) if len(distances) else None,
    )


def worst_error(segments: Sequence[Segment], corpus: int, positions: NDArray[np.int64], first: int, stop: int) -> float:
    """The most samples that a corpus is away from its exact share, anywhere in ``[first, stop)``.

    Args:
        positions: int64 [n], ascending: its global samples there.
    """
    bounds, exact = [first], [0.0]
    ends = [segment.start for segment in segments[1:]] + [stop]
    for segment, end in zip(segments, ends, strict=True):
        if end > bounds[-1] and bounds[-1] < stop:
            until = min(end, stop)
            share = segment.weights[corpus] / sum(segment.weights)
            exact.append(exact[-1] + share * (until - bounds[-1]))
            bounds.append(until)
    count = np.arange(len(positions))
    # it is furthest behind before one of its samples, furthest ahead after one; and at the end or a change of weights
    before = np.abs(count - np.interp(positions - first, np.array(bounds) - first, exact))
    after = np.abs(count + 1 - np.interp(positions + 1 - first, np.array(bounds) - first, exact))
    corners = np.abs(np.searchsorted(positions, bounds) - np.array(exact))
    return float(max(before.max(initial=0.0), after.max(initial=0.0), corners.max()))
