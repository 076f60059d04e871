"""The hash of tokens that identifies a corpus: the hashes of any parts add up to that of the whole."""

from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokshard.format.content import BASES, PRIMES, TokenHash, hash_tokens

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=50)


def by_hand(sequence):
    residues = [0] * len(PRIMES)
    for token in sequence:
        residues = [
            (residue * base + int(token) + 1) % prime
            for residue, base, prime in zip(residues, BASES, PRIMES, strict=True)
        ]
    return TokenHash(len(sequence), tuple(residues))


@given(tokens)
def test_the_hash_is_the_one_that_the_format_defines(sequence):
    assert hash_tokens(np.array(sequence, np.uint32)) == by_hand(sequence)


@pytest.mark.parametrize("length", [1_023, 1_024, 1_025, 131_071, 131_072, 131_073, 140_000])
@pytest.mark.parametrize(("dtype", "largest"), [("uint16", 2**16), ("uint32", 2**21 - 1), ("uint32", 2**32)])
def test_long_sequences_of_large_ids_are_hashed_exactly(length, dtype, largest):
    # all at their largest: a float64 that rounds would show here first
    sequence = np.full(length, largest - 1, dtype)
    powers = [pow(base, length, prime) for base, prime in zip(BASES, PRIMES, strict=True)]
    closed = [
        largest * (power - 1) * pow(base - 1, -1, prime) % prime
        for power, base, prime in zip(powers, BASES, PRIMES, strict=True)
    ]
    assert hash_tokens(sequence) == TokenHash(length, tuple(closed))


@given(st.lists(tokens, max_size=5))
def test_parts_one_after_another_have_the_hash_of_the_whole(parts):
    whole = hash_tokens(np.array([token for part in parts for token in part], np.uint32))
    assert reduce(TokenHash.then, (hash_tokens(np.array(part, np.uint32)) for part in [[], *parts])) == whole
    assert TokenHash.from_bytes(whole.to_bytes(), sum(map(len, parts))) == whole
