"""Muon equals torch.optim.Muon on every number of ranks, with and without copies. Real gloo ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.faults import Launcher
from tests.trainer.runs import on_ranks
from tokshard.run_files.model_shape import Shape
from tokshard.run_files.recipe import Compute, Optimizer, Parallel
from tokshard.trainer.model import Transformer, fill, initialise
from tokshard.trainer.optimizer import make_optimizer
from tokshard.trainer.parallel import make_mesh, process_group, sharded_model

SHAPE = Shape(dim=20, num_layers=3, num_heads=2, num_kv_heads=1, hidden_dim=27, vocab_size=33, qk_norm=True)
SETTINGS = Optimizer(name="muon", lr=0.02, momentum=0.9, weight_decay=0.1)
JOBS = {"three": (3, 1), "copies": (4, 2)}
"""Ranks, and copies of the model, which two ranks share each. Rows of 27, 20 and 10 do not divide by all of them."""
SCALE, NUM_STEPS, LOST = 3.0, 4, 2
"""What divides a gradient, and the step whose gradient is not finite."""


def gradients(model: Transformer, step: int) -> dict[str, Tensor]:
    """Whole gradients, the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    found = {name: torch.randn(of.shape, generator=generator) for name, of in model.named_parameters()}
    return {name: of * torch.nan if step == LOST else of for name, of in found.items()}


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    """A rate of its own for each step, as a schedule gives it."""
    for group in optimizer.param_groups:
        group["lr"] = SETTINGS.lr * (step + 1) / NUM_STEPS


def trained(model: Transformer) -> dict[str, Tensor]:
    """The parameters after the steps, by the optimizer of the trainer."""
    initialise(model, seed=0)
    optimizer: Any = make_optimizer(model, SETTINGS)
    for step in range(NUM_STEPS):
        of_step = gradients(model, step)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.empty_like(parameter)
            fill(parameter.grad, of_step[name])
        set_rate(optimizer, step)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(SCALE), torch.tensor(float(step == LOST))
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
    return {name: getattr(of, "full_tensor", lambda of=of: of)().detach() for name, of in model.named_parameters()}


def by_torch() -> dict[str, Tensor]:
    """The same by torch.optim.Muon, and AdamW for what is no matrix of a block."""
    model = Transformer(SHAPE)
    initialise(model, seed=0)
    named = dict(model.named_parameters())
    matrices = {name for name, of in named.items() if name.startswith("layers.") and of.ndim == 2}
    muon = torch.optim.Muon(
        [named[name] for name in matrices],
        lr=SETTINGS.lr,
        weight_decay=SETTINGS.weight_decay,
        momentum=SETTINGS.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = make_optimizer(model, replace(SETTINGS, name="adamw"))
    for step in range(NUM_STEPS):
        if step == LOST:
            continue
        for name, of in gradients(model, step).items():
            named[name].grad = of / SCALE
        for optimizer in (muon, adamw):
            set_rate(optimizer, step)
        muon.step()
        for name in matrices:
            named[name].grad = None
        adamw.step()
    return {name: of.detach() for name, of in named.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, of in expected.items():
        if name.startswith("layers.") and of.ndim == 2:
            assert torch.equal(found[name], of), name
        torch.testing.assert_close(found[name], of, atol=1e-6, rtol=1e-6)


def test_on_one_rank_it_is_that_of_torch() -> None:
    assert_same(trained(Transformer(SHAPE)), by_torch())


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_on_any_ranks_every_update_is_that_of_one_rank(tmp_path: Path, forks: Launcher) -> None:
    for name, (num_ranks, replicas) in JOBS.items():
        on_ranks(forks, num_ranks, train_rank, tmp_path / name, replicas, seconds=100)
        assert_same(torch.load(tmp_path / name), trained(Transformer(SHAPE)))


def train_rank(rank: int, path: str, replicas: str) -> None:
    settings = Parallel(device="cpu", replicas=int(replicas))
    with process_group(settings) as device:
        found = trained(sharded_model(SHAPE, make_mesh(settings, device), settings, Compute()))
        if rank == 0:
            torch.save(found, path)
