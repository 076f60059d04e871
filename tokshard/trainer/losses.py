"""From a batch to its losses: micro-batches, and cross-entropy summed over targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tokshard.runtime.batches import IGNORED
from tokshard.runtime.tensors import Batch
from tokshard.trainer.attention import Documents

TokenLosses = Callable[[Tensor, Tensor, Tensor], Tensor]


def micro_batches(batch: Batch, num_rows: int) -> Iterator[Batch]:
    """A batch in parts of `num_rows` rows, a divisor of its rows; 0: one part. Pieces never cross rows.

    `cu_seqlens` of a part counts from the start of the batch.
    """
    rows, seq_len = batch["input_ids"].shape
    num_rows = num_rows or rows
    for start in range(0, rows, num_rows):
        part = {key: value[start : start + num_rows] for key, value in batch.items() if value.shape[:1] == (rows,)}
        bounds = batch["cu_seqlens"].numpy()
        first, last = bounds.searchsorted(start * seq_len), bounds.searchsorted((start + num_rows) * seq_len, "right")
        yield {**part, "cu_seqlens": batch["cu_seqlens"][first:last]}


def backward(model: nn.Module, parts: Sequence[Batch], device: torch.device) -> Iterator[tuple[Batch, Tensor]]:
    """Add the gradient of the sum of all losses, part by part; yields each part, and the losses of its rows."""
    for part in parts:
        # replicas of HSDP exchange gradients once, after the last part
        model.set_requires_all_reduce(part is parts[-1])  # type: ignore[operator]
        row_losses = sum_of_losses(model, part, device)
        row_losses.sum().backward()  # type: ignore[no-untyped-call]
        yield part, row_losses.detach()


def sum_of_losses(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Cross-entropy summed over the targets of each row: fp32 [rows]; 0 for a row of padding.

    Does not wait for the device if the batch is in pinned memory.
    """
    names = ("input_ids", "position_ids", "labels", "cu_seqlens")
    input_ids, position_ids, labels, bounds = (batch[name].to(device, non_blocking=True) for name in names)
    bounds = bounds - bounds[0]  # of a part of a batch
    torch._dynamo.mark_dynamic(bounds, 0)  # the number of documents differs from batch to batch
    documents = Documents(cu_seqlens=bounds, max_seqlen=labels.shape[1])
    losses: Tensor = model(input_ids, position_ids, documents, labels)
    return losses.view_as(labels).sum(1)


def token_losses(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    """Cross-entropy of each token under a linear head: fp32 [T]; 0 where the label is `IGNORED`."""
    logits_TV = functional.linear(hidden_TD, weight_VD).float()
    return functional.cross_entropy(logits_TV, labels_T, reduction="none", ignore_index=IGNORED)


def chunked_losses(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, chunk: int, function: TokenLosses = token_losses
) -> Tensor:
    """`token_losses`, with the logits of at most `chunk` tokens in memory; 0: of all.

    The gradients are computed with the losses, chunk by chunk, so that no product is computed twice. The backward pass
    only scales them: it needs the same factor for all tokens, as of a sum or a mean, and gives NaN otherwise.
    """
    chunk = chunk or len(hidden_TD)
    if torch.is_grad_enabled() and chunk < len(hidden_TD):
        losses_T: Tensor = _Chunked.apply(hidden_TD, weight_VD, labels_T, chunk, function)  # type: ignore[no-untyped-call]
        return losses_T
    parts = zip(torch.split(hidden_TD, chunk), torch.split(labels_T, chunk), strict=True)
    return torch.cat([function(hidden, weight_VD, labels) for hidden, labels in parts])


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk: int, function: TokenLosses
    ) -> Tensor:
        losses, grads_of_hidden = [], []
        grad_of_weight = torch.zeros_like(weight_VD, dtype=torch.float32)  # the sum of many small numbers
        weight_VD = weight_VD.detach().requires_grad_()
        for hidden, labels in zip(torch.split(hidden_TD, chunk), torch.split(labels_T, chunk), strict=True):
            hidden_of_chunk = hidden.detach().requires_grad_()
            with torch.enable_grad():
                of_chunk = function(hidden_of_chunk, weight_VD, labels)
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
        return grad_of_hidden * factor, grad_of_weight * factor, None, None, None
