"""Orders to measure: ours, numpy's, those known to be bad, and what whole plans read of a corpus sorted by topic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.runtime.shuffle import Order, ranked
from tests.runtime.sources import ListSource
from tokshard.runtime import NumpyLoader
from tokshard.runtime.order.permutation import KEY_WORDS, NUM_ROUNDS, Permutation, derive_key
from tokshard.runtime.plan import StreamPlan


def key_of(seed: int, *, epoch: int = 0, window: int = 0) -> NDArray[np.uint64]:
    return derive_key(seed, "pieces", epoch=epoch, window=window, words=KEY_WORDS)


def permuted(length: int, seed: int, *, epoch: int = 0, window: int = 0) -> Order:
    """The permutation of tokshard."""
    return Permutation(length=length, key=key_of(seed, epoch=epoch, window=window)).all().astype(np.int64)


def enciphered(length: int, seed: int, *, num_rounds: int = NUM_ROUNDS) -> Order:
    """The rules of the cipher at any length and number of rounds: the permutation of more than 65,536 items.

    Written again, so that it can be measured where hashes are sorted instead, and with too few rounds.
    """
    bits = max(1, (length - 1).bit_length())
    mask, shift = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
    key = key_of(seed)

    def once(index: NDArray[np.uint64]) -> NDArray[np.uint64]:
        for number in range(num_rounds):
            index = (index * (key[number] | np.uint64(1)) + (key[NUM_ROUNDS + number] | np.uint64(1))) & mask
            index ^= index >> shift
        return index

    found = once(np.arange(length, dtype=np.uint64))
    while len(outside := np.flatnonzero(found >= length)):
        found[outside] = once(found[outside])
    return found.astype(np.int64)


def numpys(length: int, seed: int) -> Order:
    return np.random.default_rng(seed).permutation(length)


def congruential(length: int, seed: int, *, rank: int = 0) -> Order:
    """How fms-fsdp walks through the documents of a shard: x -> 5x + 2 (rank + seed) + 1 mod 2**k, from 0.

    A number that is not a document's is passed over. Ranks differ in the increment.
    """
    bits = max(1, (length - 1).bit_length())
    mask = np.uint64((1 << bits) - 1)
    states = np.zeros(1, np.uint64)
    multiplier, increment = np.uint64(5), np.uint64(2 * (rank + seed) + 1)
    while len(states) <= int(mask):
        # the next as many states, and a step that is twice as long
        states = np.concatenate([states, states * multiplier + increment & mask])
        increment, multiplier = multiplier * increment + increment & mask, multiplier * multiplier & mask
    return states[states < length].astype(np.int64)


def identity(length: int, seed: int) -> Order:
    return np.arange(length)


# whole plans


class SortedSource(ListSource):
    """A corpus sorted by topic: the id of a token is its position, delimiters included."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.tokens = np.arange(len(self.tokens), dtype=np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """A corpus and the sizes of a plan; blocks, windows and the corpus are whole samples.

    Args:
        lengths: tokens of each document.
        long_documents: the numbers of those that are longer than a block.
    """

    lengths: tuple[int, ...]
    long_documents: tuple[int, ...]
    seq_len: int
    block_tokens: int
    window_blocks: int

    @property
    def num_samples(self) -> int:
        return sum(self.lengths) // self.seq_len

    @property
    def long_spans(self) -> list[tuple[int, int]]:
        """Where the long documents are in the corpus."""
        stops = np.cumsum(self.lengths).tolist()
        return [(stops[number] - self.lengths[number], stops[number]) for number in self.long_documents]

    def rows(self, seed: int, *, epochs: int = 1) -> NDArray[np.int64]:
        """Positions of the tokens of every sample: int64 [samples, seq_len]."""
        sizes = {"seq_len": self.seq_len, "block_tokens": self.block_tokens, "window_blocks": self.window_blocks}
        plan = StreamPlan(SortedSource(self.lengths), seed=seed, epochs=epochs, **sizes)
        with NumpyLoader(plan, global_batch_size=BATCH) as loader:
            return np.concatenate([batch["input_ids"] for batch in loader])

    def numpys(self, seed: int) -> NDArray[np.int64]:
        """The same of one epoch of a plan whose permutations are numpy's."""
        random = np.random.default_rng(seed)
        total, block = sum(self.lengths), self.block_tokens
        starts = np.union1d(np.cumsum((0, *self.lengths[:-1])), np.arange(0, total, block))
        lengths = np.diff(starts, append=total)
        window = np.empty(total // block, np.int64)
        window[random.permutation(len(window))] = np.arange(len(window)) // self.window_blocks
        window_of_piece = window[starts // block]
        found = []
        for number in range(int(window.max()) + 1):
            pieces = random.permutation(np.flatnonzero(window_of_piece == number))
            size = lengths[pieces]
            tokens = np.arange(size.sum()) + np.repeat(starts[pieces] - (np.cumsum(size) - size), size)
            found.append(random.permutation(tokens.reshape(-1, self.seq_len)))
        return np.concatenate(found)


BATCH, STEP = 512, 128
"""Samples are read in large batches, which is faster, and counted in smaller steps: the order is the same for both."""

_LONG = (300, 700)


def _lengths() -> tuple[int, ...]:
    """Documents of 1 to 31 tokens, and two of 256: 4,096 samples of 4."""
    lengths = np.random.default_rng(3).integers(1, 32, size=1_100)
    lengths[list(_LONG)] = 256
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), 4 * 4_096))]
    return (*lengths.tolist(), 4 * 4_096 - int(lengths.sum()))


SMALLER = Shelf(lengths=_lengths(), long_documents=_LONG, seq_len=4, block_tokens=64, window_blocks=1_000)
"""A corpus of one window."""

LARGER = Shelf(lengths=_lengths(), long_documents=_LONG, seq_len=4, block_tokens=64, window_blocks=64)
"""Four windows of 64 blocks, 1,024 samples each."""


def order_of(rows: NDArray[Any]) -> Order:
    """Samples in the order of the corpus, each known by its first token."""
    return ranked(rows[:, 0])


def places_of(rows: NDArray[Any], start: int, stop: int) -> NDArray[np.int64]:
    """The samples that read some of the tokens ``[start, stop)`` of the corpus."""
    return np.flatnonzero(((rows >= start) & (rows < stop)).any(axis=1))
