"""AdamW with decay groups, alone or with Muon; and learning rates as a pure function of the step.

Muon's update is computed from the whole matrix, once, by one of the ranks that share it.

References:
    K. Jordan et al., Muon: An optimizer for hidden layers in neural networks (2024).
    J. Liu et al., Muon is Scalable for LLM Training (2025): the scale of updates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from tokshard.numbers import ceil_div
from tokshard.run_files.recipe import Optimizer
from tokshard.trainer.model import local

COEFFICIENTS, NUM_ITERATIONS = (3.4445, -4.7750, 2.0315), 5
"""Constants of the iteration, as in torch.optim.Muon."""


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
    options["fused"] = True  # divides by `grad_scale`, and heeds `found_inf`, without the host
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


class MuonAndAdamW(torch.optim.AdamW):
    """AdamW for its groups, and Muon for `matrices`, at the rate of the first group.

    Muon equals torch.optim.Muon with ``adjust_lr_fn="match_rms_adamw"``, bit for bit, on any number of ranks. Like
    fused AdamW it divides gradients by `grad_scale`, and changes nothing if `found_inf` is not 0, without the host.

    Args:
        matrices: parameters with two dimensions, the first of which is sharded.
        weight_decay_of_matrices, momentum: of Muon.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        groups: list[dict[str, Any]],
        *,
        weight_decay_of_matrices: float,
        momentum: float,
        **options: Any,
    ) -> None:
        super().__init__(groups, **options)
        self._weight_decay, self._momentum = weight_decay_of_matrices, momentum
        self._matrices = defaultdict[torch.Size, list[nn.Parameter]](list)
        for matrix in matrices:
            self._matrices[matrix.shape].append(matrix)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        super().zero_grad(set_to_none)
        for matrix in (one for matrices in self._matrices.values() for one in matrices):
            matrix.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of both."""
        loss = super().step(closure)
        for shape, matrices in self._matrices.items():
            rate, size = self.param_groups[0]["lr"], _num_shards(matrices[0])
            for start in range(0, len(matrices), size):
                part = matrices[start : start + size]
                updates = _orthogonal([self._momentum_of(matrix) for matrix in part], part[0])
                for matrix, update in zip(part, updates, strict=True):
                    new = local(matrix) * (1 - rate * self._weight_decay)
                    new.add_(update, alpha=-rate * 0.2 * math.sqrt(max(shape)))
                    local(matrix).copy_(self._kept(local(matrix), new))
        return loss

    def _momentum_of(self, matrix: nn.Parameter) -> Tensor:
        """Nesterov's mean of gradients after this one, of this rank's shard, in bf16."""
        assert matrix.grad is not None, "every matrix takes part in a loss"
        mean = local(self.state[matrix]["momentum_buffer"])
        gradient = local(matrix.grad) / getattr(self, "grad_scale", 1.0)
        gradient = self._kept(mean, gradient)  # a mean of equal numbers is the number
        mean.lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(mean, self._momentum).bfloat16()

    def _kept(self, old: Tensor, new: Tensor) -> Tensor:
        """The new values, or the old ones if the step is lost."""
        found_inf = getattr(self, "found_inf", None)
        return new if found_inf is None else torch.where(found_inf > 0, old, new)


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly the orthogonal factor of a matrix [m, n] in bf16, by Newton-Schulz iterations."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=1e-7)  # no singular value is greater than 1
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


def _orthogonal(shards: list[Tensor], like: Tensor) -> Iterator[Tensor]:
    """This rank's shards of the orthogonal factors of at most as many matrices as there are ranks that share them.

    Each rank receives all shards of one matrix, and returns the shards of its factor.

    Args:
        shards: of matrices of the same shape, on all these ranks.
        like: one of the matrices.
    """
    if not isinstance(like, DTensor) or (num_ranks := _num_shards(like)) == 1:
        return (orthogonal(shard) for shard in shards)
    group, (num_rows, num_columns) = like.device_mesh.get_group("shard"), like.shape
    is_owner, own = distributed.get_rank(group) < len(shards), shards[0].numel()
    height = ceil_div(num_rows, num_ranks)  # of each rank's rows; the last ones may have fewer
    of_ranks = [max(0, min(height, num_rows - rank * height)) * num_columns for rank in range(num_ranks)]
    of_matrices = [own] * len(shards) + [0] * (num_ranks - len(shards))
    gathered = shards[0].new_empty(num_rows * num_columns if is_owner else 0)
    of_owner = of_ranks if is_owner else [0] * num_ranks
    distributed.all_to_all_single(gathered, torch.cat([of.flatten() for of in shards]), of_owner, of_matrices, group)
    if is_owner:
        gathered = orthogonal(gathered.view(num_rows, num_columns)).flatten()
    returned = shards[0].new_empty(own * len(shards))
    distributed.all_to_all_single(returned, gathered, of_matrices, of_owner, group)
    return (of.view(shards[0].shape) for of in returned.view(len(shards), own))


def _num_shards(matrix: Tensor) -> int:
    """The number of ranks that share a matrix; copies of HSDP do not count."""
    return matrix.device_mesh.size(matrix.device_mesh.ndim - 1) if isinstance(matrix, DTensor) else 1
