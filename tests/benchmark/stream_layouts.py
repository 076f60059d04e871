"""How fast one rank lays out rows if it reads many streams, against one stream.

    python -m tests.benchmark.stream_layouts [--streams 8 64] [--corpora 20] [--rows 512] [--rounds 5]

Steps are laid out and read, by the code that feeds a loader; reading costs nothing, so that the arithmetic on pieces
is all there is. The plans take turns in one process, and the best of some rounds counts: ratios mean something while
other programs run, rates do not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import islice
from typing import Any

from tests.benchmark.processes import ROOT
from tests.benchmark.report import commit, machine, markdown, versions
from tests.runtime.sources import PeriodicSource
from tokshard.runtime.loader import narrow_batches
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.steps import RankRows

HEAD = ("streams", "tokens/s", "of one stream")
SEQ_LEN = 4_096
CORPUS_TOKENS = 10**12


class FreeSource(PeriodicSource):
    """Tokens that cost nothing to read: they are not there."""

    def read(self, *_: Any) -> None:
        pass


def rate(num_streams: int, arguments: argparse.Namespace) -> float:
    """Tokens per second of the steps after the first ones, whose tables are made by then."""
    corpora = {
        f"corpus {number}": FreeSource(CORPUS_TOKENS + number, arguments.document_tokens)
        for number in range(arguments.corpora)
    }
    plan = StreamPlan(corpora, seq_len=SEQ_LEN, seed=17, num_streams=num_streams)
    ranks = RankRows(global_batch_size=arguments.rows, num_streams=num_streams)
    steps = narrow_batches(plan, ranks, plan.cursor())
    for _ in islice(steps, arguments.warm):
        pass
    begun = time.perf_counter()
    for _ in islice(steps, arguments.steps):
        pass
    return arguments.steps * arguments.rows * SEQ_LEN / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--corpora", type=int, default=20)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--document-tokens", type=int, default=750)
    parser.add_argument("--warm", type=int, default=31)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    counts = [1, *arguments.streams]
    best = dict.fromkeys(counts, 0.0)
    for _ in range(arguments.rounds):
        for count in counts:
            best[count] = max(best[count], rate(count, arguments))
    cells = [[str(count), f"{best[count] / 1e6:.0f}M", f"{best[count] / best[1]:.2f}"] for count in counts]
    line = {
        "benchmark": "stream_layouts",
        "commit": commit(ROOT),
        "machine": machine(),
        "versions": versions(("tokshard", "numpy")),
        "options": vars(arguments),
        "tokens_per_second": best,
    }
    sys.stdout.write(markdown([HEAD, *cells], num_left=0) + "\n\n" + json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
