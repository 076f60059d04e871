"""Makes the batches of a training loop, compact or full, from narrow ones. `StreamingLoader` lists their arrays.

A full batch has 24 bytes per token. A compact one has little more than 2, and making it costs little more than a copy.
It lacks labels and positions, which can be made where the model runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.rows.narrow import IGNORED, NarrowBatch
from tokshard.runtime.rows.recycling import Recycler

if TYPE_CHECKING:
    import torch

_KEPT = ("corpus_index", "sample_index", "cu_seqlens", "max_seqlen", "step_targets", "step_weight")
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
    if narrow.step is not None:
        found["step_targets"] = np.array(narrow.step.targets, np.int64)
        found["step_weight"] = np.array(narrow.step.weight, np.float32)
    if narrow.is_masked is not None:
        found["masked"] = np.zeros(size, np.bool_)
        found["masked"][:count] = narrow.is_masked
        _ignore(next_tokens, found["masked"])
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
    numbers = input_ids.new_ones(input_ids.numel()).cumsum(0).sub_(1)
    return _derived(here, input_ids, input_ids.new_empty(input_ids.shape), numbers.reshape(input_ids.shape), numbers)


def _expanded(
    batch: Mapping[str, NDArray[Any]], tokens: NDArray[Any], recycler: Recycler | None = None
) -> dict[str, NDArray[Any]]:
    shape = (3, *tokens.shape)
    input_ids, labels, positions = np.empty(shape, np.int64) if recycler is None else recycler.empty(shape)
    numbers = np.arange(tokens.size) if recycler is None else recycler.numbers(tokens.size)
    np.copyto(input_ids, tokens)
    return _derived(batch, input_ids, labels, positions, numbers)


def _derived(batch: Mapping[str, Any], input_ids: Any, labels: Any, positions: Any, numbers: Any) -> dict[str, Any]:
    """Make labels and positions, in arrays as in tensors.

    Args:
        batch: a compact batch; its tokens are not used.
        input_ids: int64 [rows, seq_len].
        labels, positions: memory for them, of the same form.
        numbers: 0, 1, ..., one for each token; of tensors, this is the memory of `positions`, too.
    """
    flat, seq_len, size = labels.reshape(-1), labels.shape[1], labels.shape[0] * labels.shape[1]
    starts, stops, num_tokens = batch["cu_seqlens"][:-1], batch["cu_seqlens"][1:], batch["num_tokens"]
    lengths = stops - starts
    # flags are read where that saves work; on a device it would wait
    may_read = isinstance(labels, np.ndarray)
    flat[:-1] = input_ids.reshape(-1)[1:]  # a label is the next token, but for the last one of each piece
    flat[stops - 1] = batch["next_tokens"]
    if "masked" in batch and not (may_read and not batch["masked"].any()):
        _ignore(flat, _repeat(batch["masked"], lengths, size))
    if not (may_read and num_tokens.min() == seq_len):
        _ignore(labels, numbers[:seq_len] >= num_tokens[:, None])
    made = {"input_ids": input_ids, "labels": labels}
    if "loss_bounds" in batch:
        bounds = batch["loss_bounds"]
        weights = _repeat(batch["loss_weights"], bounds[1:] - bounds[:-1], size)
        _ignore(flat, weights == 0)
        weights *= flat != IGNORED
        made["loss_weights"] = weights.reshape(labels.shape)
    _subtract(numbers, _repeat(starts, lengths, size), positions.reshape(-1))
    made["position_ids"] = positions
    return made | {key: batch[key] for key in _KEPT if key in batch}


def _repeat(values: Any, counts: Any, size: int) -> Any:
    """Repeat each value, `size` in all: of a tensor without asking its device how many."""
    if isinstance(values, np.ndarray):
        return np.repeat(values, counts)
    return values.repeat_interleave(counts, output_size=size)


def _subtract(numbers: Any, starts: Any, out: Any) -> None:
    if isinstance(out, np.ndarray):
        np.subtract(numbers, starts, out=out)
    else:
        out.sub_(starts)


def _ignore(labels: Any, where: Any) -> None:
    if isinstance(labels, np.ndarray):
        np.copyto(labels, IGNORED, where=where)
    else:
        labels.masked_fill_(where, IGNORED)
