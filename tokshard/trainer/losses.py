"""From a batch to its losses: micro-batches, their gradients, and cross-entropy summed over targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tokshard.runtime.tensors import Batch
from tokshard.trainer.attention import Documents


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
