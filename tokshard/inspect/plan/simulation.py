"""How well the next samples of a run are mixed and shuffled, measured without reading tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.inspect.plan.run import Run
from tokshard.runtime.order.mixture import Segment

UNIFORM_DISTANCE = 1 - 0.5**0.5
"""Median distance of two random positions, as a fraction of the corpus."""

_SAMPLES_AT_ONCE = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSimulation:
    """How the samples of one corpus are distributed.

    Args:
        num_samples: samples from this corpus.
        worst_error: the largest deviation from its exact share, in samples.
        median_distance: median distance in the corpus between the starts of successive samples, as a fraction of the
            corpus; None for fewer than two samples.
    """

    name: str
    num_samples: int
    worst_error: float
    median_distance: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """How the next samples are distributed.

    Args:
        first, num_samples: which samples.
        blocks_per_step: minimum, median and maximum number of blocks that a step draws from, over all corpora.
    """

    first: int
    num_samples: int
    corpora: Sequence[CorpusSimulation]
    blocks_per_step: tuple[int, float, int]


def simulate(run: Run, num_samples: int) -> Simulation:
    """Measure the positions of the next samples, from a run's cursor on.

    Costs the tables of the windows that the samples lie in, and about a microsecond per piece.

    Raises:
        UsageError: no sample is left to read.
        CorpusError: a corpus cannot be read.
    """
    plan, size, first = run.plan, run.global_batch_size, run.cursor.sample
    stop = first + num_samples if run.stop.sample is None else min(first + num_samples, run.stop.sample)
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
        located, corpus_samples = mixture.locate(samples)
        hit = []
        for number in np.unique(located).tolist():
            mine = np.flatnonzero(located == number)
            positions[number].append(samples[mine])
            starts = np.empty(len(mine), np.int64)
            here, *of_parts = plan.corpora[number].by_part(samples[mine], corpus_samples[mine])
            counts, pieces = plan.readers[number].pieces_of(*of_parts, is_sequential=True)
            starts[here] = pieces.starts[np.cumsum(counts) - counts]
            steps = np.repeat(mine[here] // size, counts)
            block = first_blocks[number] + pieces.starts // plan.shape.block_tokens
            hit.append(np.unique(steps * first_blocks[-1] + block))
            places[number].append(starts)
        blocks.append(np.bincount(np.concatenate(hit) // first_blocks[-1]))
    return Simulation(
        first=first,
        num_samples=stop - first,
        corpora=[
            _corpus(
                run, number, np.concatenate([_NONE, *positions[number]]), np.concatenate([_NONE, *places[number]]), stop
            )
            for number in range(len(plan.names))
        ],
        blocks_per_step=_spread(np.concatenate(blocks), (stop - first) // size),
    )


_NONE = np.empty(0, np.int64)


def _spread(blocks: NDArray[np.int64], num_whole_steps: int) -> tuple[int, float, int]:
    """Minimum, median and maximum, without the last step if it is short."""
    whole = blocks[:num_whole_steps] if num_whole_steps else blocks
    return int(whole.min()), float(np.median(whole)), int(whole.max())


def _corpus(
    run: Run, number: int, positions: NDArray[np.int64], places: NDArray[np.int64], stop: int
) -> CorpusSimulation:
    distances = np.abs(np.diff(places)) / run.plan.sources[number].num_tokens
    segments, first = run.cursor.segments, run.cursor.sample
    return CorpusSimulation(
        name=run.plan.names[number],
        num_samples=len(positions),
        worst_error=worst_error(segments, number, positions, first, stop) if len(positions) else 0.0,
        median_distance=float(np.median(distances)) if len(distances) else None,
    )


def worst_error(segments: Sequence[Segment], corpus: int, positions: NDArray[np.int64], first: int, stop: int) -> float:
    """The largest deviation of a corpus from its exact share anywhere in ``[first, stop)``, in samples.

    Args:
        positions: int64 [n], ascending: the global samples in this range that come from the corpus.
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
    # the extremes lie just before or after a sample of the corpus, at changes of weights, and at the end
    before = np.abs(count - np.interp(positions - first, np.array(bounds) - first, exact))
    after = np.abs(count + 1 - np.interp(positions + 1 - first, np.array(bounds) - first, exact))
    corners = np.abs(np.searchsorted(positions, bounds) - np.array(exact))
    return float(max(before.max(initial=0.0), after.max(initial=0.0), corners.max()))
