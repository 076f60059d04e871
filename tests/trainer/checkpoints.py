"""Tiny models and their checkpoints, without a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from tokshard.errors import TokshardError
from tokshard.run_files.checkpoint_directory import COMPLETE, State
from tokshard.run_files.model_shape import Shape
from tokshard.run_files.recipe import Optimizer, Parallel
from tokshard.trainer import checkpoint
from tokshard.trainer.checkpoint import tensors_of
from tokshard.trainer.model import Transformer, initialise
from tokshard.trainer.optimizer import make_optimizer
from tokshard.trainer.parallel import process_group

FIRST, SECOND, THIRD, FOURTH = (f"step-0000000{step}" for step in (1, 2, 3, 4))


def alone() -> AbstractContextManager[Any]:
    """A group of this process alone."""
    return process_group(Parallel(device="cpu"))


def initialised(shape: Shape, *, seed: int = 0, **options: Any) -> Transformer:
    """A model with values, on this process alone."""
    model = Transformer(shape, **options)
    initialise(model, seed=seed)
    return model


def trained(*, seed: int, dim: int = 16, tied_embeddings: bool = False) -> tuple[Transformer, torch.optim.AdamW]:
    sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "hidden_dim": 16, "vocab_size": 20}
    shape = Shape(dim=dim, tied_embeddings=tied_embeddings, **sizes)
    model = initialised(shape, seed=seed)
    optimizer = make_optimizer(model, Optimizer())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(seed))
    optimizer.step()
    return model, optimizer


def state_after(step: int) -> State:
    return State(step=step, loader={}, config={})


def save(directory: Path, step: int) -> Path:
    return Path(checkpoint.save(str(directory), tensors_of(*trained(seed=step)), state_after(step)))


def latest(directory: Path) -> str | None:
    found = checkpoint.find_latest(str(directory))
    return found and Path(found).name


@contextmanager
def unchanged(model: Transformer, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """What is refused in here leaves every value as it was."""
    before = {name: tensor.clone() for name, tensor in tensors_of(model, optimizer).items()}
    try:
        yield
    except TokshardError:
        assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(model, optimizer).items())
        raise


def load(path: Path) -> State:
    """Into another model."""
    model, optimizer = trained(seed=9)
    with unchanged(model, optimizer):
        return checkpoint.load(str(path), model, optimizer)


def seal(path: Path) -> None:
    """Make COMPLETE true again after a change, as one who means harm would."""
    contents = {file.name: file.read_bytes() for file in path.iterdir() if file.name != COMPLETE}
    files = {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in contents.items()}
    (path / COMPLETE).write_text(json.dumps(files))
