"""Orders to measure: ours, numpy's, and those known to be bad."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmark.statistic import Order
from tokshard.runtime.order.permutation import KEY_WORDS, NUM_ROUNDS, Permutation, derive_key


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
