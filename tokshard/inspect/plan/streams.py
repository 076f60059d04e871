"""How many streams a job should have: what its nodes read from a store, without streams and with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokshard.errors import UsageError
from tokshard.inspect.plan.run import Run
from tokshard.runtime.locality import hit_blocks
from tokshard.runtime.options import MAX_STREAMS
from tokshard.runtime.order.parts import is_dealt, min_blocks, part_window_blocks
from tokshard.runtime.order.windows import Shape
from tokshard.runtime.shards import CorpusSource

_ENOUGH = 1.05
"""More streams are not worth it if they save less than this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusReads:
    """What the reads of a corpus depend on.

    Args:
        share: of the samples.
        num_blocks: full blocks that are read.
        tokens_per_piece: mean length of what lies between two ends of documents or blocks.
    """

    name: str
    share: float
    num_blocks: int
    tokens_per_piece: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsAdvice:
    """A recommended number of streams.

    Args:
        num_nodes: that share the samples of a step.
        num_streams: recommended.
        reads_without, reads_with, reads_now: bytes that a node reads per byte that it trains on: with one stream, with
            as many as recommended, with those of the plan.
        whole: corpora that have too few blocks to be dealt to so many streams, and how many they would need.
    """

    num_nodes: int
    num_streams: int
    reads_without: float
    reads_with: float
    reads_now: float
    whole: dict[str, int]


def advise(run: Run, num_nodes: int) -> StreamsAdvice:
    """The number of streams for a run on so many nodes. Only arithmetic.

    It divides the global batch; of those with which nodes read about least, the smallest, because windows of more
    streams are smaller.

    Raises:
        UsageError: there are more nodes than samples in a step.
    """
    size, shape, corpora = run.global_batch_size, run.plan.shape, corpora_of(run)
    if num_nodes > size:
        raise UsageError(f"{num_nodes} nodes share steps of {size} samples", hint="give at most as many --nodes")
    reads = {
        count: read_amplification(corpora, shape, num_nodes, count)
        for count in range(1, min(size, MAX_STREAMS, 4 * num_nodes) + 1)
        if size % count == 0
    }
    best = min(reads.values())
    num_streams = next(count for count, found in reads.items() if found <= _ENOUGH * best)
    needed = min_blocks(shape.window_blocks, num_streams)
    return StreamsAdvice(
        num_nodes=num_nodes,
        num_streams=num_streams,
        reads_without=reads[1],
        reads_with=reads[num_streams],
        reads_now=read_amplification(corpora, shape, num_nodes, run.plan.num_streams),
        whole={corpus.name: needed for corpus in corpora if num_streams > 1 and corpus.num_blocks < needed},
    )


def corpora_of(run: Run) -> list[CorpusReads]:
    """The corpora of a run under the weights at its cursor."""
    weights = run.cursor.segments[run.cursor.num_started - 1].weights
    block_tokens, found = run.plan.shape.block_tokens, []
    for name, source, corpus, weight in zip(run.plan.names, run.plan.sources, run.plan.corpora, weights, strict=True):
        assert isinstance(source, CorpusSource)
        pieces = source.corpus.num_documents + source.num_tokens / block_tokens
        found.append(
            CorpusReads(
                name=name,
                share=weight / sum(weights),
                num_blocks=corpus.num_full_blocks,
                tokens_per_piece=source.num_tokens / pieces,
            )
        )
    return found


def read_amplification(corpora: Sequence[CorpusReads], shape: Shape, num_nodes: int, num_streams: int) -> float:
    """Bytes that a node reads per byte that it trains on, if it reads each block of a window whole, and once.

    A node trains on contiguous rows of each step, which are stream after stream. Of each window it reads the blocks
    that its pieces happen to lie in.
    """
    # where nodes and streams begin, in units of 1 / (num_nodes * num_streams) of a step
    bounds = np.union1d(np.arange(num_nodes + 1) * num_streams, np.arange(num_streams + 1) * num_nodes)
    parts_of_streams = (np.diff(bounds) / num_nodes).tolist()
    total = 0.0
    for corpus in corpora:
        if is_dealt(corpus.num_blocks, shape.window_blocks, num_streams):
            blocks = part_window_blocks(shape.window_blocks, num_streams)
            reads = sum(_blocks_read(corpus, shape, blocks, part) for part in parts_of_streams) / num_streams
        else:
            blocks = max(1, min(corpus.num_blocks, shape.window_blocks))
            reads = num_nodes * _blocks_read(corpus, shape, blocks, 1 / num_nodes)
        total += corpus.share * reads / blocks
    return total


def _blocks_read(corpus: CorpusReads, shape: Shape, blocks: int, part: float) -> float:
    """Blocks of a window that are hit by a part of its samples, which cut pieces once more."""
    pieces = blocks * shape.block_tokens * (1 / corpus.tokens_per_piece + 1 / shape.seq_len)
    return hit_blocks(blocks, part * pieces)
