"""Rows of a batch: pieces of documents one after another, with labels, positions and boundaries.

A batch is made in two steps. `Packed` is narrow and is what worker processes send: token ids in the dtype of the
corpus, and what cannot be derived from them. `widen` derives the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""The label that cross-entropy leaves out, as in torch and transformers."""

PADDING_INDEX = -1
"""sample_index and corpus_index of a row that only fills a batch up."""

_MIN_CU_SEQLENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Rows of a batch as they are read.

    Args:
        tokens: uint16 or uint32 [rows, seq_len + 1]; a row's last token is the label of the one before, and no input. 0
            where a row is padding.
        piece_lengths: int32 [pieces], the inputs only, in order; they add up to rows * seq_len, padding included.
        ignored: int64 [k], places in the flattened batch whose label is -100.
        label_places: int64 [m], places in it whose label is neither that nor the next token of the row.
        labels: int64 [m], those labels.
        num_tokens_in_row: int32 [rows], inputs of each row that are no padding.
        corpus_index: int64 [rows], corpus in plan order, or `PADDING_INDEX`.
        sample_index: int64 [rows], global sample, or `PADDING_INDEX`.
    """

    tokens: NDArray[Any]
    piece_lengths: NDArray[np.int32]
    ignored: NDArray[np.int64]
    label_places: NDArray[np.int64]
    labels: NDArray[np.int64]
    num_tokens_in_row: NDArray[np.int32]
    corpus_index: NDArray[np.int64]
    sample_index: NDArray[np.int64]


class Recycler:
    """Arrays of batches that are used again once nothing else holds them.

    A batch of some hundred kilobytes costs more in page faults than in copying if its memory is new, and the allocator
    gives such memory back as soon as it is freed. Whether an array is held is its reference count: tensors and views of
    it count, a device that copies from it does not. Without the GIL, counts are not exact, and nothing is used again.

    Args:
        size: arrays that are kept.
    """

    def __init__(self, size: int) -> None:
        has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
        self._size = size if has_gil else 0
        self._arrays: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        self._unused = self._holders(0)
        self._arrays.clear()
        self._numbers = np.empty(0, np.int64)

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """An int64 array of any content."""
        for index in range(len(self._arrays)):
            if self._holders(index) == self._unused and self._arrays[index].shape == shape:
                return self._arrays[index]
        array = np.empty(shape, np.int64)
        if len(self._arrays) >= self._size:
            held = [index for index in range(len(self._arrays)) if self._holders(index) > self._unused]
            self._arrays = [self._arrays[index] for index in held]
        if len(self._arrays) < self._size:
            self._arrays.append(array)
        return array

    def numbers(self, size: int) -> NDArray[np.int64]:
        """0, 1, ...: int64 [size], read-only."""
        if len(self._numbers) < size:
            self._numbers = np.arange(size)
            self._numbers.setflags(write=False)
        return self._numbers[:size]

    def _holders(self, index: int) -> int:
        return sys.getrefcount(self._arrays[index])


def widen(packed: Packed, recycler: Recycler | None = None) -> dict[str, NDArray[Any]]:
    """The batch that a training loop gets.

    Args:
        recycler: has the memory; default: new memory.

    Returns:
        input_ids, labels, position_ids: int64 [rows, seq_len]. corpus_index, sample_index: int64 [rows].
        cu_seqlens: int32, the boundaries of all pieces in the flattened batch, its end repeated up to a power of two of
        entries, at least 64. max_seqlen: int64 [], the longest piece.
    """
    recycler = recycler or Recycler(0)
    rows, seq_len = len(packed.tokens), packed.tokens.shape[1] - 1
    size = rows * seq_len
    input_ids, labels, position_ids = recycler.empty((3, rows, seq_len))
    np.copyto(input_ids, packed.tokens[:, :-1])
    np.copyto(labels, packed.tokens[:, 1:])
    flat = labels.reshape(-1)
    flat[packed.ignored] = IGNORED
    if len(packed.labels):
        flat[packed.label_places] = packed.labels
    if packed.num_tokens_in_row.min() < seq_len:
        for row in np.flatnonzero(packed.num_tokens_in_row < seq_len).tolist():
            labels[row, packed.num_tokens_in_row[row] :] = IGNORED
    lengths = packed.piece_lengths
    ends = np.cumsum(lengths)
    np.subtract(recycler.numbers(size), np.repeat(ends - lengths, lengths), out=position_ids.reshape(-1))
    # few lengths, so that a compiled model sees few shapes
    padded = max(_MIN_CU_SEQLENS, 1 << len(ends).bit_length())
    cu_seqlens = np.empty(padded, np.int32)
    cu_seqlens[0] = 0
    cu_seqlens[1 : len(ends) + 1] = ends
    cu_seqlens[len(ends) + 1 :] = size
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "corpus_index": packed.corpus_index.copy(),  # a few numbers of an array that many batches share
        "sample_index": packed.sample_index.copy(),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": np.array(lengths.max(initial=0), np.int64),
    }


def first_row(batch: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """A batch of one row as a sample: the rows lose their first dimension."""
    return {key: value[0] if value.ndim == 2 else value for key, value in batch.items()}
