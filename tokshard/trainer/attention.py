"""Causal attention within documents. Rows are flattened: a document is a range of positions, never a mask."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Where pieces of documents start and end in flattened rows.

    Args:
        cu_seqlens: int32 [n], on the device of the model.
        bounds: the same values without repeats, on the host, for the loop of the CPU path.
        max_seqlen: the longest piece.
    """

    cu_seqlens: Tensor
    bounds: tuple[int, ...]
    max_seqlen: int

    @staticmethod
    def of(cu_seqlens: Tensor, device: torch.device) -> Documents:
        """From the loader's `cu_seqlens`, which is on the CPU; its end may be repeated."""
        bounds = tuple(dict.fromkeys(cu_seqlens.tolist()))
        longest = max((stop - start for start, stop in pairwise(bounds)), default=0)
        return Documents(cu_seqlens=cu_seqlens.to(device), bounds=bounds, max_seqlen=longest)


def attend(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Attention of every token to the earlier tokens of its piece.

    One flash kernel (`varlen_attn`) on CUDA in bf16 or fp16. Elsewhere one SDPA call per piece: the same numbers,
    slow for many short documents.

    Args:
        query: [tokens, heads, head_dim].
        key, value: [tokens, kv_heads, head_dim].
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, documents)
    parts = [
        functional.scaled_dot_product_attention(
            query[start:stop].transpose(0, 1)[None],
            key[start:stop].transpose(0, 1)[None],
            value[start:stop].transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=query.shape[1] != key.shape[1],
        )[0].transpose(0, 1)
        for start, stop in pairwise(documents.bounds)
    ]
    return torch.cat(parts)


def _varlen(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # has no CPU kernel

    groups = query.shape[1] // key.shape[1]
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        extra: dict[str, Any] = {"enable_gqa": groups > 1}
    else:
        extra, key, value = {}, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    cu_seqlens, longest = documents.cu_seqlens, documents.max_seqlen
    out = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0), **extra)
    assert isinstance(out, Tensor)
    return out
