"""How many of its samples a node of the mixture gives to its left half: a rounded line, in fixed point.

Shares are integers in units of 2**-64. Here is an example in units of 1/16, and without the dither. The left half has
weight 3 and the right half 5, so the share of the left half is ``floor(16 * 3/8) = 6``. The remainder is 8 at the
start, that is 1/2, which turns rounding down into ordinary rounding.

    n                      0   1   2   3   4   5   6   7   8
    8 + 6 n                8  14  20  26  32  38  44  50  56
    L(n) = that div 16     0   0   1   1   2   2   2   3   3
    sample n goes to       R   L   R   L   R   R   L   R

Sample 3 of the node is sample ``L(3) = 1`` of the left half, sample 4 is sample ``4 - L(4) = 2`` of the right half. If
the weights change after 5 samples, the line is at 30/16 and the left half got 2, which is 2/16 too many. The next
segment starts with the remainder ``8 + 30 - 2 * 16 = 6``, and so takes them back.

The dither adds a hash of n to the sum: between -u/2 and u/2, where u is the smaller of both shares. Without it, equal
weights would strictly alternate, and each of two ranks would read one corpus only. It cannot be larger, because L has
to grow by 0 or 1 from n to n + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ONE = 1 << 64
"""Shares and remainders are integers in units of 2**-64: what is left of 1 is lost after 2**64 samples."""

HALF = ONE >> 1
"""The remainder of a node at the start of a run."""

_WORD = ONE - 1
_LOW = np.uint64(0xFFFFFFFF)
_BITS_32 = np.uint64(32)
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_FEW = 4
"""Up to so many samples are faster one by one than as arrays."""


class Split(NamedTuple):
    """A node of the tree in one segment of the run.

    Args:
        share: of the left half.
        dither: the smaller of both shares: how far rounding may vary without giving a sample twice or backwards. 0 in
            one of several streams.
        node_count_before: samples of the node before the segment.
        remainder: of the left half at the start of the segment.
    """

    share: int
    dither: int
    node_count_before: int
    remainder: int
    key: int

    def left_before(self, count: int) -> int:
        """How many of the node's first `count` samples of the segment its left half gets."""
        if not 0 < self.share < ONE:  # one half has no weight
            return count if self.share else 0
        dithered = (self.dither >> 32) * (_mixed(self.node_count_before + count + self.key) >> 32)
        found = (self.remainder - (self.dither >> 1) + count * self.share + dithered) >> 64
        return max(0, min(found, count))

    def left_before_each(self, counts: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """`left_before` of many counts: uint64 [n]."""
        if not 0 < self.share < ONE:
            return counts.copy() if self.share else np.zeros_like(counts)
        hashed = counts + np.uint64((self.node_count_before + self.key) & _WORD)
        _mix_in_place(hashed)
        hashed >>= _BITS_32
        hashed *= np.uint64(self.dither >> 32)
        whole, fraction = product(counts, self.share)
        start = self.remainder - (self.dither >> 1)
        fraction += np.uint64(start & _WORD)
        whole += fraction < np.uint64(start & _WORD)
        fraction += hashed
        whole += fraction < hashed
        found = whole.view(np.int64) + (start >> 64)
        return np.clip(found, 0, counts.view(np.int64)).view(np.uint64)

    def halves(self, numbers: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Of samples of the node: how many before each its left half got, and whether it gets this one."""
        if len(numbers) <= _FEW:
            pairs = [(self.left_before(number), self.left_before(number + 1)) for number in numbers.tolist()]
            before = np.array([pair[0] for pair in pairs], np.uint64)
            return before, np.array([pair[1] > pair[0] for pair in pairs], np.bool_)
        found = self.left_before_each(np.concatenate([numbers, numbers + np.uint64(1)]))
        before, after = found[: len(numbers)], found[len(numbers) :]
        return before, after > before


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


def product(values: NDArray[np.uint64], factor: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """High and low words of the 128-bit products."""
    low, high = values & _LOW, values >> _BITS_32
    factor_low, factor_high = np.uint64(factor & 0xFFFFFFFF), np.uint64(factor >> 32)
    middle = high * factor_low + (low * factor_low >> _BITS_32)
    other = low * factor_high + (middle & _LOW)
    return high * factor_high + (middle >> _BITS_32) + (other >> _BITS_32), values * np.uint64(factor)
