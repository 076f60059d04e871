"""Rows of a batch: pieces of documents one after another, with labels, positions and boundaries.

A batch is made in two steps. `Packed` is narrow and is what worker processes send: token ids in the dtype of the
corpus, and what cannot be derived from them. `widen` derives the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""The label that cross-entropy leaves out, as in torch and transformers."""

PADDING_INDEX = -1
"""sample_index and corpus_index of a row that only fills a batch up."""

_CU_SEQLENS_STEP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Rows of a batch as they are read.

    Args:
        seq_len: tokens of a row.
        tokens: uint16 or uint32 [rows * seq_len]; 0 where a row is padding.
        piece_lengths: int32 [pieces], in order; they add up to rows * seq_len, padding included.
        label_places: int64 [k], places in `tokens` whose label is not the token at the next place.
        labels: int64 [k], those labels.
        num_tokens_in_row: int32 [rows], tokens of each row that are no padding.
        corpus_index: int64 [rows], corpus in plan order, or `PADDING_INDEX`.
        sample_index: int64 [rows], global sample, or `PADDING_INDEX`.
    """

    seq_len: int
    tokens: NDArray[Any]
    piece_lengths: NDArray[np.int32]
    label_places: NDArray[np.int64]
    labels: NDArray[np.int64]
    num_tokens_in_row: NDArray[np.int32]
    corpus_index: NDArray[np.int64]
    sample_index: NDArray[np.int64]


def widen(packed: Packed) -> dict[str, NDArray[Any]]:
    """The batch that a training loop gets.

    Returns:
        input_ids, labels, position_ids: int64 [rows, seq_len]. corpus_index, sample_index: int64 [rows].
        cu_seqlens: int32,
        the boundaries of all pieces in the flattened batch, its end repeated up to a multiple of 64 entries.
        max_seqlen: int64 [], the longest piece.
    """
    rows, seq_len = len(packed.sample_index), packed.seq_len
    size = rows * seq_len
    input_ids = packed.tokens.astype(np.int64)
    labels = np.empty(size, np.int64)
    labels[:-1] = input_ids[1:]
    labels[packed.label_places] = packed.labels
    short = np.flatnonzero(packed.num_tokens_in_row < seq_len)
    for row in short.tolist():
        labels[row * seq_len + int(packed.num_tokens_in_row[row]) : (row + 1) * seq_len] = IGNORED
    lengths = packed.piece_lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    position_ids = np.arange(size) - np.repeat(ends - lengths, lengths)
    padded = -(-(len(ends) + 1) // _CU_SEQLENS_STEP) * _CU_SEQLENS_STEP
    cu_seqlens = np.full(padded, size, np.int32)
    cu_seqlens[0] = 0
    cu_seqlens[1 : len(ends) + 1] = ends
    return {
        "input_ids": input_ids.reshape(rows, seq_len),
        "labels": labels.reshape(rows, seq_len),
        "position_ids": position_ids.reshape(rows, seq_len),
        "corpus_index": packed.corpus_index,
        "sample_index": packed.sample_index,
        "cu_seqlens": cu_seqlens,
        "max_seqlen": np.array(lengths.max(initial=0), np.int64),
    }


def first_row(batch: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """A batch of one row as a sample: the rows lose their first dimension."""
    return {key: value[0] if value.ndim == 2 else value for key, value in batch.items()}
