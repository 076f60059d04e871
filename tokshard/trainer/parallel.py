"""Process group, device mesh and FSDP2. Without torchrun one rank is a group of one, so there is a single code path."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tokshard.errors import TokshardError, TrainerError, UsageError
from tokshard.trainer import config
from tokshard.trainer.model import Shape, Transformer, initialise

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@contextmanager
def process_group(choice: str) -> Iterator[torch.device]:
    """Join the job of torchrun, or be a job of one, and yield this rank's device. An existing group is used.

    A rank that fails does not destroy the group: that would wait for the other ranks, which wait for this one, so that
    torchrun would never see a process end.
    """
    use_cuda = choice == "cuda" or (choice == "auto" and torch.cuda.is_available())
    if use_cuda and not torch.cuda.is_available():
        raise UsageError("parallel.device is cuda, this process sees none", hint="set parallel.device=cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if distributed.is_initialized():
        yield device
        return
    # counts and digests are reduced on the CPU, so CUDA jobs need gloo as well
    backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
    if "RANK" in os.environ:
        distributed.init_process_group(backend)
    else:
        distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield device
    except BaseException:
        if distributed.get_world_size() == 1:
            distributed.destroy_process_group()
        raise
    distributed.destroy_process_group()


@contextmanager
def together(problem: str = "", *, hint: str = "") -> Iterator[None]:
    """A block that each rank runs on its own, without collectives. If it fails on one rank, all raise that error.

    Args:
        problem, hint: for the TrainerError that replaces an OSError.
    """
    error: TokshardError | None = None
    try:
        yield
    except TokshardError as caught:
        error = caught
    except OSError as caught:
        error = TrainerError(f"{problem}: {caught}", hint=hint)
    raise_together(error)


def raise_together(error: TokshardError | None) -> None:
    """Raise the error of the first failing rank on all ranks. A collective: every rank calls it."""
    errors: list[TokshardError | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(errors, error)
    for rank, first in enumerate(errors):
        if first is not None:
            problem = first.problem if len(errors) == 1 else f"rank {rank}: {first.problem}"
            raise type(first)(problem, hint=first.hint) from error


def make_mesh(settings: config.Parallel, device: torch.device) -> DeviceMesh:
    """All ranks as (shard,), or as (replicate, shard) for HSDP.

    Raises:
        UsageError: the replicas do not divide the ranks.
    """
    world_size = distributed.get_world_size()
    if world_size % settings.replicas:
        raise UsageError(
            f"parallel.replicas is {settings.replicas}, of {world_size} ranks", hint="give a divisor of the ranks"
        )
    if settings.replicas == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    sizes = (settings.replicas, world_size // settings.replicas)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))


def sharded_model(shape: Shape, mesh: DeviceMesh, settings: config.Parallel, *, seed: int) -> Transformer:
    """A model whose parameters are fp32 shards, each block gathered in `precision` while it is used.

    Gradients are summed over ranks, not averaged: the loss is already divided by the global number of targets.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[settings.precision],
        reduce_dtype=DTYPES[settings.reduce],
        cast_forward_inputs=False,  # it would round the angles of RoPE to bf16
    )
    with torch.device("meta"):
        model = Transformer(shape)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # without it gloo refuses the divide factor
            module.set_gradient_divide_factor(1.0)
    model.to_empty(device=torch.device(mesh.device_type))
    initialise(model, seed=seed)
    return model


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of a CPU tensor over all ranks."""
    distributed.all_reduce(values)
    return values


def gather_rows(rows: Tensor) -> Tensor:
    """Concatenate a CPU tensor [n, ...] of each rank to [world_size * n, ...]."""
    parts = [torch.empty_like(rows) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, rows)
    return torch.cat(parts)
