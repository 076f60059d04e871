"""The steps of one data-parallel rank, laid out for many steps at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError
from tokshard.runtime.cursor import Cursor
from tokshard.runtime.locality import window_steps
from tokshard.runtime.options import integer
from tokshard.runtime.order.mixture import Mixture
from tokshard.runtime.order.permutation import GOLDEN, mixed
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.batches import PADDING_INDEX, Packed
from tokshard.runtime.stop import Stop

_LAYOUT_PIECES = 16_384
_ROWS_PER_CORPUS = 24
"""A layout has at least this many rows per corpus and stream: they share the calls that each of them costs."""

_MAX_LAYOUT_PIECES = 65_536
"""A layout has no more pieces than this, so that no step takes long."""

_MAX_LAYOUT_ROWS = 2_048

_LAYOUTS_PER_WINDOW = 8
"""Of corpora that are not in memory, a layout covers at most such a part of a window: what was laid out is still to be
read when the blocks of the window before are given up, and when those of the next are announced."""

_MAX_BATCH = 1 << 40
_MAX_BATCH_TOKENS = (1 << 31) - 1
"""Of one rank: cu_seqlens is int32, as attention kernels require."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How the rows of a global batch are split among data-parallel ranks: in contiguous parts.

    With one stream, a hash of the step turns the parts, so that a rank reads of all corpora. With several, a step has
    equally many rows of each, stream after stream, and a rank keeps its part, so that it reads few of them.

    Args:
        global_batch_size: rows of a step over all ranks.
        rank, world_size: data-parallel, not global under tensor, context or pipeline parallelism.
        uneven: ``"refuse"`` a world size that does not divide the batch, or ``"pad"`` every rank to the same number
            of rows.
        num_streams: of the plan.

    Raises:
        PlanError: the numbers do not fit each other.
    """

    global_batch_size: int
    rank: int = 0
    world_size: int = 1
    uneven: Literal["refuse", "pad"] = "refuse"
    num_streams: int = 1

    def __post_init__(self) -> None:
        size = integer("global_batch_size", self.global_batch_size, least=1, most=_MAX_BATCH)
        rank = integer("dp_rank", self.rank)
        world_size = integer("dp_world_size", self.world_size, least=1, most=_MAX_BATCH)
        if not 0 <= rank < world_size:
            raise PlanError(f"dp_rank is {rank} of {world_size}", hint="give a rank from 0 to dp_world_size - 1")
        if self.uneven not in ("refuse", "pad"):
            raise PlanError(f"uneven is {self.uneven!r}", hint="give 'refuse' or 'pad'")
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
                hint=f"give a global_batch_size such as {near}: every step has equally many samples of each stream",
            )
        for name, value in {"global_batch_size": size, "rank": rank, "world_size": world_size}.items():
            object.__setattr__(self, name, value)  # numpy's integers become Python's

    @property
    def rows_per_rank(self) -> int:
        """Rows of a step on each rank, padding included."""
        return -(-self.global_batch_size // self.world_size)

    @property
    def num_own_streams(self) -> int:
        """Streams that this rank reads."""
        per_stream = self.global_batch_size // self.num_streams
        first = self.rank * self.rows_per_rank
        last = min(first + self.rows_per_rank, self.global_batch_size) - 1
        return max(1, last // per_stream - first // per_stream + 1)

    def row_of(self, sample: int, start: int) -> int:
        """The row of the global batch that has a sample of the step which begins at `start`."""
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

    def samples(self, starts: NDArray[np.int64], stop: Stop) -> NDArray[np.int64]:
        """This rank's samples of the steps that begin at some global samples.

        Args:
            starts: int64 [steps], samples at which `stop` has a step.
            stop: where the pass ends.

        Returns:
            int64 [steps * rows_per_rank]; `PADDING_INDEX` for rows beyond the batch or the pass.
        """
        firsts, parts = starts[:, np.newaxis], np.full((len(starts), 1), self.rank)
        parts = (parts + turns(firsts, self.world_size, self.num_streams)) % self.world_size
        within = parts * self.rows_per_rank + np.arange(self.rows_per_rank)
        streams, rounds = np.divmod(within, self.global_batch_size // self.num_streams)
        found: NDArray[np.int64] = firsts + (streams - firsts) % self.num_streams + rounds * self.num_streams
        is_padding = within >= self.global_batch_size
        if stop.sample is not None:
            is_padding = is_padding | (found >= stop.sample)
        found[is_padding] = PADDING_INDEX
        return found.ravel()


def turns(starts: NDArray[np.int64], world_size: int, num_streams: int) -> NDArray[np.int64]:
    """By how many ranks the parts of the steps that begin at some samples are turned.

    Weights that alternate would else give a rank the same corpora at every step. With several streams, none is turned.
    """
    hashed = mixed(starts.view(np.uint64) * GOLDEN) % np.uint64(world_size)
    return hashed.view(np.int64) if num_streams == 1 else np.zeros_like(starts)


def packed_steps(plan: StreamPlan, ranks: Ranks, cursor: Cursor, stop: Stop | None = None) -> Iterator[Packed]:
    """Every step from a cursor on, as one rank reads it.

    The first layout has one step and each later one twice as many, up to some thousand pieces. So the first batch comes
    soon, and later ones share the cost of a layout. The tokens of a step may be overwritten by the next one.

    Args:
        stop: where the pass ends; default: where the plan's finite pass does.

    Raises:
        CorpusError: a shard is missing or not what its manifest says.
    """
    stop = stop or Stop(sample=plan.num_samples)
    mixture, masked, sample = plan.mixture(cursor).since(cursor.sample), plan.masked(cursor), cursor.sample
    size, rows = ranks.global_batch_size, ranks.rows_per_rank
    steps = 1
    while True:
        starts: list[int] = []
        while len(starts) < steps and stop.has_step(sample):
            starts.append(sample)
            sample += size
        if not starts:
            return
        samples = ranks.samples(np.array(starts, np.int64), stop)
        layout = plan.lay_out(mixture, samples, masked=masked, is_sequential=True)
        for step in range(len(starts)):
            yield plan.pack(layout, step * rows, (step + 1) * rows)
        pieces_per_row = layout.num_pieces / len(samples)
        wanted = max(_LAYOUT_PIECES / pieces_per_row, _ROWS_PER_CORPUS * len(plan.names) * ranks.num_own_streams)
        most = min(wanted, _MAX_LAYOUT_PIECES / pieces_per_row, _MAX_LAYOUT_ROWS)
        steps = min(2 * steps, max(1, int(most / rows)), most_steps(plan, mixture, size, sample))


def packed_step(plan: StreamPlan, ranks: Ranks, cursor: Cursor, stop: Stop) -> Packed:
    """The step at a cursor alone: the same rows, in memory of its own, without a state."""
    samples = ranks.samples(np.array([cursor.sample], np.int64), stop)
    layout = plan.lay_out(plan.mixture(cursor), samples, masked=plan.masked(cursor))
    return plan.pack(layout, 0, ranks.rows_per_rank)


def most_steps(plan: StreamPlan, mixture: Mixture, global_batch_size: int, sample: int) -> int:
    """Steps of a layout for which no window is too short."""
    if all(source.is_in_memory for source in plan.sources):
        return _MAX_LAYOUT_ROWS
    shortest = min(window_steps(plan, global_batch_size, mixture.weights_at(sample)).values())
    return max(1, int(min(shortest / _LAYOUTS_PER_WINDOW, _MAX_LAYOUT_ROWS)))
