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
        blocks_per_step: mean number of blocks that a step draws from.
        median_distance: median distance in the corpus between the starts of successive samples, as a fraction of the
            corpus; None for fewer than two samples.
    """

    name: str
    num_samples: int
    worst_error: float
    blocks_per_step: float
    median_distance: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """How the next samples are distributed.

    Args:
        first, num_samples: which samples.
        num_steps: how many they make; a short last one is not counted.
        blocks_per_step: minimum, median and maximum number of blocks that a step draws from, over all corpora.
    """

    first: int
    num_samples: int
    num_steps: int
    corpora: Sequence[CorpusSimulation]
    blocks_per_step: tuple[int, float, int]


def simulate(run: Run, num_samples: int) -> Simulation:
    """Measure the positions of the next samples, from a run's cursor on.

    Costs the tables of the windows that the samples lie in, and about a microsecond per piece.

    Raises:
        UsageError: no sample is left to read.
        CorpusError: a corpus cannot be read.
    """
    plan, size, first = run.plan.at(run.cursor), run.global_batch_size, run.cursor.sample
    stop = first + num_samples if run.stop.sample is None else min(first + num_samples, run.stop.sample)
    if stop <= first:
        raise UsageError(f"no sample is left to simulate from sample {first} on", hint="leave out --simulate")
    mixture, block_tokens = plan.mixture(run.cursor), plan.shape.block_tokens
    # of each corpus: its global samples, where the first token of each lies, and the blocks of each step
    positions, places = ([[np.empty(0, np.int64)] for _ in plan.names] for _ in range(2))
    blocks = np.zeros((len(plan.names), -(-(stop - first) // size)), np.int64)
    at_once = max(1, _SAMPLES_AT_ONCE // size) * size
    for start in range(first, stop, at_once):
        samples = np.arange(start, min(start + at_once, stop))
        located, corpus_samples = mixture.locate(samples)
        for number in np.unique(located).tolist():
            mine, num_blocks = located == number, plan.sources[number].num_tokens // block_tokens + 1
            own, starts = samples[mine], np.empty(np.count_nonzero(mine), np.int64)
            here, *of_parts = plan.corpora[number].by_part(own, corpus_samples[mine])
            counts, pieces = plan.readers[number].pieces_of(*of_parts, is_sequential=True)
            with_tokens = counts > 0
            starts[here[with_tokens]] = pieces.starts[(np.cumsum(counts) - counts)[with_tokens]]
            steps = np.repeat((own[here] - first) // size, counts)
            hit = np.unique(steps * num_blocks + pieces.starts // block_tokens) // num_blocks
            blocks[number] += np.bincount(hit, minlength=blocks.shape[1])
            positions[number].append(own)
            places[number].append(starts[np.sort(here[with_tokens])])
    blocks = blocks[:, : max(1, (stop - first) // size)]
    per_step = blocks.sum(0)
    return Simulation(
        first=first,
        num_samples=stop - first,
        num_steps=blocks.shape[1],
        corpora=[
            _corpus(run, stop, number, np.concatenate(own), np.concatenate(starts), blocks[number].mean())
            for number, (own, starts) in enumerate(zip(positions, places, strict=True))
        ],
        blocks_per_step=(int(per_step.min()), float(np.median(per_step)), int(per_step.max())),
    )


def _corpus(  # noqa: PLR0917
    run: Run, stop: int, number: int, positions: NDArray[np.int64], places: NDArray[np.int64], num_blocks: float
) -> CorpusSimulation:
    distances = np.abs(np.diff(places)) / run.plan.sources[number].num_tokens
    error = worst_error(run.cursor.segments, number, positions, run.cursor.sample, stop) if len(positions) else 0.0
    return CorpusSimulation(
        name=run.plan.names[number],
        num_samples=len(positions),
        worst_error=error,
        blocks_per_step=float(num_blocks),
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
