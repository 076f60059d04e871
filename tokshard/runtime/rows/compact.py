"""Compact batches: token ids as they are stored, and the few labels that do not follow from them.

A full batch has 24 bytes per token, a compact one little more than 2, and making it is hardly more than copying. What
it leaves out is made where the model runs: see `tokshard.runtime.rows.expansion`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.rows.batches import Packed, boundaries
from tokshard.runtime.rows.recycling import Recycler


def compact_batch(packed: Packed, recycler: Recycler | None = None) -> dict[str, NDArray[Any]]:
    """The narrow batch that a training loop gets with ``compact=True``.

    Args:
        recycler: provides the memory; default: new memory.

    Returns:
        input_ids: uint16 or uint32 [rows, seq_len]. next_tokens: int64 [n - 1], the label of the last token of each
        piece. num_tokens: int32 [rows], tokens that are not padding. corpus_index, sample_index: int64 [rows].
        cu_seqlens: int32 [n], max_seqlen: int64 [], as in the full batch. Once documents are masked, masked: bool
        [n - 1], whether no token of the piece has a label.
    """
    recycler = recycler or Recycler(0)
    tokens, lengths = packed.tokens, packed.piece_lengths
    input_ids = recycler.empty((len(tokens), tokens.shape[1] - 1), tokens.dtype)
    np.copyto(input_ids, tokens[:, :-1])
    cu_seqlens = boundaries(np.cumsum(lengths))
    next_tokens = np.empty(len(cu_seqlens) - 1, np.int64)
    next_tokens[: len(lengths)] = packed.next_tokens
    next_tokens[len(lengths) :] = packed.next_tokens[-1]  # so that whoever writes all of them writes one value
    masked = {}
    if packed.is_masked is not None:
        masked["masked"] = np.zeros(len(next_tokens), np.bool_)
        masked["masked"][: len(lengths)] = packed.is_masked
    return {
        **masked,
        "input_ids": input_ids,
        "next_tokens": next_tokens,
        "num_tokens": packed.num_tokens_in_row.copy(),  # a view would keep an array of many batches alive
        "corpus_index": packed.corpus_index.copy(),
        "sample_index": packed.sample_index.copy(),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": np.array(lengths.max(), np.int64),
    }
