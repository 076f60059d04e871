"""A training job of several real processes, for test_rescale.py: ranks over gloo that save, are killed and come back.

``python -m tests.runtime.rescale`` imports torch once, then forks the ranks of each job that it reads from stdin.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import forked
from tokshard.errors import PlanError
from tokshard.runtime import StreamingLoader, StreamPlan

GLOBAL_BATCH = 12
SAVE_EVERY = 4
WEIGHTS = {"prose": 0.7, "code": 0.3}
CHANGE_STEP, CHANGED_WEIGHTS = 22, {"prose": 0.4, "code": 0.6}
Batch = dict[str, torch.Tensor]


def plan_of(directory: Path, num_streams: int = 1) -> StreamPlan:
    """With 2 and 4 streams, one of the corpora is dealt to them; with 64, both are shared."""
    corpora = {name: directory / name for name in WEIGHTS}
    sizes = {"block_tokens": 64, "window_blocks": 4} if num_streams == 1 else {"block_tokens": 32, "window_blocks": 1}
    small = {"allow_small_blocks": num_streams > 1, "num_streams": num_streams}
    return StreamPlan(corpora, weights=WEIGHTS, seq_len=16, seed=11, **sizes, **small)


def rows_of(loader: StreamingLoader, batch: Batch) -> list[dict[str, Any]]:
    """What a rank received, and where each row says that it comes from."""
    rows = []
    for index in range(len(batch["sample_index"])):
        sample = int(batch["sample_index"][index])
        if sample < 0:
            continue  # padding
        pieces = loader.plan.trace(sample, loader.cursor)
        rows.append(
            {
                "sample": sample,
                "corpus": loader.plan.names[int(batch["corpus_index"][index])],
                "pieces": [[piece.corpus, piece.document, piece.start, piece.stop] for piece in pieces],
                "input_ids": batch["input_ids"][index].tolist(),
                "labels": batch["labels"][index].tolist(),
            }
        )
    return rows


def digest(batch: Batch) -> torch.Tensor:
    """Stands for the gradient of a batch: a number that knows every token and the sample that it is in."""
    places = torch.arange(1, batch["input_ids"].shape[1] + 1)
    return (batch["input_ids"] * places * (batch["sample_index"] + 1).unsqueeze(1)).sum().reshape(1)


class Killer:
    """Ends this rank by SIGKILL at a given step and moment, or some seconds after it."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        kill = job.get("kill") or {}
        self._place = (kill.get("step"), kill.get("moment")) if kill.get("rank") == rank else None
        self._seconds = kill.get("seconds", 0.0)

    def at(self, step: int, moment: str) -> None:
        if self._place == (step, moment):
            if not self._seconds:
                os.kill(os.getpid(), signal.SIGKILL)
            timer = threading.Timer(self._seconds, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()


def last_checkpoint(directory: Path) -> Path | None:
    """The last one that is complete: its metadata is written last."""
    steps = [int(path.parent.name) for path in directory.glob("checkpoints/*/.metadata")]
    return directory / "checkpoints" / str(max(steps)) if steps else None


def train(job: dict[str, Any], rank: int) -> None:
    directory, killer = Path(job["directory"]), Killer(job, rank)
    loader = StreamingLoader(
        plan_of(directory, job.get("num_streams", 1)),
        global_batch_size=job.get("global_batch_size", GLOBAL_BATCH),
        uneven="pad",
        prefetch_factor=job["prefetch_factor"],
    )
    model = torch.zeros(2, dtype=torch.int64)  # digest of all batches so far, steps
    state = {"loader": loader, "model": model}
    if (checkpoint := last_checkpoint(directory)) is not None:
        dcp.load(state, checkpoint_id=checkpoint)
    step = int(model[1])
    ledger = os.open(directory / "ledger" / f"{job['name']}-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    write(ledger, {"start": step, "world_size": distributed.get_world_size()})
    for batch in loader:
        step += 1
        write(ledger, {"step": step, "rows": rows_of(loader, batch)})
        killer.at(step, "received")
        total = digest(batch)
        distributed.all_reduce(total)
        model += torch.cat([total, torch.ones(1, dtype=torch.int64)])
        killer.at(step, "computed")
        if step == CHANGE_STEP:
            loader.set_weights(CHANGED_WEIGHTS)
        if step % SAVE_EVERY == 0 or step == job["steps"]:
            dcp.save(state, checkpoint_id=directory / "checkpoints" / str(step))
            killer.at(step, "saved")
        if step == job["steps"]:
            break
    loader.close()


def write(descriptor: int, line: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(line).encode() + b"\n")  # one call, so that a kill leaves whole lines


def show_meshes(job: dict[str, Any], rank: int) -> None:
    """Write which samples this rank gets under device meshes of several shapes."""
    plan = plan_of(Path(job["directory"]))
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    tensor = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pipeline = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "cp", "dp_shard"))
    meshes = {
        "none": None,
        "hsdp": hsdp,
        "dp of dp x tp": tensor["dp"],
        "dp of pp x dp": pipeline["dp"],
        "both dp of three": three["dp_replicate", "dp_shard"],
        "flattened": hsdp["dp_replicate", "dp_shard"]._flatten("dp"),
    }
    found: dict[str, Any] = {}
    for name, mesh in {"dp x tp": tensor, "pp x dp": pipeline, "three": three, "tp": tensor["tp"]}.items():
        try:
            StreamingLoader(plan, global_batch_size=GLOBAL_BATCH, dp_mesh=mesh)
        except PlanError as error:
            found[name] = str(error)
    for name, mesh in meshes.items():
        loader = StreamingLoader(plan, global_batch_size=GLOBAL_BATCH, dp_mesh=mesh)
        found[name] = next(iter(loader))["sample_index"].tolist()
        loader.close()
    (Path(job["directory"]) / f"meshes-{rank}.json").write_text(json.dumps(found))


def run_rank(job: dict[str, Any], rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", init_method=f"file://{job['directory']}/store-{job['name']}", rank=rank, world_size=job["world_size"]
    )
    {"train": train, "meshes": show_meshes}[job["kind"]](job, rank)
    distributed.destroy_process_group()


def run_logged(job: dict[str, Any], rank: int) -> None:
    log = os.open(Path(job["directory"]) / f"log-{job['name']}-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    run_rank(job, rank)


def run_job(job: dict[str, Any]) -> list[int]:
    """Run all ranks; when one dies, the others are killed too, as a scheduler does. Returns the exit codes."""
    ranks = {forked(partial(run_logged, job, rank)): rank for rank in range(job["world_size"])}
    codes = [0] * len(ranks)
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
        if any(codes):
            for other in ranks:
                os.kill(other, signal.SIGKILL)
        time.sleep(0.005)
    return codes


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run_job(json.loads(line))) + "\n")
        sys.stdout.flush()
