"""From a batch to its losses: micro-batches, and cross-entropy summed over targets."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokshard.runtime.batches import IGNORED
from tokshard.runtime.tensors import Batch
from tokshard.trainer.attention import Documents


def micro_batches(batch: Batch, num_rows: int) -> Iterator[Batch]:
    """A batch in parts of at most `num_rows` rows; 0: one part. Pieces never cross rows, so any cut is valid."""
    rows, seq_len = batch["input_ids"].shape
    for start in range(0, rows, num_rows or rows):
        stop = min(rows, start + (num_rows or rows))
        part = {key: value[start:stop] for key, value in batch.items() if key not in ("cu_seqlens", "max_seqlen")}
        bounds = batch["cu_seqlens"]
        inside = bounds[(bounds >= start * seq_len) & (bounds <= stop * seq_len)]
        yield {**part, "cu_seqlens": inside - start * seq_len}


def sum_of_losses(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Cross-entropy summed over the targets of each row: fp32 [rows]; 0 for a row of padding."""
    on_device = {key: batch[key].to(device, non_blocking=True) for key in ("input_ids", "position_ids", "labels")}
    documents = Documents.of(batch["cu_seqlens"], device)
    logits = model(on_device["input_ids"], on_device["position_ids"], documents).float()
    labels = on_device["labels"]
    losses = functional.cross_entropy(logits, labels.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view_as(labels).sum(1)
