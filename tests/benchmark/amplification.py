"""What nodes read from a store per byte that they train on, without streams and with one for each node.

    python -m tests.benchmark.amplification [--nodes 1 4 16 64] [--document-tokens 750] [--windows 2]

Replays which blocks each node asks for, in the order of its steps, through a cache that keeps as many blocks as two
windows have: what it misses is one request for a block. No token is read: the corpus does not exist. *computed* is what
`tokshard plan --nodes` says. Everything is seeded: it gives the same table anywhere.
"""

import argparse
import json
import sys
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from tests.benchmark.processes import ROOT
from tests.benchmark.report import commit, markdown, versions
from tests.runtime.sources import PeriodicSource
from tokshard.inspect.plan.streams import CorpusReads, read_amplification
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.steps import Ranks
from tokshard.runtime.stop import Stop

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


def amplification(plan: StreamPlan, num_nodes: int, num_windows: int) -> tuple[float, float]:
    """Bytes read per byte trained on, and requests per node and step, while windows are read to their end."""
    (corpus,) = plan.corpora
    window_blocks = corpus.part_shape.window_blocks
    tokens = num_windows * corpus.num_parts * window_blocks * plan.shape.block_tokens
    num_steps = tokens // (BATCH_SIZE * SEQ_LEN)
    requests = 0
    for node in range(num_nodes):
        reader = plan.reader()  # a process of its own
        ranks = Ranks(global_batch_size=BATCH_SIZE, rank=node, world_size=num_nodes, num_streams=plan.num_streams)
        cache = BlockCache(2 * window_blocks * (ranks.num_own_streams if corpus.is_dealt else 1))
        mixture = reader.mixture(reader.cursor())
        for first in range(0, num_steps, _STEPS_AT_ONCE):
            steps = np.arange(first, min(first + _STEPS_AT_ONCE, num_steps)) * BATCH_SIZE
            layout = reader.lay_out(mixture, ranks.samples(steps, Stop(sample=None)), is_sequential=True)
            for step in range(len(steps)):
                _, positions, _, _ = layout.reads.of(step * ranks.rows_per_rank, (step + 1) * ranks.rows_per_rank)
                cache.use(np.unique(positions // plan.shape.block_tokens).tolist())
        requests += cache.num_requests
    return requests * plan.shape.block_tokens / tokens, requests / num_nodes / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--document-tokens", type=int, default=750)
    parser.add_argument("--windows", type=int, default=2, help="of each stream (default: %(default)s)")
    arguments = parser.parse_args()
    source = PeriodicSource(NUM_TOKENS, arguments.document_tokens)
    rows, figures = [("nodes", "streams", "read per byte trained on", "computed", "requests per node and step")], []
    for num_nodes in arguments.nodes:
        for num_streams in sorted({1, num_nodes}):
            plan = StreamPlan({"corpus": source}, seq_len=SEQ_LEN, seed=1, num_streams=num_streams)
            found, requests = amplification(plan, num_nodes, arguments.windows)
            pieces = NUM_TOKENS / arguments.document_tokens + NUM_TOKENS / plan.shape.block_tokens
            facts = CorpusReads(
                name="corpus",
                share=1.0,
                num_blocks=plan.corpora[0].num_full_blocks,
                tokens_per_piece=NUM_TOKENS / pieces,
            )
            computed = read_amplification([facts], plan.shape, num_nodes, num_streams)
            rows.append((str(num_nodes), str(num_streams), f"{found:.2f}", f"{computed:.2f}", f"{requests:.1f}"))
            figures.append(
                {"nodes": num_nodes, "streams": num_streams, "read": found, "computed": computed, "requests": requests}
            )
    line = {"benchmark": "amplification", "commit": commit(ROOT), "versions": versions(("tokshard", "numpy"))}
    line |= {"document_tokens": arguments.document_tokens, "figures": figures}
    sys.stdout.write(markdown(rows, num_left=0) + "\n\n" + json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
