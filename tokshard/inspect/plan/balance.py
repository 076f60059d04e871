"""How even the work of the ranks is in a step, with rows as they come and dealt by their cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.inspect.plan.run import Run

_MAX_STEPS, _MAX_ROWS = 32, 16_384
"""The most steps that are looked at, and the most rows: each row takes some microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The work of the slowest rank in a step, divided by the mean over all ranks, in the next steps of a run.

    Args:
        num_ranks, rows_per_rank: data-parallel ranks, and the rows of a step on each.
        num_steps: steps that were looked at.
        in_order, by_cost: of attention alone, as each ``deal`` of a loader has it.
        saved: the part of a step's time that ``deal="cost"`` saves in a model of the given shape, if time goes by
            arithmetic alone; None if no shape is given.
    """

    num_ranks: int
    rows_per_rank: int
    num_steps: int
    in_order: float
    by_cost: float
    saved: float | None


def balance_of(run: Run, *, hidden: int | None = None, layers: int | None = None) -> Balance:
    """Look at the next steps of a run that have one size, on its ranks. Reads the ends of documents, but no tokens.

    Args:
        hidden, layers: the shape of a decoder. A layer multiplies each token by about 12 * hidden**2 weights, and
            attention takes 2 * hidden operations for each pair of tokens of a piece in order: so a row costs
            ``12 * hidden * seq_len``, the sum of the squares of its pieces, and ``vocabulary / layers`` a token for the
            weights of the head, all in the same unit.

    Raises:
        UsageError: the pass is over, or only one of `hidden` and `layers` is given.
        PlanError: the loader would refuse the ranks.
        CorpusError: a shard is missing, or differs from its manifest.
    """
    if (hidden is None) != (layers is None):
        raise UsageError(
            "the shape of a model needs --hidden and --layers, and one is missing", hint="give both, or neither"
        )
    plan, step = run.plan, 1 + (run.step or 0)
    size = run.size_of(step)
    ranks = replace(run.ranks(size, rank=0), deal="cost")
    rows = ranks.rows_per_rank
    num_steps = max(1, min(_MAX_STEPS, _MAX_ROWS // (rows * run.world_size)))
    starts = np.arange(run.cursor.sample, run.cursor.sample + num_steps * size, size)
    alike = [run.size_of(step + n) == size and run.stop.has_step(start) for n, start in enumerate(starts.tolist())]
    starts = starts[: [*alike, False].index(False)]
    if not len(starts):
        raise UsageError("the pass is over, so no step is left to look at", hint="leave out --checkpoint")
    samples = ranks.samples(starts, run.stop.sample, num_ranks=run.world_size)
    squares = plan.lay_out(run.cursor, samples).costs()

    def slowest(deal_of: NDArray[np.int64], costs: NDArray[np.float64]) -> tuple[float, float]:
        """The cost of the slowest rank over the mean, averaged over steps; and its sum."""
        sums = costs[deal_of].sum(axis=1).reshape(len(starts), run.world_size)
        return float((sums.max(axis=1) / sums.mean(axis=1)).mean()), float(sums.max(axis=1).sum())

    in_order, by_cost = replace(ranks, deal="order").dealt(squares), ranks.dealt(squares)
    saved = None
    if hidden is not None and layers is not None:
        vocab_size = next(iter(run.corpora.values())).vocab_size
        costs = squares.astype(np.float64) + plan.seq_len * (12 * hidden + vocab_size / layers)
        saved = 1 - slowest(by_cost, costs)[1] / slowest(in_order, costs)[1]
    return Balance(
        num_ranks=run.world_size,
        rows_per_rank=rows,
        num_steps=len(starts),
        in_order=slowest(in_order, squares.astype(np.float64))[0],
        by_cost=slowest(by_cost, squares.astype(np.float64))[0],
        saved=saved,
    )
