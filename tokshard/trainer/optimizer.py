"""AdamW with decay groups, alone or with Muon; and learning rates as a pure function of the step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tokshard.run_files.recipe import Optimizer
from tokshard.trainer.muon import MuonAndAdamW


def make_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """AdamW, or Muon and AdamW. Its state exists from the start, so that a checkpoint loads into it in place."""
    decayed, kept = decay_groups(model)
    matrices = [p for name, p in decayed.items() if name.startswith("layers.") and settings.name == "muon"]
    is_matrix = set(matrices)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in decayed.values() if p not in is_matrix], "weight_decay": settings.weight_decay},
        {"params": list(kept.values()), "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    options["fused"] = True  # divides by `grad_scale`, and heeds `found_inf`, without a word from the host
    if settings.name == "muon":
        options |= {"weight_decay_of_matrices": settings.weight_decay, "momentum": settings.momentum}
        optimizer: torch.optim.AdamW = MuonAndAdamW(matrices, groups, **options)
    else:
        optimizer = torch.optim.AdamW(groups, **options)
    for parameter in model.parameters():
        names = ("momentum_buffer",) if parameter in is_matrix else ("exp_avg", "exp_avg_sq")
        state = {name: torch.zeros_like(parameter, requires_grad=False) for name in names}
        step = {} if parameter in is_matrix else {"step": torch.tensor(0.0, device=parameter.device)}
        optimizer.state[parameter] = step | state
    return optimizer


def decay_groups(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Parameters by name: those with weight decay, and those without (norms and the embedding)."""
    named = dict(model.named_parameters())
    kept = {name: p for name, p in named.items() if p.ndim < 2 or name.startswith("embedding.")}
    return {name: p for name, p in named.items() if name not in kept}, kept


def learning_rate(settings: Optimizer, step: int, num_steps: int) -> float:
    """The rate of step `step`, counted from 0: linear warmup, then cosine, linear, or stable and a decay (WSD)."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    is_late, final = settings.schedule == "wsd", settings.lr * settings.final_fraction
    num_decay = settings.decay_steps if is_late else num_steps - settings.warmup_steps
    done = min(1.0, max(0.0, (step + 1 - num_steps + num_decay) / max(1, num_decay)))
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "1-sqrt": 1 - math.sqrt(done)}
    return final + (settings.lr - final) * left[settings.decay if is_late else settings.schedule]
