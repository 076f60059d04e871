"""Makes the batches of a training loop, compact or full, from narrow ones. `StreamingLoader` lists their arrays.

A full batch has 24 bytes per token. A compact one has little more than 2, and making it costs little more than a copy.
It lacks labels and positions, which can be made where the model runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.rows.narrow import IGNORED, NarrowBatch
from tokshard.runtime.rows.recycling import Recycler

if TYPE_CHECKING:
    import torch

_KEPT = ("corpus_index", "sample_index", "cu_seqlens", "max_seqlen")
_MIN_CU_SEQLENS = 64


def compact_batch(narrow: NarrowBatch, recycler: Recycler | None = None) -> dict[str, NDArray[Any]]:
    """The compact batch.

    Args:
        recycler: provides the memory; default: new memory.
    """
    shape, dtype = narrow.tokens.shape, narrow.tokens.dtype
    input_ids = np.empty(shape, dtype) if recycler is None else recycler.empty(shape, dtype)
    np.copyto(input_ids, narrow.tokens)
    return _fields(narrow) | {"input_ids": input_ids}


def full_batch(narrow: NarrowBatch, recycler: Recycler | None = None) -> dict[str, NDArray[Any]]:
    """The full batch; arguments as for `compact_batch`."""
    return _expanded(_fields(narrow), narrow.tokens, recycler)


def _fields(narrow: NarrowBatch) -> dict[str, NDArray[Any]]:
    """All arrays of a compact batch except its tokens."""
    lengths, count = narrow.piece_lengths, len(narrow.piece_lengths)
    # few sizes, so that a compiled model sees few shapes: the last boundary is repeated, and so is its label
    size = max(_MIN_CU_SEQLENS, 1 << count.bit_length()) - 1
    cu_seqlens, next_tokens = np.zeros(size + 1, np.int32), np.empty(size, np.int64)
    np.cumsum(lengths, out=cu_seqlens[1 : count + 1])
    cu_seqlens[count + 1 :] = cu_seqlens[count]
    next_tokens[:count] = narrow.next_tokens
    found: dict[str, NDArray[Any]] = {
        "next_tokens": next_tokens,
        "num_tokens": narrow.num_tokens.copy(),  # a view would keep an array of many batches alive
        "corpus_index": narrow.corpus_index.copy(),
        "sample_index": narrow.sample_index.copy(),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": np.array(lengths.max(), np.int64),
    }
    if narrow.is_masked is not None:
        found["masked"] = np.zeros(size, np.bool_)
        found["masked"][:count] = narrow.is_masked
        next_tokens[found["masked"]] = IGNORED
    next_tokens[count:] = next_tokens[count - 1]
    if narrow.loss is not None:
        bounds, weights = narrow.loss
        size = max(_MIN_CU_SEQLENS, 1 << len(bounds).bit_length())
        found["loss_bounds"] = np.full(size, narrow.tokens.size, np.int32)
        found["loss_bounds"][: len(bounds)] = bounds
        found["loss_weights"] = np.zeros(size - 1, np.float32)
        found["loss_weights"][1 : 2 * len(weights) : 2] = weights
    return found


@overload
def expand(
    batch: Mapping[str, torch.Tensor], device: torch.device | str | int | None = None
) -> dict[str, torch.Tensor]: ...
@overload
def expand(batch: Mapping[str, NDArray[Any]], device: None = None) -> dict[str, NDArray[Any]]: ...
def expand(batch: Mapping[str, Any], device: torch.device | str | int | None = None) -> dict[str, Any]:
    """The full batch of a compact one, equal to the loader's batch without ``compact=True``.

    Tensors are copied to the device in their narrow dtype, and labels and positions are made there, without waiting for
    the device. If the batch is pinned, the copy does not wait either. numpy arrays stay numpy arrays.

    Args:
        batch: a batch of a loader with ``compact=True``.
        device: device of the result; default: the device of the tensors.

    Raises:
        ValueError: the batch is not compact, or a device is given for numpy arrays.
    """
    if "next_tokens" not in batch:
        raise ValueError(f"the batch has {', '.join(batch)}, and no next_tokens: expand is for a loader's compact=True")
    if isinstance(batch["input_ids"], np.ndarray):
        if device is not None:
            raise ValueError(f"device is {device!r}, and the batch has numpy arrays, which have no device")
        return _expanded(batch, batch["input_ids"])
    here = {key: value.to(device, non_blocking=value.is_pinned()) for key, value in batch.items()}
    input_ids = here["input_ids"].long()  # methods of tensors are all that is needed: torch is not imported here
    size = input_ids.numel()
    return _derived(
        here,
        input_ids,
        input_ids.new_empty(input_ids.shape),
        input_ids.new_ones(size).cumsum(0).sub_(1),
        # a given output_size spares asking the device for it
        repeat=lambda values, counts: values.repeat_interleave(counts, output_size=size),
        subtract=operator.sub,
        ignore=lambda labels, where: labels.masked_fill_(where, IGNORED),
        may_look=False,
    )


def _expanded(
    batch: Mapping[str, NDArray[Any]], tokens: NDArray[Any], recycler: Recycler | None = None
) -> dict[str, NDArray[Any]]:
    shape = (3, *tokens.shape)
    input_ids, labels, position_ids = np.empty(shape, np.int64) if recycler is None else recycler.empty(shape)
    numbers = np.arange(tokens.size) if recycler is None else recycler.numbers(tokens.size)
    np.copyto(input_ids, tokens)
    subtract = partial(np.subtract, out=position_ids.reshape(-1))
    return _derived(
        batch, input_ids, labels, numbers, repeat=np.repeat, subtract=subtract, ignore=_ignore, may_look=True
    )


def _ignore(labels: NDArray[np.int64], where: NDArray[np.bool_]) -> None:
    np.copyto(labels, IGNORED, where=where)


def _derived(
    batch: Mapping[str, Any],
    input_ids: Any,
    labels: Any,
    numbers: Any,
    *,
    repeat: Callable[..., Any],
    subtract: Callable[..., Any],
    ignore: Callable[..., Any],
    may_look: bool,
) -> dict[str, Any]:
    """Make labels and positions, in arrays as in tensors.

    Args:
        batch: a compact batch; its tokens are not used.
        input_ids: int64 [rows, seq_len].
        labels: memory for them, of the same form.
        numbers: int64 [rows * seq_len]: 0, 1, ...
        repeat, subtract: functions of arrays or tensors; `subtract` may write into memory that it is given.
        ignore: makes labels `IGNORED` where flags are true.
        may_look: whether flags may be read, to save work. On a device this would wait.
    """
    flat, seq_len = labels.reshape(-1), labels.shape[1]
    starts, stops, num_tokens = batch["cu_seqlens"][:-1], batch["cu_seqlens"][1:], batch["num_tokens"]
    lengths = stops - starts
    flat[:-1] = input_ids.reshape(-1)[1:]  # a label is the next token, but for the last one of each piece
    flat[stops - 1] = batch["next_tokens"]
    if "masked" in batch and not (may_look and not batch["masked"].any()):
        ignore(flat, repeat(batch["masked"], lengths))
    if not (may_look and num_tokens.min() == seq_len):
        ignore(labels, numbers[:seq_len] >= num_tokens[:, None])
    made = {"input_ids": input_ids, "labels": labels}
    if "loss_bounds" in batch:
        weights = repeat(batch["loss_weights"], batch["loss_bounds"][1:] - batch["loss_bounds"][:-1])
        ignore(flat, weights == 0)
        weights *= flat != IGNORED
        made["loss_weights"] = weights.reshape(labels.shape)
    made["position_ids"] = subtract(numbers, repeat(starts, lengths)).reshape(labels.shape)
    return made | {key: batch[key] for key in _KEPT}
