"""The balances of all streams of a plan as arrays: a change of weights, or a count, costs a few calls per corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.order.mixture import Balance, shares_of, tree
from tokshard.runtime.order.rounding import ONE, product


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What each of some streams was given so far. Their trees have no dither.

    Args:
        counts: int64 [corpora, streams], samples of each.
        whole, fraction: int64 and uint64 [nodes, streams]: the remainder of a node is ``whole * 2**64 + fraction``, in
            units of 2**-64.
    """

    counts: NDArray[np.int64]
    whole: NDArray[np.int64]
    fraction: NDArray[np.uint64]

    @classmethod
    def of(cls, balances: Sequence[Balance]) -> Tally:
        """The balances of some streams, of which there is at least one."""
        shape = len(balances), len(balances[0].remainders)
        remainders = [divmod(value, ONE) for balance in balances for value in balance.remainders]
        return cls(
            counts=np.array([balance.counts for balance in balances], np.int64).T,
            whole=np.array([pair[0] for pair in remainders], np.int64).reshape(shape).T,
            fraction=np.array([pair[1] for pair in remainders], np.uint64).reshape(shape).T,
        )

    def balances(self) -> tuple[Balance, ...]:
        """The same, stream by stream."""
        pairs = zip(self.whole.T.tolist(), self.fraction.T.tolist(), strict=True)
        remainders = ([whole * ONE + part for whole, part in zip(*pair, strict=True)] for pair in pairs)
        return tuple(
            Balance(counts=tuple(counts), remainders=tuple(carried))
            for counts, carried in zip(self.counts.T.tolist(), remainders, strict=True)
        )

    def after(self, numbers: NDArray[np.int64], weights: Sequence[float]) -> Tally:
        """The balances after some more samples of each stream, under one set of weights. The formula is `Split`'s.

        Args:
            numbers: int64 [streams].
        """
        counts, whole, fraction = self.counts.copy(), self.whole.copy(), self.fraction.copy()
        if len(counts) == 1:
            counts[0] += numbers
        gained = {0: numbers}  # by node; a half with one corpus is not a node
        nodes = tree(len(counts))
        for number, (node, share) in enumerate(zip(nodes, shares_of(nodes, weights), strict=True)):
            total = gained.pop(number)
            left = total if share else np.zeros_like(total)
            if 0 < share < ONE:
                high, low = product(total.view(np.uint64), share)
                low += fraction[number]
                line = high.view(np.int64) + whole[number] + (low < fraction[number])
                left = np.clip(line, 0, total)
                whole[number], fraction[number] = line - left, low
            for start, stop, child, part in (
                (node.start, node.middle, node.left(number), left),
                (node.middle, node.stop, node.right(number), total - left),
            ):
                if stop - start == 1:
                    counts[start] += part
                else:
                    gained[child] = part
        return Tally(counts=counts, whole=whole, fraction=fraction)
