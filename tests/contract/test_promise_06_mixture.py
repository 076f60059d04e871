"""Promise 6: how far a corpus is from its exact share of the samples.

Within a weight segment at most 8 samples for g < 2^50; a change adds at most 16. tests/runtime/test_mixture.py has the
tighter bounds that follow from the rules.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests.runtime.sources import PeriodicSource
from tokshard.runtime import StreamPlan
from tokshard.runtime.cursor import Cursor
from tokshard.runtime.options import checked_weights

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


@pytest.mark.parametrize("num_corpora", [1, 2, 3, 12, 100, 500])
def test_each_corpus_is_within_8_samples_of_its_exact_share_for_1_to_500_corpora(num_corpora: int) -> None:
    rng = np.random.default_rng(num_corpora)
    sizes = np.exp(rng.uniform(0, np.log(10**7), num_corpora)).astype(int).tolist()
    corpora = {f"corpus {number}": PeriodicSource(size + number) for number, size in enumerate(sizes)}
    for weights in (rng.pareto(0.5, num_corpora), np.array([0.9] + [1e-4] * (num_corpora - 1)), np.ones(num_corpora)):
        weights[num_corpora // 2 + 1 :: 7] = 0
        plan = StreamPlan(corpora, seq_len=64, seed=3, weights=dict(zip(corpora, weights.tolist(), strict=True)))
        for sample in [*range(1, 300, 13), *np.exp2(rng.uniform(8, 50, 30)).astype(np.int64).tolist()]:
            assert max(distances(plan, plan.cursor(), sample)) <= 8


@pytest.mark.parametrize("seed", range(5))
def test_each_corpus_is_within_8_samples_of_its_exact_share_within_a_segment(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan = plan_of(seed)
    for _ in range(20):
        weights = dict(zip(NAMES, rng.pareto(1.0, len(NAMES)).tolist(), strict=True))
        start = int(rng.integers(0, 1 << 49))
        cursor = plan.cursor().advanced(start).weighted(checked_weights(plan.names, weights))
        before = plan.mixture(cursor).counts_before(start)
        for length in np.exp2(rng.uniform(0, 49, 10)).astype(np.int64).tolist():
            counts = plan.mixture(cursor).counts_before(start + length)
            total = sum(map(Fraction, weights.values()))
            for number, weight in enumerate(weights.values()):
                share = length * Fraction(weight) / total
                assert abs(counts[number] - before[number] - share) <= 8


@pytest.mark.parametrize("seed", range(5))
def test_a_change_of_weights_adds_at_most_16_samples_of_error(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan = plan_of(seed)
    cursor = plan.cursor()
    for _ in range(30):
        cursor = cursor.advanced(int(np.exp2(rng.uniform(0, 45))))
        weights = dict(zip(NAMES, rng.pareto(1.0, len(NAMES)).tolist(), strict=True))
        before = distances(plan, cursor, cursor.sample)
        cursor = cursor.weighted(checked_weights(plan.names, weights))
        later = cursor.sample + int(np.exp2(rng.uniform(0, 45)))
        for old, new in zip(before, distances(plan, cursor, later), strict=True):
            assert new <= old + 16
