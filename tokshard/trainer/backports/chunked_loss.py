"""Cross-entropy under a linear head, with the logits of only some tokens in memory.

Shapes in names: T tokens, D width of the model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

TokenLosses = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]

IGNORED = -100
"""The label of a token without a target, as everywhere in torch."""


def token_losses(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, loss_weights_T: Tensor | None = None
) -> Tensor:
    """Cross-entropy of each token under a linear head, times its weight: fp32 [T]; 0 where the label is `IGNORED`."""
    logits_TV = functional.linear(hidden_TD, weight_VD).float()
    losses_T = functional.cross_entropy(logits_TV, labels_T, reduction="none", ignore_index=IGNORED)
    return losses_T if loss_weights_T is None else losses_T * loss_weights_T


def chunked_losses(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    loss_weights_T: Tensor | None = None,
    *,
    chunk: int,
    function: TokenLosses = token_losses,
) -> Tensor:
    """`token_losses`, with the logits of at most `chunk` tokens in memory; 0: of all.

    The gradients are computed with the losses, chunk by chunk, so no product is computed twice. The backward pass only
    scales them: it needs the same factor for all tokens, as in a sum or a mean, and gives NaN otherwise. So the weights
    of tokens are applied here.
    """
    chunk = chunk or len(hidden_TD)
    if torch.is_grad_enabled() and chunk < len(hidden_TD):
        losses_T: Tensor = _Chunked.apply(hidden_TD, weight_VD, labels_T, loss_weights_T, chunk, function)  # type: ignore[no-untyped-call]
        return losses_T
    parts = _chunks(hidden_TD, labels_T, loss_weights_T, chunk)
    return torch.cat([function(hidden, weight_VD, labels, weights) for hidden, labels, weights in parts])


def _chunks(
    hidden_TD: Tensor, labels_T: Tensor, loss_weights_T: Tensor | None, chunk: int
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    weights = repeat(None) if loss_weights_T is None else torch.split(loss_weights_T, chunk)
    return zip(torch.split(hidden_TD, chunk), torch.split(labels_T, chunk), weights, strict=False)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        loss_weights_T: Tensor | None,
        chunk: int,
        function: TokenLosses,
    ) -> Tensor:
        losses, grads_of_hidden = [], []
        grad_of_weight = torch.zeros_like(weight_VD, dtype=torch.float32)  # the sum of many small numbers
        weight_VD = weight_VD.detach().requires_grad_()
        for hidden, labels, weights in _chunks(hidden_TD, labels_T, loss_weights_T, chunk):
            hidden_of_chunk = hidden.detach().requires_grad_()
            with torch.enable_grad():
                of_chunk = function(hidden_of_chunk, weight_VD, labels, weights)
                grads = torch.autograd.grad(of_chunk.sum(), (hidden_of_chunk, weight_VD))
            losses.append(of_chunk.detach())
            grads_of_hidden.append(grads[0])
            grad_of_weight += grads[1]
        ctx.save_for_backward(torch.cat(grads_of_hidden), grad_of_weight.to(weight_VD.dtype))
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        grad_of_hidden, grad_of_weight = ctx.saved_tensors
        factor = torch.where((grad_T == grad_T[0]).all(), grad_T[0], torch.nan)
        return grad_of_hidden * factor, grad_of_weight * factor, None, None, None, None
