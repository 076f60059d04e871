"""The parts of the order, each by itself: keys, permutations and windows; the mixture is in test_mixture.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.runtime.sources import PeriodicSource
from tests.spec import order as spec
from tokshard.runtime.order import permutation as permutations
from tokshard.runtime.order.permutation import KEY_WORDS, MAX_SORTED, Permutation, derive_key
from tokshard.runtime.order.pieces import PieceReader
from tokshard.runtime.order.windows import CorpusOrder, Shape
from tokshard.runtime.plan import StreamPlan

seeds = st.integers(0, 2**64 - 1)
far = st.integers(0, 2) | st.integers(0, 2**60)


def key_of(seed: int) -> NDArray[np.uint64]:
    return derive_key(seed, "pieces", words=KEY_WORDS)


# keys


@given(
    seed=seeds,
    purpose=st.sampled_from(["blocks", "pieces", "samples", "phases", "deal", "transform"]),
    corpus=st.binary(min_size=32, max_size=32),
    places=st.fixed_dictionaries({"stream": far, "epoch": far, "window": far}),
    words=st.integers(1, 40),
)
def test_keys_are_the_hashes_that_the_rules_name(
    seed: int, purpose: Any, corpus: bytes, places: dict[str, int], words: int
) -> None:
    key, model = (
        derive_key(seed, purpose, corpus=corpus, words=words, **places),
        spec.Key(purpose, seed, corpus, **places),
    )
    assert key.tolist() == [model[index] for index in range(words)]


# permutations


@example(seed=1, length=MAX_SORTED, places=[7])
@given(
    seed=seeds,
    length=st.one_of(
        st.integers(1, 1000),
        st.sampled_from([MAX_SORTED + more for more in (-1, 0, 1)]),
        st.sampled_from([2**bits + more for bits in (17, 31, 32, 33, 61) for more in (-1, 0, 1)]),
        st.integers(1, 2**62),
    ),
    places=st.lists(st.integers(0, 2**62), max_size=30),
)
def test_items_of_a_permutation_of_any_length_are_those_of_the_rules_and_the_inverse_leads_back(
    seed: int, length: int, places: list[int]
) -> None:
    indices = [0, length - 1, *(place % length for place in places)]
    permutation, wanted = Permutation(length=length, key=key_of(seed)), np.array(indices, np.uint64)
    items = permutation(wanted)
    assert items.tolist() == [spec.perm(length, spec.Key("pieces", seed))(index) for index in indices]
    assert permutation.inverse(items).tolist() == indices
    assert permutation(permutation.inverse(wanted)).tolist() == indices


@pytest.mark.parametrize("length", [0, 1, 10, MAX_SORTED, MAX_SORTED + 1, 2**62])
def test_an_index_beyond_a_permutation_is_refused(length: int) -> None:
    permutation, beyond = Permutation(length=length, key=key_of(1)), np.array([length], np.uint64)
    with pytest.raises(IndexError, match=f"index {length} is outside a permutation of {length} items"):
        permutation(beyond)
    with pytest.raises(IndexError, match=f"item {length} is outside a permutation of {length} items"):
        permutation.inverse(beyond)
    assert permutation(beyond[:0]).tolist() == permutation.inverse(beyond[:0]).tolist() == []


def test_items_of_equal_hashes_stay_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutations, "GOLDEN", np.uint64(1 << 63))  # two hashes: of even and of odd items
    even, odd = list(range(0, 1_000, 2)), list(range(1, 1_000, 2))
    for seed in range(4):
        assert Permutation(length=1_000, key=key_of(seed)).all().tolist() in ([*even, *odd], [*odd, *even])


def test_hashes_that_differ_in_their_last_bits_alone_are_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutations, "keyed_hashes", lambda index, _: np.uint64(999) - index[np.newaxis])
    assert Permutation(length=1_000, key=key_of(1)).all().tolist() == list(range(999, -1, -1))


# windows


def reader_of(source: Any, shape: Shape) -> PieceReader:
    return PieceReader(CorpusOrder(source=source, shape=shape, seed=1))


def test_a_piece_costs_9_bytes() -> None:
    reader = reader_of(PeriodicSource(10**6, 100), Shape(seq_len=64, block_tokens=4096, window_blocks=64))
    table = reader.table(reader.order.window(0, 0, 0))
    arrays = table.shuffled_starts, table.unshuffled_starts, table.kinds
    assert sum(array.nbytes for array in arrays) == 9 * table.num_pieces + 4


def test_a_window_of_2_to_the_32_tokens_is_refused_and_one_token_less_is_read() -> None:
    shape = Shape(seq_len=2**20, block_tokens=2**31, window_blocks=2)
    fitting, larger = (reader_of(PeriodicSource(size, 2**29), shape) for size in (2**32 - 1, 2**32))
    table = fitting.table(fitting.order.window(0, 0, 0))
    assert int(table.shuffled_starts[-1]) == 2**32 - 1
    assert table.cut(np.array([0]), np.array([2**32 - 1]))[1].lengths.sum() == 2**32 - 1
    with pytest.raises(ValueError, match="a window of 4294967296 tokens does not fit"):
        larger.table(larger.order.window(0, 0, 0))
    StreamPlan(PeriodicSource(100), seq_len=4, block_tokens=2**30 - 1, window_blocks=3)  # the largest that a plan takes


def test_windows_that_have_2_to_the_32_tokens_together_are_read_at_once() -> None:
    reader = reader_of(PeriodicSource(2**33, 2**20 - 3), Shape(seq_len=2**20, block_tokens=2**31, window_blocks=1))
    samples = np.array([5, 2047, 2048, 4100, 6150, 8191])  # of all four windows
    counts, together = reader.pieces_of(np.zeros_like(samples), samples)
    alone = [reader.pieces_of(np.zeros(1, np.int64), samples[at : at + 1]) for at in range(len(samples))]
    assert counts.tolist() == [int(count[0]) for count, _ in alone]
    for name in ("starts", "lengths", "ends_document"):
        found = np.concatenate([getattr(pieces, name) for _, pieces in alone])
        assert np.array_equal(getattr(together, name), found)
