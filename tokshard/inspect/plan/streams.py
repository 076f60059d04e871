"""How many streams a job should have, from what its nodes read without streams and with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokshard.errors import UsageError
from tokshard.inspect.plan.run import Run
from tokshard.runtime.options import MAX_STREAMS, default_window_blocks
from tokshard.runtime.order.windows import is_dealt, min_blocks
from tokshard.runtime.plan import StreamPlan

_ENOUGH = 1.05
"""More streams are not worth it if they save less than this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsAdvice:
    """A recommended number of streams.

    Args:
        num_nodes: nodes that share the samples of a step.
        num_streams: recommended.
        reads_without, reads_with, reads_now: bytes that a node reads per byte that it trains on: with one stream, with
            as many as recommended, with those of the plan.
        shared: corpora that have too few blocks to be dealt to so many streams, and how many they would need.
    """

    num_nodes: int
    num_streams: int
    reads_without: float
    reads_with: float
    reads_now: float
    shared: dict[str, int]


def advise(run: Run, num_nodes: int) -> StreamsAdvice:
    """The number of streams for a run on so many nodes. Only arithmetic.

    It divides every global batch. Among the numbers with nearly the least reads it is the smallest, because more
    streams have smaller windows.

    Raises:
        UsageError: there are more nodes than samples in a step.
    """
    size, shares = math.gcd(*run.batch_sizes), run.shares(run.cursor.segments[run.cursor.num_started - 1])
    blocks = {name: corpus.num_full_blocks for name, corpus in zip(run.plan.names, run.plan.corpora, strict=True)}
    corpora = [(shares[name], num_blocks) for name, num_blocks in blocks.items()]
    if num_nodes > (least := min(run.batch_sizes)):
        raise UsageError(f"{num_nodes} nodes share steps of {least} samples", hint="give at most as many --nodes")
    reads = {
        count: read_amplification(corpora, window_blocks_of(run.plan, count), num_nodes, count)
        for count in range(1, min(size, MAX_STREAMS, 4 * num_nodes) + 1)
        if size % count == 0
    }
    best = min(reads.values())
    num_streams = next(count for count, found in reads.items() if found <= _ENOUGH * best)
    needed = min_blocks(window_blocks_of(run.plan, num_streams), num_streams)
    return StreamsAdvice(
        num_nodes=num_nodes,
        num_streams=num_streams,
        reads_without=reads[1],
        reads_with=reads[num_streams],
        reads_now=read_amplification(corpora, run.plan.shape.window_blocks, num_nodes, run.plan.num_streams),
        shared={name: needed for name, num_blocks in blocks.items() if num_streams > 1 and num_blocks < needed},
    )


def window_blocks_of(plan: StreamPlan, num_streams: int) -> int:
    """The blocks of a window if the plan had another number of streams."""
    if not plan.has_default_windows:
        return plan.shape.window_blocks
    return default_window_blocks(plan.shape.block_tokens, num_streams, plan.schedule)


def read_amplification(
    corpora: Sequence[tuple[float, int]], window_blocks: int, num_nodes: int, num_streams: int
) -> float:
    """Bytes that a node reads per byte that it trains on, if it reads each window of its samples whole, once.

    A node trains on contiguous rows of each step. Rows are ordered by stream, so a node has samples of the streams that
    its rows overlap. If a corpus is shared, every node has samples of every window.

    Args:
        corpora: of each, its share of the samples, and the full blocks that are read.
    """
    # where the rows of nodes and streams begin, in units of 1 / (num_nodes * num_streams) of a step
    begins = np.union1d(np.arange(num_nodes) * num_streams, np.arange(num_streams) * num_nodes)
    readers_of_a_stream = len(begins) / num_streams
    return sum(
        share * (readers_of_a_stream if is_dealt(num_blocks, window_blocks, num_streams) else num_nodes)
        for share, num_blocks in corpora
    )
