"""All randomness of an order: keys, which are hashes of fixed-width fields, and permutations seeded by them.

A key depends only on the fields below, so it can be computed anywhere, in any order. Two purposes, epochs or windows
never share a key by accident, as they would if numbers were added to a seed. A permutation is a bijection on
``range(n)`` that can be evaluated at any index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tokshard.forking import cached_property

ORDER_VERSION = 1
"""Names the rules of the order. Bump when any sample of any plan would change."""

NUM_EPOCHS = 1 << 64
"""The number of epochs that keys distinguish."""

Purpose = Literal["deal", "blocks", "pieces", "samples", "phases", "transform"]

_WORDS_PER_HASH = 8
_HASH_BYTES = 64

MAX_SORTED = 65_536
"""Up to this length the order comes from sorting hashes; above, from the cipher. Part of the order version."""

_INDEX_BITS = np.uint64(MAX_SORTED - 1)

NUM_ROUNDS = 8
"""Rounds of the cipher. Four rounds pass common tests, yet at 16,384 items 6 of 60 keys fail at power-of-two lags."""

KEY_WORDS = 2 * NUM_ROUNDS

_CHUNK = 32_768
"""Indices that go through the rounds together, so that they stay in the cache."""

_FEW = 16
"""Items outside that are walked one by one. Changes speed only, not results."""

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def derive_key(
    seed: int,
    purpose: Purpose,
    *,
    corpus: bytes = b"",
    stream: int = 0,
    epoch: int = 0,
    window: int = 0,
    words: int = 2,
) -> NDArray[np.uint64]:
    """A key of `words` 64-bit words.

    The hashed bytes are, little-endian: order version (4 bytes), purpose (ASCII, padded with zeros to 16), seed (8),
    content fingerprint of the corpus (32), stream that owns a part of it (8), epoch (8), window (8), index of the hash
    (4). Each hash is 64 bytes of blake2b, eight words.

    Args:
        seed: in ``[0, 2**64)``.
        corpus: 32 bytes; empty if the key does not depend on a corpus.

    Returns:
        uint64 [words].

    References:
        Saarinen and Aumasson, RFC 7693 (blake2b).
    """
    head = b"".join(
        (
            ORDER_VERSION.to_bytes(4, "little"),
            purpose.encode().ljust(16, b"\0"),
            seed.to_bytes(8, "little"),
            corpus.ljust(32, b"\0"),
            stream.to_bytes(8, "little"),
            epoch.to_bytes(8, "little"),
            window.to_bytes(8, "little"),
        )
    )
    hashes = (
        hashlib.blake2b(head + index.to_bytes(4, "little"), digest_size=_HASH_BYTES).digest()
        for index, _ in enumerate(range(0, words, _WORDS_PER_HASH))
    )
    return np.frombuffer(b"".join(hashes), "<u8").astype(np.uint64)[:words]


@dataclass(frozen=True, eq=False, kw_only=True)
class Permutation:
    """A seeded bijection on ``range(length)``, evaluated at any index.

    Up to `MAX_SORTED` items it is the stable argsort of a 64-bit keyed hash of the index: 24 bytes per item while it is
    made, 8 when kept. Above, memory is O(1) in `length`: each index goes through `NUM_ROUNDS` steps of a linear
    congruential generator modulo the next power of two. An xor-shift follows each step, because the low bits of such a
    generator are weak. All of it is repeated until the index is below `length` (less than twice on average). An index
    costs about 10 ns in bulk, 80 above 2**32 items. The order is pseudorandom, not uniform over all ``length!`` orders.

    Args:
        length: at least 0, at most 2**62.
        key: uint64 [`KEY_WORDS`], from `derive_key`.

    References:
        Knuth, TAOCP vol. 2, 3.2.1 (linear congruential sequences); Black and Rogaway, "Ciphers with arbitrary finite
        domains", CT-RSA 2002 (cycle walking); Steele, Lea and Flood, OOPSLA 2014 (the mixing constants of splitmix64).
    """

    length: int
    key: NDArray[np.uint64]

    @classmethod
    def seeded(cls, length: int, seed: int, purpose: Purpose, **fields: Any) -> Permutation:
        """A permutation with the key of a purpose; fields as in `derive_key`."""
        return cls(length=length, key=derive_key(seed, purpose, **fields, words=KEY_WORDS))

    def __post_init__(self) -> None:
        if not 0 <= self.length <= 1 << 62:
            raise ValueError(f"length must be in [0, 2**62], got {self.length}")
        if self.key.shape != (KEY_WORDS,) or self.key.dtype != np.uint64:
            raise ValueError(f"key must be uint64 [{KEY_WORDS}], got {self.key.dtype} {list(self.key.shape)}")

    def __call__(self, index: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
        """Map positions in the shuffled order to items.

        Args:
            index: [n], each in ``[0, length)``; int64 is fastest.

        Returns:
            uint64 [n].

        Raises:
            IndexError: an entry is outside ``[0, length)``.
        """
        if self.length <= MAX_SORTED:
            try:
                items: NDArray[np.uint64] = self._sorted[index]
            except IndexError:
                raise self._outside("index", index) from None
            return items
        if len(index) and int(index.max()) >= self.length:
            raise self._outside("index", index)
        found = self._encrypt(index.astype(self._word))
        outside = np.flatnonzero(found >= self.length)
        # the walk stays on one cycle of a bijection, and that cycle holds the index it started from, which is inside
        while len(outside) > _FEW:
            found[outside] = self._encrypt(found[outside])
            outside = outside[found[outside] >= self.length]
        found[outside] = list(self._walked(found[outside].tolist()))
        return found.astype(np.uint64)

    def all(self) -> NDArray[np.uint64]:
        """Every item in order: uint64 [length]."""
        return self._sorted if self.length <= MAX_SORTED else self(np.arange(self.length, dtype=np.uint64))

    def inverse(self, items: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Map items to their positions in the shuffled order, at about the cost of a call.

        Args:
            items: uint64 [n], each in ``[0, length)``.

        Returns:
            uint64 [n].

        Raises:
            IndexError: an entry is outside ``[0, length)``.
        """
        if len(items) and int(items.max()) >= self.length:
            raise self._outside("item", items)
        if self.length <= MAX_SORTED:
            positions: NDArray[np.uint64] = self._sorted_inverse[items]
            return positions
        found = self._decrypt(items.astype(self._word))
        outside = np.flatnonzero(found >= self.length)
        # backwards on the same cycle: all indices between a position and its item are outside
        while len(outside):
            found[outside] = self._decrypt(found[outside])
            outside = outside[found[outside] >= self.length]
        return found.astype(np.uint64)

    def _outside(self, what: str, numbers: NDArray[np.integer[Any]]) -> IndexError:
        return IndexError(f"{what} {int(numbers.max())} is outside a permutation of {self.length} items")

    @cached_property
    def _sorted(self) -> NDArray[np.uint64]:
        index = np.arange(self.length, dtype=np.uint64)
        items: NDArray[np.uint64] = keyed_hashes(index, self.key[np.newaxis])[0]
        # numbers are sorted twice as fast as their indices: the last bits of each hash make room for its index
        items &= ~_INDEX_BITS
        items |= index
        items.sort()
        if (
            int(np.diff(items).min(initial=MAX_SORTED)) < MAX_SORTED
        ):  # hashes differ only in bits that were cut off, if at all
            items = np.argsort(keyed_hashes(index, self.key[np.newaxis])[0], kind="stable").astype(np.uint64)
        items &= _INDEX_BITS
        items.setflags(write=False)
        return items

    @cached_property
    def _sorted_inverse(self) -> NDArray[np.uint64]:
        positions = np.empty(self.length, np.uint64)
        positions[self._sorted] = np.arange(self.length, dtype=np.uint64)
        return positions

    @cached_property
    def _word(self) -> type[np.uint32 | np.uint64]:
        """The integer type for arithmetic modulo ``2**bits``: half the width is several times faster."""
        return np.uint32 if self.length <= 1 << 32 else np.uint64

    @cached_property
    def _rounds(self) -> tuple[list[tuple[Any, Any]], Any, Any]:
        bits, word = max(1, (self.length - 1).bit_length()), self._word
        mask = (1 << bits) - 1
        multipliers, increments = self.key[:NUM_ROUNDS].tolist(), self.key[NUM_ROUNDS:].tolist()
        steps = [(word((a | 1) & mask), word((c | 1) & mask)) for a, c in zip(multipliers, increments, strict=True)]
        return steps, word(mask), word((bits + 1) // 2)

    def _encrypt(self, found: NDArray[Any]) -> NDArray[Any]:
        """The bijection on ``range(2**bits)``, in place. Arithmetic wraps modulo 2**32 or 2**64, multiples of that."""
        rounds, mask, shift = self._rounds
        scratch = np.empty_like(found[:_CHUNK])
        for start in range(0, len(found), _CHUNK):
            part = found[start : start + _CHUNK]
            shifted = scratch[: len(part)]
            for multiplier, increment in rounds:
                part *= multiplier
                part += increment
                part &= mask
                np.right_shift(part, shift, out=shifted)
                part ^= shifted
        return found

    def _walked(self, items: Iterable[int]) -> Iterator[int]:
        """Items at the end of their walks, one by one: for a few, faster than a call of numpy for each operation."""
        rounds, mask, shift = self._rounds
        steps = [(int(multiplier), int(increment)) for multiplier, increment in rounds]
        last, half = int(mask), int(shift)
        for found in items:
            item = found
            while item >= self.length:
                for multiplier, increment in steps:
                    item = (item * multiplier + increment) & last
                    item ^= item >> half
            yield item

    def _decrypt(self, found: NDArray[Any]) -> NDArray[Any]:
        """The inverse of `_encrypt`, in place."""
        rounds, mask, shift = self._rounds
        modulus = int(mask) + 1
        backwards = [(self._word(pow(int(a), -1, modulus)), increment) for a, increment in reversed(rounds)]
        for multiplier, increment in backwards:
            found ^= found >> shift  # its own inverse: the shift is at least half of the bits
            found -= increment
            found *= multiplier
            found &= mask
        return found


def keyed_hashes(index: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of each index under each key: splitmix64's finalizer, twice, a word of the key before and after each.

    Args:
        index: uint64 [n].
        keys: uint64 [keys, 3 or more], the first words of keys.

    Returns:
        uint64 [keys, n].
    """
    hashed = (index + keys[:, :1]) * GOLDEN
    for word in (1, 2):
        hashed = mixed(hashed) + keys[:, word : word + 1]
    return hashed


def mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64, applied to each word."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
