"""The statistics of `shuffle` over many orders, and whether a uniform permutation would have them.

References:
    Freeman and Tukey, Annals of Mathematical Statistics 21 (1950): Poisson as a normal score. Fisher and Cornish,
    Technometrics 2 (1960): quantiles of Student's t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from tests.runtime import shuffle
from tests.runtime.shuffle import Floats

FALSE_ALARM = 1e-6
"""Chance that a uniform permutation fails one check. The suite makes several hundred, on seeds that never change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """What is measured.

    Args:
        measure: z-scores of an order or of two, or a count if there are `moments`.
        moments: mean and variance of a count.
    """

    measure: Callable[..., Floats]
    moments: Callable[[int], tuple[float, float]] | None = None


OF_ONE: Mapping[str, Statistic] = {
    "serial correlation": Statistic(measure=shuffle.serial_correlation),
    "flipped bits": Statistic(measure=shuffle.flipped_bits),
    "input bits": Statistic(measure=shuffle.input_bits),
    "parity": Statistic(measure=shuffle.parity),
    "distances": Statistic(measure=shuffle.distances),
    "neighbours": Statistic(measure=shuffle.neighbours, moments=shuffle.neighbour_moments),
    "fixed points": Statistic(measure=shuffle.fixed_points, moments=shuffle.fixed_point_moments),
    "displacement": Statistic(measure=shuffle.displacement),
    "topic mix": Statistic(measure=shuffle.topic_mix),
}

OF_TWO: Mapping[str, Statistic] = {
    "rank correlation": Statistic(measure=shuffle.rank_correlation),
    "equal positions": Statistic(measure=shuffle.equal_positions, moments=shuffle.fixed_point_moments),
    "offsets": Statistic(measure=shuffle.offsets),
    "shifted correlation": Statistic(measure=shuffle.shifted_correlation),
}


def in_ranks(global_batch_size: int) -> dict[str, Statistic]:
    """Of one order that two ranks share."""
    return {"two ranks in step": Statistic(measure=partial(shuffle.ranks_in_step, global_batch_size=global_batch_size))}


def of_places(num_items: int, *, global_batch_size: int) -> dict[str, Statistic]:
    """Of the ascending places of one long document."""
    measures: dict[str, Callable[..., Floats]] = {
        "long document: together": shuffle.together,
        "long document: span": shuffle.span,
        "long document: mean place": shuffle.mean_place,
        "long document: touched steps": partial(shuffle.touched_steps, global_batch_size=global_batch_size),
    }
    return {name: Statistic(measure=partial(measure, num_items=num_items)) for name, measure in measures.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """One statistic of many orders.

    Args:
        values: z-scores [orders, k].
        num_items: of each order.
        total, expected: of a count, over all orders; else None.
    """

    values: Floats
    num_items: int
    total: float | None = None
    expected: float = 0.0

    @property
    def worst(self) -> float:
        """The greatest abs(z); of a count, whose orders are pooled because few say little, that of the total."""
        if self.total is None:
            return float(np.abs(self.values).max())
        return abs(sqrt(self.total) + sqrt(self.total + 1) - sqrt(4 * self.expected + 1))

    @property
    def worst_allowed(self) -> float:
        """Bonferroni: what the worst of so many independent normal scores exceeds with the chance `FALSE_ALARM`."""
        num_scores = 1 if self.total is not None else self.values.size
        return score_bound(num_scores)

    @property
    def squares(self) -> Floats:
        """Mean z^2 of each order: these are independent of each other, what they are means of need not be."""
        return np.asarray((self.values**2).mean(axis=1))

    @property
    def mean_square(self) -> float:
        """1 for a uniform permutation: more is bunched, less is too even."""
        return float(self.squares.mean())


def scores(orders: Iterable[Any], statistics: Mapping[str, Statistic] = OF_ONE, **options: Any) -> dict[str, Scores]:
    """Each statistic of each order, or of each tuple of orders, made one at a time."""
    found: dict[str, list[Floats]] = {name: [] for name in statistics}
    num_items = 0
    for order in orders:
        one_or_two = order if isinstance(order, tuple) else (order,)
        num_items = len(one_or_two[0])
        for name, statistic in statistics.items():
            found[name].append(statistic.measure(*one_or_two, **options))
    result = {}
    for name, statistic in statistics.items():
        values = np.stack(found[name])
        if not values.size:
            continue
        if statistic.moments is None:
            result[name] = Scores(values=values, num_items=num_items)
        else:
            mean, variance = statistic.moments(num_items)
            result[name] = Scores(
                values=(values - mean) / sqrt(variance),
                num_items=num_items,
                total=float(values.sum()),
                expected=mean * len(values),
            )
    return result


def failures(found: Mapping[str, Scores], reference: Mapping[str, Scores]) -> list[str]:
    """What a uniform permutation would not do, each with the chance `FALSE_ALARM`; empty if all is well.

    Two checks of each statistic. From `NORMAL_FROM` items the worst score stays under its Bonferroni bound. And the
    mean square is 1: as many orders as there are, times it, is nearly chi-square, with as many degrees of freedom as
    fit the spread of the mean square over the orders of `reference`, which are numpy's.
    """
    failed = []
    for name, one in found.items():
        if one.num_items >= shuffle.NORMAL_FROM and not one.worst <= one.worst_allowed:
            failed.append(f"{name}: worst abs(z) is {one.worst:.1f}, at most {one.worst_allowed:.1f} expected")
        score, allowed = _mean_square_score(one, reference[name])
        if not abs(score) <= allowed:
            failed.append(f"{name}: mean z^2 is {one.mean_square:.3f}, {score:.1f} deviations from 1")
    return failed


def differences(found: Mapping[str, Scores], reference: Mapping[str, Scores]) -> list[str]:
    """Where two sets of orders differ although they should be of one kind: Welch's t of z and of z^2, per statistic.

    For orders that no formula describes: shuffled within windows. The chance of an alarm is `FALSE_ALARM` each.
    """
    failed = []
    for name, one in found.items():
        other = reference[name]
        for what, left, right in (
            ("z", one.values.mean(axis=1), other.values.mean(axis=1)),
            ("z^2", one.squares, other.squares),
        ):
            spread = sqrt(left.var(ddof=1) / len(left) + right.var(ddof=1) / len(right))
            score = float(left.mean() - right.mean()) / spread
            if not abs(score) <= t_quantile(min(len(left), len(right)) - 1):
                failed.append(f"{name}: mean {what} is {left.mean():.3f}, of numpy's {right.mean():.3f}: {score:.1f}")
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
    return shuffle.chi_square_score(one.mean_square * freedom, freedom), t_quantile(len(reference.squares) - 1)
