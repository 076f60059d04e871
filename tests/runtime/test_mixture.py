"""Which corpus a sample comes from: the rules, their closed form, and how far a corpus is from its share."""

from __future__ import annotations

import pickle
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples, some
from tests.runtime import page_model
from tests.runtime.sources import PeriodicSource
from tokshard.runtime import StreamPlan
from tokshard.runtime.order.mixture import Mixture, Segment, are_weights
from tokshard.runtime.rows.steps import RankRows

seeds = st.integers(0, 2**64 - 1)


def mixture_of(*changes: tuple[int, list[float]], seed: int = 0, num_streams: int = 1) -> Mixture:
    segments = tuple(Segment(start=start, weights=tuple(weights)) for start, weights in changes)
    return Mixture(seed=seed, num_streams=num_streams, segments=segments)


def shares_of(mixture: Mixture, stop: int) -> list[Fraction]:
    """The exact share of each corpus in the samples before `stop`."""
    exact = [Fraction(0)] * mixture.num_corpora
    starts = [segment.start for segment in mixture.segments]
    for segment, end in zip(mixture.segments, [*starts[1:], stop], strict=True):
        total = sum(map(Fraction, segment.weights))
        for number, weight in enumerate(segment.weights):
            exact[number] += max(0, min(end, stop) - segment.start) * Fraction(weight) / total
    return exact


def largest_error(mixture: Mixture, stop: int) -> float:
    counts = mixture.counts_before(stop)
    assert sum(counts) == stop - mixture.segments[0].start
    return max(abs(float(count - share)) for count, share in zip(counts, shares_of(mixture, stop), strict=True))


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[int, list[tuple[int, list[float]]]]:
    """A seed, and some corpora whose weights change a few times within the first 300 samples."""
    corpora = draw(st.integers(1, 9))
    weights = st.lists(
        st.one_of(st.sampled_from([0.0, 1e-4, 0.1, 0.25, 1.0, 3.0]), st.floats(0, 1e9, allow_subnormal=False)),
        min_size=corpora,
        max_size=corpora,
    ).filter(any)
    starts = [0, *sorted(draw(st.sets(st.integers(1, 300), max_size=6)))]
    return draw(seeds), [(start, draw(weights)) for start in starts]


@given(given=mixtures(), stop=st.integers(1, 200))
def test_corpora_are_those_of_the_rules_one_sample_after_another(
    given: tuple[int, list[tuple[int, list[float]]]], stop: int
) -> None:
    seed, changes = given
    corpora, _ = mixture_of(*changes, seed=seed).locate(np.arange(stop))
    model = page_model.Mixture.of_start(seed, 1, [(start, tuple(weights)) for start, weights in changes])
    assert corpora.tolist() == [model.located(sample)[0] for sample in range(stop)]


@given(given=mixtures(), samples=st.sets(st.integers(0, 500), max_size=60), num_streams=st.integers(1, 9))
def test_samples_are_the_same_one_by_one_and_all_at_once(
    given: tuple[int, list[tuple[int, list[float]]]], samples: set[int], num_streams: int
) -> None:
    mixture = mixture_of(*given[1], seed=given[0], num_streams=num_streams)
    wanted = np.array(list(samples), np.int64)
    corpora, ordinals = mixture.locate(wanted)
    assert (corpora.dtype, ordinals.dtype, len(corpora)) == (np.int64, np.int64, len(samples))
    for sample, corpus, ordinal in zip(wanted.tolist(), corpora.tolist(), ordinals.tolist(), strict=True):
        alone = mixture_of(*given[1], seed=given[0], num_streams=num_streams).locate(np.array([sample]))
        assert (alone[0].tolist(), alone[1].tolist()) == ([corpus], [ordinal])
        assert mixture.balance_before(sample).counts[corpus, sample % num_streams] == ordinal
        assert mixture.sample_of(corpus, ordinal, sample % num_streams) == sample
    assert mixture.samples_of(corpora, ordinals, wanted % num_streams).tolist() == wanted.tolist()


@given(given=mixtures())
def test_every_corpus_is_read_from_its_first_sample_on_without_a_gap(
    given: tuple[int, list[tuple[int, list[float]]]],
) -> None:
    mixture = mixture_of(*given[1], seed=given[0])
    corpora, ordinals = mixture.locate(np.arange(400))
    for corpus in range(mixture.num_corpora):
        mine = ordinals[corpora == corpus]
        assert mine.tolist() == list(range(len(mine)))
        if corpus in corpora:
            assert mixture.counts_before(400)[corpus] == len(mine)


@given(given=mixtures(), cut=st.integers(0, 400), num_streams=st.integers(1, 9))
def test_a_balance_is_all_that_the_past_leaves_behind(
    given: tuple[int, list[tuple[int, list[float]]]], cut: int, num_streams: int
) -> None:
    seed, changes = given
    whole = mixture_of(*changes, seed=seed, num_streams=num_streams)
    weights = [weights for start, weights in changes if start <= cut][-1]
    later = [Segment(start=start, weights=tuple(weights)) for start, weights in changes if start > cut]
    rest = Mixture(
        seed=seed,
        num_streams=num_streams,
        segments=(Segment(start=cut, weights=tuple(weights)), *later),
        balance=whole.balance_before(cut),
    )
    samples = np.arange(cut, cut + 300)
    assert pickle.loads(pickle.dumps(rest)).locate(samples)[0].tolist() == rest.locate(samples)[0].tolist()
    # a node rounds from its carried line, so nothing but a node without weight tells where its segment began
    assert rest.locate(samples)[0].tolist() == whole.locate(samples)[0].tolist()
    assert rest.balance_before(cut + 300) == whole.balance_before(cut + 300)


@pytest.mark.parametrize("place", [0, 1, 2])
@given(seed=seeds, start=st.integers(0, 2**50))
def test_a_corpus_of_weight_0_is_never_read_wherever_it_is_listed(place: int, seed: int, start: int) -> None:
    weights = [0.3, 0.7]
    weights.insert(place, 0.0)
    mixture = mixture_of((0, weights), seed=seed)
    assert set(mixture.locate(np.arange(start, start + 1000))[0].tolist()) == {0, 1, 2} - {place}
    assert mixture.counts_before(2**50)[place] == 0
    assert mixture.sample_of(place, 0) is None


@given(seed=seeds, before=st.integers(0, 50), place=st.integers(0, 4))
def test_a_corpus_whose_weight_becomes_0_is_not_read_once_more(seed: int, before: int, place: int) -> None:
    later = [0.1] * 5
    later[place] = 0.0
    mixture = mixture_of((0, [1.0, 0.3, 2.0, 0.01, 0.7]), (before + 1, later), (before + 100, [1.0] * 5), seed=seed)
    assert place not in mixture.locate(np.arange(before + 1, before + 100))[0]
    assert place in mixture.locate(np.arange(before + 100, before + 120))[0]


@given(seed=seeds, ends=st.booleans())
def test_one_corpus_among_corpora_of_weight_0_is_read_alone(seed: int, ends: bool) -> None:
    weights = [0.0, 2.5, 0.0, 0.0] if ends else [0.0, 0.0, 0.1]
    corpora, ordinals = mixture_of((0, weights), seed=seed).locate(np.arange(12345, 12355))
    assert set(corpora.tolist()) == {weights.index(max(weights))}
    assert ordinals.tolist() == list(range(12345, 12355))


@given(seed=seeds)
def test_a_corpus_of_one_sample_in_10_000_comes_as_often(seed: int) -> None:
    mixture = mixture_of((0, [1e-4, 1 - 1e-4]), seed=seed)
    places = np.flatnonzero(mixture.locate(np.arange(200_000))[0] == 0)
    assert 19 <= len(places) <= 21
    assert int(np.diff(places).max()) < 12_000
    assert mixture.counts_before(10**12)[0] == pytest.approx(10**8, abs=2)


@given(
    weights=st.lists(st.floats(1e-9, 1.0), min_size=2, max_size=40),
    seed=seeds,
    stop=st.integers(0, 2**50),
)
@example(
    # made for a corpus of the Weyl sequence that came before to be 18.2 samples away
    weights=[1_957_046_584_210_878_559.0, 13_346_761_994_367_640_751.0, 3_142_936_495_683_032_306.0],
    seed=8_144_662_582_787_559,
    stop=745_544_524_947_890,
)
def test_until_weights_change_a_corpus_is_at_most_half_a_sample_per_level_away_from_its_share(
    weights: list[float], seed: int, stop: int
) -> None:
    levels = (len(weights) - 1).bit_length()
    assert largest_error(mixture_of((0, weights), seed=seed), stop) <= levels / 2 + 2**-10


@pytest.mark.slow
@pytest.mark.parametrize("every", [101, pytest.param(7, marks=pytest.mark.soak)])
@some("heavy", [255, 0, 499])
def test_500_corpora_of_which_one_has_nearly_everything_each_get_their_share(heavy: int, every: int) -> None:
    weights = [1e-4] * 500
    weights[heavy] = 0.9
    mixture = mixture_of((0, weights), seed=5)
    for stop in [*range(0, 3000, every), *(2**bits - 1 for bits in range(12, 51))]:
        assert largest_error(mixture, stop) <= 4.75


@pytest.mark.soak
def test_thousands_of_small_changes_add_up_to_no_error() -> None:
    steps = np.linspace(0, 1, 5_000).tolist()
    anneal = [(16 * number, [1 - part, part, 0.01, 1e-4]) for number, part in enumerate(steps)]
    mixture = mixture_of(*anneal, seed=3)
    assert largest_error(mixture, 80_000) < 3


def test_a_corpus_of_small_weight_is_read_however_often_weights_change() -> None:
    mixture = mixture_of(*((8 * number, [0.01, 1.0 + number % 2]) for number in range(3_000)), seed=1)
    expected = float(shares_of(mixture, 24_000)[0])
    assert mixture.counts_before(24_000)[0] == pytest.approx(expected, abs=3)


@settings(max_examples=examples(30))
@given(seed=seeds)
def test_nothing_is_caught_up_after_a_change(seed: int) -> None:
    mixture = mixture_of((0, [1.0, 0.0]), (10**6, [0.5, 0.5]), seed=seed)
    corpora, _ = mixture.locate(np.arange(10**6, 10**6 + 1000))
    assert np.count_nonzero(corpora) == pytest.approx(500, abs=2)
    assert np.abs(np.cumsum(corpora - 0.5)).max() < 3


@pytest.mark.parametrize("world_size", [2, 4, 8, 32])
def test_equal_weights_do_not_give_a_rank_the_same_corpora_at_every_step(world_size: int) -> None:
    corpora = {name: PeriodicSource(10**9 + number) for number, name in enumerate("abcd")}
    plan = StreamPlan(corpora, seq_len=64, weights=dict.fromkeys(corpora, 1.0))
    found = mixture_of((0, [1.0] * 4)).locate(np.arange(32))[0]
    assert found.tolist() == found[:4].tolist() * 8, "every step has the same corpora in the same rows"
    ranks = RankRows(global_batch_size=32, rank=1, world_size=world_size)
    samples = ranks.samples(np.arange(0, 32 * 512, 32))
    read = plan.mixture(plan.cursor()).locate(samples)[0]
    for corpus in range(4):
        assert np.mean(read == corpus) == pytest.approx(0.25, abs=0.07)


def test_thousands_of_arbitrary_changes_lose_no_sample() -> None:
    rng = np.random.default_rng(4)
    changes = [(3 * number, rng.pareto(0.5, 17).tolist()) for number in range(2_000)]
    balance = mixture_of(*changes, seed=9).balance_before(6_000)
    assert balance.counts.sum() == 6_000


def test_a_sample_before_the_first_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 9 lies before the first weights, which start at 10"):
        mixture_of((10, [1.0])).counts_before(9)


@pytest.mark.parametrize("bad", [[0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0], [float("inf")], []])
def test_weights_that_say_nothing_are_told(bad: list[float]) -> None:
    assert not are_weights(bad)


def test_a_mixture_whose_weights_differ_in_the_middle_counts_anew_from_there_on() -> None:
    def segments(middle: tuple[float, ...], start: int = 200) -> tuple[Segment, ...]:
        weights = [(1.0, 2.0, 3.0), (2.0, 1.0, 0.0), middle, (1.0, 1.0, 1.0), (3.0, 2.0, 1.0)]
        starts = [0, 100, start, 300, 400]
        return tuple(Segment(start=first, weights=part) for first, part in zip(starts, weights, strict=True))

    known = Mixture(seed=3, num_streams=2, segments=segments((5.0, 1.0, 1.0)))
    known.counts_before(1_000)
    for middle, start in (((5.0, 1.0, 1.0), 200), ((1.0, 1.0, 5.0), 200), ((5.0, 1.0, 1.0), 240)):
        changed = known.changed(segments(middle, start))
        fresh = Mixture(seed=3, num_streams=2, segments=segments(middle, start))
        for sample in (50, 150, 250, 350, 450, 1_000):
            assert changed.balance_before(sample) == fresh.balance_before(sample)


@settings(max_examples=examples(20))
@given(given=mixtures(), num_streams=st.integers(2, 9), far=st.sampled_from([0, 1, 77, 10**6, 2**61]))
def test_a_mixture_goes_on_from_any_sample_with_any_weights(
    given: tuple[int, list[tuple[int, list[float]]]], num_streams: int, far: int
) -> None:
    seed, changes = given
    whole = mixture_of(*changes, (changes[-1][0] + far + 3, changes[0][1]), seed=seed, num_streams=num_streams)
    later = whole.segments[-1].start
    balance = whole.balance_before(later)
    since = Mixture(seed=seed, num_streams=num_streams, segments=whole.segments[-1:], balance=balance)
    assert since.balance_before(later) == balance
    samples = np.arange(later, later + 100)
    assert all(map(np.array_equal, since.locate(samples), whole.locate(samples)))


def test_1_024_streams_of_20_corpora_say_in_a_moment_where_each_corpus_is_used_up() -> None:
    mixture = mixture_of((0, [float(number + 1) for number in range(20)]), num_streams=1_024)
    corpora, streams = np.repeat(np.arange(20), 1_024), np.tile(np.arange(1_024), 20)
    start = time.process_time()  # of this process, whatever else runs
    samples = mixture.samples_of(corpora, np.full(len(corpora), 12_345), streams)
    assert time.process_time() - start < 4, "one by one it took 10 s"
    located = mixture.locate(samples)
    assert np.array_equal(located[0], corpora)
    assert np.array_equal(samples % 1_024, streams)
    assert (located[1] == 12_345).all()
