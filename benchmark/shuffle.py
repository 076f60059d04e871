"""How well orders are shuffled: statistics of tokshard's, of numpy's and of known bad ones, in one table.

    python -m benchmark.shuffle [--seeds 64]

`statistic.py` says what each statistic is, `orders.py` what each order is. Whole plans read a corpus sorted by topic.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmark import orders
from benchmark.processes import ROOT
from benchmark.report import commit, machine, versions
from benchmark.scores import OF_ONE, OF_TWO, Scores, in_ranks, of_places, scores
from benchmark.statistic import Order, ranked, topic_excess
from tests.runtime.sources import ListSource
from tokshard.runtime import NumpyLoader, StreamPlan


class SortedSource(ListSource):
    """A corpus sorted by topic: the id of a token is its position, delimiters included."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.tokens = np.arange(len(self.tokens), dtype=np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """A corpus and the sizes of a plan; blocks, windows and the corpus are whole samples.

    Args:
        lengths: tokens of each document.
        long_documents: the numbers of those that are longer than a block.
    """

    lengths: tuple[int, ...]
    long_documents: tuple[int, ...]
    seq_len: int
    block_tokens: int
    window_blocks: int

    @property
    def num_samples(self) -> int:
        return sum(self.lengths) // self.seq_len

    @property
    def long_spans(self) -> list[tuple[int, int]]:
        """Where the long documents are in the corpus."""
        stops = np.cumsum(self.lengths).tolist()
        return [(stops[number] - self.lengths[number], stops[number]) for number in self.long_documents]

    def rows(self, seed: int, *, epochs: int = 1) -> NDArray[np.int64]:
        """Positions of the tokens of every sample: int64 [samples, seq_len]."""
        sizes = {"seq_len": self.seq_len, "block_tokens": self.block_tokens, "window_blocks": self.window_blocks}
        plan = StreamPlan(SortedSource(self.lengths), seed=seed, epochs=epochs, **sizes)
        with NumpyLoader(plan, global_batch_size=BATCH) as loader:
            return np.concatenate([batch["input_ids"] for batch in loader])

    def numpys(self, seed: int) -> NDArray[np.int64]:
        """The same of one epoch of a plan whose permutations are numpy's."""
        random = np.random.default_rng(seed)
        total, block = sum(self.lengths), self.block_tokens
        starts = np.union1d(np.cumsum((0, *self.lengths[:-1])), np.arange(0, total, block))
        lengths = np.diff(starts, append=total)
        window = np.empty(total // block, np.int64)
        window[random.permutation(len(window))] = np.arange(len(window)) // self.window_blocks
        window_of_piece = window[starts // block]
        found = []
        for number in range(int(window.max()) + 1):
            pieces = random.permutation(np.flatnonzero(window_of_piece == number))
            size = lengths[pieces]
            tokens = np.arange(size.sum()) + np.repeat(starts[pieces] - (np.cumsum(size) - size), size)
            found.append(random.permutation(tokens.reshape(-1, self.seq_len)))
        return np.concatenate(found)


BATCH, STEP = 512, 128
"""Samples are read in large batches, which is faster, and counted in smaller steps: the order is the same for both."""

_LONG = (300, 700)


def _lengths() -> tuple[int, ...]:
    """Documents of 1 to 31 tokens, and two of 256: 4,096 samples of 4."""
    lengths = np.random.default_rng(3).integers(1, 32, size=1_100)
    lengths[list(_LONG)] = 256
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), 4 * 4_096))]
    return (*lengths.tolist(), 4 * 4_096 - int(lengths.sum()))


SMALLER = Shelf(lengths=_lengths(), long_documents=_LONG, seq_len=4, block_tokens=64, window_blocks=1_000)
"""A corpus of one window."""

LARGER = Shelf(lengths=_lengths(), long_documents=_LONG, seq_len=4, block_tokens=64, window_blocks=64)
"""Four windows of 64 blocks, 1,024 samples each."""


def order_of(rows: NDArray[Any]) -> Order:
    """Samples in the order of the corpus, each known by its first token."""
    return ranked(rows[:, 0])


def places_of(rows: NDArray[Any], start: int, stop: int) -> NDArray[np.int64]:
    """The samples that read some of the tokens ``[start, stop)`` of the corpus."""
    return np.flatnonzero(((rows >= start) & (rows < stop)).any(axis=1))


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
