"""Which corpus a sample comes from, and which sample of that corpus it is, in closed form.

The corpora, in plan order, are the leaves of a balanced binary tree. A node that has given n samples has given
``L(n)`` of them to its left half, where L is the line ``n * share`` rounded: never one sample away from it. So a sample
is found by walking down the tree, and a corpus is as many roundings away from its exact share as the tree is deep.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ONE = 1 << 64
"""Shares and remainders are integers in units of 2**-64: what is left of 1 is lost after 2**64 samples."""

_HALF = ONE >> 1
_WORD = ONE - 1
_LOW = np.uint64(0xFFFFFFFF)
_BITS_32 = np.uint64(32)
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_FEW = 4
"""Up to so many samples are faster one by one than as arrays."""


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
    """What the samples so far leave behind for those that follow.

    Args:
        counts: samples of each corpus, in plan order.
        remainders: per node of the tree, how much of a sample its left half has still to get (above 1/2) or got too
            much (below), in units of 2**-64. Less than two samples of rounding, whatever the history was.
    """

    counts: tuple[int, ...]
    remainders: tuple[int, ...]

    @classmethod
    def at_start(cls, num_corpora: int) -> Balance:
        """Nothing was read yet."""
        return cls(counts=(0,) * num_corpora, remainders=(_HALF,) * (num_corpora - 1))


class _Node(NamedTuple):
    """A node covers the corpora ``[start, stop)``; its halves meet at `middle`. Nodes are numbered in preorder."""

    start: int
    middle: int
    stop: int

    def left(self, number: int) -> int:
        return number + 1

    def right(self, number: int) -> int:
        return number + self.middle - self.start


class _Split(NamedTuple):
    """A node in one segment.

    Args:
        share: of the left half.
        sway: the smaller of both shares: how far the rounding may sway without giving a sample twice or backwards.
        given: samples of the node before the segment.
        remainder: of the left half at the start of the segment.
    """

    share: int
    sway: int
    given: int
    remainder: int
    key: int

    def left_before(self, count: int) -> int:
        """How many of the node's first `count` samples of the segment its left half gets."""
        if not self.sway:  # one half has no weight
            return count if self.share else 0
        swayed = (self.sway >> 32) * (_mixed(self.given + count + self.key) >> 32)
        found = (self.remainder - (self.sway >> 1) + count * self.share + swayed) >> 64
        return max(0, min(found, count))

    def left_before_each(self, counts: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """`left_before` of many counts: uint64 [n]."""
        if not self.sway:
            return counts.copy() if self.share else np.zeros_like(counts)
        hashed = counts + np.uint64((self.given + self.key) & _WORD)
        _mix_in_place(hashed)
        hashed >>= _BITS_32
        hashed *= np.uint64(self.sway >> 32)
        whole, fraction = _product(counts, self.share)
        start = self.remainder - (self.sway >> 1)
        fraction += np.uint64(start & _WORD)
        whole += fraction < np.uint64(start & _WORD)
        fraction += hashed
        whole += fraction < hashed
        found = whole.view(np.int64) + (start >> 64)
        return np.clip(found, 0, counts.view(np.int64)).view(np.uint64)


@dataclass(frozen=True, eq=False, kw_only=True)
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
        key: uint64 [corpora - 1], from the seed: how the rounding sways.
        segments: by ascending start.
        balance: at the start of the first segment.
    """

    key: NDArray[np.uint64]
    segments: tuple[Segment, ...]
    balance: Balance
    _nodes: list[_Node] = field(init=False, repr=False)
    _balances: dict[int, Balance] = field(init=False, repr=False)  # threads may fill it twice, with the same
    _splits: dict[int, list[_Split]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_balances", {0: self.balance})
        object.__setattr__(self, "_nodes", _tree(len(self.balance.counts)))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.key, self.segments, self.balance))  # without what was counted already

    def changed(self, segments: tuple[Segment, ...]) -> Mixture:
        """A mixture with other segments, which knows what is counted already of those that are the same."""
        changed = Mixture(key=self.key, segments=segments, balance=self.balance)
        for index, (segment, other) in enumerate(zip(self.segments, segments, strict=False)):
            if segment != other:
                break
            if index in self._balances:
                changed._balances[index] = self._balances[index]
        return changed

    def since(self, sample: int) -> Mixture:
        """The same from a global sample on, without the segments that are over then."""
        index = self._segment_at(sample)
        return Mixture(key=self.key, segments=self.segments[index:], balance=self._balance_at(index))

    def counts_before(self, sample: int) -> tuple[int, ...]:
        """How many samples of each corpus come before a global sample.

        Raises:
            ValueError: the sample lies before the first segment.
        """
        return self.balance_before(sample).counts

    def balance_before(self, sample: int) -> Balance:
        """What the samples before a global sample leave behind.

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
        corpora, ordinals = np.empty_like(samples), np.empty_like(samples)
        done = 0
        while done < len(samples):
            index = self._segment_at(int(samples[done]))
            stop = len(samples)
            if index + 1 < len(self.segments):
                stop = int(np.searchsorted(samples, self.segments[index + 1].start))
            inside = samples[done:stop] - self.segments[index].start
            corpora[done:stop], ordinals[done:stop] = self._locate(index, inside)
            done = stop
        return corpora, ordinals

    def sample_of(self, corpus: int, ordinal: int) -> int | None:
        """The global sample that is sample `ordinal` of a corpus; None if no weight ever leads there.

        Raises:
            ValueError: that sample came before the first segment.
        """
        if ordinal < self.balance.counts[corpus]:
            raise ValueError(f"sample {ordinal} of corpus {corpus} lies before the first weights")
        for index, segment in enumerate(self.segments):
            missing = ordinal - self._balance_at(index).counts[corpus]
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
        """At the start of a segment."""
        known = index
        while known not in self._balances:
            known -= 1
        while known < index:
            length = self.segments[known + 1].start - self.segments[known].start
            self._balances[known + 1] = self._balance_after(known, length)
            known += 1
        return self._balances[index]

    def _balance_after(self, index: int, count: int) -> Balance:
        """After so many samples of a segment."""
        before = self._balance_at(index)
        counts, remainders = list(before.counts), list(before.remainders)
        splits = self._splits_of(index)
        gained = {0: count}  # by node; a half of one corpus is no node
        if not splits:
            counts[0] += count
        for number, (node, split) in enumerate(zip(self._nodes, splits, strict=True)):
            total = gained.pop(number)
            left = split.left_before(total)
            if split.sway:
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

    def _splits_of(self, index: int) -> list[_Split]:
        splits = self._splits.get(index)
        if splits is None:
            balance = self._balance_at(index)
            weights = _prefix_sums(_integers(self.segments[index].weights))
            counts = _prefix_sums(balance.counts)
            splits = [
                _split(node, weights, counts, remainder, key)
                for node, remainder, key in zip(self._nodes, balance.remainders, self.key.tolist(), strict=True)
            ]
            self._splits[index] = splits
        return splits

    def _locate(self, index: int, inside: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Corpus and ordinal of samples of one segment, counted from its start."""
        corpora, ordinals = np.empty_like(inside), np.empty_like(inside)
        counts, splits = self._balance_at(index).counts, self._splits_of(index)
        # (first corpus, last + 1, node if there are two or more, which samples, their numbers at the node)
        waiting = [(0, len(counts), 0, np.arange(len(inside)), inside.astype(np.uint64))]
        while waiting:
            start, stop, number, places, numbers = waiting.pop()
            if stop - start == 1:
                corpora[places] = start
                ordinals[places] = numbers.view(np.int64) + counts[start]
                continue
            node = self._nodes[number]
            before, is_left = _halves(splits[number], numbers)
            left, right = np.flatnonzero(is_left), np.flatnonzero(~is_left)
            if len(left):
                waiting.append((start, node.middle, node.left(number), places[left], before[left]))
            if len(right):
                waiting.append((node.middle, stop, node.right(number), places[right], (numbers - before)[right]))
        return corpora, ordinals

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


def _rebuild(key: NDArray[np.uint64], segments: tuple[Segment, ...], balance: Balance) -> Mixture:
    return Mixture(key=key, segments=segments, balance=balance)


def _halves(split: _Split, numbers: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Of samples of a node: how many before each its left half got, and whether it gets this one."""
    if len(numbers) <= _FEW:
        pairs = [(split.left_before(number), split.left_before(number + 1)) for number in numbers.tolist()]
        before = np.array([pair[0] for pair in pairs], np.uint64)
        return before, np.array([pair[1] > pair[0] for pair in pairs], np.bool_)
    found = split.left_before_each(np.concatenate([numbers, numbers + np.uint64(1)]))
    before, after = found[: len(numbers)], found[len(numbers) :]
    return before, after > before


def _tree(num_corpora: int) -> list[_Node]:
    """The nodes in preorder."""
    found: list[_Node] = []
    waiting = [(0, num_corpora)]
    while waiting:
        start, stop = waiting.pop()
        if stop - start > 1:
            middle = (start + stop) // 2
            found.append(_Node(start, middle, stop))
            waiting += [(middle, stop), (start, middle)]
    return found


def _split(node: _Node, weights: Sequence[int], counts: Sequence[int], remainder: int, key: int) -> _Split:
    total = weights[node.stop] - weights[node.start]
    left = weights[node.middle] - weights[node.start]
    share = (left << 64) // total if total else 0
    given = counts[node.stop] - counts[node.start]
    return _Split(share, min(share, ONE - share), given, remainder, key)


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
    """Whether weights say something: finite, at least 0 and not all 0."""
    return all(0 <= weight < math.inf for weight in weights) and any(weights)


def _mixed(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    value = value * _GOLDEN & _WORD
    value = (value ^ value >> 30) * _MIX_1 & _WORD
    value = (value ^ value >> 27) * _MIX_2 & _WORD
    return value ^ value >> 31


def _mix_in_place(values: NDArray[np.uint64]) -> None:
    values *= np.uint64(_GOLDEN)
    values ^= values >> np.uint64(30)
    values *= np.uint64(_MIX_1)
    values ^= values >> np.uint64(27)
    values *= np.uint64(_MIX_2)
    values ^= values >> np.uint64(31)


def _product(values: NDArray[np.uint64], factor: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """High and low words of the 128-bit products."""
    low, high = values & _LOW, values >> _BITS_32
    factor_low, factor_high = np.uint64(factor & 0xFFFFFFFF), np.uint64(factor >> 32)
    middle = high * factor_low + (low * factor_low >> _BITS_32)
    other = low * factor_high + (middle & _LOW)
    return high * factor_high + (middle >> _BITS_32) + (other >> _BITS_32), values * np.uint64(factor)
