"""The error of a run when a device has no memory left."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed

from tokshard.errors import TrainerError
from tokshard.run_files.recipe import Config, saved_form

ESTIMATE = """
import json, sys
from tokshard.run_files.recipe import resolve
from tokshard.trainer.estimate import estimate
found = estimate(resolve(json.loads(sys.argv[2])), ranks=int(sys.argv[1])).peak_bytes
kinds = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in sorted(found.items(), key=lambda item: -item[1]))
print(f"{sum(found.values()) / 2**30:.2f} GiB for a rank ({kinds})")
"""


@contextmanager
def out_of_memory_explained(settings: Config, device: torch.device) -> Iterator[None]:
    """Replaces torch's OutOfMemoryError by one with the settings, and starts an estimate. CUDA leaves a snapshot.

    Raises:
        TrainerError: memory ran out.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
        data, train, compute = settings.data, settings.train, settings.compute
        rows = train.micro_batch_size or max(data.rows_of_rank(num_ranks))
        snapshot = f"; {write_snapshot(train.out, 'out-of-memory')}" if device.type == "cuda" else ""
        raise TrainerError(
            f"rank {rank}: memory ran out: {str(error).splitlines()[0]} A micro-batch has {rows} rows of "
            f"{data.seq_len} tokens; compute.recompute is {compute.recompute}, compute.loss_chunk "
            f"{compute.loss_chunk}, parallel.precision {settings.parallel.precision}, parallel.replicas "
            f"{settings.parallel.replicas}, of {num_ranks} ranks; "
            f"{_begin_estimate(settings, num_ranks)}{snapshot}",
            hint="lower train.micro_batch_size, set compute.recompute=selective or full, or take more ranks",
        ) from error


def write_snapshot(out: str, what: str) -> str:
    """Write the allocations of this rank's GPU into `out`, for pytorch.org/memory_viz; returns a line about it.

    It has the lines of code that allocated in steps of `train.profile_steps`.

    Args:
        what: part of the file's name, so that no snapshot replaces another.
    """
    path = os.path.join(out, f"memory-{what}-rank-{distributed.get_rank()}.pickle")
    try:
        torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call] # noqa: SLF001 - torch documents it
    except (OSError, RuntimeError) as error:
        return f"{path} could not be written: {error}"
    return f"{path} has what was in memory"


def _begin_estimate(settings: Config, num_ranks: int) -> str:
    """Start an estimate that outlives this process, once for all ranks and restarts of a job; returns a line about it.

    It is a process of its own, because it needs a process group without other ranks.
    """
    fields = json.dumps(saved_form(settings))
    digest = hashlib.sha256(f"{num_ranks} {fields}".encode()).hexdigest()[:8]
    path = os.path.join(settings.train.out, f"memory-estimate-{digest}.txt")
    command = [sys.executable, "-c", ESTIMATE, str(num_ranks), fields]
    try:
        with open(path, "x") as file:
            outputs = [(os.POSIX_SPAWN_DUP2, file.fileno(), number) for number in (1, 2)]
            # in a process group of its own: torchrun ends the group of a rank
            os.posix_spawn(sys.executable, command, os.environ, file_actions=outputs, setpgroup=0)
    except FileExistsError:
        pass  # another rank was first
    except OSError as error:
        return f"{path} could not be written: {error}"
    return f"{path} says in a moment what tokshard.trainer.estimate finds for these settings"
