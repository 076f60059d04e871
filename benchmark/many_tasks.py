"""What a build costs the process that coordinates it, apart from the work of its tasks.

    python -m benchmark.many_tasks --tasks 1000 10000 100000
    python -m benchmark.many_tasks --tasks 1000 --milliseconds 30

The inputs are sparse files of 100 tasks of 1 MiB each, which are never read. In place of an executor, a stand-in leaves
for each task a tiny shard and a receipt as large as that of a 512 MiB task, at once; what that takes is subtracted.
All else is the build: each run begins, stops before the commit, and is continued by another process. Nothing is synced.
"""

import argparse
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmark.counted_store import REQUESTS, SCHEME, CountedStore, be_slow, set_uncounted
from benchmark.report import commit as commit_of
from benchmark.report import machine, markdown, versions
from tests.pipeline.inputs import write_byte_tokenizer
from tokshard.format.arrays import table_batch
from tokshard.format.names import shard_name
from tokshard.format.schema import HASH_GROUP, HASH_STRIDE, ORDINAL_STRIDE
from tokshard.format.tables import WRITTEN_SHARD_SCHEMA
from tokshard.numbers import read_count
from tokshard.pipeline.adopt import adopt, finished_corpora
from tokshard.pipeline.build import run_stages
from tokshard.pipeline.commit import commit
from tokshard.pipeline.executors.base import Ended, Event, InlineExecutor, RunUsage, WorkerUsage
from tokshard.pipeline.options import BuildOptions
from tokshard.pipeline.request import Build
from tokshard.pipeline.resolve import resolve
from tokshard.pipeline.tasks.planning import Run
from tokshard.pipeline.tasks.running import Stage
from tokshard.pipeline.work import BuildRun, run_stage
from tokshard.pipeline.workspace.lease import lock
from tokshard.pipeline.workspace.ownership import check_directory
from tokshard.pipeline.workspace.receipts import Key, OutputCounts, Receipt, SourceCounts, write_receipt
from tokshard.store import STORES_BY_SCHEME

ROOT = Path(__file__).parents[1]
TASK_BYTES = 1 << 20
TASKS_PER_INPUT = 100
TASK_TOKENS = 130_000_000
"""Of a task of 512 MiB; its receipt has as much to say of its shard."""
SHARD = b"a tiny shard"
VERBS = ("get", "stat", "list", "put", "delete", "lease")


class StandIn:
    """An executor whose tasks are done at once.

    Attributes:
        seconds, cpu_seconds: what the tasks took; the coordinator's cost is without it.
    """

    seconds = cpu_seconds = 0.0
    num_workers = 1
    run_shared = None

    def __init__(self, build: Build, stage: Stage, *_: Any) -> None:
        self._build, self._stage = build, stage
        self._run: Run | None = None
        self.usage = WorkerUsage()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def has_room(self) -> bool:
        return self._run is None

    def submit(self, run: Run) -> None:
        self._run = run

    def events(self) -> Iterator[Event]:
        submitted, self._run = self._run, None
        assert submitted is not None
        started, cpu = time.perf_counter(), time.thread_time()
        set_uncounted(is_uncounted=True)
        message = pickle.dumps(leave(self._build, self._stage, submitted.task.key))
        set_uncounted(is_uncounted=False)
        StandIn.seconds += time.perf_counter() - started
        StandIn.cpu_seconds += time.thread_time() - cpu
        yield pickle.loads(message)  # as it arrives from a worker
        yield Ended(submitted.task)


def leave(build: Build, stage: Stage, key: Key) -> Receipt:
    """Put a shard and a receipt, as a task does."""
    documents = TASK_TOKENS // 1_000
    counts = SourceCounts(
        index=key[0],
        records_read=documents + 50,
        documents=documents,
        tokens=TASK_TOKENS,
        text_bytes=4 * TASK_TOKENS,
        left_out={"empty": 40, "over max-document-bytes": 10},
    )
    lengths = [documents // 20 + bucket for bucket in range(20)]
    name = shard_name(generation=0, first_input=key[0], segment=key[1], part=0)
    batches = [documents // 8] * 8
    row = {
        "name": name,
        "num_documents": documents,
        "num_tokens": TASK_TOKENS,
        "num_bytes": len(SHARD),
        "sha256": bytes(32),
        "tokens_hash": np.array([*key, 1, 2], "<u8").tobytes()[
            : WRITTEN_SHARD_SCHEMA.field("tokens_hash").type.byte_width
        ],
        "num_targets": TASK_TOKENS - documents,
        "loss_hash": bytes(24),
        "batch_documents": batches,
        "batch_tokens": [TASK_TOKENS // 8] * 8,
        "batch_offsets_position": batches,
        "batch_values_position": batches,
        "batch_loss_position": [],
        "batch_loss_bytes": [],
        "batch_loss_hash": [],
        "stride_documents": list(range(-(-TASK_TOKENS // ORDINAL_STRIDE))),
        "group_hashes": [0] * -(-TASK_TOKENS // (HASH_STRIDE * HASH_GROUP)),
        "run_document": [0],
        "run_source": [key[0]],
        "run_record": [0],
        "stride_hashes": list(range(-(-TASK_TOKENS // HASH_STRIDE))),
    }
    table = table_batch({n: [v] for n, v in row.items()}, WRITTEN_SHARD_SCHEMA).serialize().to_pybytes()
    output = OutputCounts(
        sources=[counts],
        length_counts=lengths,
        shortest=1,
        longest=1 << 19,
        shards={name: len(SHARD)},
        table=table,
    )
    receipt = Receipt(key=key, most_documents=documents, input_bytes=TASK_BYTES, outputs=[output])
    build.outputs[0].store.put(name, SHARD)
    write_receipt(build.workspace.store, stage.name, receipt)
    return receipt


@contextmanager
def measured(step: str, steps: list[dict[str, Any]]) -> Iterator[None]:
    """Add what the block costs this process."""
    REQUESTS.clear()
    StandIn.seconds = StandIn.cpu_seconds = 0.0
    before, started, cpu = _peak_bytes(), time.perf_counter(), time.process_time()
    yield
    steps.append(
        {
            "step": step,
            "seconds": time.perf_counter() - started - StandIn.seconds,
            "cpu_seconds": time.process_time() - cpu - StandIn.cpu_seconds,
            "peak_bytes": _peak_bytes(),
            "growth_bytes": _peak_bytes() - before,
            "requests": dict(REQUESTS),
        }
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build(folder: Path, *, is_restart: bool) -> list[dict[str, Any]]:
    """What the steps of a build cost: until all tasks are done, or from there to its end."""
    options = BuildOptions(
        tokenizer=str(folder / "tokenizer"), out=f"{SCHEME}://{folder}/out", task_bytes=TASK_BYTES, workers=1
    )
    steps: list[dict[str, Any]] = []
    with measured("prepare again" if is_restart else "prepare", steps):
        resolved, tokenizer = resolve([str(folder / "inputs")], options)
        assert finished_corpora(resolved) is None
        check_directory(resolved.workspace, resolved.outputs)
        lease = lock(resolved.workspace)
        lease.__enter__()
        tasks = adopt(resolved, tokenizer)
    with measured("run, all done" if is_restart else "run", steps):
        run = BuildRun(make_executor=StandIn, observer=lambda _: None)
        settled = run_stages(resolved, tasks, lambda stage: run_stage(resolved, stage, run))
    assert len(settled.shards) == len(tasks)
    if is_restart:
        with measured("commit", steps):
            result = commit(resolved, settled, RunUsage())
        assert result.corpora[0].manifest.num_shards == len(tasks)
    lease.__exit__(None, None, None)
    return steps


def task_requests(folder: Path, num_tasks: int = 8) -> dict[str, float]:
    """Requests of a real task that reads 1 MiB of lines, without those of the coordinator."""
    line = json.dumps({"text": "a text of some words " * 200}).encode() + b"\n"
    (folder / "inputs").mkdir()
    (folder / "inputs" / "lines.jsonl").write_bytes(line * (num_tasks * TASK_BYTES // len(line)))
    found: Counter[str] = Counter()

    class Counting(InlineExecutor):
        def events(self) -> Iterator[Event]:
            REQUESTS.clear()
            happened = list(super().events())
            found.update(REQUESTS)
            yield from happened

    options = BuildOptions(
        tokenizer=str(folder / "tokenizer"), out=f"{SCHEME}://{folder}/out", task_bytes=TASK_BYTES, workers=1
    )
    resolved, tokenizer = resolve([str(folder / "inputs")], options)
    with lock(resolved.workspace):
        tasks = adopt(resolved, tokenizer)
        run = BuildRun(
            make_executor=lambda build, stage, _, on_progress: Counting(build, stage, on_progress),
            observer=lambda _: None,
        )
        run_stages(resolved, tasks, lambda stage: run_stage(resolved, stage, run))
    # the tokenizer is read once by each worker
    return {kind: (count - (kind == "get")) / len(tasks) for kind, count in found.items()}


def in_process(folder: Path, what: str, milliseconds: float) -> Any:
    """What a fresh process finds."""
    command = [sys.executable, "-m", "benchmark.many_tasks", "--child", what, "--folder", str(folder)]
    command += ["--milliseconds", str(milliseconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def child(folder: Path, what: str) -> Any:
    """The part of one process."""
    STORES_BY_SCHEME[SCHEME] = CountedStore
    os.fsync = lambda _: None  # the time of a disk does not count as the coordinator's
    return task_requests(folder) if what == "task" else build(folder, is_restart=what == "restart")


def steps_of(num_tasks: int, folder: str | None, milliseconds: float) -> list[dict[str, Any]]:
    """All steps of one build."""
    with tempfile.TemporaryDirectory(prefix="tokshard-tasks-", dir=folder) as name:
        here = Path(name)
        write_byte_tokenizer(here / "tokenizer")
        (here / "inputs").mkdir()
        for first in range(0, num_tasks, TASKS_PER_INPUT):
            with (here / "inputs" / f"{first:08d}.jsonl").open("wb") as file:
                file.truncate(min(TASKS_PER_INPUT, num_tasks - first) * TASK_BYTES)
        return [step for what in ("begin", "restart") for step in in_process(here, what, milliseconds)]


def rows_of(num_tasks: int, steps: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """The table of one number of tasks."""
    yield ["step", "s", "CPU s", "CPU us a task", "peak MB", "kB a task", *(f"{verb}s" for verb in VERBS)]
    for step in steps:
        yield [
            step["step"],
            f"{step['seconds']:.2f}",
            f"{step['cpu_seconds']:.2f}",
            f"{step['cpu_seconds'] / num_tasks * 1e6:,.0f}",
            f"{step['peak_bytes'] / 1e6:,.0f}",
            f"{step['growth_bytes'] / num_tasks / 1e3:.2f}",
            *(f"{step['requests'].get(verb, 0):,}" for verb in VERBS),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.many_tasks", description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", type=read_count, default=[1_000, 10_000], help="one build each")
    parser.add_argument("--milliseconds", type=float, default=0.0, help="that each request takes")
    parser.add_argument("--folder", help="where the files go; default: the temporary directory")
    parser.add_argument("--child", choices=["task", "begin", "restart"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        be_slow(arguments.milliseconds / 1e3)
        sys.stdout.write(json.dumps(child(Path(arguments.folder), arguments.child)))
        return
    here = machine()
    with tempfile.TemporaryDirectory(prefix="tokshard-tasks-", dir=arguments.folder) as name:
        write_byte_tokenizer(Path(name) / "tokenizer")
        per_task = in_process(Path(name), "task", 0.0)
    shown = ", ".join(f"{count:g} {kind}" for kind, count in sorted(per_task.items()))
    sys.stdout.write(f"requests of a task with one shard: {shown}\n\n")
    runs = []
    for num_tasks in arguments.tasks:
        steps = steps_of(num_tasks, arguments.folder, arguments.milliseconds)
        runs.append({"tasks": num_tasks, "steps": steps})
        sys.stdout.write(f"{num_tasks:,} tasks\n{markdown(list(rows_of(num_tasks, steps)), num_left=1)}\n\n")
        sys.stdout.flush()
    line = {
        "benchmark": "many_tasks",
        "commit": commit_of(ROOT),
        "versions": versions(["numpy", "pyarrow", "msgspec"]),
        "machine": here,
        "milliseconds": arguments.milliseconds,
        "task_requests": per_task,
        "runs": runs,
    }
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
