"""Reads a corpus from a location as a training loop does, and says what it cost; run in a fresh process.

    python -m benchmark.remote_steps LOCATION --counts URL --stretches 67108864 268435456 --rows 64

Prints one line of JSON. Imports are over when the clock starts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmark.range_server import COUNTS
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.runtime.bytes.cache import MEMORY_BYTES, Cache
from tokshard.runtime.bytes.corpus import CorpusSource

SEQ_LEN = 4_096
WAIT_SECONDS = 0.001
"""A batch that comes later than this is a wait that the loop sees."""

_POLL_SECONDS = 0.01


def counted(url: str | None) -> dict[str, int]:
    """What a server has counted so far; nothing of a local corpus."""
    if url is None:
        return {}
    with urllib.request.urlopen(url + COUNTS) as answer:
        found: dict[str, int] = json.load(answer)
    return found


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What was counted in between; the most at once is of the whole time."""
    return {name: after[name] - (0 if name == "most_at_once" else before.get(name, 0)) for name in after}


class PeakMemory:
    """The most anonymous memory of this process, looked at every 10 ms until `stop`, and its peak resident size."""

    def __init__(self) -> None:
        self._most, self._is_over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, int]:
        self._is_over.set()
        self._thread.join()
        return {"own_bytes": self._most, "peak_bytes": _status("VmHWM")}

    def _watch(self) -> None:
        while not self._is_over.wait(_POLL_SECONDS):
            self._most = max(self._most, _status("RssAnon"))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def take(batches: Iterator[Any], num_steps: int, *, rows: int, step_seconds: float, url: str | None) -> dict[str, Any]:
    """Take so many batches, each followed by a step of so many seconds.

    Returns:
        tokens, seconds, CPU seconds, the waits for batches, and what the server counted.
    """
    before, cpu, started = counted(url), time.process_time(), time.perf_counter()
    waits = []
    for _ in range(num_steps):
        asked = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - asked)
        if step_seconds:
            time.sleep(step_seconds)
    return {
        "tokens": num_steps * rows * SEQ_LEN,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu,
        "longest_wait_seconds": max(waits),
        "median_wait_seconds": statistics.median(waits),
        "waits": sum(wait > WAIT_SECONDS for wait in waits),
        "steps": num_steps,
        "counts": difference(before, counted(url)),
    }


def read(arguments: argparse.Namespace) -> dict[str, Any]:
    """Open the corpus, take the first batch, and then the stretches."""
    before_bytes, memory = _status("RssAnon"), PeakMemory()
    before, started = counted(arguments.counts), time.perf_counter()
    cache = Cache(memory_bytes=arguments.memory_bytes, cache_dir=arguments.cache_dir)
    source = CorpusSource(arguments.location, cache=cache)
    opened, opening = time.perf_counter(), counted(arguments.counts)
    plan = StreamPlan({"a": source}, seq_len=SEQ_LEN, seed=17, num_streams=arguments.streams)
    world_size = arguments.world_size
    global_rows = world_size * arguments.rows
    with NumpyLoader(plan, global_batch_size=global_rows, dp_rank=0, dp_world_size=world_size) as loader:
        loader.skip(arguments.sample)
        batches = iter(loader)
        next(batches)
        first = time.perf_counter()
        after = counted(arguments.counts)
        stretches = [
            take(
                batches,
                max(1, tokens // (arguments.rows * SEQ_LEN)),
                rows=arguments.rows,
                step_seconds=arguments.step_milliseconds / 1e3,
                url=arguments.counts,
            )
            for tokens in arguments.stretches
        ]
    return {
        "open_seconds": opened - started,
        "first_batch_seconds": first - started,
        "open_counts": difference(before, opening),
        "first_batch_counts": difference(opening, after),
        "corpus_tokens": source.num_tokens,
        "stretches": stretches,
        "before_bytes": before_bytes,
        **memory.stop(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.remote_steps")
    parser.add_argument("location")
    parser.add_argument("--counts", help="URL of the server, which counts")
    parser.add_argument("--stretches", nargs="*", type=int, default=[], help="tokens of each, one after another")
    parser.add_argument("--rows", type=int, default=8, help="of a step of one rank")
    parser.add_argument("--world-size", type=int, default=1, help="ranks, of which the first one reads")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--sample", type=int, default=0, help="to begin at")
    parser.add_argument("--step-milliseconds", type=float, default=0.0)
    parser.add_argument("--cache-dir", help="keeps on a disk of this machine what was read")
    parser.add_argument("--memory-bytes", type=int, default=MEMORY_BYTES, help="kept in memory of what was read")
    sys.stdout.write(json.dumps(read(parser.parse_args())) + "\n")


if __name__ == "__main__":
    main()
