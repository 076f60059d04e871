"""The steps of one data-parallel rank: which samples each has, laid out for many steps at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError
from tokshard.runtime.arguments import integer
from tokshard.runtime.batches import PADDING_INDEX, Packed
from tokshard.runtime.order.mixture import Mixture
from tokshard.runtime.plan import StreamPlan

_LAYOUT_PIECES = 16_384
_ROWS_PER_CORPUS = 24
"""A layout has at least so many rows per corpus, so that the calls that each corpus costs are shared by many."""

_MAX_LAYOUT_PIECES = 65_536
"""But no more pieces than this, so that no step takes long."""

_MAX_LAYOUT_ROWS = 2_048

_MAX_BATCH = 1 << 40
_MAX_BATCH_TOKENS = (1 << 31) - 1
"""Of one rank: cu_seqlens is int32, as attention kernels want it."""


class Ranks:
    """How the rows of a global batch are dealt out to data-parallel ranks: contiguous slices, in order.

    Args:
        global_batch_size: rows of a step over all ranks.
        rank, world_size: data-parallel, not global under tensor, context or pipeline parallelism.
        uneven: ``"refuse"`` a world size that does not divide the batch, or ``"pad"`` every rank to the same number
            of rows.

    Raises:
        PlanError: the numbers do not fit each other.
    """

    def __init__(self, global_batch_size: int, rank: int, world_size: int, uneven: Literal["refuse", "pad"]) -> None:
        global_batch_size = integer("global_batch_size", global_batch_size, least=1, most=_MAX_BATCH)
        rank, world_size = integer("dp_rank", rank), integer("dp_world_size", world_size, least=1, most=_MAX_BATCH)
        if not 0 <= rank < world_size:
            raise PlanError(f"dp_rank is {rank} of {world_size}", hint="give a rank from 0 to dp_world_size - 1")
        if uneven not in ("refuse", "pad"):
            raise PlanError(f"uneven is {uneven!r}", hint="give 'refuse' or 'pad'")
        if global_batch_size % world_size and uneven == "refuse":
            near = global_batch_size - global_batch_size % world_size or world_size
            raise PlanError(
                f"{world_size} ranks do not divide a global batch of {global_batch_size} samples",
                hint=f"use uneven='pad', or a global_batch_size such as {near}",
            )
        self.global_batch_size, self.rank, self.world_size = global_batch_size, rank, world_size
        self.rows_per_rank = -(-global_batch_size // world_size)

    def check_size(self, seq_len: int) -> None:
        """Refuse batches whose tokens cannot be counted.

        Raises:
            PlanError: a rank's part of a batch has 2**31 tokens or more.
        """
        if self.rows_per_rank * seq_len > _MAX_BATCH_TOKENS:
            raise PlanError(
                f"a global_batch_size of {self.global_batch_size} makes {self.rows_per_rank} rows of {seq_len} tokens "
                f"on each of {self.world_size} ranks, 2**31 tokens or more",
                hint=f"give a global_batch_size of at most {_MAX_BATCH_TOKENS // seq_len * self.world_size}",
            )

    def samples(self, starts: NDArray[np.int64], stop: int | None) -> NDArray[np.int64]:
        """This rank's samples of the steps that begin at some global samples.

        Args:
            starts: int64 [steps], each below `stop`.
            stop: number of samples of a finite pass.

        Returns:
            int64 [steps * rows_per_rank]; `PADDING_INDEX` for rows beyond the batch or the pass.
        """
        within = self.rank * self.rows_per_rank + np.arange(self.rows_per_rank)
        found: NDArray[np.int64] = starts[:, np.newaxis] + within
        is_padding = np.broadcast_to(within >= self.global_batch_size, found.shape)
        if stop is not None:
            is_padding = is_padding | (found >= stop)
        found[is_padding] = PADDING_INDEX
        return found.ravel()


def is_last(sample: int, num_samples: int | None, limit: int | None, global_batch_size: int) -> bool:
    """Whether no step begins at a sample: a finite pass is over, or a corpus would be used up within the step."""
    stop = sample + global_batch_size
    if num_samples is not None:
        if sample >= num_samples:
            return True
        stop = min(stop, num_samples)
    return limit is not None and stop > limit


def packed_steps(
    plan: StreamPlan,
    mixture: Mixture,
    ranks: Ranks,
    sample: int,
    *,
    limit: int | None = None,
    first: int = 0,
    stride: int = 1,
) -> Iterator[Packed]:
    """Every step from a global sample on, or each `stride`-th of them, as one rank reads it.

    The first layout has one step, and each following one twice as many, up to some thousand pieces: so the first batch
    comes soon, and later ones share the cost of laying out.

    Args:
        limit: global sample at which a corpus is used up.
        first: steps to pass over at the start.

    Raises:
        CorpusError: a shard is missing or not what its manifest says.
    """
    size, rows = ranks.global_batch_size, ranks.rows_per_rank
    steps = 1
    sample += first * size
    while True:
        starts: list[int] = []
        while len(starts) < steps and not is_last(sample, plan.num_samples, limit, size):
            starts.append(sample)
            sample += stride * size
        if not starts:
            return
        samples = ranks.samples(np.array(starts, np.int64), plan.num_samples)
        layout = plan.lay_out(mixture, samples, is_sequential=True)
        for step in range(len(starts)):
            yield plan.pack(layout, step * rows, (step + 1) * rows)
        pieces_per_row = layout.num_pieces / len(samples)
        wanted = max(_LAYOUT_PIECES / pieces_per_row, _ROWS_PER_CORPUS * len(plan.names))
        most = min(wanted, _MAX_LAYOUT_PIECES / pieces_per_row, _MAX_LAYOUT_ROWS)
        steps = min(2 * steps, max(1, int(most / rows)))
