"""AdamW with decay groups, and learning rates as a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from tokshard.run_files.recipe import Optimizer


def make_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """AdamW whose state exists from the start, so that a checkpoint loads into it in place."""
    decayed, kept = decay_groups(model)
    optimizer = torch.optim.AdamW(
        [
            {"params": list(decayed.values()), "weight_decay": settings.weight_decay},
            {"params": list(kept.values()), "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,  # divides by `grad_scale`, and heeds `found_inf`, without a word from the host
    )
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def decay_groups(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Parameters by name: those with weight decay, and those without (norms and the embedding)."""
    named = dict(model.named_parameters())
    kept = {name: p for name, p in named.items() if p.ndim < 2 or name.startswith("embedding.")}
    return {name: p for name, p in named.items() if name not in kept}, kept


def learning_rate(settings: Optimizer, step: int, num_steps: int) -> float:
    """The rate of step `step`, counted from 0: linear warmup, then cosine, or stable and a linear decay (WSD)."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    final = settings.lr * settings.final_fraction
    if settings.schedule == "cosine":
        done = (step + 1 - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps)
        return final + (settings.lr - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    left = (num_steps - step - 1) / settings.decay_steps if settings.decay_steps else 1.0
    return final + (settings.lr - final) * max(0.0, min(1.0, left))
