"""Process group, device mesh and FSDP2. Without torchrun one rank is a group of one, so there is a single code path."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tokshard.errors import TokshardError, TrainerError, UsageError
from tokshard.extras import extra_module
from tokshard.run_files.model_shape import Shape
from tokshard.run_files.recipe import Compute, Parallel
from tokshard.trainer.backports.chunked_loss import token_losses
from tokshard.trainer.launcher import device_index, rank_of
from tokshard.trainer.model import Transformer
from tokshard.wording import printable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@contextmanager
def process_group(settings: Parallel) -> Iterator[torch.device]:
    """Join the job of torchrun, or be a job of one, and yield this rank's device. An existing group is used.

    A rank that fails does not destroy the group: that would wait for the other ranks, which wait for this one, so that
    torchrun would never see a process end.

    Raises:
        UsageError: the launcher or the device does not fit.
        TrainerError: another rank is gone, or did not answer in time.
    """
    rank = rank_of(os.environ)
    device = _device(settings.device)
    if distributed.is_initialized():
        yield device
        return
    # errors and paths are exchanged on the CPU, so CUDA jobs need gloo as well
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=settings.init_timeout_seconds)
    try:
        if rank is None:
            store = distributed.HashStore()  # type: ignore[attr-defined] # torch documents it, and does not declare it
            distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        else:
            distributed.init_process_group(backend, timeout=timeout)
        yield device
    except BaseException as error:
        if distributed.is_initialized() and distributed.get_world_size() == 1:
            distributed.destroy_process_group()
        if isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            raise TrainerError(
                f"rank {rank}: another rank is gone or did not answer: {str(error).splitlines()[0]}",
                hint="find the first error of the other ranks; if they are only slow, raise "
                "parallel.init_timeout_seconds or parallel.step_timeout_seconds",
            ) from error
        raise
    distributed.destroy_process_group()


def limit_waits(mesh: DeviceMesh, settings: Parallel) -> None:
    """From now on, wait for another rank only as long as a step may take, not as long as a start."""
    # newer versions of torch have the public one, and warn about the other
    set_timeout = getattr(distributed, "set_timeout", None) or distributed_c10d._set_pg_timeout  # noqa: SLF001
    for group in (None, *mesh.get_all_groups()):
        set_timeout(timedelta(seconds=settings.step_timeout_seconds), group)


def _device(choice: str) -> torch.device:
    use_cuda = choice == "cuda" or (choice == "auto" and torch.cuda.is_available())
    if not use_cuda:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("parallel.device is cuda, this process sees none", hint="set parallel.device=cpu")
    device = torch.device("cuda", device_index(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


@contextmanager
def together(problem: str = "", *, hint: str = "", group: ProcessGroup | None = None) -> Iterator[None]:
    """A block that each rank runs on its own, without collectives. If it fails on one rank, all raise that error.

    Args:
        problem, hint: for the TrainerError that replaces an OSError.
        group: all ranks; default: the group of the training loop, which another thread must not use.
    """
    error: TokshardError | None = None
    try:
        yield
    except TokshardError as caught:
        error = caught
    except OSError as caught:
        error = TrainerError(f"{problem}: {caught}", hint=hint)
    raise_together(error, group)


def raise_together(error: TokshardError | None, group: ProcessGroup | None = None) -> None:
    """Raise the error of the first failing rank on all ranks. A collective: every rank calls it."""
    errors: list[TokshardError | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(errors, error, group)
    for rank, first in enumerate(errors):
        if first is not None:
            problem = first.problem if len(errors) == 1 else f"rank {rank}: {first.problem}"
            raise type(first)(problem, hint=first.hint) from error


def say(line: str, *, ranks: Sequence[int] = (0,)) -> None:
    """A line for people, from these ranks. A closed or full stdout does not end a run."""
    if distributed.get_rank() in ranks:
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.write(printable(line) + "\n")
            sys.stdout.flush()


def check_same(value: str, problem: str, *, hint: str) -> None:
    """Refuse to continue if a value differs between ranks. A collective: every rank calls it.

    Raises:
        TrainerError: names the first rank that differs from rank 0, with `problem`; the same error on all ranks.
    """
    of_rank_0 = [value]
    distributed.broadcast_object_list(of_rank_0)
    raise_together(TrainerError(problem, hint=hint) if value != of_rank_0[0] else None)


def check_replicas(settings: Parallel, num_ranks: int) -> None:
    """Refuse copies of the model that cannot have equally many ranks.

    Raises:
        UsageError: the replicas do not divide the ranks.
    """
    if num_ranks % settings.replicas:
        raise UsageError(
            f"parallel.replicas is {settings.replicas}, of {num_ranks} ranks", hint="give a divisor of the ranks"
        )


def make_mesh(settings: Parallel, device: torch.device) -> DeviceMesh:
    """All ranks as (shard,), or as (replicate, shard) for HSDP.

    Raises:
        UsageError: the replicas do not divide the ranks.
    """
    world_size = distributed.get_world_size()
    check_replicas(settings, world_size)
    if settings.replicas == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    sizes = (settings.replicas, world_size // settings.replicas)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))


def sharded_model(shape: Shape, mesh: DeviceMesh, settings: Parallel, compute: Compute) -> Transformer:
    """A model whose parameters are fp32 shards without values yet: `initialise` it, or load a checkpoint.

    Embedding, blocks, and the last norm with the head are gathered in `precision` while they are used. Gradients are
    summed over ranks, not averaged: the loss is already divided by the global number of targets.

    Raises:
        UsageError: the device cannot compute in this precision, or torchao is missing.
    """
    if mesh.device_type == "cuda" and settings.precision == "fp32":
        raise UsageError(
            "parallel.precision is fp32, which attention on CUDA cannot compute", hint="set parallel.precision=bf16"
        )
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[settings.precision],
        reduce_dtype=DTYPES[settings.reduce],
        cast_forward_inputs=False,  # it would round the angles of RoPE to bf16
    )
    with torch.device("meta"):
        model = Transformer(shape, recompute=compute.recompute, loss_chunk=compute.loss_chunk)
    if compute.float8 != "off":
        use_float8(model.layers, compute.float8, emulate=mesh.device_type == "cpu")
    if compute.compile != "off":
        model.head.token_losses = torch.compile(token_losses, fullgraph=True, backend=compute.compile)
        for layer in model.layers:
            layer.compile(fullgraph=True, backend=compute.compile)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # the backward pass begins with the last unit, and does not read the first one's weights unless they are the head's
    last = [model.norm, model.head]
    if shape.tied_embeddings:
        last = [model.embedding, *last]
    else:
        fully_shard(model.embedding, mesh=mesh, mp_policy=policy)
        model.embedding.set_unshard_in_backward(False)  # type: ignore[operator]
    fully_shard(last, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # without it gloo refuses the divide factor
            module.set_gradient_divide_factor(1.0)
    model.to_empty(device=torch.device(mesh.device_type))
    return model


def use_float8(blocks: nn.Module, recipe: str, *, emulate: bool) -> None:
    """Compute linear layers in float8, in place; parameters keep their names and dtype.

    Raises:
        UsageError: torchao is missing.
    """
    float8 = extra_module("torchao.float8", f"compute.float8 is {recipe}, and torchao is missing", extra="float8")
    settings = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    float8.convert_to_float8_training(blocks, config=settings)
