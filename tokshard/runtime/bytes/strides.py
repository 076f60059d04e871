"""Where the strides of a corpus lie: the pieces of a shard that are fetched, checked and kept as wholes.

A stride is `HASH_STRIDE` tokens of one shard; the last of a shard may be shorter. Strides are numbered through the
whole corpus. The *place* of a token is its stride times the tokens of a stride, plus its position there: within a
shard, places and positions differ by a constant. Pure arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive strides of one shard.

    Args:
        shard: its number in the corpus.
        first, stop: strides, counted in the shard.
        number: of the first stride in the corpus.
    """

    shard: int
    first: int
    stop: int
    number: int


@dataclass(frozen=True, slots=True)
class Parts:
    """Pieces of a corpus, cut where strides begin; int64 [n] each.

    Args:
        strides: the stride that holds each part.
        starts: where it starts there.
        lengths: its tokens.
        at: where it goes.
    """

    strides: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    at: NDArray[np.int64]

    def __getitem__(self, chosen: NDArray[np.bool_]) -> Parts:
        return Parts(self.strides[chosen], self.starts[chosen], self.lengths[chosen], self.at[chosen])


class Strides:
    """The strides of a corpus.

    Args:
        first_tokens: int64 [shards + 1], position of the first token of each shard, and the end of the corpus.
        tokens: of a stride.
    """

    def __init__(self, first_tokens: NDArray[np.int64], tokens: int) -> None:
        self.tokens = tokens
        self._first_tokens = first_tokens
        counts = -(-np.diff(first_tokens) // tokens)
        self._first: NDArray[np.int64] = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self._shift = self._first * tokens - first_tokens

    def cut(self, starts: NDArray[np.int64], lengths: NDArray[np.int64], at: NDArray[np.int64]) -> Parts:
        """Cut pieces, each of which lies in one shard.

        Args:
            starts, lengths: int64 [n], positions and tokens of the pieces; at least 1 token.
            at: int64 [n], where each goes.
        """
        size = self.tokens
        places = starts + self._shift[np.searchsorted(self._first_tokens, starts, "right") - 1]
        stops = places + lengths
        first = places // size
        counts = (stops - 1) // size - first + 1
        if len(counts) == int(counts.sum()):
            return Parts(first, places - first * size, lengths, at)
        pieces = np.repeat(np.arange(len(starts)), counts)
        strides = np.arange(len(pieces)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        begins = np.maximum(places[pieces], strides * size)
        ends = np.minimum(stops[pieces], (strides + 1) * size)
        return Parts(strides, begins - strides * size, ends - begins, at[pieces] + begins - places[pieces])

    def covering(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
        """The strides that hold some stretches of the corpus, each once, in the order of the stretches.

        Args:
            starts, stops: int64 [n], each start below its stop. A stretch may go over several shards.
        """
        first = self._stride_of(starts)
        counts = self._stride_of(stops - 1) - first + 1
        found = np.arange(int(counts.sum())) + np.repeat(first - np.cumsum(counts) + counts, counts)
        _, index = np.unique(found, return_index=True)
        strides: NDArray[np.int64] = found[np.sort(index)]
        return strides

    def runs(self, strides: NDArray[np.int64], longest: int) -> Iterator[Run]:
        """Put strides together that follow each other, in the order in which they are given.

        Args:
            strides: int64 [n].
            longest: strides of a run.
        """
        if not len(strides):
            return
        shards = np.searchsorted(self._first, strides, "right") - 1
        is_first = np.ones(len(strides), np.bool_)
        is_first[1:] = (np.diff(strides) != 1) | (np.diff(shards) != 0)
        bounds = [*np.flatnonzero(is_first).tolist(), len(strides)]
        for low, high in itertools.pairwise(bounds):
            shard = int(shards[low])
            base = int(self._first[shard])
            number, end = int(strides[low]), int(strides[high - 1]) + 1
            while number < end:
                stop = min(number + longest, end)
                yield Run(shard, number - base, stop - base, number)
                number = stop

    def _stride_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        shards = np.searchsorted(self._first_tokens, positions, "right") - 1
        found: NDArray[np.int64] = (positions + self._shift[shards]) // self.tokens
        return found
