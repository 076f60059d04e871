"""Checkpoints that exist wholly or not at all, for any number of ranks.

    OUT/checkpoints/step-00000100/     shards of DCP (model, optimizer, RNG), state.json, COMPLETE

All of it is written in `step-....partial`, which one rename commits. COMPLETE lists every file with its size, so that
a directory that was copied half, or whose file system renames without atomicity, is not picked up either.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from tokshard.errors import TrainerError

COMPLETE = "COMPLETE"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")


def save(
    directory: str,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    keep: int = 0,
) -> str:
    """Commit a checkpoint; every rank calls it, and returns when it is complete.

    Args:
        state: step, cursor and configuration: JSON, the same on every rank.
        keep: delete all but the newest so many; 0: none.

    Raises:
        TrainerError: the disk is full, or another error of the file system.
    """
    final = os.path.join(directory, f"step-{step:08d}")
    partial = final + ".partial"
    is_first = distributed.get_rank() == 0
    rng = {f"rng.{name}.{distributed.get_rank()}": value for name, value in _rng().items()}
    try:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
            os.makedirs(partial)
        distributed.barrier()
        save_tensors({**_tensors(model, optimizer), **rng}, checkpoint_id=partial)
        if is_first:
            _commit(partial, final, state)
            for old in find_all(directory)[:-keep] if keep else []:
                shutil.rmtree(old)
    except (OSError, CheckpointException) as error:  # the latter is no Exception
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        raise TrainerError(
            f"{partial} could not be saved: {'; '.join(map(str, causes))}",
            hint="make room or repair the directory; the same command goes on from the checkpoint before",
        ) from error
    distributed.barrier()
    return final


def load(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load a checkpoint of any world size in place; returns its `state`.

    A rank that the saving job did not have keeps its random state.

    Raises:
        TrainerError: the checkpoint is not complete, or of another model.
    """
    if not is_complete(path):
        raise TrainerError(f"{path} is no complete checkpoint", hint="give a directory step-... that holds COMPLETE")
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors, rng = _tensors(model, optimizer), _rng()
    for name, tensor in tensors.items():
        size = getattr(saved.get(name), "size", None)
        if size != tensor.size():
            raise TrainerError(
                f"{path} is of another model: {name} is {size and tuple(size)} there, {tuple(tensor.size())} here",
                hint="give the [model] of its state.json, or start a new run in another train.out",
            )
    keys = {name: f"rng.{name}.{distributed.get_rank()}" for name in rng}
    wanted = {key: rng[name] for name, key in keys.items() if key in saved}
    load_tensors({**tensors, **wanted}, checkpoint_id=path)
    if keys["cpu"] in wanted:
        torch.set_rng_state(rng["cpu"])
    if "cuda" in rng and keys["cuda"] in wanted:
        torch.cuda.set_rng_state(rng["cuda"])
    with open(os.path.join(path, STATE), encoding="utf-8") as file:
        state: dict[str, Any] = json.load(file)
    return state


def find_latest(directory: str) -> str | None:
    """The newest complete checkpoint, as rank 0 sees it: all ranks agree."""
    found: list[str | None] = [None]
    if distributed.get_rank() == 0 and (complete := find_all(directory)):
        found = [complete[-1]]
    distributed.broadcast_object_list(found)
    return found[0]


def find_all(directory: str) -> list[str]:
    """Complete checkpoints, oldest first."""
    if not os.path.isdir(directory):
        return []
    named = [(int(match[1]), name) for name in os.listdir(directory) if (match := _NAME.fullmatch(name))]
    paths = [os.path.join(directory, name) for _, name in sorted(named)]
    return [path for path in paths if is_complete(path)]


def is_complete(path: str) -> bool:
    """Whether the marker is there and every file that it lists has its size."""
    try:
        with open(os.path.join(path, COMPLETE), encoding="utf-8") as file:
            sizes = json.load(file)
        return all(os.path.getsize(os.path.join(path, name)) == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _commit(partial: str, final: str, state: dict[str, Any]) -> None:
    """Make what all ranks have written, and `state`, durable; then visible at once."""
    _write(os.path.join(partial, STATE), state)
    sizes = {name: os.path.getsize(os.path.join(partial, name)) for name in sorted(os.listdir(partial))}
    for name in sizes:
        _sync(os.path.join(partial, name))
    _write(os.path.join(partial, COMPLETE), sizes)
    _sync(partial)
    if os.path.exists(final):  # an earlier attempt at this step, given up when an older checkpoint was loaded
        shutil.rmtree(final)
    os.rename(partial, final)  # readers see the whole checkpoint or none
    _sync(os.path.dirname(final))


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor under a name that depends on neither ranks nor decay groups."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        tensors |= {f"optimizer.{key}.{name}": value for key, value in optimizer.state[parameter].items()}
    return tensors


def _rng() -> dict[str, Tensor]:
    rng = {"cpu": torch.get_rng_state()}
    return {**rng, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else rng


def _write(path: str, value: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
    _sync(path)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
