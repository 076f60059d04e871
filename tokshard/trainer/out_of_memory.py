"""What a run says when a device has no memory left."""

from __future__ import annotations

import json
import os
import subprocess
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
found = estimate(resolve(json.load(sys.stdin)), ranks=int(sys.argv[1])).peak_bytes
kinds = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in sorted(found.items(), key=lambda item: -item[1]))
print(f"finds {sum(found.values()) / 2**30:.2f} GiB for a rank ({kinds})")
"""
ESTIMATE_SECONDS = 120


@contextmanager
def out_of_memory_explained(settings: Config, device: torch.device) -> Iterator[None]:
    """Replaces torch's OutOfMemoryError by one with the settings and the estimate. CUDA leaves a snapshot in `out`.

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
            f"{settings.parallel.replicas}, of {num_ranks} ranks; tokshard.trainer.estimate "
            f"{_estimated(settings, num_ranks)}{snapshot}",
            hint="lower train.micro_batch_size, set compute.recompute=selective or full, or take more ranks",
        ) from error


def write_snapshot(out: str, what: str) -> str:
    """Write what is allocated on this rank's GPU into `out`, for pytorch.org/memory_viz; returns a line about it.

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


def _estimated(settings: Config, num_ranks: int) -> str:
    """In a process of its own: an estimate needs a process group without other ranks."""
    command = [sys.executable, "-c", ESTIMATE, str(num_ranks)]
    try:
        done = subprocess.run(  # noqa: S603 - this Python
            command,
            input=json.dumps(saved_form(settings)),
            capture_output=True,
            text=True,
            timeout=ESTIMATE_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"finds nothing: {error}"
    return done.stdout.strip()
