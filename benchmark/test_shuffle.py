"""Orders are shuffled as well as numpy's: every statistic of `statistic.py`, over 64 seeds and more, at many lengths.

Seeds never change, so neither does the outcome, unless the order changes. The golden vectors would show that. So only
short orders are measured by default, and the rest in the soak. A uniform permutation fails one check with the chance
`scores.FALSE_ALARM`, by theory; no bound was chosen for what passes. The same checks are shown to catch bad orders.
`python -m benchmark.shuffle` measures more kinds of orders, whole plans and ranks among them, and how windows shuffle a
corpus sorted by topic. Whole plans need no check here: test_page_model.py compares each of their samples with the page.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmark import orders, statistic
from benchmark.scores import OF_ONE, OF_TWO, Scores, failures, in_ranks, of_places, score_bound, scores, t_quantile
from tests.examples import some
from tokshard.runtime.order.permutation import MAX_SORTED

NUM_SEEDS = 64

SMALL = [12, 17, 64, 100]
LARGE = [1_000, 4_095, 16_384]
HEAVY = [MAX_SORTED, MAX_SORTED + 1, 100_000, (1 << 17) + 1]


def seeds_for(length: int) -> range:
    """More where a single score is not normal, so that only means are tested."""
    return range(2 * NUM_SEEDS if length < statistic.NORMAL_FROM else NUM_SEEDS)


@functools.cache
def numpys(length: int) -> dict[str, Scores]:
    return scores(orders.numpys(length, 10_000 + seed) for seed in seeds_for(length))


def check(order: Callable[[int, int], NDArray[np.int64]], length: int) -> list[str]:
    return failures(scores(order(length, seed) for seed in seeds_for(length)), numpys(length))


# the formulas


def test_every_statistic_has_mean_0_and_mean_square_1_over_all_orders_or_sets_of_places() -> None:
    every = [np.array(order) for order in itertools.permutations(range(6))]
    places = [np.array(places) for places in itertools.combinations(range(12), 5)]
    for found in (
        scores(every),
        scores(every, in_ranks(2)),
        scores(((every[77], order) for order in every), OF_TWO),
        scores(places, of_places(12, global_batch_size=2)),
    ):
        for one in found.values():  # but those that bins are for, which are of more items
            assert np.allclose(one.values.mean(axis=0), 0, atol=1e-9)
            assert np.allclose((one.values**2).mean(axis=0), 1)


@pytest.mark.parametrize("name", ["distances", "topic mix"])
def test_chi_squares_have_mean_0_and_mean_square_1_over_numpys_orders(name: str) -> None:
    one = scores((orders.numpys(1_000, seed) for seed in range(600)), {name: OF_ONE[name]})[name]
    for values in (one.values.mean(axis=1), one.squares - 1):
        assert abs(values.mean()) / values.std(ddof=1) * len(values) ** 0.5 < t_quantile(len(values) - 1)


# the permutation alone


def test_every_order_of_a_tiny_set_is_as_frequent_as_any_other() -> None:
    for length, num_orders in ((2, 2), (3, 6), (4, 24), (5, 120)):
        num_seeds = 30 * num_orders
        counts = Counter(tuple(orders.permuted(length, seed).tolist()) for seed in range(num_seeds))
        assert set(counts) == set(itertools.permutations(range(length)))
        chi_square = sum((count - 30) ** 2 / 30 for count in counts.values())
        assert abs(statistic.chi_square_score(chi_square, num_orders - 1)) < score_bound(1)


@pytest.mark.slow
@some(
    "order, length",
    [
        *((order, length) for length in SMALL for order in (orders.permuted, orders.enciphered)),
        *((order, length) for length in LARGE for order in (orders.permuted, orders.enciphered, orders.numpys)),
        *((orders.permuted, length) for length in HEAVY),
    ],
    default=2 * len(SMALL),
)
def test_sorted_hashes_and_the_cipher_are_uniform_permutations_as_numpys_is(order: Any, length: int) -> None:
    assert not check(order, length)


@pytest.mark.parametrize("length", [70_001, 1 << 17])
def test_the_cipher_that_is_measured_is_the_permutation_of_long_sets(length: int) -> None:
    assert np.array_equal(orders.enciphered(length, 5), orders.permuted(length, 5))


@some(
    "order, length, statistics",
    [
        (orders.identity, 1_000, list(OF_ONE)),
        (orders.congruential, 64, ["flipped bits"]),  # of fms-fsdp
        (orders.congruential, 1_000, ["flipped bits"]),
        (orders.congruential, 16_384, ["serial correlation", "flipped bits", "distances"]),
        (functools.partial(orders.enciphered, num_rounds=4), 16_384, ["serial correlation", "flipped bits"]),
    ],
    default=3,
)
def test_bad_orders_are_caught(order: Any, length: int, statistics: list[str]) -> None:
    caught = " ".join(check(order, length))
    assert all(f"{name}: " in caught for name in statistics)
