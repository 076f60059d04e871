"""The statistics of `shuffle` over many orders, and whether a uniform permutation would have them.

References:
    Fisher and Cornish, Technometrics 2 (1960): quantiles of Student's t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmark import statistic
from benchmark.statistic import Floats

FALSE_ALARM = 1e-6
"""Chance that a uniform permutation fails one check. The suite makes several hundred, on seeds that never change."""


Statistics = Mapping[str, Callable[..., Floats]]
"""What is measured: z-scores of an order, of two, or of the places of a document."""

OF_ONE: Statistics = {
    "serial correlation": statistic.serial_correlation,
    "flipped bits": statistic.flipped_bits,
    "distances": statistic.distances,
    "topic mix": statistic.topic_mix,
}

OF_TWO: Statistics = {"shifted correlation": statistic.shifted_correlation}


def in_ranks(global_batch_size: int) -> Statistics:
    """Of one order that two ranks share."""
    return {"two ranks in step": partial(statistic.ranks_in_step, global_batch_size=global_batch_size)}


def of_places(num_items: int, *, global_batch_size: int) -> Statistics:
    """Of the ascending places of one long document."""
    return {
        "long document: together": partial(statistic.together, num_items=num_items),
        "long document: touched steps": partial(
            statistic.touched_steps, num_items=num_items, global_batch_size=global_batch_size
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """One statistic of many orders.

    Args:
        values: z-scores [orders, k].
        num_items: of each order.
    """

    values: Floats
    num_items: int

    @property
    def worst(self) -> float:
        """The greatest abs(z)."""
        return float(np.abs(self.values).max())

    @property
    def worst_allowed(self) -> float:
        """Bonferroni: what the worst of so many independent normal scores exceeds with the chance `FALSE_ALARM`."""
        return score_bound(self.values.size)

    @property
    def squares(self) -> Floats:
        """Mean z^2 of each order: these are independent of each other, what they are means of need not be."""
        return np.asarray((self.values**2).mean(axis=1))

    @property
    def mean_square(self) -> float:
        """1 for a uniform permutation: more is bunched, less is too even."""
        return float(self.squares.mean())


def scores(orders: Iterable[Any], statistics: Statistics = OF_ONE) -> dict[str, Scores]:
    """Each statistic of each order, or of each tuple of orders, made one at a time."""
    found: dict[str, list[Floats]] = {name: [] for name in statistics}
    num_items = 0
    for order in orders:
        one_or_two = order if isinstance(order, tuple) else (order,)
        num_items = len(one_or_two[0])
        for name, measure in statistics.items():
            found[name].append(measure(*one_or_two))
    stacked = {name: np.stack(values) for name, values in found.items()}
    return {name: Scores(values=values, num_items=num_items) for name, values in stacked.items() if values.size}


def failures(found: Mapping[str, Scores], reference: Mapping[str, Scores]) -> list[str]:
    """What a uniform permutation would not do, each with the chance `FALSE_ALARM`; empty if all is well.

    Two checks of each statistic. From `NORMAL_FROM` items the worst score stays under its Bonferroni bound. And the
    mean square is 1: as many orders as there are, times it, is nearly chi-square, with as many degrees of freedom as
    fit the spread of the mean square over the orders of `reference`, which are numpy's.
    """
    failed = []
    for name, one in found.items():
        if one.num_items >= statistic.NORMAL_FROM and not one.worst <= one.worst_allowed:
            failed.append(f"{name}: worst abs(z) is {one.worst:.1f}, at most {one.worst_allowed:.1f} expected")
        score, allowed = _mean_square_score(one, reference[name])
        if not abs(score) <= allowed:
            failed.append(f"{name}: mean z^2 is {one.mean_square:.3f}, {score:.1f} deviations from 1")
    return failed


def score_bound(num_scores: int) -> float:
    """What the worst of so many independent abs(z) exceeds with the chance `FALSE_ALARM`."""
    return -NormalDist().inv_cdf(FALSE_ALARM / (2 * num_scores))


def t_quantile(freedom: int) -> float:
    """What abs(t) exceeds with the chance `FALSE_ALARM`."""
    z = -NormalDist().inv_cdf(FALSE_ALARM / 2)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def _mean_square_score(one: Scores, reference: Scores) -> tuple[float, float]:
    freedom = 2 * len(one.squares) / max(float(reference.squares.var(ddof=1)), 1e-9)
    return statistic.chi_square_score(one.mean_square * freedom, freedom), t_quantile(len(reference.squares) - 1)
