"""Orders are shuffled as well as numpy's: every statistic of `shuffle`, over 64 seeds and more, at many lengths.

Seeds never change, so neither does the outcome, unless the order changes. The golden vectors would show that. So only
short orders are measured by default, and the rest in the soak. A uniform permutation fails one check with the chance
`scores.FALSE_ALARM`, by theory; no bound was chosen for what passes. The same checks are shown to catch bad orders.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.examples import some
from tests.runtime import orders, shuffle
from tests.runtime.orders import BATCH, LARGER, SMALLER, STEP, Shelf, order_of, orders_within, places_of
from tests.runtime.scores import (
    OF_ONE,
    OF_TWO,
    Scores,
    Statistic,
    differences,
    failures,
    in_ranks,
    of_places,
    score_bound,
    scores,
    t_quantile,
)
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


def test_every_statistic_has_mean_0_and_mean_square_1_over_all_orders() -> None:
    every = [np.array(order) for order in itertools.permutations(range(6))]
    found = scores(every)
    assert found.keys() == OF_ONE.keys() - {"distances", "topic mix"}  # which are of more items
    against_first = scores(((every[77], order) for order in every), _without_bins(OF_TWO))
    for one in (*found.values(), *scores(every, in_ranks(2)).values(), *against_first.values()):
        assert np.allclose(one.values.mean(axis=0), 0, atol=1e-9)
        assert np.allclose((one.values**2).mean(axis=0), 1)


def test_every_statistic_of_places_has_mean_0_and_mean_square_1_over_all_sets_of_places() -> None:
    every = [np.array(places) for places in itertools.combinations(range(12), 5)]
    for one in scores(every, of_places(12, global_batch_size=2)).values():
        assert one.values.mean() == pytest.approx(0, abs=1e-9)
        assert one.mean_square == pytest.approx(1)


def _without_bins(statistics: Mapping[str, Statistic]) -> dict[str, Statistic]:
    return {name: statistic for name, statistic in statistics.items() if name != "offsets"}


@pytest.mark.parametrize("name", ["distances", "topic mix", "offsets"])
def test_chi_squares_have_mean_0_and_mean_square_1_over_numpys_orders(name: str) -> None:
    statistics = {**OF_ONE, **OF_TWO}
    many = [orders.numpys(1_000, seed) for seed in range(600)]
    of_two = zip(many[::2], many[1::2], strict=True)
    one = scores(of_two if name in OF_TWO else many, {name: statistics[name]})[name]
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
def test_every_item_of_a_small_set_is_as_often_at_any_position() -> None:
    worst = max(
        abs(shuffle.items_at_positions([orders.permuted(length, seed) for seed in range(100)]))
        for length in range(6, 65)
    )
    assert worst < score_bound(59)


@pytest.mark.slow
@some("length", [*SMALL, *LARGE], default=len(SMALL))
def test_sorted_hashes_are_a_uniform_permutation(length: int) -> None:
    assert not check(orders.permuted, length)


@pytest.mark.slow
@some("length", [*SMALL, *LARGE], default=len(SMALL))
def test_the_cipher_is_a_uniform_permutation_even_where_hashes_are_sorted_instead(length: int) -> None:
    assert not check(orders.enciphered, length)


@pytest.mark.soak
@pytest.mark.parametrize("length", HEAVY)
def test_a_long_permutation_is_uniform_on_both_sides_of_the_longest_that_is_sorted(length: int) -> None:
    assert not check(orders.permuted, length)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_permutation_of_a_million_items_is_uniform() -> None:
    found = scores(orders.permuted(1 << 20, seed) for seed in range(60))
    # z^2 spreads a little less over longer orders, which have more lags and bits, than in this reference
    assert not failures(found, numpys(HEAVY[-1]))


@pytest.mark.parametrize("length", [70_001, 1 << 17])
def test_the_cipher_that_is_measured_is_the_permutation_of_long_sets(length: int) -> None:
    assert np.array_equal(orders.enciphered(length, 5), orders.permuted(length, 5))


@some("length", [1_000, 16_384])
def test_numpys_permutation_passes_the_same_checks(length: int) -> None:
    assert not check(orders.numpys, length)


# what the checks catch


@some("length", [1_000, 16_384])
def test_the_identity_is_caught_by_every_statistic(length: int) -> None:
    caught = " ".join(check(orders.identity, length))
    assert all(f"{name}: " in caught for name in OF_ONE)


@pytest.mark.soak
def test_the_generator_of_fms_fsdp_is_caught() -> None:
    found = scores(orders.congruential(16_384, seed) for seed in SEEDS)
    caught = " ".join(failures(found, numpys(16_384)))
    for name in ("serial correlation", "flipped bits", "parity", "distances"):
        assert f"{name}: worst" in caught
    # parity alternates: every pair of neighbours differs, 128 deviations
    assert found["parity"].worst == pytest.approx(128, abs=1)


@pytest.mark.parametrize("length", [64, 1_000])
def test_the_generator_of_fms_fsdp_is_caught_in_small_sets(length: int) -> None:
    assert any("flipped bits" in failure for failure in check(orders.congruential, length))


@pytest.mark.soak
def test_four_rounds_of_the_cipher_are_caught() -> None:
    found = scores(orders.enciphered(16_384, seed, num_rounds=4) for seed in SEEDS)
    caught = " ".join(failures(found, numpys(16_384)))
    assert "serial correlation: worst" in caught
    assert "flipped bits: worst" in caught


# two seeds, two epochs, two windows


def pairs(length: int, *, seed: int = 0, epoch: int = 0, window: int = 0) -> dict[str, Scores]:
    """Orders whose keys differ by so much."""
    both = (
        (orders.permuted(length, first), orders.permuted(length, first + seed, epoch=epoch, window=window))
        for first in range(0, 2 * NUM_SEEDS, 2)
    )
    return scores(both, OF_TWO)


@functools.cache
def numpy_pairs(length: int) -> dict[str, Scores]:
    both = ((orders.numpys(length, 2 * seed), orders.numpys(length, 2 * seed + 1)) for seed in OTHER_SEEDS)
    return scores(both, OF_TWO)


@some("length", [100, 16_384, MAX_SORTED + 1])
@pytest.mark.parametrize("other", [{"seed": 1}, {"epoch": 1}, {"window": 1}], ids=["seeds", "epochs", "windows"])
def test_the_orders_of_two_seeds_epochs_or_windows_are_unrelated(length: int, other: dict[str, int]) -> None:
    assert not failures(pairs(length, **other), numpy_pairs(length))


@pytest.mark.soak
def test_ranks_of_fms_fsdp_that_go_in_step_are_caught() -> None:
    both = ((orders.congruential(16_384, seed), orders.congruential(16_384, seed, rank=1)) for seed in SEEDS)
    caught = " ".join(failures(scores(both, OF_TWO), numpy_pairs(16_384)))
    assert "shifted correlation: worst" in caught
    assert "equal positions: worst" in caught


# whole plans over a corpus sorted by topic


@functools.cache
def plan_rows(shelf: Shelf) -> list[NDArray[np.int64]]:
    """Two epochs for each seed, as two ranks read them."""
    return [shelf.rows(seed, epochs=2, global_batch_size=BATCH) for seed in SEEDS]


def epoch_rows(shelf: Shelf) -> list[NDArray[np.int64]]:
    return [rows[: shelf.num_samples] for rows in plan_rows(shelf)]


@functools.cache
def numpy_rows(shelf: Shelf, **options: bool) -> list[NDArray[np.int64]]:
    return [shelf.numpys(seed, **options) for seed in OTHER_SEEDS]


IN_RANKS = in_ranks(BATCH)


def long_scores(shelf: Shelf, many: list[NDArray[np.int64]]) -> dict[str, Scores]:
    """How the samples that read a long document are spread over the steps."""
    places = (places_of(rows, *span) for rows in many for span in shelf.long_spans)
    return scores(places, of_places(shelf.num_samples, global_batch_size=STEP))


@pytest.mark.soak
def test_what_a_plan_reads_is_its_samples_in_order() -> None:
    plan, rows = LARGER.plan(0, epochs=2), plan_rows(LARGER)[0]
    for sample in (0, 1, 127, 128, 1_023, 1_024, 4_095, 4_096, 8_191):
        assert plan.sample(sample)["input_ids"].tolist() == rows[sample].tolist()


@pytest.mark.soak
def test_a_corpus_of_one_window_is_a_uniform_permutation_of_its_samples() -> None:
    found = scores(order_of(rows) for rows in epoch_rows(SMALLER))
    assert not failures(found, numpys(4_096))


@pytest.mark.soak
def test_the_samples_of_each_window_are_a_uniform_permutation() -> None:
    found = scores(part for rows in epoch_rows(LARGER) for part in orders_within(order_of(rows), 1_024))
    assert not failures(found, numpys(1_024))


@pytest.mark.soak
def test_windows_are_shuffled_as_well_as_numpy_shuffles_windows() -> None:
    found = scores(order_of(rows) for rows in epoch_rows(LARGER))
    assert not differences(found, scores(order_of(rows) for rows in numpy_rows(LARGER)))


@pytest.mark.soak
@pytest.mark.parametrize("shelf", [SMALLER, LARGER], ids=["one window", "windows"])
def test_two_epochs_of_a_plan_are_unrelated(shelf: Shelf) -> None:
    size = shelf.num_samples
    both = ((order_of(rows[:size]), order_of(rows[size:])) for rows in plan_rows(shelf))
    others = itertools.pairwise(order_of(rows) for rows in numpy_rows(shelf))
    found, reference = scores(both, OF_TWO), scores(others, OF_TWO)
    assert not differences(found, reference)
    if shelf is SMALLER:
        assert not failures(found, reference)


@pytest.mark.soak
@pytest.mark.parametrize("shelf", [SMALLER, LARGER], ids=["one window", "windows"])
def test_two_seeds_of_a_plan_are_unrelated(shelf: Shelf) -> None:
    many = [order_of(rows) for rows in epoch_rows(shelf)]
    others = [order_of(rows) for rows in numpy_rows(shelf)]
    found, reference = (scores(zip(some[::2], some[1::2], strict=True), OF_TWO) for some in (many, others))
    assert not differences(found, reference)
    if shelf is SMALLER:
        assert not failures(found, reference)


@pytest.mark.soak
def test_two_ranks_read_unrelated_places_in_the_same_step() -> None:
    found = scores((order_of(rows) for rows in epoch_rows(SMALLER)), IN_RANKS)
    assert not failures(found, scores((orders.numpys(4_096, seed) for seed in OTHER_SEEDS), IN_RANKS))
    found = scores((order_of(rows) for rows in epoch_rows(LARGER)), IN_RANKS)
    assert not differences(found, scores((order_of(rows) for rows in numpy_rows(LARGER)), IN_RANKS))


@pytest.mark.soak
def test_ranks_that_read_the_same_places_are_caught() -> None:
    order = (
        np.stack([np.arange(2_048), np.arange(2_048) + 2_048], axis=1)
        .reshape(-1, BATCH // 2, 2)
        .transpose(0, 2, 1)
        .ravel()
    )
    found = scores([order.copy() for _ in SEEDS], IN_RANKS)
    assert failures(found, scores((orders.numpys(4_096, seed) for seed in OTHER_SEEDS), IN_RANKS))


@pytest.mark.soak
def test_topics_are_mixed_in_batches_as_without_windows_if_there_is_one_and_as_numpy_mixes_windows() -> None:
    def excess(many: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        return np.array([shuffle.topic_excess(order_of(rows), num_batches=32, num_topics=16) for rows in many])

    def deviation(found: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
        spread = (found.var(ddof=1) + reference.var(ddof=1)) / NUM_SEEDS
        return float(abs(found.mean() - reference.mean()) / spread**0.5)

    for shelf in (SMALLER, LARGER):
        found = excess(epoch_rows(shelf))
        assert deviation(found, excess(numpy_rows(shelf))) < t_quantile(NUM_SEEDS - 1)
        if shelf is SMALLER:
            assert deviation(found, np.ones(NUM_SEEDS)) < t_quantile(NUM_SEEDS - 1)


@pytest.mark.soak
def test_the_pieces_of_a_long_document_are_spread_over_the_steps() -> None:
    one_window = long_scores(SMALLER, epoch_rows(SMALLER))
    assert not differences(one_window, long_scores(SMALLER, numpy_rows(SMALLER)))
    for found in one_window.values():
        assert abs(float(found.values.sum()) / len(found.values) ** 0.5) < score_bound(1)
    assert not differences(long_scores(LARGER, epoch_rows(LARGER)), long_scores(LARGER, numpy_rows(LARGER)))


@pytest.mark.soak
def test_samples_that_are_not_shuffled_leave_a_long_document_together_and_are_caught() -> None:
    unshuffled = long_scores(SMALLER, numpy_rows(SMALLER, are_samples_shuffled=False))
    caught = " ".join(differences(unshuffled, long_scores(SMALLER, numpy_rows(SMALLER))))
    assert "together: mean z is" in caught
    assert "touched steps: mean z is" in caught
