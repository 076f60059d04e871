"""Orders are shuffled as well as numpy's: every statistic of `shuffle`, over 64 seeds and more, at many lengths.

Seeds never change, so neither does the outcome, unless the order changes. The golden vectors would show that. So only
short orders are measured by default, and the rest in the soak. A uniform permutation fails one check with the chance
`scores.FALSE_ALARM`, by theory; no bound was chosen for what passes. The same checks are shown to catch bad orders.
`python -m benchmark.shuffle` measures more kinds of orders, and how windows shuffle a corpus sorted by topic.
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

from tests.examples import some
from tests.runtime import orders, shuffle
from tests.runtime.orders import BATCH, LARGER, SMALLER, order_of, orders_within
from tests.runtime.scores import OF_ONE, OF_TWO, Scores, failures, in_ranks, of_places, score_bound, scores, t_quantile
from tokshard.runtime.order.permutation import MAX_SORTED

NUM_SEEDS = 64
SEEDS, OTHER_SEEDS = range(NUM_SEEDS), range(10_000, 10_000 + NUM_SEEDS)

SMALL = [12, 17, 64, 100]
LARGE = [1_000, 4_095, 16_384]
HEAVY = [MAX_SORTED, MAX_SORTED + 1, 100_000, (1 << 17) + 1]


def seeds_for(length: int) -> range:
    """More where a single score is not normal, so that only means are tested."""
    return range(2 * NUM_SEEDS if length < shuffle.NORMAL_FROM else NUM_SEEDS)


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
        assert abs(shuffle.chi_square_score(chi_square, num_orders - 1)) < score_bound(1)


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


# two seeds, two epochs, two windows


@functools.cache
def numpy_pairs(length: int) -> dict[str, Scores]:
    both = ((orders.numpys(length, 2 * seed), orders.numpys(length, 2 * seed + 1)) for seed in OTHER_SEEDS)
    return scores(both, OF_TWO)


@some("length", [100, 16_384, MAX_SORTED + 1])
@pytest.mark.parametrize("other", [{"seed": 1}, {"epoch": 1}, {"window": 1}], ids=["seeds", "epochs", "windows"])
def test_the_orders_of_two_seeds_epochs_or_windows_are_unrelated(length: int, other: dict[str, int]) -> None:
    places = {key: value for key, value in other.items() if key != "seed"}
    both = (
        (orders.permuted(length, first), orders.permuted(length, first + other.get("seed", 0), **places))
        for first in range(0, 2 * NUM_SEEDS, 2)
    )
    assert not failures(scores(both, OF_TWO), numpy_pairs(length))


@pytest.mark.soak
def test_ranks_of_fms_fsdp_that_go_in_step_are_caught() -> None:
    both = ((orders.congruential(16_384, seed), orders.congruential(16_384, seed, rank=1)) for seed in SEEDS)
    assert "shifted correlation: worst" in " ".join(failures(scores(both, OF_TWO), numpy_pairs(16_384)))


# whole plans


@pytest.mark.soak
@pytest.mark.parametrize(("shelf", "size"), [(SMALLER, 4_096), (LARGER, 1_024)], ids=["one window", "windows"])
def test_the_samples_of_each_window_of_a_plan_are_a_uniform_permutation_in_every_epoch(shelf: Any, size: int) -> None:
    epochs = [order_of(part) for seed in SEEDS for part in np.split(shelf.rows(seed, epochs=2), 2)]
    assert not failures(scores(part for order in epochs for part in orders_within(order, size)), numpys(size))
    if shelf is SMALLER:  # and those of two epochs, two seeds and two ranks are unrelated
        others = [orders.numpys(size, seed) for seed in OTHER_SEEDS]
        for pairs in (zip(epochs[::2], epochs[1::2], strict=True), zip(epochs[::4], epochs[2::4], strict=True)):
            assert not failures(scores(pairs, OF_TWO), numpy_pairs(size))
        assert not failures(scores(epochs[::2], in_ranks(BATCH)), scores(others, in_ranks(BATCH)))


@pytest.mark.soak
def test_ranks_that_read_the_same_places_are_caught() -> None:
    pairs = np.stack([np.arange(2_048), np.arange(2_048) + 2_048], axis=1).reshape(-1, BATCH // 2, 2)
    found = scores([pairs.transpose(0, 2, 1).ravel() for _ in SEEDS], in_ranks(BATCH))
    assert failures(found, scores((orders.numpys(4_096, seed) for seed in OTHER_SEEDS), in_ranks(BATCH)))
