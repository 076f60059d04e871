"""From a batch to its losses: micro-batches, their gradients, and weighted sums of cross-entropy over targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tokshard.runtime import expand
from tokshard.runtime.tensors import Batch
from tokshard.trainer.attention import Documents


def micro_batches(batch: Batch, num_rows: int, device: torch.device) -> Iterator[Batch]:
    """A compact batch on a device, in full parts of `num_rows` rows, a divisor of its rows; 0: one part.

    Does not wait for the device if the batch is in pinned memory. Pieces never cross rows; `cu_seqlens` of a part
    counts from the start of the batch.
    """
    rows, seq_len = batch["input_ids"].shape
    num_rows = num_rows or rows
    bounds, full = batch["cu_seqlens"].numpy(), expand(batch, device)
    for start in range(0, rows, num_rows):
        part = {key: value[start : start + num_rows] for key, value in full.items() if value.shape[:1] == (rows,)}
        first, last = bounds.searchsorted(start * seq_len), bounds.searchsorted((start + num_rows) * seq_len, "right")
        yield {**part, "cu_seqlens": full["cu_seqlens"][first:last]}


def backward(model: nn.Module, parts: Sequence[Batch]) -> Iterator[tuple[Batch, Tensor]]:
    """Add the gradient of the sum of all losses, part by part; yields each part, and the losses of its rows."""
    for part in parts:
        # replicas of HSDP exchange gradients once, after the last part
        model.set_requires_all_reduce(part is parts[-1])  # type: ignore[operator]
        row_losses = sum_of_losses(model, part)
        row_losses.sum().backward()  # type: ignore[no-untyped-call]
        yield part, row_losses.detach()


def sum_of_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy summed over the targets of each row of a full batch: fp32 [rows]; 0 for a row of padding.

    With loss spans each target counts with its weight.
    """
    labels, bounds = batch["labels"], batch["cu_seqlens"] - batch["cu_seqlens"][0]  # of a part of a batch
    torch._dynamo.mark_dynamic(bounds, 0)  # the number of documents differs from batch to batch
    documents = Documents(cu_seqlens=bounds, max_seqlen=labels.shape[1])
    losses: Tensor = model(batch["input_ids"], batch["position_ids"], documents, labels, batch.get("loss_weights"))
    return losses.view_as(labels).sum(1)
