"""How well orders are shuffled: statistics of tokshard's, of numpy's and of known bad ones, in one table.

    python -m benchmark.shuffle [--seeds 64]

`tests/runtime/shuffle.py` says what each statistic is, `tests/runtime/orders.py` what each order is.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmark.processes import ROOT
from benchmark.report import commit, machine, versions
from tests.runtime import orders
from tests.runtime.orders import BATCH, LARGER, SMALLER, STEP, Shelf, order_of, places_of
from tests.runtime.scores import OF_ONE, OF_TWO, Scores, in_ranks, of_places, scores
from tests.runtime.shuffle import Order, topic_excess

FIRST_OF_NUMPY = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One kind of order.

    Args:
        order: of a seed.
    """

    name: str
    num_items: int
    order: Callable[[int], Order]

    def measure(self, num_seeds: int) -> dict[str, Scores]:
        """All statistics of orders; of two orders, those of neighbouring seeds."""
        pairs = ((self.order(2 * seed), self.order(2 * seed + 1)) for seed in range(num_seeds))
        return {
            **scores((self.order(seed) for seed in range(num_seeds)), {**OF_ONE, **in_ranks(BATCH)}),
            **{f"two seeds: {name}": found for name, found in scores(pairs, OF_TWO).items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanColumn:
    """What plans read.

    Args:
        rows: the samples of one epoch, of a seed.
    """

    name: str
    shelf: Shelf
    rows: Callable[[int], NDArray[np.int64]]

    @property
    def num_items(self) -> int:
        return self.shelf.num_samples

    def measure(self, num_seeds: int) -> dict[str, Scores]:
        every = [self.rows(seed) for seed in range(2 * num_seeds)]
        places = chain.from_iterable((places_of(rows, *span) for span in self.shelf.long_spans) for rows in every)
        found = Column(name=self.name, num_items=self.num_items, order=lambda seed: order_of(every[seed]))
        of_long = of_places(self.num_items, global_batch_size=STEP)
        return {**found.measure(num_seeds), **scores(places, of_long)}


def columns() -> Iterator[Column | PlanColumn]:
    def of(name: str, length: int, order: Callable[..., Order]) -> Column:
        return Column(name=name, num_items=length, order=partial(order, length))

    yield of("hash", 65_536, orders.permuted)
    yield of("cipher", 131_072, orders.permuted)
    yield of("cipher", 16_384, orders.enciphered)
    yield of("numpy", 65_536, lambda length, seed: orders.numpys(length, FIRST_OF_NUMPY + seed))
    yield of("4 rounds", 16_384, partial(orders.enciphered, num_rounds=4))
    yield of("fms-fsdp", 65_536, orders.congruential)
    for name, shelf in (("1 window", SMALLER), ("4 windows", LARGER)):
        yield PlanColumn(name=f"plan, {name}", shelf=shelf, rows=shelf.rows)
    yield PlanColumn(name="numpy, 4 windows", shelf=LARGER, rows=lambda seed: LARGER.numpys(FIRST_OF_NUMPY + seed))


def excess(column: Column | PlanColumn, num_seeds: int) -> float:
    """Chi-square of 16 topics in batches of `STEP`, as a multiple of what a uniform permutation has."""
    assert isinstance(column, PlanColumn)
    batches = column.num_items // STEP
    found = [topic_excess(order_of(column.rows(seed)), num_batches=batches, num_topics=16) for seed in range(num_seeds)]
    return float(np.mean(found))


def table(measured: list[tuple[Column | PlanColumn, dict[str, Scores]]]) -> Iterator[str]:
    """Markdown: worst abs(z), and mean z^2; in bold what is over its bound."""
    yield "| statistic | " + " | ".join(f"{column.name} {column.num_items:,}" for column, _ in measured) + " |"
    yield "|---" * (len(measured) + 1) + "|"
    names = list(dict.fromkeys(name for _, found in measured for name in found))
    for name in names:
        yield f"| {name} | " + " | ".join(_cell(found.get(name)) for _, found in measured) + " |"


def _cell(one: Scores | None) -> str:
    if one is None:
        return ""
    worst = f"{one.worst:.1f}" if one.worst < 100 else f"{one.worst:,.0f}"
    square = f"{one.mean_square:.2f}" if one.mean_square < 100 else f"{one.mean_square:,.0f}"
    return f"**{worst}** {square}" if one.worst > one.worst_allowed else f"{worst} {square}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=64, help="orders of each kind, 2 or more (default: %(default)s)")
    num_seeds = parser.parse_args().seeds
    here = machine()
    measured = [(column, column.measure(num_seeds)) for column in columns()]
    _say(*table(measured), "")
    plans = {column.name: excess(column, num_seeds) for column, _ in measured if isinstance(column, PlanColumn)}
    ratios = ", ".join(f"{name} {value:.3f}" for name, value in plans.items())
    _say(f"chi-square of topics per batch, over that of a uniform permutation: {ratios}", "")
    figures: list[dict[str, Any]] = [
        {
            "order": column.name,
            "num_items": column.num_items,
            "statistic": name,
            "worst": round(one.worst, 2),
            "worst_allowed": round(one.worst_allowed, 2),
            "mean_square": round(one.mean_square, 4),
        }
        for column, found in measured
        for name, one in found.items()
    ]
    line = {
        "benchmark": "shuffle",
        "commit": commit(ROOT),
        "versions": versions(("tokshard", "numpy")),
        "machine": here,
        "seeds": num_seeds,
        "topic_excess": {name: round(value, 4) for name, value in plans.items()},
        "figures": figures,
    }
    _say(json.dumps(line))


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
