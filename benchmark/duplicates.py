"""What finding exact duplicates costs, from the hashes of many tasks to what each encoding task leaves out.

    python -m benchmark.duplicates --hashes 1e8
    python -m benchmark.duplicates --hashes 1e6 2e6 4e6 8e6 --per-task 1000

The hashes are made up, in the files and receipts that hashing tasks leave. Every fifth text repeats an earlier one of
another task, so what is found is known and checked. Needs 60 bytes of disk per hash, which are removed at the end.
"""

import argparse
import contextlib
import json
import os
import pickle
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmark.report import commit, machine, markdown, versions
from tokshard.numbers import read_count
from tokshard.pipeline.stages import Stage, _duplicates
from tokshard.pipeline.tasks.duplicates import Drops, HashSink, find
from tokshard.pipeline.tasks.exchange import redeal
from tokshard.pipeline.tasks.planning import StepTask
from tokshard.pipeline.workspace.places import HASH
from tokshard.pipeline.workspace.receipts import OutputCounts, Receipt, SourceCounts, file_path, write_receipt
from tokshard.store import Store
from tokshard.store.posix import PosixStore

ROOT = Path(__file__).parents[1]
EVERY = 5
"""One of so many texts repeats an earlier one."""


@dataclass(slots=True, kw_only=True)
class Cost:
    """What a step cost.

    Args:
        opens: files of the build opened, for reading or writing, receipts included.
        seconds: until the last process ended.
        peak_bytes: resident memory of the largest process.
    """

    step: str
    tasks: int
    opens: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0


class Meter:
    """Counts what this process opens and reads below a directory."""

    def __init__(self, directory: str) -> None:
        self.opens = self.read_bytes = 0
        self._directory = directory
        sys.addaudithook(self._hear)
        read = PosixStore.read

        def counting_read(store: PosixStore, name: str, ranges: Any, **options: Any) -> Any:
            self.read_bytes += sum(length for _, length in ranges)
            return read(store, name, ranges, **options)

        PosixStore.read = counting_read  # type: ignore[method-assign]

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        # of a folder that is synced, only the name is opened
        if event == "open" and str(arguments[0]).startswith(self._directory) and not os.path.isdir(arguments[0]):
            self.opens += 1


def in_processes(cost: Cost, directory: str, works: Sequence[Callable[[], Any]], num_workers: int) -> list[Any]:
    """The results of functions, run in forks of this process, each of which runs every `num_workers`-th of them."""
    started = time.perf_counter()
    pipes = []
    for worker in range(num_workers):
        read_end, write_end = os.pipe()
        if not os.fork():
            os.close(read_end)
            meter = Meter(directory)
            results = [work() for work in works[worker::num_workers]]
            with open(write_end, "wb") as pipe:
                pickle.dump((results, meter.opens, meter.read_bytes), pipe)
            os._exit(0)
        os.close(write_end)
        pipes.append(read_end)
    found: list[Any] = [None] * len(works)
    for worker, read_end in enumerate(pipes):
        with open(read_end, "rb") as pipe:
            results, opens, read_bytes = pickle.load(pipe)
        found[worker::num_workers] = results
        cost.opens += opens
        cost.read_bytes += read_bytes
    for _ in pipes:
        usage = os.wait4(-1, 0)[2]
        cost.cpu_seconds += usage.ru_utime + usage.ru_stime
        cost.peak_bytes = max(cost.peak_bytes, usage.ru_maxrss * 1024)
    cost.seconds = time.perf_counter() - started
    return found


def hashes_of(texts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Two columns that look random, equal for the same text: uint64 [n, 2]."""
    # every text whose number leaves a rest of 4 is the same as one in the first half of those before it
    ids = np.where(texts % EVERY == EVERY - 1, texts // EVERY // 2 * EVERY, texts).astype(np.uint64)
    columns = []
    for salt in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03):
        mixed = ids + np.uint64(salt)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        columns.append(mixed ^ (mixed >> np.uint64(31)))
    return np.stack(columns, axis=1)


def write_hashes(store: Store, index: int, start: int, stop: int) -> Receipt:
    """What the hashing task of the texts ``[start, stop)`` leaves."""
    key = index, 0
    with contextlib.ExitStack() as stack:
        writer = HashSink(store, key, stack)
        writer.add(hashes_of(np.arange(start, stop)))
        counts = SourceCounts(index=0, documents=stop - start)
        receipt = writer.finish(Receipt(key=key, outputs=[OutputCounts(sources=[counts])]))
    write_receipt(store, HASH, receipt)
    return receipt


def run_step(stage: Stage, task: StepTask) -> Receipt:
    """What a task of the search leaves."""
    assert stage.dealt is not None
    assert stage.levels is not None
    name = file_path(stage.name, task.key)
    if task.kind == "find":
        assert stage.hashed is not None
        return find(name, task, stage.dealt, stage.levels, earlier=stage.earlier, hashed=stage.hashed)
    return redeal(name, task, stage.dealt, stage.levels)


def check_drops(drops: Drops, index: int, start: int, stop: int) -> None:
    """Look up what an encoding task leaves out; it has to be every fifth text."""
    expected = np.flatnonzero(np.arange(start, stop) % EVERY == EVERY - 1)
    found = drops.of((index, 0))
    if not np.array_equal(found, expected):
        raise SystemExit(f"task {index}: {len(found)} duplicates, expected {len(expected)}")


def costs_of(num_hashes: int, per_task: int, num_workers: int, folder: str | None) -> Iterator[Cost]:
    """Make hashes, find the duplicates, and look them up, step by step."""
    directory = tempfile.mkdtemp(prefix="tokshard-duplicates-", dir=folder)
    try:
        store = PosixStore(directory)
        spans = [(start, min(start + per_task, num_hashes)) for start in range(0, num_hashes, per_task)]

        def measured(step: str, works: Sequence[Callable[[], Any]]) -> tuple[Cost, list[Any]]:
            cost = Cost(step=step, tasks=len(works))
            return cost, in_processes(cost, directory, works, num_workers)

        hash_works = [lambda i=i, span=span: write_hashes(store, i, *span) for i, span in enumerate(spans)]
        cost, receipts = measured("hashes, made up", hash_works)
        cost.written_bytes = sum(receipt.file_bytes for receipt in receipts)
        yield cost
        steps: list[Cost] = []

        def run_stage(stage: Stage) -> Any:
            works = [lambda task=task: run_step(stage, task) for task in stage.tasks]
            cost, found = measured(f"{stage.name}: {stage.tasks[0].kind}", works)
            cost.written_bytes = sum(receipt.file_bytes for receipt in found)
            steps.append(cost)
            return SimpleNamespace(counted=found)

        place: Any = SimpleNamespace(store=store)
        build: Any = SimpleNamespace(workspace=place, outputs=[SimpleNamespace(generation=0)], is_array=False)
        meter = Meter(directory)
        started, cpu = time.perf_counter(), time.process_time()
        drops = _duplicates(build, receipts, run_stage)
        coordinator = Cost(
            step="coordinator",
            tasks=1,
            opens=meter.opens,
            read_bytes=meter.read_bytes,
            seconds=time.perf_counter() - started - sum(step.seconds for step in steps),
            cpu_seconds=time.process_time() - cpu,
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        yield from (*steps, coordinator)
        lookups = [lambda i=i, span=span: check_drops(drops, i, *span) for i, span in enumerate(spans)]
        yield measured("looked up to encode", lookups)[0]
    finally:
        shutil.rmtree(directory)


def rows_of(costs: Sequence[Cost]) -> Iterator[list[str]]:
    """The table of one number of hashes."""
    yield ["step", "tasks", "opens", "MB read", "MB written", "s", "CPU s", "peak MB"]
    for cost in costs:
        yield [
            cost.step,
            f"{cost.tasks:,}",
            f"{cost.opens:,}",
            f"{cost.read_bytes / 1e6:,.0f}",
            f"{cost.written_bytes / 1e6:,.0f}",
            f"{cost.seconds:.1f}",
            f"{cost.cpu_seconds:.1f}",
            f"{cost.peak_bytes / 1e6:,.0f}",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.duplicates", description=__doc__.splitlines()[0])
    parser.add_argument("--hashes", nargs="+", type=read_count, default=[1_000_000], help="one run each")
    parser.add_argument("--per-task", type=read_count, default=100_000, help="hashes of a hashing task")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", help="where the files go; default: the temporary directory")
    arguments = parser.parse_args()
    here = machine()
    runs = []
    for num_hashes in arguments.hashes:
        costs = list(costs_of(num_hashes, arguments.per_task, arguments.workers, arguments.folder))
        opens = sum(cost.opens for cost in costs[1:])
        runs.append({"hashes": num_hashes, "opens": opens, "steps": [asdict(cost) for cost in costs]})
        sys.stdout.write(f"{num_hashes:,} hashes of {costs[0].tasks:,} tasks: {opens:,} opens after hashing\n")
        sys.stdout.write(markdown(list(rows_of(costs)), num_left=1) + "\n\n")
    line = {
        "benchmark": "duplicates",
        "commit": commit(ROOT),
        "versions": versions(["numpy", "pyarrow"]),
        "machine": here,
        "per_task": arguments.per_task,
        "workers": arguments.workers,
        "runs": runs,
    }
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
