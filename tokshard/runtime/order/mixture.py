"""The corpus of each sample, and its number in that corpus, in closed form, for all streams at once.

The corpora, in plan order, are the leaves of a balanced binary tree. Of its first n samples in a stream, a node gives
its left half ``L(n) = (r + n * s) div 2**64``: the line of the half's share s, rounded. So a sample is found by walking
down the tree, and a corpus is off by one rounding per level. Here is an example in units of 1/16. The left half has
weight 3 and the right half 5, so ``s = floor(16 * 3/8) = 6``; the remainder r is 8 at the start, that is 1/2.

    n                      0   1   2   3   4   5   6   7   8
    8 + 6 n                8  14  20  26  32  38  44  50  56
    L(n) = that div 16     0   0   1   1   2   2   2   3   3
    sample n goes to       R   L   R   L   R   R   L   R

Sample 3 of the node is sample ``L(3) = 1`` of the left half, sample 4 is sample ``4 - L(4) = 2`` of the right half. If
the weights change after 5 samples, the line is at 38/16 and the left half got 2: the next weights start with the
remainder ``38 - 2 * 16 = 6``. ORDER.md, section 7, has the rules.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokshard.numbers import ceil_div
from tokshard.runtime.order.permutation import KEY_WORDS, Permutation, derive_key

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

ONE = 1 << 64
"""Shares and remainders are integers in units of 2**-64. Rounding could lose one sample only after 2**64 samples."""

_END = (3 << 61) + 1
"""No run has so many samples: batches made ahead may lie a little behind 2**62, the last sample."""

_LOW, _BITS_32 = np.uint64(0xFFFFFFFF), np.uint64(32)

_KEPT_BYTES = 1 << 28
"""Balances at the starts of segments are kept up to about this size; beyond it, only some of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of the run with fixed weights.

    Args:
        start: first global sample.
        weights: one per corpus, in plan order.
    """

    start: int
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Balance:
    """The state of the mixture after some samples: all that later samples depend on.

    Args:
        counts: int64 [corpora, streams], samples of each.
        remainders: uint64 [nodes, streams], the remainder that each node carries over, in units of 2**-64.
    """

    counts: Ints
    remainders: Words

    @classmethod
    def at_start(cls, seed: int, num_streams: int, num_corpora: int) -> Balance:
        """The balance of a new run.

        The streams start a node at staggered remainders; otherwise all would round at the same time. So the root over C
        streams gives the same counts as one stream: ``floor(x) + floor(x + 1/C) + ... = floor(C x)`` (Hermite).
        """
        odd = 2 * _places(seed, num_streams, num_corpora - 1).astype(np.uint64) + np.uint64(1)
        quotient, rest = divmod(1 << 63, num_streams)
        return cls(
            counts=np.zeros((num_corpora, num_streams), np.int64),
            remainders=odd * np.uint64(quotient) + odd * np.uint64(rest) // np.uint64(num_streams),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Balance):
            return NotImplemented
        return np.array_equal(self.counts, other.counts) and np.array_equal(self.remainders, other.remainders)

    __hash__ = None  # type: ignore[assignment]


class Mixture:
    """The corpora of a run's samples, under weights that change at given samples.

    Any position is reached at once: a sample costs a step per level of the tree. Each segment before it costs the same,
    once for all streams.

    Args:
        seed: seed of the plan.
        num_streams: streams of the plan.
        segments: segments by ascending start.
        balance: balance at the start of the first segment; None: the run starts there.
    """

    def __init__(
        self, *, seed: int, num_streams: int, segments: tuple[Segment, ...], balance: Balance | None = None
    ) -> None:
        self.seed, self.num_streams, self.segments, self.balance = seed, num_streams, segments, balance
        self.num_corpora = len(segments[0].weights)
        self._tree = _tree(self.num_corpora)
        self._starts = np.array([*(segment.start for segment in segments), _END], np.int64)
        size = 24 * num_streams * self.num_corpora * len(segments)
        self._keep_every = 1 + size // _KEPT_BYTES
        # by segment, as far as they were asked for; two threads may count the same, and find the same
        self._balances: dict[int, Balance] = {}
        self._shares: dict[int, _Shares] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.seed, self.num_streams, self.segments, self.balance))  # without what was counted

    def changed(self, segments: tuple[Segment, ...]) -> Mixture:
        """The same mixture with other segments. Counts of equal segments are kept."""
        changed = Mixture(seed=self.seed, num_streams=self.num_streams, segments=segments, balance=self.balance)
        num_same = 0
        for one, other in zip(self.segments, segments, strict=False):
            if one != other:
                break
            num_same += 1
        # the balance at a start needs the weights before it only
        changed._balances = {
            index: balance
            for index, balance in list(self._balances.items())
            if index <= num_same and changed._starts[index] == self._starts[index]
        }
        return changed

    def weights_at(self, sample: int) -> tuple[float, ...]:
        """The weights in force at a global sample, which is not before the first segment."""
        return self.segments[self._segment_at(sample)].weights

    def locate(self, samples: Ints) -> tuple[Ints, Ints]:
        """Corpus of each global sample, and its number among the samples of that corpus in its stream.

        Args:
            samples: int64 [n], in any order.

        Returns:
            int64 [n] twice.

        Raises:
            ValueError: a sample lies before the first segment.
        """
        numbers, streams = np.divmod(samples, self.num_streams)
        if len(samples):
            self._segment_at(int(samples.min()))
        corpora, corpus_samples = np.empty_like(samples), np.empty_like(samples)
        indices = np.searchsorted(self._starts[:-1], samples, "right") - 1
        for index in np.unique(indices).tolist():
            here: Ints | slice = slice(None) if (indices == index).all() else np.flatnonzero(indices == index)
            mine, balance = streams[here], self._balance_at(index)
            inside = numbers[here] - samples_before(self.segments[index].start, mine, self.num_streams)
            corpora[here], inside = self._descend(index, mine, inside)
            corpus_samples[here] = inside + balance.counts[corpora[here], mine]
        return corpora, corpus_samples

    def counts_before(self, sample: int) -> tuple[int, ...]:
        """The number of samples of each corpus before a global sample, over all streams.

        Raises:
            ValueError: the sample lies before the first segment.
        """
        return tuple(self.balance_before(sample).counts.sum(1).tolist())

    def balance_before(self, sample: int) -> Balance:
        """The balance before a global sample.

        Raises:
            ValueError: the sample lies before the first segment.
        """
        return self._advanced(self._segment_at(sample), sample)

    def samples_of(self, corpora: Ints, corpus_samples: Ints, streams: Ints) -> Ints:
        """The global samples that read given samples of corpora: the inverse of `locate`.

        Args:
            corpora, corpus_samples, streams: int64 [n]; sample `corpus_samples` of a corpus in a stream.

        Returns:
            int64 [n]; -1 where the corpus never gets so many samples in the stream.

        Raises:
            ValueError: one of them came before the first segment.
        """
        if bool((corpus_samples < self._balance_at(0).counts[corpora, streams]).any()):
            raise ValueError("a sample of a corpus lies before the first weights")
        found, waiting = np.full(len(corpora), -1, np.int64), np.arange(len(corpora))
        for index in range(len(self.segments)):
            after = self._balance_at(index + 1).counts[corpora[waiting], streams[waiting]]
            is_here = after > corpus_samples[waiting]
            here = waiting[is_here]
            if len(here):
                of, mine = corpora[here], streams[here]
                missing = corpus_samples[here] - self._balance_at(index).counts[of, mine]
                first = samples_before(self.segments[index].start, mine, self.num_streams)
                found[here] = (first + self._search(index, of, mine, missing)) * self.num_streams + mine
            waiting = waiting[~is_here]
        return found

    def _segment_at(self, sample: int) -> int:
        index = bisect_right(self.segments, sample, key=lambda segment: segment.start) - 1
        if index < 0:
            raise ValueError(f"sample {sample} lies before the first weights, which start at {self.segments[0].start}")
        return index

    def _balance_at(self, index: int) -> Balance:
        """The balance at the start of a segment, or at the last possible sample."""
        known = index
        while known and known not in self._balances:
            known -= 1
        if known not in self._balances:
            start = self.balance or Balance.at_start(self.seed, self.num_streams, self.num_corpora)
            self._balances[0] = start
        balance = self._balances[known]
        for past in range(known, index):
            balance = self._advanced(past, int(self._starts[past + 1]), balance)
            if (past + 1) % self._keep_every == 0:
                self._balances[past + 1] = balance
        return balance

    def _advanced(self, index: int, sample: int, balance: Balance | None = None) -> Balance:
        """The balance at a sample of a segment, from the balance at its start."""
        before, tree, shares = balance or self._balance_at(index), self._tree, self._shares_of(index)
        streams = np.arange(self.num_streams)
        start = samples_before(self.segments[index].start, streams, self.num_streams)
        given = np.empty((2 * self.num_corpora - 1, self.num_streams), np.int64)
        given[0] = samples_before(sample, streams, self.num_streams) - start
        remainders = before.remainders.copy()
        for level in tree.levels:
            left, remainders[level] = shares.left(level[:, np.newaxis], given[level], remainders[level])
            given[tree.lefts[level]], given[tree.rights[level]] = left, given[level] - left
        return Balance(counts=before.counts + given[self.num_corpora - 1 :], remainders=remainders)

    def _descend(self, index: int, streams: Ints, inside: Ints, corpora: Ints | None = None) -> tuple[Ints, Ints]:
        """Follow samples of one segment down the tree.

        Args:
            inside: int64 [n], samples of the streams, counted from the start of the segment.
            corpora: int64 [n], the corpora to go to; default: the corpora of the samples.

        Returns:
            int64 [n] twice: the corpora, and how many of their samples in the stream come before.
        """
        balance, tree, shares = self._balance_at(index), self._tree, self._shares_of(index)
        first_leaf = self.num_corpora - 1
        at, numbers = np.zeros_like(inside), inside.copy()
        here: Ints | slice = slice(None)
        for _ in tree.levels:
            nodes, mine, total = at[here], streams[here], numbers[here]
            left, after = shares.left(nodes, total, balance.remainders[nodes, mine])
            is_left = shares.grow(nodes, after) if corpora is None else corpora[here] < tree.middles[nodes]
            at[here] = np.where(is_left, tree.lefts[nodes], tree.rights[nodes])
            numbers[here] = np.where(is_left, left, total - left)
            if not tree.is_even:
                here = np.flatnonzero(at < first_leaf)
        return at - first_leaf, numbers

    def _search(self, index: int, corpora: Ints, streams: Ints, missing: Ints) -> Ints:
        """The number of samples of a segment after which corpora have got `missing` of them; they get more in it.

        Args:
            missing: int64 [n], samples of the corpora.
        """
        longest = samples_before(int(self._starts[index + 1]), streams, self.num_streams) - samples_before(
            self.segments[index].start, streams, self.num_streams
        )

        def has_more(lengths: Ints) -> NDArray[np.bool_]:
            return self._descend(index, streams, lengths, corpora)[1] > missing

        # near the line, which is off by less than two per level; where that does not hold, anywhere
        weights = np.array(self.segments[index].weights)
        with np.errstate(all="ignore"):
            share = (weights / weights.max() / (weights / weights.max()).sum())[corpora]
            off = 2.0 * len(self._tree.levels) + 1
            low, high = ((missing + sign * off) / share * (1 + sign * 1e-9) + sign for sign in (-1, 1))
        low, high = (
            np.minimum(np.nan_to_num(np.clip(bound, 0, 2.0**62)).astype(np.int64), longest) for bound in (low, high)
        )
        low, high = np.where(has_more(low), 0, low), np.where(has_more(high), high, longest)
        while bool((high - low > 1).any()):
            middle = low + (high - low) // 2  # the sum may exceed 2**63
            is_enough = has_more(middle)
            low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
        return low

    def _shares_of(self, index: int) -> _Shares:
        shares = self._shares.get(index)
        if shares is None:
            shares = self._shares[index] = _Shares.of(self._tree, self.segments[index].weights)
        return shares


def _rebuild(seed: int, num_streams: int, segments: tuple[Segment, ...], balance: Balance | None) -> Mixture:
    return Mixture(seed=seed, num_streams=num_streams, segments=segments, balance=balance)


class _Tree(NamedTuple):
    """The binary tree over corpora. Its nodes are numbered in preorder, and its leaves after them, in plan order.

    Args:
        bounds: (first corpus, first of the right half, last + 1) of each node.
        lefts, rights: int64 [nodes], the halves of each.
        middles: int64 [nodes], the first corpus of the right half.
        levels: the nodes of each depth.
        is_even: whether all leaves are at the same depth.
    """

    bounds: tuple[tuple[int, int, int], ...]
    lefts: Ints
    rights: Ints
    middles: Ints
    levels: tuple[Ints, ...]
    is_even: bool


@lru_cache(maxsize=8)
def _tree(num_corpora: int) -> _Tree:
    bounds, depths = [], []
    waiting = [(0, num_corpora, 0)]
    while waiting:
        start, stop, depth = waiting.pop()
        if stop - start > 1:
            middle = (start + stop) // 2
            bounds.append((start, middle, stop))
            depths.append(depth)
            waiting += [(middle, stop, depth + 1), (start, middle, depth + 1)]
    halves = []
    for number, (start, middle, stop) in enumerate(bounds):
        leaf = num_corpora - 1
        left = number + 1 if middle - start > 1 else leaf + start
        right = number + middle - start if stop - middle > 1 else leaf + middle
        halves.append((left, right))
    lefts, rights = np.array(halves, np.int64).reshape(-1, 2).T.copy()
    middles = np.array([middle for _, middle, _ in bounds], np.int64)
    levels = tuple(np.flatnonzero(np.array(depths) == depth) for depth in sorted(set(depths)))
    return _Tree(tuple(bounds), lefts, rights, middles, levels, num_corpora == 1 << len(levels))


class _Shares(NamedTuple):
    """The shares of the left halves of all nodes, in units of 2**-64.

    Args:
        words: uint64 [nodes]; 0 also for 2**64.
        is_all: bool [nodes], whether the share is 2**64.
    """

    words: Words
    is_all: NDArray[np.bool_]

    @classmethod
    def of(cls, tree: _Tree, weights: Sequence[float]) -> _Shares:
        """The shares for weights; 0 for a node without weight."""
        sums = [0, *accumulate(_integers(weights))]
        found = []
        for start, middle, stop in tree.bounds:
            total = sums[stop] - sums[start]
            found.append((sums[middle] - sums[start] << 64) // total if total else 0)
        return cls(
            words=np.array([share % ONE for share in found], np.uint64),
            is_all=np.array([share == ONE for share in found], np.bool_),
        )

    def left(self, nodes: Ints, numbers: Ints, remainders: Words) -> tuple[Ints, Words]:
        """The numbers of the nodes' samples that their left halves get, and the remainders after them."""
        share, n = self.words[nodes], numbers.view(np.uint64)
        share_low, share_high, low, high = share & _LOW, share >> _BITS_32, n & _LOW, n >> _BITS_32
        middle = high * share_low + (low * share_low >> _BITS_32)
        other = low * share_high + (middle & _LOW)
        product = high * share_high + (middle >> _BITS_32) + (other >> _BITS_32)
        after = n * share + remainders
        return (product + (after < remainders) + n * self.is_all[nodes]).view(np.int64), after

    def grow(self, nodes: Ints, remainders: Words) -> NDArray[np.bool_]:
        """Whether the left halves also get one sample more."""
        share = self.words[nodes]
        return (remainders + share < share) | self.is_all[nodes]


def samples_before(sample: int, streams: Any, num_streams: int) -> Any:
    """The number of samples of a stream, or of each in an array of streams, before a global sample."""
    return ceil_div(sample - streams, num_streams)


@lru_cache(maxsize=2)
def _places(seed: int, num_streams: int, num_nodes: int) -> NDArray[np.uint16]:
    """The place of each stream among those that start at a node, in a row between 0 and 1: uint16 [nodes, streams]."""
    places = np.zeros((num_nodes, num_streams), np.uint16)
    for node in range(num_nodes if num_streams > 1 else 0):
        key = derive_key(seed, "phases", window=node, words=KEY_WORDS)
        places[node] = Permutation(length=num_streams, key=key).all()
    return places


def _integers(weights: Sequence[float]) -> list[int]:
    """Integers in exact proportion to weights: a float is taken as a binary fraction."""
    ratios = [float(weight).as_integer_ratio() for weight in weights]
    scale = max(denominator for _, denominator in ratios)  # powers of two: the largest is a multiple of the others
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def times_the_largest(weights: Sequence[float]) -> int:
    """How many times all weights together are the largest one, rounded down."""
    integers = _integers(weights)
    return sum(integers) // max(integers)


def are_weights(weights: Sequence[float]) -> bool:
    """Whether weights can be shares: finite, at least 0 and not all 0."""
    return all(0 <= weight < math.inf for weight in weights) and any(weights)
