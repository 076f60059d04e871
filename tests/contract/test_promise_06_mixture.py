"""Promise 6: how far a corpus is from its exact share of the samples.

With one set of weights at most half a sample for each level of the tree of corpora; with streams, what ORDER.md says.
tests/runtime/test_mixture.py compares each sample with the rules, also after changes of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime.sources import PeriodicSource
from tokshard.runtime import StreamPlan
from tokshard.runtime.order.mixture import Mixture, Segment


def distances(plan: StreamPlan, weights: Sequence[float], sample: int) -> list[float]:
    """How far each corpus is from its exact share, in samples."""
    counts, total = plan.mixture(plan.cursor()).counts_before(sample), sum(map(Fraction, weights))
    return [
        abs(float(count - sample * Fraction(weight) / total)) for count, weight in zip(counts, weights, strict=True)
    ]


BADLY_SPREAD = [1_957_046_584_210_878_559.0, 13_346_761_994_367_640_751.0, 3_142_936_495_683_032_306.0]
"""With these weights, a corpus of the Weyl sequence that came before was 18.2 samples away at sample `FAR`."""

FAR = 745_544_524_947_890


@pytest.mark.slow
@pytest.mark.parametrize("num_corpora", [1, 2, 3, 12, 100, 500])
def test_each_corpus_is_within_half_a_sample_per_level_of_its_exact_share_for_1_to_500_corpora(
    num_corpora: int,
) -> None:
    rng = np.random.default_rng(num_corpora)
    sizes = np.exp(rng.uniform(0, np.log(10**7), num_corpora)).astype(int).tolist()
    corpora = {f"corpus {number}": PeriodicSource(1_000 * size + number) for number, size in enumerate(sizes)}
    drawn = rng.pareto(0.5, num_corpora), np.array([0.9] + [1e-4] * (num_corpora - 1)), np.ones(num_corpora)
    for weights in drawn:
        weights[num_corpora // 2 + 1 :: 7] = 0
    for weights in (*drawn, np.resize(BADLY_SPREAD, num_corpora)):
        plan = StreamPlan(corpora, seq_len=64, seed=3, weights=dict(zip(corpora, weights.tolist(), strict=True)))
        for sample in [*range(1, 300, 13), FAR, *np.exp2(rng.uniform(8, 50, 10)).astype(np.int64).tolist()]:
            assert max(distances(plan, weights.tolist(), sample)) <= (num_corpora - 1).bit_length() / 2 + 2**-10


some_weights = st.lists(st.sampled_from([0.0, 1e-9, 0.1, 0.3, 1.0, 7.0]), min_size=5, max_size=5).filter(any)


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
