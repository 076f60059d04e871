"""The parts of the order, each by itself: keys, permutation, mixture and windows."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.runtime import naive
from tests.runtime.sources import ListSource, PeriodicSource
from tokshard.runtime import permutation as permutations
from tokshard.runtime.mixture import STEP, Mixture, Segment, floor_sum, thresholds
from tokshard.runtime.permutation import KEY_WORDS, MAX_SORTED, Permutation
from tokshard.runtime.seeds import ORDER_VERSION, derive_key
from tokshard.runtime.windows import CorpusStream, Shape

MODULUS = 1 << 64
seeds = st.integers(0, MODULUS - 1)


def key_of(seed: int) -> NDArray[np.uint64]:
    return derive_key(seed, "pieces", words=KEY_WORDS)


# keys

fields = st.fixed_dictionaries(
    {
        "seed": seeds,
        "purpose": st.sampled_from(["blocks", "pieces", "samples", "mixture"]),
        "corpus": st.binary(min_size=32, max_size=32),
        "ordinal": st.integers(0, 2**40),
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
            ["blocks", "pieces", "samples", "mixture"],
            [0, 1, 2, 256],
            [b"", bytes(31) + b"\1", b"\1" + bytes(31)],
            [0, 1, 256],
            [0, 1, 2, 255, 256, 2**32],
            [0, 1, 2, 255, 256, 2**32],
        )
    )
    keys = {
        derive_key(seed, purpose, corpus=corpus, ordinal=ordinal, epoch=epoch, window=window, words=1).tobytes()
        for purpose, seed, corpus, ordinal, epoch, window in every
    }
    assert len(keys) == len(every)


@given(field=fields, words=st.integers(1, 40))
def test_a_longer_key_starts_with_the_shorter_one(field: dict[str, Any], words: int) -> None:
    longest = derive_key(**field, words=40)
    assert derive_key(**field, words=words).tolist() == longest[:words].tolist()
    assert len(set(longest.tolist())) == 40


def test_keys_are_the_hashes_that_the_rules_name() -> None:
    corpus = bytes(range(32))
    key = derive_key(17, "pieces", corpus=corpus, ordinal=1, epoch=2, window=3, words=16)
    assert key.tolist() == naive.words(17, "pieces", corpus.hex(), ordinal=1, epoch=2, window=3)
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


@settings(max_examples=25)
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
    assert found == [permutation.at(index) for index in indices]
    assert permutation(np.array(indices[::-1], np.uint64)).tolist() == found[::-1]


@settings(max_examples=100)
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


@pytest.mark.parametrize("length", [1, 2, 300, MAX_SORTED, MAX_SORTED + 1, 70_000])
def test_a_permutation_is_the_one_that_the_rules_name(length: int) -> None:
    key = key_of(length)
    assert Permutation(length=length, key=key).all().tolist() == naive.permutation(length, key.tolist())


def test_permutations_have_their_golden_values() -> None:
    key = derive_key(17, "blocks", words=KEY_WORDS)
    # golden: other values are another order, so ORDER_VERSION goes up
    assert ORDER_VERSION == 1
    assert Permutation(length=10, key=key).all().tolist() == [7, 8, 5, 2, 4, 0, 9, 3, 6, 1]
    large = Permutation(length=100_000, key=key)
    assert [large.at(index) for index in (0, 1, 2, 99_999)] == [33_722, 95_044, 95_526, 74_225]
    huge = Permutation(length=2**62, key=key)
    assert [huge.at(index) for index in (0, 2**62 - 1)] == [4_358_567_445_520_172_136, 1_792_030_085_945_312_769]


@pytest.mark.parametrize("length", [0, 1, 10, MAX_SORTED, MAX_SORTED + 1, 2**62])
def test_an_index_beyond_a_permutation_is_refused(length: int) -> None:
    permutation = Permutation(length=length, key=key_of(1))
    with pytest.raises(IndexError, match=f"index {length} is outside a permutation of {length} items"):
        permutation.at(length)
    assert permutation(np.empty(0, np.uint64)).tolist() == []


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


# mixture


@given(
    count=st.integers(0, 60),
    modulus=st.integers(1, 2**64),
    step=st.integers(0, 2**65),
    offset=st.integers(0, 2**66),
)
@example(count=50, modulus=1, step=3, offset=2)
@example(count=50, modulus=7, step=0, offset=6)
def test_a_floor_sum_is_the_sum_of_the_floors(count: int, modulus: int, step: int, offset: int) -> None:
    assert floor_sum(count, modulus, step, offset) == sum((step * x + offset) // modulus for x in range(count))


weights = st.lists(
    st.one_of(st.sampled_from([0.0, 1e-4, 0.5, 1.0]), st.floats(0, 1e9, allow_subnormal=False)), min_size=1, max_size=8
).filter(any)


@given(weights=weights)
def test_shares_are_the_exact_cumulative_fractions_and_end_at_the_whole(weights: list[float]) -> None:
    ends = thresholds(weights)
    exact = [Fraction(weight) for weight in weights]
    for number, end in enumerate(ends):
        share = sum(exact[: number + 1]) / sum(exact)
        assert end <= MODULUS * share < end + 1
    assert ends[-1] == MODULUS


@pytest.mark.parametrize("bad", [[0.0, 0.0], [1.0, -1.0], [-0.5]])
def test_weights_that_make_no_shares_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be at least 0 and not all 0"):
        thresholds(bad)


def mixture_of(*changes: tuple[int, list[float]], offset: int = 0) -> Mixture:
    segments = tuple(Segment(start=start, weights=tuple(weights)) for start, weights in changes)
    return Mixture(offset=offset, segments=segments, counts=(0,) * len(changes[0][1]))


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    """Some corpora whose weights change a few times within the first 300 samples."""
    corpora = draw(st.integers(1, 6))
    shares = st.lists(st.sampled_from([0.0, 1e-4, 0.1, 0.25, 1.0, 3.0]), min_size=corpora, max_size=corpora).filter(any)
    starts = [0, *sorted(draw(st.sets(st.integers(1, 300), max_size=4)))]
    return mixture_of(*((start, draw(shares)) for start in starts), offset=draw(seeds))


@given(mixture=mixtures(), stop=st.integers(0, 400))
def test_counts_before_a_sample_are_those_of_the_rows_before_it(mixture: Mixture, stop: int) -> None:
    corpora, _ = mixture.rows(0, stop)
    assert list(mixture.counts_before(stop)) == np.bincount(corpora, minlength=len(mixture.counts)).tolist()


@given(mixture=mixtures(), start=st.integers(0, 400), length=st.integers(0, 50))
def test_rows_are_the_same_one_by_one_and_all_at_once(mixture: Mixture, start: int, length: int) -> None:
    corpora, ordinals = mixture.rows(start, start + length)
    assert (corpora.dtype, ordinals.dtype, len(corpora)) == (np.int64, np.int64, length)
    for index in range(length):
        corpus, ordinal = mixture.rows(start + index, start + index + 1)
        assert (corpus.tolist(), ordinal.tolist()) == ([corpora[index]], [ordinals[index]])
        assert ordinals[index] == mixture.counts_before(start + index)[corpora[index]]


@given(mixture=mixtures())
def test_every_corpus_is_read_from_its_first_sample_on_without_a_gap(mixture: Mixture) -> None:
    corpora, ordinals = mixture.rows(0, 400)
    for corpus in range(len(mixture.counts)):
        mine = ordinals[corpora == corpus]
        assert mine.tolist() == list(range(len(mine)))


@given(mixture=mixtures(), stop=st.integers(0, 300))
def test_corpora_are_those_of_the_rules(mixture: Mixture, stop: int) -> None:
    corpora, _ = mixture.rows(0, stop)
    found = []
    for sample in range(stop):
        shares = [segment.weights for segment in mixture.segments if segment.start <= sample][-1]
        value = Fraction((sample * STEP + mixture.offset) % MODULUS)
        exact = list(itertools.accumulate(Fraction(share) for share in shares))
        # the end of a share is rounded down to a whole number, like the sequence
        found.append(next(i for i, end in enumerate(exact) if value < MODULUS * end // exact[-1]))
    assert corpora.tolist() == found


@pytest.mark.parametrize("place", [0, 1, 2])
@given(offset=seeds, start=st.integers(0, 2**50))
def test_a_corpus_of_weight_0_is_never_read_wherever_it_is_listed(place: int, offset: int, start: int) -> None:
    shares = [0.3, 0.7]
    shares.insert(place, 0.0)
    corpora, _ = mixture_of((0, shares), offset=offset).rows(start, start + 1000)
    assert set(corpora.tolist()) == {0, 1, 2} - {place}
    assert mixture_of((0, shares), offset=offset).counts_before(2**50)[place] == 0


@given(offset=seeds, ends=st.booleans())
def test_one_corpus_among_corpora_of_weight_0_is_read_alone(offset: int, ends: bool) -> None:
    shares = [0.0, 2.5, 0.0, 0.0] if ends else [0.0, 0.0, 0.1]
    mixture = mixture_of((0, shares), offset=offset)
    corpora, ordinals = mixture.rows(12345, 12355)
    assert set(corpora.tolist()) == {shares.index(max(shares))}
    assert ordinals.tolist() == list(range(12345, 12355))


@given(offset=seeds)
def test_a_corpus_of_one_sample_in_10_000_comes_as_often(offset: int) -> None:
    mixture = mixture_of((0, [1e-4, 1 - 1e-4]), offset=offset)
    corpora, _ = mixture.rows(0, 200_000)
    places = np.flatnonzero(corpora == 0)
    assert 18 <= len(places) <= 22
    assert int(np.diff(places).max()) < 30_000
    assert mixture.counts_before(10**12)[0] == pytest.approx(10**8, abs=8)


def test_500_corpora_each_get_their_share() -> None:
    shares = [float(number) for number in range(500)]
    mixture = mixture_of((0, shares), offset=987654321)
    counts = np.array(mixture.counts_before(10**6))
    assert np.abs(counts - 10**6 * np.array(shares) / sum(shares)).max() < 8
    corpora, ordinals = mixture.rows(10**6, 10**6 + 50_000)
    for corpus in np.unique(corpora).tolist():
        mine = ordinals[corpora == corpus]
        assert mine.tolist() == list(range(counts[corpus], counts[corpus] + len(mine)))


LARGEST_ERROR = 20
"""Samples that a corpus may be away from its exact share before sample 2**50. A search found 18.2 for weights, seed and
place that were made for each other; one random place in a million is 8 away."""


@given(
    shares=st.lists(st.integers(0, 2**63), min_size=2, max_size=8).filter(any),
    offset=seeds,
    start=st.integers(0, 2**50),
    length=st.integers(0, 2**50),
)
@example(
    # the worst that the search found
    shares=[1_957_046_584_210_878_559, 13_346_761_994_367_640_751, MODULUS - 15_303_808_578_026_519_310],
    offset=8_144_662_582_787_559,
    start=0,
    length=745_544_524_947_890,
)
def test_a_corpus_is_never_far_from_its_share_wherever_weights_begin(
    shares: list[int], offset: int, start: int, length: int
) -> None:
    mixture = Mixture(offset=offset, segments=(Segment(start=start, weights=tuple(shares)),), counts=(0,) * len(shares))
    counts = mixture.counts_before(start + length)
    assert sum(counts) == length
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - Fraction(length * share, sum(shares))) <= LARGEST_ERROR


def test_a_sample_before_the_first_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 9 lies before the first weights, which start at 10"):
        mixture_of((10, [1.0])).counts_before(9)


# windows


def stream_of(num_tokens: int, block: int, window_blocks: int) -> CorpusStream:
    shape = Shape(seq_len=4, block_tokens=block, window_blocks=window_blocks)
    return CorpusStream(PeriodicSource(num_tokens, 7), shape, seed=1)


@given(tokens=st.integers(1, 10**15), block=st.integers(1, 10**6), window_blocks=st.integers(1, 100), data=st.data())
def test_every_window_but_the_last_of_an_epoch_has_the_same_number_of_tokens(
    tokens: int, block: int, window_blocks: int, data: st.DataObject
) -> None:
    stream = stream_of(tokens, block, window_blocks)
    epoch = data.draw(st.integers(0, 10**6))
    index = data.draw(st.integers(0, stream.num_windows - 1))
    window = stream.window(epoch, index)
    last = stream.window(epoch, stream.num_windows - 1)
    assert window.start == epoch * tokens + index * window_blocks * block
    assert (window.stop - window.start == window_blocks * block) or window == last
    assert last.stop == (epoch + 1) * tokens
    assert last.stop - last.start < (window_blocks + 1) * block
    assert 0 <= last.tail_tokens < block
    for one in (window, last):
        assert one.num_blocks * block + one.tail_tokens == one.stop - one.start > 0


@given(
    tokens=st.integers(1, 10**15),
    block=st.integers(1, 10**6),
    window_blocks=st.integers(1, 100),
    position=st.integers(0, 2**70),
)
def test_a_position_lies_in_the_window_that_is_found_for_it(
    tokens: int, block: int, window_blocks: int, position: int
) -> None:
    stream = stream_of(tokens, block, window_blocks)
    window = stream.window_at(position)
    assert window.start <= position < window.stop
    assert stream.window_at(window.start) == stream.window_at(window.stop - 1) == window
    following = stream.window_at(window.stop)
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
    stream = stream_of(tokens, 10, 3)
    found = [stream.window(0, index) for index in range(stream.num_windows)]
    assert [(window.num_blocks, window.tail_tokens) for window in found] == windows


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40)
small_shapes = st.builds(
    Shape, seq_len=st.integers(1, 30), block_tokens=st.integers(1, 64), window_blocks=st.integers(1, 6)
)


@given(lengths=lengths, shape=small_shapes, seed=seeds, epoch=st.integers(0, 3))
def test_the_pieces_of_the_windows_of_an_epoch_hold_every_token_once(
    lengths: list[int], shape: Shape, seed: int, epoch: int
) -> None:
    source = ListSource(lengths)
    stream = CorpusStream(source, shape, seed=seed)
    read: list[int] = []
    for index in range(stream.num_windows):
        window = stream.window(epoch, index)
        table = stream.table(window)
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


def test_a_piece_costs_8_bytes() -> None:
    stream = CorpusStream(PeriodicSource(10**6, 100), Shape(seq_len=64, block_tokens=4096, window_blocks=64), seed=3)
    table = stream.table(stream.window(0, 0))
    assert table.stream_starts.nbytes + table.place_starts.nbytes == 8 * table.num_pieces + 4


@given(lengths=lengths, shape=small_shapes, samples=st.sets(st.integers(0, 200), max_size=30))
def test_pieces_of_samples_are_the_same_one_by_one_and_all_at_once(
    lengths: list[int], shape: Shape, samples: set[int]
) -> None:
    source = ListSource(lengths)
    numbers = np.array(sorted(samples), np.int64)
    counts, together = CorpusStream(source, shape, seed=5).pieces_of(numbers)
    alone = [CorpusStream(source, shape, seed=5).pieces_of(numbers[at : at + 1]) for at in range(len(numbers))]
    assert counts.tolist() == [int(count[0]) for count, _ in alone]
    assert together.starts.tolist() == [start for _, pieces in alone for start in pieces.starts.tolist()]
    assert together.lengths.tolist() == [length for _, pieces in alone for length in pieces.lengths.tolist()]


@settings(max_examples=15)
@given(lengths=lengths, shape=small_shapes, seed=seeds)
def test_the_blocks_and_pieces_of_another_epoch_ordinal_or_seed_come_in_another_order(
    lengths: list[int], shape: Shape, seed: int
) -> None:
    source = ListSource([*lengths, *range(1, 40)])  # enough pieces that equal orders are no accident

    def order(**options: Any) -> list[int]:
        stream = CorpusStream(source, shape, **{"seed": seed, **options})
        numbers = np.arange(-(-source.num_tokens // shape.seq_len))
        return stream.pieces_of(numbers)[1].starts.tolist()

    first = order()
    assert order() == first
    assert order(seed=seed ^ 1) != first
    assert order(ordinal=1) != first
    assert order(start_epoch=1) != first
