"""The hash of tokens that identifies a corpus: the hashes of any parts add up to that of the whole."""

from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import Source, write_corpus
from tokshard.format.content import BASES, PRIMES, TokenHash, hash_tokens
from tokshard.format.opening import open_corpus

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
    whole = np.array([token for part in parts for token in part], np.uint32)
    assert reduce(TokenHash.then, (hash_tokens(np.array(part, np.uint32)) for part in [[], *parts])) == hash_tokens(
        whole
    )


@given(tokens, st.data())
def test_another_token_or_another_order_has_another_hash(sequence, data):
    other = data.draw(st.permutations(sequence) | tokens)
    assert (hash_tokens(np.array(sequence, np.uint32)) == hash_tokens(np.array(other, np.uint32))) == (
        other == sequence
    )


def test_a_hash_comes_back_from_its_bytes():
    found = hash_tokens(np.arange(10, dtype=np.uint16))
    assert TokenHash.from_bytes(found.to_bytes(), 10) == found


def test_corpora_with_the_same_documents_have_one_fingerprint_however_they_are_cut_and_whatever_they_keep(tmp_path):
    documents = [[1, 2, 0], [0], [3, 3, 1, 0], [2, 0]]
    urls = Source(documents=documents, metadata={"url": ["a", "b", None, "c"]})
    corpora = [
        write_corpus(tmp_path / "whole", documents),
        write_corpus(tmp_path / "small-shards", documents, shard_tokens=4),
        write_corpus(tmp_path / "with-a-column", sources=[urls], columns={"url": "string"}),
        write_corpus(
            tmp_path / "of-two-sources", sources=[Source(documents=documents[:1]), Source(documents=documents[1:])]
        ),
    ]
    assert len({open_corpus(corpus).fingerprint for corpus in corpora}) == 1
    assert len(open_corpus(corpora[1]).shards) == 3
