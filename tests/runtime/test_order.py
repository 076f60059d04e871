"""The parts of the order, each by itself: keys, permutation and windows; the mixture is in test_mixture.py."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.examples import examples
from tests.runtime import page_model
from tests.runtime.sources import ListSource, PeriodicSource
from tokshard.errors import PlanError
from tokshard.runtime.order import permutation as permutations
from tokshard.runtime.order.permutation import KEY_WORDS, MAX_SORTED, ORDER_VERSION, Permutation, derive_key
from tokshard.runtime.order.pieces import PieceReader
from tokshard.runtime.order.windows import CorpusOrder, Shape, Window
from tokshard.runtime.plan import StreamPlan

MODULUS = 1 << 64
seeds = st.integers(0, MODULUS - 1)


def key_of(seed: int) -> NDArray[np.uint64]:
    return derive_key(seed, "pieces", words=KEY_WORDS)


def item_at(permutation: Permutation, index: int) -> int:
    return int(permutation(np.array([index], np.uint64))[0])


# keys

fields = st.fixed_dictionaries(
    {
        "seed": seeds,
        "purpose": st.sampled_from(["blocks", "pieces", "samples", "phases"]),
        "corpus": st.binary(min_size=32, max_size=32),
        "stream": st.integers(0, 2**40),
        "epoch": st.integers(0, 2**60),
        "window": st.integers(0, 2**60),
    }
)


@given(one=fields, other=fields)
def test_two_keys_are_equal_only_if_all_their_fields_are(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (derive_key(**one).tolist() == derive_key(**other).tolist()) == (one == other)
    for name, value in other.items():
        changed = {**one, name: value}
        assert (derive_key(**one).tolist() == derive_key(**changed).tolist()) == (one == changed)


def test_purposes_corpora_ordinals_epochs_and_windows_never_share_a_key() -> None:
    every = list(
        itertools.product(
            ["blocks", "pieces", "samples", "phases"],
            [0, 1, 2, 256],
            [b"", bytes(31) + b"\1", b"\1" + bytes(31)],
            [0, 1, 256],
            [0, 1, 2, 255, 256, 2**32],
            [0, 1, 2, 255, 256, 2**32],
        )
    )
    keys = {
        derive_key(seed, purpose, corpus=corpus, stream=stream, epoch=epoch, window=window, words=1).tobytes()
        for purpose, seed, corpus, stream, epoch, window in every
    }
    assert len(keys) == len(every)


@given(field=fields, words=st.integers(1, 40))
def test_a_longer_key_starts_with_the_shorter_one(field: dict[str, Any], words: int) -> None:
    longest = derive_key(**field, words=40)
    assert derive_key(**field, words=words).tolist() == longest[:words].tolist()
    assert len(set(longest.tolist())) == 40


def test_keys_are_the_hashes_that_the_rules_name() -> None:
    corpus = bytes(range(32))
    key = derive_key(17, "pieces", corpus=corpus, stream=1, epoch=2, window=3, words=16)
    model = page_model.Key("pieces", 17, corpus, stream=1, epoch=2, window=3)
    assert key.tolist() == [model[index] for index in range(16)]
    # golden: other values are another order, so ORDER_VERSION goes up
    assert ORDER_VERSION == 1
    assert key.tolist()[:3] == [0x83415D69864C52FA, 0xD82B10103E891CEE, 0xA77666D54960433B]


# permutation


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_a_permutation_of_every_short_length_is_a_bijection(seed: int) -> None:
    key = key_of(seed)
    for length in range(301):
        assert sorted(Permutation(length=length, key=key).all().tolist()) == list(range(length))


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_the_cipher_of_every_short_length_is_a_bijection(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutations, "MAX_SORTED", 0)
    key = key_of(seed)
    for length in range(1, 301):
        found = Permutation(length=length, key=key)(np.arange(length, dtype=np.uint64))
        assert sorted(found.tolist()) == list(range(length))


@settings(max_examples=examples(25))
@given(seed=seeds, length=st.integers(MAX_SORTED - 2, 1 << 20))
@example(seed=0, length=MAX_SORTED)
@example(seed=0, length=MAX_SORTED + 1)
@example(seed=0, length=1 << 17)
@example(seed=0, length=(1 << 17) + 1)
@example(seed=0, length=1 << 20)
def test_a_permutation_of_every_long_length_is_a_bijection(seed: int, length: int) -> None:
    found = Permutation(length=length, key=key_of(seed)).all()
    assert len(found) == length
    assert np.array_equal(np.sort(found), np.arange(length, dtype=np.uint64))


@given(
    seed=seeds,
    length=st.one_of(st.integers(1, 1000), st.integers(MAX_SORTED - 5, MAX_SORTED + 5), st.integers(1, 2**62)),
    data=st.data(),
)
def test_an_item_is_the_same_asked_for_alone_in_a_batch_and_in_any_order(
    seed: int, length: int, data: st.DataObject
) -> None:
    indices = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=30))
    permutation = Permutation(length=length, key=key_of(seed))
    found = permutation(np.array(indices, np.uint64)).tolist()
    assert found == [item_at(permutation, index) for index in indices]
    assert permutation(np.array(indices[::-1], np.uint64)).tolist() == found[::-1]


@settings(max_examples=examples(100))
@given(seed=seeds, length=st.integers(MAX_SORTED + 1, 1 << 62), data=st.data())
def test_distinct_places_of_a_huge_permutation_hold_distinct_items_in_range(
    seed: int, length: int, data: st.DataObject
) -> None:
    near = data.draw(st.integers(0, length - 1))
    drawn = data.draw(st.lists(st.integers(0, length - 1), max_size=200, unique=True))
    indices = sorted({*drawn, 0, length - 1, *(index for index in range(near - 50, near + 50) if 0 <= index < length)})
    found = Permutation(length=length, key=key_of(seed))(np.array(indices, np.uint64)).tolist()
    assert len(set(found)) == len(indices)
    assert max(found) < length


@pytest.mark.slow
@pytest.mark.parametrize("cipher_from", [0, MAX_SORTED])
@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_the_inverse_of_every_short_permutation_leads_back_both_ways(
    seed: int, cipher_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permutations, "MAX_SORTED", cipher_from)
    key = key_of(seed)
    for length in range(1, 301):
        permutation, every = Permutation(length=length, key=key), np.arange(length, dtype=np.uint64)
        assert permutation.inverse(permutation(every)).tolist() == every.tolist()
        assert permutation(permutation.inverse(every)).tolist() == every.tolist()


@given(
    seed=seeds,
    length=st.one_of(
        st.integers(1, 1000),
        st.integers(MAX_SORTED - 5, MAX_SORTED + 5),
        st.sampled_from([2**bits + more for bits in (17, 31, 32, 33, 61) for more in (-1, 0, 1)]),
        st.integers(1, 2**62),
    ),
    data=st.data(),
)
def test_the_inverse_of_a_permutation_of_any_length_leads_back_both_ways(
    seed: int, length: int, data: st.DataObject
) -> None:
    drawn = data.draw(st.lists(st.integers(0, length - 1), max_size=30))
    indices = [0, length - 1, *drawn]
    permutation, wanted = Permutation(length=length, key=key_of(seed)), np.array(indices, np.uint64)
    assert permutation.inverse(permutation(wanted)).tolist() == indices
    assert permutation(permutation.inverse(wanted)).tolist() == indices


@pytest.mark.parametrize("length", [1, 2, 300, MAX_SORTED, MAX_SORTED + 1, 70_000])
def test_a_permutation_is_the_one_that_the_rules_name(length: int) -> None:
    item = page_model.perm(length, page_model.Key("pieces", length))
    assert Permutation(length=length, key=key_of(length)).all().tolist() == list(map(item, range(length)))


def test_permutations_have_their_golden_values() -> None:
    key = derive_key(17, "blocks", words=KEY_WORDS)
    # golden: other values are another order, so ORDER_VERSION goes up
    assert ORDER_VERSION == 1
    assert Permutation(length=10, key=key).all().tolist() == [7, 8, 5, 2, 4, 0, 9, 3, 6, 1]
    large = Permutation(length=100_000, key=key)
    assert [item_at(large, index) for index in (0, 1, 2, 99_999)] == [33_722, 95_044, 95_526, 74_225]
    huge = Permutation(length=2**62, key=key)
    assert [item_at(huge, index) for index in (0, 2**62 - 1)] == [4_358_567_445_520_172_136, 1_792_030_085_945_312_769]


@pytest.mark.parametrize("length", [0, 1, 10, MAX_SORTED, MAX_SORTED + 1, 2**62])
def test_an_index_beyond_a_permutation_is_refused(length: int) -> None:
    permutation = Permutation(length=length, key=key_of(1))
    with pytest.raises(IndexError, match=f"index {length} is outside a permutation of {length} items"):
        item_at(permutation, length)
    with pytest.raises(IndexError, match=f"item {length} is outside a permutation of {length} items"):
        permutation.inverse(np.array([length], np.uint64))
    none = np.empty(0, np.uint64)
    assert permutation(none).tolist() == permutation.inverse(none).tolist() == []


def test_what_makes_no_permutation_is_refused() -> None:
    with pytest.raises(ValueError, match="length must be in"):
        Permutation(length=-1, key=key_of(1))
    with pytest.raises(ValueError, match="length must be in"):
        Permutation(length=2**62 + 1, key=key_of(1))
    with pytest.raises(ValueError, match="key must be uint64"):
        Permutation(length=3, key=key_of(1)[:-1])
    with pytest.raises(ValueError, match="key must be uint64"):
        Permutation(length=3, key=key_of(1).astype(np.int64))


def test_items_a_power_of_two_apart_land_in_unrelated_places() -> None:
    length, bins = 1 << 17, 16
    index = np.arange(length)
    worst = 0.0
    for seed in range(20):
        items = Permutation(length=length, key=key_of(seed)).all().astype(np.int64)
        for bit in range(17):
            lag = 1 << bit
            apart = (items[lag:] - items[:-lag]) % length
            flipped = items[index ^ lag] ^ items
            for distances in (apart, flipped):
                counts = np.bincount(distances * bins // length, minlength=bins)
                expected = len(distances) / bins
                chi_square = float(((counts - expected) ** 2 / expected).sum())
                worst = max(worst, (chi_square - bins) / (2 * bins) ** 0.5)
    # with four rounds of the cipher instead of eight it is above 20
    assert worst < 15


# windows


def order_of(num_tokens: int, block: int, window_blocks: int) -> CorpusOrder:
    shape = Shape(seq_len=4, block_tokens=block, window_blocks=window_blocks)
    return CorpusOrder(source=PeriodicSource(num_tokens, 7), shape=shape, seed=1)


def reader_of(source: Any, shape: Shape, **options: Any) -> PieceReader:
    return PieceReader(CorpusOrder(source=source, shape=shape, **options))


def read_of(reader: PieceReader, samples: NDArray[np.int64], part: int = 0) -> Any:
    return reader.pieces_of(np.full_like(samples, part), samples)


def sizes_of(order: CorpusOrder, window: Window) -> tuple[int, int]:
    """Full blocks of a window, and tokens of its tail."""
    starts, stops = order.blocks(window)
    tails = (stops - starts)[stops - starts < order.shape.block_tokens]
    return len(starts) - len(tails), int(tails.sum())


@given(tokens=st.integers(1, 10**15), block=st.integers(1, 10**6), window_blocks=st.integers(1, 100), data=st.data())
def test_every_window_but_the_last_of_an_epoch_has_the_same_number_of_tokens(
    tokens: int, block: int, window_blocks: int, data: st.DataObject
) -> None:
    order = order_of(tokens, block, window_blocks)
    epoch = data.draw(st.integers(0, 10**6))
    index = data.draw(st.integers(0, order.num_windows - 1))
    window = order.window(0, epoch, index)
    last = order.window(0, epoch, order.num_windows - 1)
    assert window.start == epoch * tokens + index * window_blocks * block
    assert (window.stop - window.start == window_blocks * block) or window == last
    assert last.stop == (epoch + 1) * tokens
    assert last.stop - last.start < (window_blocks + 1) * block
    for one in (window, last):
        num_blocks, tail_tokens = sizes_of(order, one)
        assert num_blocks * block + tail_tokens == one.stop - one.start > 0
        assert num_blocks <= window_blocks


@given(
    tokens=st.integers(1, 10**15),
    block=st.integers(1, 10**6),
    window_blocks=st.integers(1, 100),
    position=st.integers(0, 2**70),
)
def test_a_position_lies_in_the_window_that_is_found_for_it(
    tokens: int, block: int, window_blocks: int, position: int
) -> None:
    order = order_of(tokens, block, window_blocks)
    window = order.window_at(0, position)
    assert window.start <= position < window.stop
    assert order.window_at(0, window.start) == order.window_at(0, window.stop - 1) == window
    following = order.window_at(0, window.stop)
    assert following.start == window.stop
    assert (following.epoch, following.index) in {(window.epoch, window.index + 1), (window.epoch + 1, 0)}


@pytest.mark.parametrize(
    ("tokens", "windows"),
    [
        # blocks of 10 tokens, windows of 3 blocks: (full blocks, tokens of the tail)
        (60, [(3, 0), (3, 0)]),
        (70, [(3, 0), (3, 0), (1, 0)]),
        (65, [(3, 0), (3, 5)]),
        (79, [(3, 0), (3, 0), (1, 9)]),
        (30, [(3, 0)]),
        (39, [(3, 9)]),
        (10, [(1, 0)]),
        (9, [(0, 9)]),
        (1, [(0, 1)]),
    ],
)
def test_the_tail_is_one_more_block_of_the_last_window(tokens: int, windows: list[tuple[int, int]]) -> None:
    order = order_of(tokens, 10, 3)
    assert [sizes_of(order, order.window(0, 0, index)) for index in range(order.num_windows)] == windows


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40)
small_shapes = st.builds(
    Shape, seq_len=st.integers(1, 30), block_tokens=st.integers(1, 64), window_blocks=st.integers(1, 6)
)


@given(lengths=lengths, shape=small_shapes, seed=seeds, epoch=st.integers(0, 3))
def test_the_pieces_of_the_windows_of_an_epoch_hold_every_token_once(
    lengths: list[int], shape: Shape, seed: int, epoch: int
) -> None:
    source = ListSource(lengths)
    reader = reader_of(source, shape, seed=seed)
    read: list[int] = []
    for index in range(reader.order.num_windows):
        window = reader.order.window(0, epoch, index)
        table = reader.table(window)
        room = window.stop - window.start
        counts, pieces = table.cut(np.array([0]), np.array([room]))
        assert counts.tolist() == [table.num_pieces]
        assert int(pieces.lengths.sum()) == room
        for start, length, is_end in zip(
            pieces.starts.tolist(), pieces.lengths.tolist(), pieces.ends_document.tolist(), strict=True
        ):
            place = source.document_at(start)
            assert start + length <= place.stop
            assert is_end == (start + length == place.stop)
            read += range(start, start + length)
    assert sorted(read) == list(range(source.num_tokens))


def test_a_piece_costs_9_bytes() -> None:
    reader = reader_of(PeriodicSource(10**6, 100), Shape(seq_len=64, block_tokens=4096, window_blocks=64), seed=3)
    table = reader.table(reader.order.window(0, 0, 0))
    arrays = table.shuffled_starts, table.unshuffled_starts, table.kinds
    assert sum(array.nbytes for array in arrays) == 9 * table.num_pieces + 4


@given(lengths=lengths, shape=small_shapes, samples=st.sets(st.integers(0, 200), max_size=30))
def test_pieces_of_samples_are_the_same_one_by_one_and_all_at_once(
    lengths: list[int], shape: Shape, samples: set[int]
) -> None:
    source = ListSource(lengths)
    numbers = np.array(sorted(samples), np.int64)
    counts, together = read_of(reader_of(source, shape, seed=5), numbers)
    alone = [read_of(reader_of(source, shape, seed=5), numbers[at : at + 1]) for at in range(len(numbers))]
    assert counts.tolist() == [int(count[0]) for count, _ in alone]
    assert together.starts.tolist() == [start for _, pieces in alone for start in pieces.starts.tolist()]
    assert together.lengths.tolist() == [length for _, pieces in alone for length in pieces.lengths.tolist()]


@pytest.mark.slow
@settings(max_examples=examples(6))
@given(lengths=lengths, shape=small_shapes, seed=seeds)
def test_the_blocks_and_pieces_of_another_epoch_ordinal_or_seed_come_in_another_order(
    lengths: list[int], shape: Shape, seed: int
) -> None:
    source = ListSource([*lengths, *range(1, 40)])  # so many pieces that orders cannot be equal by chance

    def order(**options: Any) -> list[int]:
        reader = reader_of(source, shape, **{"seed": seed, **options})
        return read_of(reader, np.arange(-(-source.num_tokens // shape.seq_len)))[1].starts.tolist()

    first = order()
    assert order() == first
    assert order(seed=seed ^ 1) != first
    assert order(start_epoch=1) != first


def test_items_of_equal_hashes_stay_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutations, "GOLDEN", np.uint64(1 << 63))  # two hashes: of even and of odd items
    for seed in range(4):
        found = Permutation(length=1_000, key=key_of(seed)).all().tolist()
        assert found in (
            list(range(0, 1_000, 2)) + list(range(1, 1_000, 2)),
            [*range(1, 1_000, 2), *range(0, 1_000, 2)],
        )


def test_a_window_of_2_to_the_32_tokens_is_refused_and_one_token_less_is_read() -> None:
    class Two(PeriodicSource):
        dtype = np.dtype(np.uint16)

    for num_tokens, fits in ((2**32, False), (2**32 - 1, True)):
        source = Two(num_tokens, 2**29)
        shape = Shape(seq_len=2**20, block_tokens=2**31, window_blocks=2)
        reader = reader_of(source, shape, seed=1)
        window = reader.order.window(0, 0, 0)
        if fits:
            table = reader.table(window)
            assert int(table.shuffled_starts[-1]) == num_tokens
            assert table.cut(np.array([0]), np.array([num_tokens]))[1].lengths.sum() == num_tokens
        else:
            with pytest.raises(ValueError, match="a window of 4294967296 tokens does not fit"):
                reader.table(window)
    with pytest.raises(PlanError, match=r"a window of 3 blocks of 1073741824 tokens has 2\*\*32 tokens or more"):
        StreamPlan(PeriodicSource(100), seq_len=4, block_tokens=2**30, window_blocks=3)
    StreamPlan(PeriodicSource(100), seq_len=4, block_tokens=2**30 - 1, window_blocks=3)


def test_windows_that_have_2_to_the_32_tokens_together_are_read_at_once() -> None:
    source = PeriodicSource(2**33, 2**20 - 3)
    shape = Shape(seq_len=2**20, block_tokens=2**31, window_blocks=1)
    samples = np.array([5, 2047, 2048, 4100, 6150, 8191])  # of all four windows
    counts, together = read_of(reader_of(source, shape, seed=1), samples)
    alone = [read_of(reader_of(source, shape, seed=1), samples[at : at + 1]) for at in range(len(samples))]
    assert counts.tolist() == [int(count[0]) for count, _ in alone]
    assert together.starts.tolist() == [start for _, pieces in alone for start in pieces.starts.tolist()]
    assert together.lengths.tolist() == [length for _, pieces in alone for length in pieces.lengths.tolist()]
    assert together.ends_document.tolist() == [end for _, pieces in alone for end in pieces.ends_document.tolist()]


def test_a_sample_beyond_2_to_the_64_epochs_is_refused() -> None:
    plan = StreamPlan(ListSource([1]), seq_len=300, seed=1)
    with pytest.raises(PlanError, match=r"epoch 1844674407370955\d+ of a corpus .* an order has 2\*\*64"):
        plan.sample(2**64 // 300 + 1)
    plan.sample(2**64 // 300 - 1)
