"""Which corpus a sample comes from, and which sample of that corpus it is, in closed form.

The corpora, in plan order, are the leaves of a balanced binary tree. Of its first n samples, a node gives ``L(n)`` to
its left half, where L is the line ``n * share``, rounded: never one sample away from it. So a sample is found by
walking down the tree, and the error of a corpus is one rounding per level of the tree.
`rounding` has the arithmetic of a node, with an example. ORDER.md, section 7, has the rules.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.order.rounding import HALF, ONE, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of the run with fixed weights.

    Args:
        start: first global sample.
        weights: one per corpus, in plan order.
    """

    start: int
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """What later samples need to know of all earlier ones.

    Args:
        counts: samples of each corpus, in plan order.
        remainders: per node of the tree, the rounding that is carried on, in units of 2**-64: 1/2 at the start, more if
            the left half got less than its share. Always less than two samples, whatever the history was.
    """

    counts: tuple[int, ...]
    remainders: tuple[int, ...]

    @classmethod
    def at_start(cls, num_corpora: int) -> Balance:
        """The balance of a new run."""
        return cls(counts=(0,) * num_corpora, remainders=(HALF,) * (num_corpora - 1))


class Node(NamedTuple):
    """A node covers the corpora ``[start, stop)``; its halves meet at `middle`. Nodes are numbered in preorder."""

    start: int
    middle: int
    stop: int

    def left(self, number: int) -> int:
        return number + 1

    def right(self, number: int) -> int:
        return number + self.middle - self.start


class Mixture:
    """The corpora of a run, sample by sample, under weights that change at given samples.

    Any position is reached at once: a sample costs a step per level of the tree, and each segment before it a step per
    corpus, once.

    Before the first change a node is at most 3/4 of a sample off its share, and 1/2 if one half has nearly all of it; a
    half inherits what its node is off by its share. So 512 corpora are at most 4.75 samples off, 2**15 at most 8; and
    g / 2**64 more per level after g samples, because shares are cut to 64 bits. The rounding is carried over a change
    of weights, less than 3/2 per node, so that a node is never further off, however often weights change. A corpus is,
    because its nodes' rounding counts by the shares of then: small changes (an anneal in 5,000 steps) stay below 1
    sample, changes to any other weights add up like a random walk (7 corpora: 4 to 13 samples after 2,000). Nothing
    else is carried: what was read before is not caught up.

    Args:
        key: uint64 [corpora - 1], from the seed: makes the dither of each node; None: without dither, for one of
            several streams, which differ anyway.
        segments: by ascending start.
        balance: at the start of the first segment.
    """

    def __init__(self, *, key: NDArray[np.uint64] | None, segments: tuple[Segment, ...], balance: Balance) -> None:
        self.key, self.segments, self.balance = key, segments, balance
        self._nodes = tree(len(balance.counts))
        # by segment, as far as they were asked for; two threads may count the same, and find the same
        self._balances: dict[int, Balance] = {0: balance}
        self._splits: dict[int, list[Split]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.key, self.segments, self.balance))  # without what was counted already

    def changed(self, segments: tuple[Segment, ...]) -> Mixture:
        """A mixture with other segments, which keeps what was counted for those that are the same."""
        changed = Mixture(key=self.key, segments=segments, balance=self.balance)
        for index, (segment, other) in enumerate(zip(self.segments, segments, strict=False)):
            if segment != other:
                break
            if index in self._balances:
                changed._balances[index] = self._balances[index]
        return changed

    def since(self, sample: int) -> Mixture:
        """The mixture from a global sample on, without the segments that end before it."""
        index = self._segment_at(sample)
        return Mixture(key=self.key, segments=self.segments[index:], balance=self._balance_at(index))

    def counts_before(self, sample: int) -> tuple[int, ...]:
        """How many samples of each corpus come before a global sample.

        Raises:
            ValueError: the sample lies before the first segment.
        """
        return self.balance_before(sample).counts

    def balance_before(self, sample: int) -> Balance:
        """The balance before a global sample.

        Raises:
            ValueError: the sample lies before the first segment.
        """
        index = self._segment_at(sample)
        return self._balance_after(index, sample - self.segments[index].start)

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Corpus and sample of that corpus for each global sample.

        Args:
            samples: int64 [n], ascending.

        Returns:
            int64 [n] twice.

        Raises:
            ValueError: a sample lies before the first segment.
        """
        corpora, corpus_samples = np.empty_like(samples), np.empty_like(samples)
        done = 0
        while done < len(samples):
            index = self._segment_at(int(samples[done]))
            stop = len(samples)
            if index + 1 < len(self.segments):
                stop = int(np.searchsorted(samples, self.segments[index + 1].start))
            inside = samples[done:stop] - self.segments[index].start
            corpora[done:stop], corpus_samples[done:stop] = self._locate(index, inside)
            done = stop
        return corpora, corpus_samples

    def sample_of(self, corpus: int, corpus_sample: int) -> int | None:
        """The global sample that is sample `corpus_sample` of a corpus; None if the corpus never gets that many.

        Raises:
            ValueError: that sample came before the first segment.
        """
        if corpus_sample < self.balance.counts[corpus]:
            raise ValueError(f"sample {corpus_sample} of corpus {corpus} lies before the first weights")
        for index, segment in enumerate(self.segments):
            missing = corpus_sample - self._balance_at(index).counts[corpus]
            length = self.segments[index + 1].start - segment.start if index + 1 < len(self.segments) else None
            if length is None:
                length = self._enough(index, corpus, missing)
            if length is not None and self._gained(index, corpus, length) > missing:
                low, high = 0, length  # the corpus has `missing` samples before low, more before high
                while high - low > 1:
                    middle = (low + high) // 2
                    if self._gained(index, corpus, middle) > missing:
                        high = middle
                    else:
                        low = middle
                return segment.start + low
        return None

    def _segment_at(self, sample: int) -> int:
        index = bisect_right(self.segments, sample, key=lambda segment: segment.start) - 1
        if index < 0:
            raise ValueError(f"sample {sample} lies before the first weights, which start at {self.segments[0].start}")
        return index

    def _balance_at(self, index: int) -> Balance:
        """The balance at the start of a segment."""
        known = index
        while known not in self._balances:
            known -= 1
        while known < index:
            length = self.segments[known + 1].start - self.segments[known].start
            self._balances[known + 1] = self._balance_after(known, length)
            known += 1
        return self._balances[index]

    def _balance_after(self, index: int, count: int) -> Balance:
        """The balance after so many samples of a segment."""
        before = self._balance_at(index)
        counts, remainders = list(before.counts), list(before.remainders)
        splits = self._splits_of(index)
        gained = {0: count}  # by node; a half with one corpus is not a node
        if not splits:
            counts[0] += count
        for number, (node, split) in enumerate(zip(self._nodes, splits, strict=True)):
            total = gained.pop(number)
            left = split.left_before(total)
            if 0 < split.share < ONE:
                remainders[number] += total * split.share - left * ONE
            for start, stop, child, part in (
                (node.start, node.middle, node.left(number), left),
                (node.middle, node.stop, node.right(number), total - left),
            ):
                if stop - start == 1:
                    counts[start] += part
                else:
                    gained[child] = part
        return Balance(counts=tuple(counts), remainders=tuple(remainders))

    def _splits_of(self, index: int) -> list[Split]:
        splits = self._splits.get(index)
        if splits is None:
            balance = self._balance_at(index)
            shares = shares_of(self._nodes, self.segments[index].weights)
            counts = _prefix_sums(balance.counts)
            keys = [None] * len(self._nodes) if self.key is None else self.key.tolist()
            splits = [
                _split(node, share, counts, remainder, key)
                for node, share, remainder, key in zip(self._nodes, shares, balance.remainders, keys, strict=True)
            ]
            self._splits[index] = splits
        return splits

    def _locate(self, index: int, inside: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Corpus and sample of that corpus, of samples of one segment that are counted from its start."""
        corpora, corpus_samples = np.empty_like(inside), np.empty_like(inside)
        counts, splits = self._balance_at(index).counts, self._splits_of(index)
        # (first corpus, last + 1, node if there are two or more, which samples, their numbers at the node)
        waiting = [(0, len(counts), 0, np.arange(len(inside)), inside.astype(np.uint64))]
        while waiting:
            start, stop, number, places, numbers = waiting.pop()
            if stop - start == 1:
                corpora[places] = start
                corpus_samples[places] = numbers.view(np.int64) + counts[start]
                continue
            node = self._nodes[number]
            before, is_left = splits[number].halves(numbers)
            left, right = np.flatnonzero(is_left), np.flatnonzero(~is_left)
            if len(left):
                waiting.append((start, node.middle, node.left(number), places[left], before[left]))
            if len(right):
                waiting.append((node.middle, stop, node.right(number), places[right], (numbers - before)[right]))
        return corpora, corpus_samples

    def _gained(self, index: int, corpus: int, count: int) -> int:
        """Samples of one corpus among the first `count` of a segment."""
        splits = self._splits_of(index)
        start, stop, number = 0, len(self.balance.counts), 0
        while stop - start > 1:
            node, left = self._nodes[number], splits[number].left_before(count)
            if corpus < node.middle:
                stop, number, count = node.middle, node.left(number), left
            else:
                start, number, count = node.middle, node.right(number), count - left
        return count

    def _enough(self, index: int, corpus: int, missing: int) -> int | None:
        """A length of the last segment in which a corpus gets more than `missing` samples."""
        if not self.segments[index].weights[corpus]:
            return None
        length = 1
        while self._gained(index, corpus, length) <= missing:
            length *= 2
            if length >> 200:  # a share of less than 2**-64 rounds to nothing
                return None
        return length


def _rebuild(key: NDArray[np.uint64] | None, segments: tuple[Segment, ...], balance: Balance) -> Mixture:
    return Mixture(key=key, segments=segments, balance=balance)


def tree(num_corpora: int) -> list[Node]:
    """The nodes in preorder."""
    found: list[Node] = []
    waiting = [(0, num_corpora)]
    while waiting:
        start, stop = waiting.pop()
        if stop - start > 1:
            middle = (start + stop) // 2
            found.append(Node(start, middle, stop))
            waiting += [(middle, stop), (start, middle)]
    return found


def shares_of(nodes: Sequence[Node], weights: Sequence[float]) -> list[int]:
    """The share of the left half of each node, in units of 2**-64; 0 for a node without weight."""
    sums = _prefix_sums(_integers(weights))
    found = []
    for node in nodes:
        total, left = sums[node.stop] - sums[node.start], sums[node.middle] - sums[node.start]
        found.append((left << 64) // total if total else 0)
    return found


def _split(node: Node, share: int, counts: Sequence[int], remainder: int, key: int | None) -> Split:
    node_count_before = counts[node.stop] - counts[node.start]
    dither = 0 if key is None else min(share, ONE - share)
    return Split(share, dither, node_count_before, remainder, key or 0)


def _prefix_sums(values: Sequence[int]) -> list[int]:
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def _integers(weights: Sequence[float]) -> list[int]:
    """Weights in proportion, exactly: a float counts as the binary fraction that it is."""
    ratios = [float(weight).as_integer_ratio() for weight in weights]
    scale = max(denominator for _, denominator in ratios)  # powers of two: the largest is a multiple of the others
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def are_weights(weights: Sequence[float]) -> bool:
    """Whether weights can be shares: finite, at least 0 and not all 0."""
    return all(0 <= weight < math.inf for weight in weights) and any(weights)
