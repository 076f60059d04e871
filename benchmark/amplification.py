"""What nodes read from a store per byte that they train on, without streams and with one for each node.

    python -m benchmark.amplification [--nodes 1 4 16 64] [--document-tokens 750] [--windows 2]

Replays the steps of each node. *announced* are the blocks that its source is asked to read ahead, which a ranged corpus
fetches; *needed* those that its samples lie in, less what a cache of two windows still has: fewer could not be fetched.
*computed* is what `tokshard plan --nodes` says. No token is read: the corpus does not exist. Everything is seeded: it
gives the same table anywhere.
"""

import argparse
import json
import sys
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmark.processes import ROOT
from benchmark.report import commit, markdown, versions
from tests.runtime.sources import PeriodicSource
from tokshard.inspect.plan.streams import read_amplification
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.steps import RankRows

SEQ_LEN = 4_096
BATCH_SIZE = 512
NUM_TOKENS = 10**12
_STEPS_AT_ONCE = 8


@dataclass(slots=True)
class BlockCache:
    """The blocks that a node keeps: those that it used last."""

    num_blocks: int
    num_requests: int = 0
    kept: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def use(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.kept:
                self.kept.move_to_end(block)
                continue
            self.num_requests += 1
            self.kept[block] = None
            if len(self.kept) > self.num_blocks:
                self.kept.popitem(last=False)


class AnnouncedSource(PeriodicSource):
    """Counts the blocks that are announced to it."""

    num_announced = 0

    def will_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        self.num_announced += len(starts)


@dataclass(frozen=True, slots=True)
class Reads:
    """Blocks that are read per block trained on, and blocks that are announced per node and step."""

    announced: float
    needed: float
    per_step: float


def amplification(num_streams: int, num_nodes: int, num_windows: int, document_tokens: int) -> Reads:
    """What nodes read until windows are read to their end."""
    plan = StreamPlan(
        {"corpus": AnnouncedSource(NUM_TOKENS, document_tokens)}, seq_len=SEQ_LEN, num_streams=num_streams
    )
    (corpus,) = plan.corpora
    window_blocks = corpus.shape.window_blocks
    tokens = num_windows * corpus.num_parts * window_blocks * plan.shape.block_tokens
    num_steps = tokens // (BATCH_SIZE * SEQ_LEN)
    needed = announced = 0
    for node in range(num_nodes):
        source, before = AnnouncedSource(NUM_TOKENS, document_tokens), 0
        reader = StreamPlan({"corpus": source}, seq_len=SEQ_LEN, seed=1, num_streams=num_streams)
        ranks = RankRows(global_batch_size=BATCH_SIZE, rank=node, world_size=num_nodes, num_streams=plan.num_streams)
        cache = BlockCache(2 * window_blocks * (ranks.num_own_streams if corpus.is_dealt else 1))
        for first in range(0, num_steps, _STEPS_AT_ONCE):
            steps = np.arange(first, min(first + _STEPS_AT_ONCE, num_steps)) * BATCH_SIZE
            layout = reader.lay_out(reader.cursor(), ranks.samples(steps), is_sequential=True)
            before = before or source.num_announced  # the first window: from now on that of the next is announced
            for step in range(len(steps)):
                low, high = (layout.first_pieces[row * ranks.rows_per_rank] for row in (step, step + 1))
                cache.use(np.unique(layout.starts[low:high] // plan.shape.block_tokens).tolist())
        needed += cache.num_requests
        announced += source.num_announced - before
    trained_on = tokens // plan.shape.block_tokens
    return Reads(announced / trained_on, needed / trained_on, announced / num_nodes / num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--document-tokens", type=int, default=750)
    parser.add_argument("--windows", type=int, default=2, help="of each stream (default: %(default)s)")
    arguments = parser.parse_args()
    head = ("nodes", "streams", "announced", "needed", "computed", "blocks per node and step")
    rows, figures = [head], []
    for num_nodes in arguments.nodes:
        for num_streams in sorted({1, num_nodes}):
            found = amplification(num_streams, num_nodes, arguments.windows, arguments.document_tokens)
            computed = read_amplification([(1.0, NUM_TOKENS // 65_536)], 1_024, num_nodes, num_streams)
            values = (found.announced, found.needed, computed, found.per_step)
            rows.append((str(num_nodes), str(num_streams), *(f"{value:.2f}" for value in values)))
            figures.append(dict(zip(head, (num_nodes, num_streams, *values), strict=True)))
    line = {"benchmark": "amplification", "commit": commit(ROOT), "versions": versions(("tokshard", "numpy"))}
    line |= {"document_tokens": arguments.document_tokens, "figures": figures}
    sys.stdout.write(markdown(rows, num_left=0) + "\n\n" + json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
