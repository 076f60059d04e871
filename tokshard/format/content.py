"""The content of a corpus as a hash of only its tokens: shards and batches do not matter.

Shards are written by many processes, so the hash of a corpus is computed from the hashes of its shards. It
detects accidents; against forgery there is the SHA-256 of every file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.numbers import ceil_div

PRIMES = (2_097_143, 2_096_867, 2_096_687, 2_095_943, 2_095_547, 2_095_343)
"""The largest safe primes below 2**21: a product of two residues has 42 bits, so a float64 adds up 2**11 of them."""

BASES = (1_415_926, 535_897, 932_384, 626_433, 832_795, 288_419)
"""One for each prime, from the decimals of pi. Of a safe prime, the powers of any base repeat after 10**6 at least."""

HASH_BYTES = 4 * len(PRIMES)

_ROW = 1 << 10
_ROWS = 1 << 8
"""Rows of a slice: putting slices together costs Python some 25 us each. Changes speed only."""
_ROWS_AT_ONCE = 1 << 5
"""Rows that are multiplied together. OpenBLAS starts threads above 2**18 products, here there are 2**15 * 6. On a busy
machine the threads took 20 ns per token, 12 times as much. Changes speed only."""

_LARGEST_TERM = 1 << 21


@dataclass(frozen=True, slots=True)
class TokenHash:
    """The hash of a sequence of tokens.

    Modulo each prime p, with its base r, the hash of tokens t_0, t_1, ... is ``h = h * r + t_i + 1``, from 0 on. So
    the hash of two sequences one after the other follows from their hashes and the length of the second.

    Args:
        num_tokens: length of the sequence.
        residues: one for each of `PRIMES`.

    References:
        Karp and Rabin, "Efficient randomized pattern-matching algorithms", IBM J. Res. Dev. 31 (1987).
    """

    num_tokens: int = 0
    residues: tuple[int, ...] = (0,) * len(PRIMES)

    def then(self, following: TokenHash) -> TokenHash:
        """The hash of these tokens with others after them."""
        residues = tuple(
            (one * pow(base, following.num_tokens, prime) + other) % prime
            for one, other, base, prime in zip(self.residues, following.residues, BASES, PRIMES, strict=True)
        )
        return TokenHash(self.num_tokens + following.num_tokens, residues)

    def to_bytes(self) -> bytes:
        """`HASH_BYTES` bytes: the residues as little-endian uint32."""
        return b"".join(residue.to_bytes(4, "little") for residue in self.residues)

    @classmethod
    def from_bytes(cls, content: bytes, num_tokens: int) -> TokenHash:
        """The inverse of `to_bytes`."""
        return cls(num_tokens, tuple(np.frombuffer(content, "<u4").tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The content of consecutive documents, as counts and hashes. Contents add up.

    Args:
        tokens: the hash of their tokens.
        num_targets: their tokens that are targets.
        loss: the hash of the weight of each token, see `Targets.hashed`; zeros in a corpus without loss spans.
    """

    num_documents: int = 0
    tokens: TokenHash = TokenHash()
    num_targets: int = 0
    loss: TokenHash = TokenHash()

    def then(self, following: Content) -> Content:
        """The content of these documents with others after them."""
        return Content(
            num_documents=self.num_documents + following.num_documents,
            tokens=self.tokens.then(following.tokens),
            num_targets=self.num_targets + following.num_targets,
            loss=self.loss.then(following.loss),
        )


def hash_tokens(tokens: NDArray[Any]) -> TokenHash:
    """The hash of an array of tokens; about 1 ns each.

    Args:
        tokens: uint16 or uint32 [n].
    """
    found = TokenHash()
    for start in range(0, len(tokens), _ROW * _ROWS):
        found = found.then(_hash_slice(tokens[start : start + _ROW * _ROWS]))
    return found


def join_contents(parts: Iterable[Content]) -> Content:
    """The content of documents one after another."""
    return reduce(Content.then, parts, Content())


def _hash_slice(tokens: NDArray[Any]) -> TokenHash:
    rows = ceil_div(len(tokens), _ROW)
    row_powers, powers = _powers()
    terms = np.zeros((min(rows, _ROWS_AT_ONCE), _ROW))  # zeros before the first token change nothing
    of_rows = np.empty((rows, len(PRIMES)))
    is_small = int(tokens.max()) + 1 < _LARGEST_TERM
    before = len(tokens) - rows * _ROW
    for first in range(0, rows, _ROWS_AT_ONCE):
        part = terms[: rows - first]
        start, stop = before + first * _ROW, before + first * _ROW + part.size
        np.add(tokens[max(0, start) : stop], 1.0, out=part.reshape(-1)[max(0, -start) :])
        if is_small:
            of_rows[first : first + len(part)] = part @ row_powers
        else:
            columns = [np.mod(part, prime) @ row_powers[:, k] for k, prime in enumerate(PRIMES)]
            of_rows[first : first + len(part)] = np.stack(columns, axis=1)
    residues = np.mod((np.mod(of_rows, PRIMES) * powers[_ROWS - rows :]).sum(axis=0), PRIMES)
    return TokenHash(len(tokens), tuple(int(residue) for residue in residues))


@cache
def _powers() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Falling powers of the bases within a row, and of a whole row: float64 [_ROW, primes], [_ROWS, primes]."""
    pairs = list(zip(BASES, PRIMES, strict=True))
    within = [[pow(base, _ROW - 1 - place, prime) for base, prime in pairs] for place in range(_ROW)]
    of_rows = [[pow(base, _ROW * (_ROWS - 1 - row), prime) for base, prime in pairs] for row in range(_ROWS)]
    return np.array(within, np.float64), np.array(of_rows, np.float64)
