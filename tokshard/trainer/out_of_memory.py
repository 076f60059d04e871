"""The error of a run when a device has no memory left."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed

from tokshard.errors import TokshardError, TrainerError
from tokshard.run_files.recipe import Config, saved_form
from tokshard.trainer.estimate import estimate


@contextmanager
def out_of_memory_explained(settings: Config, device: torch.device) -> Iterator[None]:
    """Replaces torch's OutOfMemoryError by one with the settings, and writes an estimate. CUDA leaves a snapshot.

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
            f"{_write_estimate(settings, num_ranks)}{snapshot}",
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


def _write_estimate(settings: Config, num_ranks: int) -> str:
    """Write an estimate, once for all ranks and restarts of a job; returns a line about it."""
    digest = hashlib.sha256(f"{num_ranks} {json.dumps(saved_form(settings))}".encode()).hexdigest()[:8]
    path = os.path.join(settings.train.out, f"memory-estimate-{digest}.txt")
    try:
        found = sorted(estimate(settings, ranks=num_ranks).peak_bytes.items(), key=lambda item: -item[1])
        kinds = ", ".join(f"{kind} {size / 2**30:.2f}" for kind, size in found)
        with open(path, "x") as file:
            file.write(f"{sum(size for _, size in found) / 2**30:.2f} GiB for a rank ({kinds})\n")
    except FileExistsError:
        pass  # another rank was first
    except (OSError, TokshardError) as error:
        return f"{path} could not be written: {error}"
    return f"{path} says what tokshard.trainer.estimate finds for these settings"
