"""Which corpus a sample comes from: the rules, and their closed form.

How far a corpus is from its share: tests/contract/test_promise_06_mixture.py. That a run which goes on, with these or
other weights, depends on the counts and remainders of its state alone: test_histories.py.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spec import order as spec
from tokshard.runtime.order.mixture import Mixture, Segment

seeds = st.integers(0, 2**64 - 1)


def mixture_of(*changes: tuple[int, list[float]], seed: int = 0, num_streams: int = 1) -> Mixture:
    segments = tuple(Segment(start=start, weights=tuple(weights)) for start, weights in changes)
    return Mixture(seed=seed, num_streams=num_streams, segments=segments)


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


@given(
    given=mixtures(),
    samples=st.sets(st.integers(0, 500) | st.integers(0, 2**50), min_size=1, max_size=40),
    num_streams=st.integers(1, 9),
)
def test_samples_of_corpora_are_those_of_the_rules_and_lead_back(
    given: tuple[int, list[tuple[int, list[float]]]], samples: set[int], num_streams: int
) -> None:
    seed, changes = given
    mixture = mixture_of(*changes, seed=seed, num_streams=num_streams)
    segments = [(start, tuple(weights)) for start, weights in changes]
    model = spec.Mixture.of_start(seed, num_streams, segments)
    wanted = np.array(list(samples), np.int64)
    corpora, ordinals = mixture.locate(wanted)
    assert (corpora.dtype, ordinals.dtype) == (np.int64, np.int64)
    assert list(zip(corpora.tolist(), ordinals.tolist(), strict=True)) == [model.located(each) for each in samples]
    assert mixture.samples_of(corpora, ordinals, wanted % num_streams).tolist() == wanted.tolist()
    for sample in (min(samples), max(samples)):
        assert [*map(list, mixture.balance_before(sample).counts.T)] == model.counts_before(sample)
        assert mixture.counts_before(sample) == tuple(map(sum, zip(*model.counts_before(sample), strict=True)))
    never = np.flatnonzero(~np.array([weights for _, weights in changes]).any(axis=0))
    assert set(mixture.samples_of(never, never * 0, never * 0).tolist()) <= {-1}


def test_a_sample_before_the_first_weights_is_refused() -> None:
    balance = mixture_of((0, [1.0])).balance_before(10)
    rest = Mixture(seed=0, num_streams=1, segments=(Segment(start=10, weights=(1.0,)),), balance=balance)
    for call in (lambda: rest.counts_before(9), lambda: rest.locate(np.array([12, 9]))):
        with pytest.raises(ValueError, match="sample 9 lies before the first weights, which start at 10"):
            call()
    with pytest.raises(ValueError, match="a sample of a corpus lies before the first weights"):
        rest.samples_of(*np.array([[0], [9], [0]]))
    assert rest.samples_of(*np.array([[0], [10], [0]])).tolist() == [10]


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
