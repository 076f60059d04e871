"""Which corpus a sample comes from, and which sample of that corpus it is, in closed form.

Global sample g reads the corpus into whose share of ``[0, 2**64)`` the Weyl sequence ``(g * STEP + offset) mod
2**64`` falls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

STEP = 0x9E3779B97F4C3939
"""Its continued fraction over 2**64 has no quotient above 4, so counts stay within a few samples of their share."""

_MODULUS = 1 << 64


def floor_sum(count: int, modulus: int, step: int, offset: int) -> int:
    """``sum(floor((step * x + offset) / modulus) for x in range(count))`` in O(log modulus) steps; exact.

    Args:
        count, step, offset: at least 0.
        modulus: at least 1.

    References:
        Graham, Knuth and Patashnik, Concrete Mathematics, section 3.5 (sums of floors, by the steps of Euclid's
        algorithm).
    """
    total = 0
    while count:
        total += (step // modulus) * (count * (count - 1) // 2) + (offset // modulus) * count
        step, offset = step % modulus, offset % modulus
        top = step * count + offset
        if top < modulus:
            break
        count, offset = divmod(top, modulus)
        modulus, step = step, modulus
    return total


def thresholds(weights: Sequence[float | Fraction | int]) -> tuple[int, ...]:
    """Upper ends of the shares of ``[0, 2**64)``: ``floor(2**64 * cumulative exact fraction)``; the last is 2**64.

    Args:
        weights: finite, at least 0, not all 0; a float counts as the exact binary fraction that it is.
    """
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    if min(exact) < 0 or total <= 0:
        raise ValueError(f"weights must be at least 0 and not all 0, got {list(weights)}")
    ends, cumulative = [], Fraction(0)
    for weight in exact:
        cumulative += weight
        ends.append(int(_MODULUS * cumulative / total))
    return tuple(ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of the run with fixed weights.

    Args:
        start: first global sample.
        weights: one per corpus, in plan order.
    """

    start: int
    weights: tuple[float, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Mixture:
    """The corpora of a run, sample by sample, under weights that change at given samples.

    Any position is reached at once: how often a corpus occurs before it costs about 60 us per corpus and segment,
    paid once per segment.

    Args:
        offset: of the Weyl sequence, from the seed.
        segments: by ascending start.
        counts: samples of each corpus before the first segment's start.
    """

    offset: int
    segments: tuple[Segment, ...]
    counts: tuple[int, ...]

    @cached_property
    def _ends(self) -> list[tuple[int, ...]]:
        return [thresholds(segment.weights) for segment in self.segments]

    @cached_property
    def _counts_at_start(self) -> list[tuple[int, ...]]:
        """Samples of each corpus before the start of each segment."""
        result = [self.counts]
        for index in range(1, len(self.segments)):
            start, stop = self.segments[index - 1].start, self.segments[index].start
            gained = self._gained(index - 1, start, stop)
            result.append(tuple(before + more for before, more in zip(result[-1], gained, strict=True)))
        return result

    def counts_before(self, sample: int) -> tuple[int, ...]:
        """How many samples of each corpus come before a global sample.

        Raises:
            ValueError: the sample lies before the first segment.
        """
        index = self._segment_at(sample)
        gained = self._gained(index, self.segments[index].start, sample)
        return tuple(before + more for before, more in zip(self._counts_at_start[index], gained, strict=True))

    def rows(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Corpus and sample of that corpus for each global sample of ``[start, stop)``.

        Returns:
            int64 [stop - start] twice.
        """
        corpora, ordinals = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        while start < stop:
            index = self._segment_at(start)
            following = self.segments[index + 1].start if index + 1 < len(self.segments) else stop
            end = min(stop, following)
            corpus = self._corpora(index, start, end)
            ordinal = np.empty(len(corpus), np.int64)
            for number, before in enumerate(self.counts_before(start)):
                places = np.flatnonzero(corpus == number)
                ordinal[places] = before + np.arange(len(places))
            corpora.append(corpus)
            ordinals.append(ordinal)
            start = end
        return np.concatenate(corpora), np.concatenate(ordinals)

    def _segment_at(self, sample: int) -> int:
        index = bisect_right(self.segments, sample, key=lambda segment: segment.start) - 1
        if index < 0:
            raise ValueError(f"sample {sample} lies before the first weights, which start at {self.segments[0].start}")
        return index

    def _corpora(self, index: int, start: int, stop: int) -> NDArray[np.int64]:
        places = np.arange(stop - start, dtype=np.uint64)
        base = np.uint64((start * STEP + self.offset) % _MODULUS)
        values = places * np.uint64(STEP) + base
        # an end of 2**64, before corpora of weight 0, does not fit a word: nothing lies beyond it
        inner = [end for end in self._ends[index][:-1] if end < _MODULUS]
        ends = np.array(inner, np.uint64)
        return np.searchsorted(ends, values, "right").astype(np.int64)

    def _gained(self, index: int, start: int, stop: int) -> tuple[int, ...]:
        below = [self._count_below(end, stop) - self._count_below(end, start) for end in self._ends[index]]
        return tuple(high - low for high, low in zip(below, [0, *below], strict=False))

    def _count_below(self, end: int, stop: int) -> int:
        """How many of the first `stop` values of the sequence are below `end`."""
        if end == _MODULUS:
            return stop
        whole = floor_sum(stop, _MODULUS, STEP, self.offset)
        return whole + stop - floor_sum(stop, _MODULUS, STEP, self.offset + _MODULUS - end)
