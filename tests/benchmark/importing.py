"""Import of a Megatron-LM file next to a plain copy of it, on this machine: one run, one table, one line of JSON.

    python -m tests.benchmark.importing [--megabytes 200] [--repeats 3] [--workers 1]

Both write to the same folder and end with what they wrote on disk (`fsync`); the file of ids is in the page cache for
both. The import is `tokshard import` as a process of its own, start-up included. It also hashes the tokens for the
content and for the strides, and the shards with SHA-256.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from tests.benchmark.processes import ROOT
from tests.benchmark.report import aligned, commit, machine, spread_of, versions

RECIPE = ROOT / "recipes" / "tokenizer"
VOCABULARY = 16_384
DOCUMENT = 1_000
"""Tokens in a document, on average."""


def write_megatron(prefix: Path, num_tokens: int) -> None:
    """Random documents of 1 to 2 x `DOCUMENT` uint16 ids, each ending in id 0."""
    generator = np.random.default_rng(17)
    lengths = generator.integers(1, 2 * DOCUMENT, num_tokens // DOCUMENT).astype("<i4")
    tokens = generator.integers(1, VOCABULARY, int(lengths.sum()), dtype=np.uint16)
    ends = np.cumsum(lengths.astype(np.int64))
    tokens[ends - 1] = 0
    places = ((ends - lengths) * 2).astype("<i8")
    head = np.array([1], "<u8").tobytes() + bytes([8]) + np.array([len(lengths), len(lengths) + 1], "<u8").tobytes()
    bounds = np.arange(len(lengths) + 1, dtype="<i8")
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0" + head + lengths.tobytes() + places.tobytes() + bounds.tobytes()
    )


def copy(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("wb") as written:
        shutil.copyfileobj(read, written, 1 << 20)
        written.flush()
        os.fsync(written.fileno())


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of this process and its children."""
    before, started = sum(os.times()[:4]), time.perf_counter()
    work()
    return time.perf_counter() - started, sum(os.times()[:4]) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tokenizer", default=str(RECIPE))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokshard-importing-") as scratch:
        place = Path(scratch)
        write_megatron(place / "ids", int(given.megabytes * 1e6 / 2))
        size = (place / "ids.bin").stat().st_size
        copies, imports = [], []
        for _ in range(given.repeats):
            copies.append(seconds(partial(copy, place / "ids.bin", place / "copy")))
            words = ["import", place / "ids", "--tokenizer", given.tokenizer, "--out", place / "out", "--quiet"]
            command = [sys.executable, "-m", "tokshard", *words, "--workers", str(given.workers)]
            imports.append(seconds(partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)))
            shutil.rmtree(place / "out")
            (place / "copy").unlink()
    figures = {
        name: {
            "wall_seconds": spread_of([wall for wall, _ in found]),
            "cpu_seconds": spread_of([cpu for _, cpu in found]),
            "mb_per_second": round(size / 1e6 / statistics.median(wall for wall, _ in found)),
        }
        for name, found in (("copy", copies), ("import", imports))
    }
    rows = [("", "wall s", "CPU s", "MB/s")]
    for name, figure in figures.items():
        walls, cpus = (f"{figure[key]['median']:.2f}" for key in ("wall_seconds", "cpu_seconds"))
        rows.append((name, walls, cpus, f"{figure['mb_per_second']:,}"))
    sys.stdout.write(aligned(rows, num_left=1) + "\n")
    line = {"benchmark": "importing", "bytes": size, "workers": given.workers, **figures, "commit": commit(ROOT)}
    line |= {"versions": versions(("tokshard", "pyarrow", "numpy")), "machine": machine()}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
