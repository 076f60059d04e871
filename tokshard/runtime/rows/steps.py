"""The rows of a step for each data-parallel rank, and the number of steps in a layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError
from tokshard.numbers import ceil_div
from tokshard.runtime.options import integer
from tokshard.runtime.order.permutation import GOLDEN, mixed
from tokshard.runtime.order.windows import CorpusOrder
from tokshard.runtime.rows.narrow import PADDING_INDEX

_LAYOUT_PIECES = 16_384
_ROWS_PER_CORPUS = 24
"""A layout has at least this many rows per corpus and stream, which share the cost of its calls."""

_MAX_LAYOUT_PIECES = 65_536
"""A layout has no more pieces than this, so that no step takes long."""

_MAX_LAYOUT_ROWS = 2_048

_LAYOUTS_PER_WINDOW = 32
"""For corpora that are not in memory, a window has at least so many layouts: blocks are dropped when their rows are
read, and the next table is made between layouts, in small steps, so no batch waits for one."""

_MAX_DEALT_ROWS = 4_096
"""Rows that are dealt by cost together: each rank lays all of them out, which takes 2 to 5 us a row."""

Deal = Literal["order", "cost"]

_MAX_BATCH = 1 << 40
_MAX_BATCH_TOKENS = (1 << 31) - 1
"""The most tokens of a rank's batch: cu_seqlens is int32, as attention kernels require."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows:
    """The rows of each global batch that one data-parallel rank reads: by default one of its contiguous parts.

    With one stream, a hash of the step rotates the parts, so each rank reads from all corpora. With several streams, a
    step has the same number of rows from each, stream after stream. A rank always has the same part, so it reads few
    streams.

    Dealt by cost, neighbouring parts are shared: their rows are sorted by the cost of attention. Each of their ranks
    gets one of the most costly, then each gets one of the next, and so on. In a turn, the most costly row goes to the
    rank that has the least so far. So the sums of the ranks are nearly even, and so are their n-th micro-batches.

    Args:
        global_batch_size: rows of a step over all ranks.
        rank, world_size: data-parallel rank and world size, not the global ones under tensor, context or pipeline
            parallelism.
        uneven: ``"refuse"`` a world size that does not divide the batch, or ``"pad"`` every rank to the same number
            of rows.
        num_streams: streams of the plan.
        deal: ``"order"``: rows go to ranks in the order of the plan; ``"cost"``: see above.

    Raises:
        PlanError: the numbers do not fit together.
    """

    global_batch_size: int
    rank: int = 0
    world_size: int = 1
    uneven: Literal["refuse", "pad"] = "refuse"
    num_streams: int = 1
    deal: Deal = "order"

    def __post_init__(self) -> None:
        size = integer("global_batch_size", self.global_batch_size, least=1, most=_MAX_BATCH)
        rank = integer("dp_rank", self.rank)
        world_size = integer("dp_world_size", self.world_size, least=1, most=_MAX_BATCH)
        if not 0 <= rank < world_size:
            raise PlanError(f"dp_rank is {rank} of {world_size}", hint="give a rank from 0 to dp_world_size - 1")
        if self.uneven not in ("refuse", "pad"):
            raise PlanError(f"uneven is {self.uneven!r}", hint="give 'refuse' or 'pad'")
        if self.deal not in ("order", "cost"):
            raise PlanError(f"deal is {self.deal!r}", hint="give 'order' or 'cost'")
        if size % world_size and self.uneven == "refuse":
            near = size - size % world_size or world_size
            raise PlanError(
                f"{world_size} ranks do not divide a global batch of {size} samples",
                hint=f"use uneven='pad', or a global_batch_size such as {near}",
            )
        if size % self.num_streams:
            near = size - size % self.num_streams or self.num_streams
            raise PlanError(
                f"a global batch of {size} samples is not a multiple of the {self.num_streams} streams of the plan",
                hint=f"give a global_batch_size such as {near}: a step has equally many samples of each stream",
            )
        for name, value in {"global_batch_size": size, "rank": rank, "world_size": world_size}.items():
            object.__setattr__(self, name, value)  # numpy's integers become Python's

    @property
    def rows_per_rank(self) -> int:
        """Rows of a step on each rank, padding included."""
        return ceil_div(self.global_batch_size, self.world_size)

    @property
    def num_dealt_together(self) -> int:
        """Ranks whose rows are dealt by cost among them: as many as possible, but none of other streams."""
        if self.deal == "order":
            return 1
        per_stream, rest = divmod(self.global_batch_size // self.num_streams, self.rows_per_rank)
        sharing = self.world_size
        if self.num_streams > 1:
            sharing = math.gcd(sharing, per_stream) if rest == 0 else 1
        most = max(1, min(sharing, _MAX_DEALT_ROWS // self.rows_per_rank))
        return next(number for number in range(most, 0, -1) if sharing % number == 0)

    @property
    def num_own_streams(self) -> int:
        """Streams that this rank reads."""
        per_stream = self.global_batch_size // self.num_streams
        first = self.rank * self.rows_per_rank
        last = min(first + self.rows_per_rank, self.global_batch_size) - 1
        return max(1, last // per_stream - first // per_stream + 1)

    def row_of(self, sample: int, start: int) -> int:
        """The row of a sample in the global batch of the step that begins at `start`."""
        per_stream = self.global_batch_size // self.num_streams
        return sample % self.num_streams * per_stream + (sample - start) // self.num_streams

    def check_size(self, seq_len: int) -> None:
        """Refuse batches with more tokens than cu_seqlens can count.

        Raises:
            PlanError: a rank's part of a batch has 2**31 tokens or more.
        """
        if self.rows_per_rank * seq_len > _MAX_BATCH_TOKENS:
            raise PlanError(
                f"a global_batch_size of {self.global_batch_size} makes {self.rows_per_rank} rows of {seq_len} tokens "
                f"on each of {self.world_size} ranks, 2**31 tokens or more",
                hint=f"give a global_batch_size of at most {_MAX_BATCH_TOKENS // seq_len * self.world_size}",
            )

    def parts(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The part of each step, given by its first sample, that is this rank's in the order of the plan."""
        return (self.rank + rotations(starts, self.world_size, self.num_streams)) % self.world_size

    def samples(self, starts: NDArray[np.int64], end: int | None = None, *, num_ranks: int) -> NDArray[np.int64]:
        """This rank's samples in steps, given by their first global samples, in the order of the plan.

        Args:
            starts: int64 [steps].
            end: the first sample that is padding; None: there is none.
            num_ranks: a divisor of the world size. The steps are divided into parts of so many ranks, and the result
                has the part that this rank's rows are in.

        Returns:
            int64 [steps * num_ranks * rows_per_rank]; `PADDING_INDEX` for rows beyond the batch or the end.
        """
        firsts, parts = starts[:, np.newaxis], self.parts(starts)[:, np.newaxis] // num_ranks
        within = parts * num_ranks * self.rows_per_rank + np.arange(num_ranks * self.rows_per_rank)
        streams, rounds = np.divmod(within, self.global_batch_size // self.num_streams)
        found: NDArray[np.int64] = firsts + (streams - firsts) % self.num_streams + rounds * self.num_streams
        found[(within >= self.global_batch_size) | (found >= (np.iinfo(np.int64).max if end is None else end))] = (
            PADDING_INDEX
        )
        return found.ravel()

    def dealt(self, costs: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of each rank, among those of `num_dealt_together` ranks.

        Args:
            costs: int64 [n * num_dealt_together * rows_per_rank], the cost of each row, in the order of the plan.

        Returns:
            int64 [n * num_dealt_together, rows_per_rank]: numbers of rows.
        """
        rows: NDArray[np.int64] = np.arange(len(costs)).reshape(-1, self.rows_per_rank)
        if self.deal == "order":
            return rows
        num_ranks = self.num_dealt_together
        costs = costs.reshape(-1, num_ranks * self.rows_per_rank)
        groups = np.arange(len(costs))[:, np.newaxis]
        by_cost = np.argsort(-costs, axis=1, kind="stable")
        found, sums = rows.reshape(len(costs), num_ranks, -1), np.zeros((len(costs), num_ranks), np.int64)
        for turn in range(self.rows_per_rank):
            mine = by_cost[:, turn * num_ranks : (turn + 1) * num_ranks]
            ranks = np.argsort(sums, axis=1, kind="stable")  # the most costly row goes to the one with the least
            found[groups, ranks, turn] = mine + groups * costs.shape[1]
            sums[groups, ranks] += costs[groups, mine]
        return rows

    def steps_at_once(self, pieces_per_row: float, num_corpora: int, num_ranks: int) -> int:
        """The number of steps in a layout: many, to share its calls among rows, but none that takes long.

        Args:
            num_ranks: ranks whose rows are in the layout.
        """
        num_streams = self.num_streams if num_ranks == self.world_size else self.num_own_streams
        wanted = max(_LAYOUT_PIECES / pieces_per_row, _ROWS_PER_CORPUS * num_corpora * num_streams)
        most = min(wanted, _MAX_LAYOUT_PIECES / pieces_per_row, _MAX_LAYOUT_ROWS)
        return max(1, int(most / (num_ranks * self.rows_per_rank)))


def rotations(starts: NDArray[np.int64], world_size: int, num_streams: int) -> NDArray[np.int64]:
    """The number of ranks by which the parts of each step are rotated; steps are given by their first samples.

    Without that, alternating weights would give a rank the same corpora at every step. 0 with several streams.
    """
    hashed = mixed(starts.view(np.uint64) * GOLDEN) % np.uint64(world_size)
    return hashed.view(np.int64) if num_streams == 1 else np.zeros_like(starts)


def steps_per_window(corpora: Sequence[CorpusOrder], weights: Sequence[float], step_tokens: int) -> list[float]:
    """The steps that a window of each corpus lasts; with streams, a window of each stream.

    Infinite where the whole corpus is one window, or its weight is 0.

    Args:
        weights: weights of the corpora.
        step_tokens: tokens of a step over all ranks.
    """
    largest = max(weights)
    shares = [weight / largest for weight in weights]  # weights go up to 1e308, so products of them overflow
    total, found = sum(shares), []
    for corpus, share in zip(corpora, shares, strict=True):
        read, window_tokens = step_tokens * share / total, corpus.num_parts * corpus.window_tokens
        found.append(math.inf if corpus.num_windows == 1 or not read else window_tokens / read)
    return found


def steps_of_shortest_window(corpora: Sequence[CorpusOrder], weights: Sequence[float], step_tokens: int) -> int:
    """The most steps in a layout that every window is long enough for; arguments as for `steps_per_window`."""
    if all(corpus.source.is_in_memory for corpus in corpora):
        return _MAX_LAYOUT_ROWS
    shortest = min(steps_per_window(corpora, weights, step_tokens))
    return max(1, int(min(shortest / _LAYOUTS_PER_WINDOW, _MAX_LAYOUT_ROWS)))
