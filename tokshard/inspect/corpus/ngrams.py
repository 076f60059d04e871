"""The n-grams of tokens of a benchmark's texts, and where they occur in arrays of tokens. Pure, exact.

Windows of n tokens are hashed with about ten operations on whole arrays, for any n: with powers of an odd number
modulo 2**64, the hash of a window is a difference of two prefix sums, times the inverse of a power. A table of flags
rejects nearly all windows, a binary search nearly all others, and the tokens of the rest are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 15
"""Windows that are hashed at once: their arrays fit into the cache of a core."""

_MIN_FLAGS, _MAX_FLAGS = 1 << 16, 1 << 27
_FLAGS_PER_GRAM = 64
_MAX_BASES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Grams:
    """The distinct n-grams of some items.

    Args:
        tokens: uint32 [grams, n], by ascending hash; no two have one hash.
        hashes: uint64 [grams], ascending.
        bounds: int64 [grams + 1]: bounds of each gram in `items`.
        items: int64: indices of items, ascending for each gram.
        num_of_item: int64 [items]: distinct n-grams of each; 0 if it has fewer than n tokens.
        base: the odd number of the hash.
    """

    tokens: NDArray[np.uint32]
    hashes: NDArray[np.uint64]
    bounds: NDArray[np.int64]
    items: NDArray[np.int64]
    num_of_item: NDArray[np.int64]
    base: int
    _flags: NDArray[np.bool_] = field(repr=False)
    _powers: NDArray[np.uint64] = field(repr=False)
    _inverses: NDArray[np.uint64] = field(repr=False)

    @property
    def n(self) -> int:
        """Tokens in a gram."""
        return int(self.tokens.shape[1])

    def find(self, tokens: NDArray[np.unsignedinteger]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the n-grams occur: int64 [matches]: the start of each match, ascending, and its gram."""
        starts, grams = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        shift = np.uint64(64 - (len(self._flags) - 1).bit_length())
        for first in range(0, len(tokens) - self.n + 1 if len(self.hashes) else 0, _CHUNK):
            part = tokens[first : first + _CHUNK + self.n - 1]
            hashes = _window_hashes(part, self.n, self._powers, self._inverses)
            candidates = np.flatnonzero(self._flags[(hashes >> shift).astype(np.int64)])
            if not len(candidates):
                continue
            wanted = hashes[candidates]
            places = np.minimum(np.searchsorted(self.hashes, wanted), len(self.hashes) - 1)
            is_equal = self.hashes[places] == wanted
            candidates, places = candidates[is_equal], places[is_equal]
            found = part[candidates[:, None] + np.arange(self.n)] if len(candidates) else part[:0].reshape(0, self.n)
            is_equal = (found == self.tokens[places]).all(axis=1)
            starts.append(candidates[is_equal] + first)
            grams.append(places[is_equal])
        return np.concatenate(starts), np.concatenate(grams)

    def shared(
        self, tokens: NDArray[np.unsignedinteger], ends: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """The documents that share n-grams with items: each, its items, and the distinct n-grams it shares with each.

        Documents with the same n-grams get the same arrays: all items of a benchmark may begin with one phrase.
        A document ends with a delimiter, which no gram has, so no match spans two documents.

        Args:
            tokens: of documents, one after another.
            ends: int64 [documents]: where each ends.
        """
        starts, grams = self.find(tokens)
        documents = np.searchsorted(ends, starts, "right")
        pairs = np.unique(documents * max(1, len(self.hashes)) + grams)
        documents, grams = np.divmod(pairs, max(1, len(self.hashes)))
        bounds = np.flatnonzero(np.diff(documents, prepend=-1, append=len(ends)))
        items_of = dict[bytes, tuple[NDArray[np.int64], NDArray[np.int64]]]()
        for start, stop in pairwise(bounds.tolist()):
            own = grams[start:stop]
            key = own.tobytes()
            if key not in items_of:
                items_of[key] = self._items_of(own)
            yield int(documents[start]), *items_of[key]

    def _items_of(self, grams: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        counts = self.bounds[grams + 1] - self.bounds[grams]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.unique(self.items[np.repeat(self.bounds[grams], counts) + within], return_counts=True)


def grams_of(texts: Sequence[tuple[int, NDArray[np.uint32]]], n: int, *, delimiters: Sequence[int]) -> Grams:
    """The n-grams of items. Memory is 12 n + 100 bytes for each n-gram while they are made.

    Args:
        texts: item and tokens of each text; an item may have several, and an n-gram never spans two. Items count
            from 0.
        delimiters: ids that begin or end documents: n-grams with one are left out.
    """
    parts, owners = [np.empty((0, n), np.uint32)], [np.empty(0, np.int64)]
    for item, tokens in texts:
        if len(tokens) >= n:
            windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint32), n)
            windows = windows[~np.isin(windows, delimiters).any(axis=1)]
            parts.append(windows)
            owners.append(np.full(len(windows), item))
    every, owner = np.concatenate(parts), np.concatenate(owners)
    base, hashes = _distinguishing(every, n)
    distinct, first, gram = np.unique(hashes, return_index=True, return_inverse=True)
    num_items = 1 + max((item for item, _ in texts), default=-1)
    pairs = np.unique(gram.reshape(-1) * max(1, num_items) + owner)
    of_gram, items = np.divmod(pairs, max(1, num_items))
    num_flags = _MIN_FLAGS
    while num_flags < min(_MAX_FLAGS, _FLAGS_PER_GRAM * len(distinct)):
        num_flags *= 2
    flags = np.zeros(num_flags, np.bool_)
    flags[(distinct >> np.uint64(64 - (num_flags - 1).bit_length())).astype(np.int64)] = True
    powers, inverses = _powers(base, _CHUNK + n)
    return Grams(
        tokens=every[first],
        hashes=distinct,
        bounds=np.searchsorted(of_gram, np.arange(len(distinct) + 1)),
        items=items,
        num_of_item=np.bincount(items, minlength=num_items),
        base=base,
        _flags=flags,
        _powers=powers,
        _inverses=inverses,
    )


def _distinguishing(grams: NDArray[np.uint32], n: int) -> tuple[int, NDArray[np.uint64]]:
    """A base that gives different n-grams different hashes, and the hashes: uint64 [grams]."""
    generator = np.random.default_rng(17)
    for _ in range(_MAX_BASES):
        base = int(generator.integers(1 << 63)) * 2 + 1
        weights = _powers(base, n)[0]
        hashes = np.zeros(len(grams), np.uint64)
        for place in range(n):
            hashes += grams[:, place] * weights[place]
        order = np.argsort(hashes, kind="stable")
        is_same = hashes[order[1:]] == hashes[order[:-1]]
        same = np.flatnonzero(is_same)
        if np.array_equal(grams[order[same + 1]], grams[order[same]]):
            return base, hashes
    raise AssertionError("no base distinguishes the n-grams")  # the odds of one are 1 : 2**64 / grams**2


def _powers(base: int, count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Powers of a base and of its inverse modulo 2**64: uint64 [count]."""
    found = []
    for factor in (base, pow(base, -1, 1 << 64)):
        factors = np.full(count, factor, np.uint64)
        factors[:1] = 1
        found.append(np.cumprod(factors, dtype=np.uint64))
    return found[0], found[1]


def _window_hashes(
    tokens: NDArray[np.unsignedinteger], n: int, powers: NDArray[np.uint64], inverses: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """The hash of each window, the sum of token times power of its place: uint64 [tokens - n + 1]."""
    sums = np.zeros(len(tokens) + 1, np.uint64)
    np.cumsum(tokens * powers[: len(tokens)], out=sums[1:])
    hashes = sums[n:] - sums[:-n]
    hashes *= inverses[: len(hashes)]
    return hashes
