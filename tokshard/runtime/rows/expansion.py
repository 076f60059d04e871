"""The full batch of a compact one: labels and positions made where the model runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.rows.batches import IGNORED

if TYPE_CHECKING:
    import torch


@overload
def expand(
    batch: Mapping[str, torch.Tensor], device: torch.device | str | int | None = None
) -> dict[str, torch.Tensor]: ...
@overload
def expand(batch: Mapping[str, NDArray[Any]], device: None = None) -> dict[str, NDArray[Any]]: ...
def expand(batch: Mapping[str, Any], device: torch.device | str | int | None = None) -> dict[str, Any]:
    """The full batch of a compact one, equal to what the loader gives without ``compact=True``.

    Tensors go to the device narrow, and labels and positions are made there, without waiting for the device; of a
    pinned batch the copy does not wait either. Arrays of numpy stay arrays of numpy.

    Args:
        batch: of a loader with ``compact=True``.
        device: of the result; default: where the tensors are.

    Returns:
        input_ids, labels, position_ids: int64 [rows, seq_len]. corpus_index, sample_index: int64 [rows]. cu_seqlens:
        int32 [n]. max_seqlen: int64 [].

    Raises:
        ValueError: the batch is not compact, or a device is given for numpy arrays.
    """
    if "next_tokens" not in batch:
        raise ValueError(f"the batch has {', '.join(batch)}, and no next_tokens: expand is for a loader's compact=True")
    if isinstance(batch["input_ids"], np.ndarray):
        if device is not None:
            raise ValueError(f"device is {device!r}, and the batch has numpy arrays, which have no device")
        return expand_arrays(batch)
    from tokshard.runtime.tensors import expand_tensors  # imports torch, which numpy batches do not need

    return expand_tensors(batch, device)


def expand_arrays(batch: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The full batch of a compact one of numpy arrays."""
    kept = {key: batch[key] for key in ("corpus_index", "sample_index", "cu_seqlens", "max_seqlen")}
    input_ids = batch["input_ids"].astype(np.int64)
    rows, seq_len = input_ids.shape
    starts, stops = batch["cu_seqlens"][:-1], batch["cu_seqlens"][1:]
    labels = np.roll(input_ids.reshape(-1), -1)
    labels[stops - 1] = batch["next_tokens"]
    if "masked" in batch:
        labels[np.repeat(batch["masked"], stops - starts)] = IGNORED
    is_padding = np.arange(seq_len) >= batch["num_tokens"][:, np.newaxis]
    position_ids = np.arange(rows * seq_len) - np.repeat(starts, stops - starts)
    return kept | {
        "input_ids": input_ids,
        "labels": np.where(is_padding, IGNORED, labels.reshape(rows, seq_len)),
        "position_ids": position_ids.reshape(rows, seq_len),
    }
