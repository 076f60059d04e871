"""How fast one core reads tokens at all: what a loader is measured against."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.format.corpus import Corpus

DOCUMENT_TOKENS = 1_000
"""Of a gathered document."""

BATCH_TOKENS = 8 * 4_096
"""Tokens that are converted at once: a batch of 8 rows of 4,096."""

ENOUGH_TOKENS = 64 << 20
"""What a limit is measured on: as many tokens as a window, and more than the caches of a processor hold."""

CACHED_TOKENS = 16 << 20
"""Fewer tokens may lie in the caches of the processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Tokens per second of one core, from memory-mapped shards to fresh int64 arrays.

    Args:
        contiguous: one shard after another.
        gather: slices of `document_tokens` tokens from random places.
    """

    contiguous: float
    gather: float
    document_tokens: int


class LimitReader:
    """Reads mapped tokens in the two ways that no loader beats.

    Making one reads all of the arrays once, so that the limits are those of memory and not of the disk.

    Args:
        arrays: token ids, such as `mapped_tokens` gives; together at least one token.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self.num_tokens = sum(map(len, arrays))
        self.document_tokens = min(DOCUMENT_TOKENS, max(map(len, arrays)))
        for array in arrays:
            array.max()
        self._places = _places(arrays)
        self._slices = _random_slices(arrays, self.document_tokens)

    def measure(self, seconds: float) -> Limits:
        """Both limits, one after the other, each for so long."""
        return Limits(
            contiguous=self._read(seconds, gathers=False),
            gather=self._read(seconds, gathers=True),
            document_tokens=self.document_tokens,
        )

    def _read(self, seconds: float, *, gathers: bool) -> float:
        count = -(-BATCH_TOKENS // self.document_tokens) if gathers else 1
        places = self._slices if gathers else self._places
        num_tokens = 0
        started = time.perf_counter()
        while (passed := time.perf_counter() - started) < seconds or not num_tokens:
            views = [array[start:stop] for array, start, stop in itertools.islice(places, count)]
            tokens = np.concatenate(views) if gathers else views[0]
            num_tokens += len(tokens.astype(np.int64))
        return num_tokens / passed


def mapped_tokens(corpora: Sequence[Corpus], *, num_tokens: int = ENOUGH_TOKENS) -> list[NDArray[Any]]:
    """The token ids of record batches of all corpora in turn, until there are enough: read-only memory maps.

    Raises:
        DamagedCorpusError: a shard is missing or not what its manifest says.
    """
    found: list[NDArray[Any]] = []
    for array in _in_turn([_batches(corpus) for corpus in corpora]):
        found.append(array)
        num_tokens -= len(array)
        if num_tokens <= 0:
            break
    return found


def _batches(corpus: Corpus) -> Iterator[NDArray[Any]]:
    for index in range(len(corpus.shards)):
        shard = corpus.shard(index)
        for batch in range(len(shard.places)):
            yield shard.batch(batch)[1]


def _in_turn(iterators: Sequence[Iterator[NDArray[Any]]]) -> Iterator[NDArray[Any]]:
    for row in itertools.zip_longest(*iterators):
        yield from (array for array in row if array is not None)


def _places(arrays: Sequence[NDArray[Any]]) -> Iterator[tuple[NDArray[Any], int, int]]:
    """Batch after batch of all arrays, and again from the start, without end."""
    return itertools.cycle(
        [
            (array, start, min(start + BATCH_TOKENS, len(array)))
            for array in arrays
            for start in range(0, len(array), BATCH_TOKENS)
        ]
    )


def _random_slices(arrays: Sequence[NDArray[Any]], length: int) -> Iterator[tuple[NDArray[Any], int, int]]:
    """About as many tokens as there are, in slices from random places, without end."""
    long_enough = [array for array in arrays if len(array) >= length]
    rooms = np.array([len(array) - length + 1 for array in long_enough], np.int64)
    stops = np.cumsum(rooms)
    places = np.random.default_rng(0).integers(0, stops[-1], max(1_000, int(stops[-1]) // length))
    chosen = np.searchsorted(stops, places, "right")
    starts = places - (stops - rooms)[chosen]
    return itertools.cycle(
        [
            (long_enough[number], start, start + length)
            for number, start in zip(chosen.tolist(), starts.tolist(), strict=True)
        ]
    )
