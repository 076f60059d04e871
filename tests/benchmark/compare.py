"""How fast this checkout reads a plan next to another one: pairs in turn, tokens per CPU-second.

    python -m tests.benchmark.compare OTHER_TREE [--lengths 40 750] [--corpora 1 3] [--pairs 7] [--loader NumpyLoader]

Each run is a process of its own, which imports the package of its tree alone. Nothing is asserted of time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmark import page_cache
from tests.benchmark.processes import ROOT
from tests.benchmark.report import commit, machine, markdown, spread_of, versions

LOADERS = ("StreamingLoader", "NumpyLoader")
PACKAGES = ("torch", "numpy", "pyarrow")

_MAKE = """
import sys
from pathlib import Path
from tests.benchmark.shards import corpus
folder, length, *sizes = sys.argv[1:]
for number, size in enumerate(sizes):
    print(corpus(Path(folder), num_tokens=int(size), document_tokens=int(length), number=number))
"""
"""Makes corpora with the writer of a tree: the bytes of two trees may differ, their documents do not."""

_READ = """
import json, sys, time
import tokshard.runtime
SEQ_LEN, ROWS, BLOCK_TOKENS, WINDOW_BLOCKS, WARM_UP_STEPS = 4_096, 8, 65_536, 1_024, 8
loader_name, num_tokens, *corpora = sys.argv[1:]
num_tokens = int(num_tokens)
name = loader_name if hasattr(tokshard.runtime, loader_name) else "StreamingLoader"
plan = tokshard.runtime.StreamPlan(
    {str(number): path for number, path in enumerate(corpora)},
    seq_len=SEQ_LEN, seed=17, block_tokens=BLOCK_TOKENS, window_blocks=WINDOW_BLOCKS,
)
loader = getattr(tokshard.runtime, name)(plan, global_batch_size=ROWS, dp_rank=0, dp_world_size=1)
tokens = [source.num_tokens for source in plan.sources]
first_window = min(tokens[0], BLOCK_TOKENS * WINDOW_BLOCKS) * sum(tokens) / tokens[0]
loader.skip(max(0, int(first_window - num_tokens / 2)) // SEQ_LEN // ROWS * ROWS)
batches = iter(loader)
for _ in range(WARM_UP_STEPS):
    next(batches)
steps = max(1, num_tokens // (SEQ_LEN * ROWS))
cpu, wall = time.process_time(), time.perf_counter()
for _ in range(steps):
    next(batches)
cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
loader.close()
print(json.dumps({"loader": name, "tokens": steps * SEQ_LEN * ROWS, "cpu_seconds": cpu, "wall_seconds": wall}))
"""
"""Reads tokens in the middle of which a window of the first corpus ends, so that its tables are paid as in a long job.

Counted is the CPU time of the process, user and system, all threads; not the imports and the first batches.
"""


@dataclass(slots=True)
class Case:
    """Corpora that are read together, and the tokens per CPU-second of each pair of runs, other tree first."""

    document_tokens: int
    corpora: int
    pairs: list[tuple[float, float]] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [ours / others for others, ours in self.pairs]


_MAKERS = ("tokshard/format/**/*.py", "tests/benchmark/shards.py", "tests/corpora.py")
"""The modules of a tree on which the bytes of its corpora depend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A checkout, and where corpora are made."""

    root: Path
    base: Path

    @property
    def folder(self) -> Path:
        """Where the corpora of this tree are made: another one if it moves, or if what makes them changes."""
        digest = hashlib.sha256(str(self.root).encode())
        for path in sorted(found for pattern in _MAKERS for found in self.root.glob(pattern)):
            digest.update(f"{path.relative_to(self.root)} {path.stat().st_size} ".encode() + path.read_bytes())
        return self.base / f"{self.root.name}-{digest.hexdigest()[:12]}"

    def corpora(self, length: int, sizes: Sequence[int]) -> list[str]:
        return self._python(_MAKE, str(self.folder), str(length), *map(str, sizes)).split("\n")[:-1]

    def read(self, loader: str, num_tokens: int, corpora: Sequence[str]) -> dict[str, Any]:
        said = json.loads(self._python(_READ, loader, str(num_tokens), *corpora))
        assert isinstance(said, dict)
        return said

    def _python(self, code: str, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": str(self.root)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"a run of {self.root} failed:\n{done.stderr[-3000:]}")
        return done.stdout


def measure(other: Tree, ours: Tree, arguments: argparse.Namespace) -> list[Case]:
    """All cases in turn, then all of them again; which tree of a pair is first alternates."""
    cases = [Case(length, count) for length in arguments.lengths for count in arguments.corpora]
    sizes = [5 * arguments.tokens // 2, *[5 * arguments.tokens // 4] * (max(arguments.corpora) - 1)]
    made = {(tree.root, length): tree.corpora(length, sizes) for tree in (other, ours) for length in arguments.lengths}
    for pair in range(arguments.pairs):
        for case in cases:
            speeds: dict[Path, float] = {}
            for tree in (other, ours) if pair % 2 else (ours, other):
                corpora = made[tree.root, case.document_tokens][: case.corpora]
                page_cache.warm(path for corpus in corpora for path in sorted(Path(corpus).glob("shard-*")))
                found = tree.read(arguments.loader, arguments.tokens, corpora)
                speeds[tree.root] = found["tokens"] / found["cpu_seconds"]
            case.pairs.append((speeds[other.root], speeds[ours.root]))
            sys.stderr.write(
                f"{pair + 1}/{arguments.pairs}  {case.document_tokens} x {case.corpora}: "
                f"{case.pairs[-1][0] / 1e6:.1f} {case.pairs[-1][1] / 1e6:.1f} {case.ratios[-1]:.3f}\n"
            )
    return cases


def rows(cases: Sequence[Case]) -> Iterator[list[str]]:
    yield ["document", "corpora", "other, M tokens/CPU-s", "this", "this / other", "least", "most"]
    for case in cases:
        others, ours = (statistics.median(speeds) / 1e6 for speeds in zip(*case.pairs, strict=True))
        ratios = case.ratios
        yield [
            str(case.document_tokens),
            str(case.corpora),
            f"{others:.1f}",
            f"{ours:.1f}",
            *(f"{ratio:.3f}" for ratio in (statistics.median(ratios), min(ratios), max(ratios))),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.compare", description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the root of another checkout")
    parser.add_argument("--lengths", nargs="+", type=int, default=[750, 40], help="mean lengths of documents")
    parser.add_argument("--corpora", nargs="+", type=int, default=[1, 3], help="how many corpora are read together")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=50_000_000, help="of one run; default: %(default)s")
    parser.add_argument(
        "--loader", choices=LOADERS, default=LOADERS[0], help="a tree without it is read by its StreamingLoader"
    )
    default = Path(tempfile.gettempdir()) / "tokshard-benchmark-compare"
    parser.add_argument("--folder", type=Path, default=default, help="where corpora are made once")
    arguments = parser.parse_args()
    here = machine()
    base = arguments.folder.resolve()
    other, ours = Tree(root=arguments.other.resolve(), base=base), Tree(root=ROOT, base=base)
    cases = measure(other, ours, arguments)
    line = {
        "benchmark": "compare",
        "commits": {"other": commit(other.root), "this": commit(ours.root)},
        "versions": versions(PACKAGES),
        "machine": here,
        "pairs": arguments.pairs,
        "run_tokens": arguments.tokens,
        "loader": arguments.loader,
        "cases": [
            {
                "document_tokens": case.document_tokens,
                "corpora": case.corpora,
                "other": spread_of([each for each, _ in case.pairs]),
                "this": spread_of([each for _, each in case.pairs]),
                "this_to_other": spread_of(case.ratios),
            }
            for case in cases
        ],
    }
    sys.stdout.write(f"{markdown(rows(cases), num_left=0)}\n\n{json.dumps(line)}\n")


if __name__ == "__main__":
    main()
