"""Promise 6: how far a corpus is from its exact share of the samples.

Within a weight segment at most 8 samples for g < 2^50; a change adds at most 16. With streams, each of them counts for
itself, and all together stay within the bound of ORDER.md. tests/runtime/test_mixture.py has the
tighter bounds that follow from the rules.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime.sources import PeriodicSource
from tokshard.runtime import Cursor, StreamPlan
from tokshard.runtime.order.mixture import Mixture, Segment

NAMES = [f"corpus {number}" for number in range(12)]


def plan_of(seed: int) -> StreamPlan:
    corpora = {name: PeriodicSource(10**9 + number) for number, name in enumerate(NAMES)}
    return StreamPlan(corpora, seq_len=64, seed=seed)


def distances(plan: StreamPlan, cursor: Cursor, sample: int) -> list[float]:
    """How far each corpus is from the sum of its exact shares, in samples."""
    segments = [segment for segment in cursor.segments if segment.start < sample]
    stops = [*(segment.start for segment in segments[1:]), sample]
    counts = plan.mixture(cursor).counts_before(sample)
    exact = [Fraction(0)] * len(counts)
    for segment, stop in zip(segments, stops, strict=True):
        total = sum(map(Fraction, segment.weights))
        for number, weight in enumerate(segment.weights):
            exact[number] += (stop - segment.start) * Fraction(weight) / total
    return [abs(float(count - share)) for count, share in zip(counts, exact, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("num_corpora", [1, 2, 3, 12, 100, 500])
def test_each_corpus_is_within_8_samples_of_its_exact_share_for_1_to_500_corpora(num_corpora: int) -> None:
    rng = np.random.default_rng(num_corpora)
    sizes = np.exp(rng.uniform(0, np.log(10**7), num_corpora)).astype(int).tolist()
    corpora = {f"corpus {number}": PeriodicSource(1_000 * size + number) for number, size in enumerate(sizes)}
    for weights in (rng.pareto(0.5, num_corpora), np.array([0.9] + [1e-4] * (num_corpora - 1)), np.ones(num_corpora)):
        weights[num_corpora // 2 + 1 :: 7] = 0
        plan = StreamPlan(corpora, seq_len=64, seed=3, weights=dict(zip(corpora, weights.tolist(), strict=True)))
        for sample in [*range(1, 300, 13), *np.exp2(rng.uniform(8, 50, 10)).astype(np.int64).tolist()]:
            assert max(distances(plan, plan.cursor(), sample)) <= 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_segment_adds_at_most_8_samples_of_error_wherever_it_begins_and_a_change_of_weights_16(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan = plan_of(seed)
    cursor = plan.cursor()
    for _ in range(30):
        cursor = cursor.advanced(int(np.exp2(rng.uniform(0, 44))))
        before = distances(plan, cursor, cursor.sample)
        counts = plan.mixture(cursor).counts_before(cursor.sample)
        weights = tuple(rng.pareto(1.0, len(NAMES)).tolist())
        cursor = cursor.weighted(weights)
        total = sum(map(Fraction, weights))
        for length in np.exp2(rng.uniform(0, 45, 5)).astype(np.int64).tolist():
            later = plan.mixture(cursor).counts_before(cursor.sample + length)
            for weight, first, last in zip(weights, counts, later, strict=True):
                assert abs(last - first - length * Fraction(weight) / total) <= 8
            for old, new in zip(before, distances(plan, cursor, cursor.sample + length), strict=True):
                assert new <= old + 16


some_weights = st.lists(st.sampled_from([0.0, 1e-9, 0.1, 0.3, 1.0, 7.0]), min_size=5, max_size=5).filter(any)


@settings(max_examples=examples(25))
@given(
    num_streams=st.integers(1, 64),
    seed=st.integers(0, 2**64 - 1),
    weights=st.lists(some_weights, min_size=1, max_size=6),
    lengths=st.lists(st.integers(0, 500) | st.integers(0, 2**40), min_size=6, max_size=6),
    node=st.integers(0, 3),
)
def test_a_node_of_a_stream_is_always_less_than_a_sample_off_whatever_the_weights_were(
    num_streams: int, seed: int, weights: list[list[float]], lengths: list[int], node: int
) -> None:
    starts = np.cumsum([0, *(length + 1 for length in lengths)]).tolist()
    segments = tuple(Segment(start=start, weights=tuple(w)) for start, w in zip(starts, weights, strict=False))
    mixture = Mixture(seed=seed, num_streams=num_streams, segments=segments)
    start, stop = [(0, 5), (0, 2), (2, 5), (3, 5)][node]
    middle = (start + stop) // 2
    for stream in {0, num_streams // 2, num_streams - 1}:
        off = Fraction(0)
        for segment, first, last in zip(segments, starts, starts[1:], strict=False):
            balances = (mixture.balance_before(sample) for sample in (first, last))
            before, after = (balance.counts[:, stream].tolist() for balance in balances)
            left = sum(after[start:middle]) - sum(before[start:middle])
            total = sum(after[start:stop]) - sum(before[start:stop])
            of_node = sum(map(Fraction, segment.weights[start:stop]))
            if of_node:
                off += left - total * sum(map(Fraction, segment.weights[start:middle])) / of_node
            assert abs(off) < 1


@settings(max_examples=examples(8))
@given(
    num_streams=st.integers(1, 64),
    seed=st.integers(0, 2**64 - 1),
    weights=some_weights,
    rounds=st.lists(st.integers(0, 300) | st.integers(0, 2**40), min_size=1, max_size=5),
)
def test_streams_together_stay_within_the_bound_that_the_order_states(
    num_streams: int, seed: int, weights: list[float], rounds: list[int]
) -> None:
    segment = Segment(start=0, weights=tuple(weights))
    mixtures = Mixture(seed=seed, num_streams=num_streams, segments=(segment,))
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    for number in rounds:
        counts = mixtures.counts_before(number * num_streams)
        # the root is rounded as if it were one: Hermite's identity
        assert abs(sum(counts[:2]) - number * num_streams * sum(shares[:2])) <= Fraction(1, 2) + Fraction(1, 2**20)
        for sample in (number * num_streams, number * num_streams + num_streams // 3):
            counts = mixtures.counts_before(sample)
            for count, share in zip(counts, shares, strict=True):
                assert abs(count - sample * share) <= 2 + num_streams**0.5
