"""Causal attention within documents, one op on every device. Rows are flattened: a document is a range of positions."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tokshard.trainer.backports.varlen_on_cpu import varlen_attn

TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Since torch 2.12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The bounds of pieces of documents in flattened rows.

    Args:
        cu_seqlens: int32 [n], on the device of the model; its end may be repeated.
        max_seqlen: at least the longest piece. Compiled code is made for one value: give the length of a row.
    """

    cu_seqlens: Tensor
    max_seqlen: int


def attend(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Attention of every token to the earlier tokens of its piece, and to itself.

    A flash kernel on CUDA, in bf16 or fp16. On the CPU a call per piece, in any precision.

    Args:
        query: [tokens, heads, head_dim].
        key, value: [tokens, kv_heads, head_dim].
    """
    groups = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {"enable_gqa": groups > 1} if TAKES_GROUPS else {}
    if not TAKES_GROUPS:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    cu_seqlens, longest = documents.cu_seqlens, documents.max_seqlen
    out = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0), **options)
    assert isinstance(out, Tensor)
    return out
