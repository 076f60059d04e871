"""Causal attention within documents, one op on every device. Rows are flattened: a document is a range of positions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Since torch 2.12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Where pieces of documents start and end in flattened rows.

    Args:
        cu_seqlens: int32 [n], on the device of the model; its end may be repeated.
        max_seqlen: at least the longest piece. Compiled code is made for one value: give the length of a row.
    """

    cu_seqlens: Tensor
    max_seqlen: int


def attend(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Attention of every token to the earlier tokens of its piece, and to itself.

    A flash kernel on CUDA, in bf16 or fp16. On the CPU the kernel below: a call per piece, in any precision.

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


def _forward(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    _cu_seqlens_of_keys: Tensor,
    _max_query: int,
    _max_key: int,
    is_causal: bool = False,
    scale: float | None = None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """The varlen op on the CPU, where torch has no kernel for it: causal attention of sequences to themselves."""
    if not is_causal:
        raise NotImplementedError("on the CPU only causal attention, window_size=(-1, 0), is implemented")
    out = torch.empty_like(query)
    logsumexp = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    groups = query.shape[1] // key.shape[1]
    for piece in _pieces(cu_seqlens):
        inputs = _heads(query[piece]), _heads(key[piece], groups), _heads(value[piece], groups)
        of_piece, logsumexp_of_piece = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *inputs, 0.0, True, scale=scale
        )
        out[piece], logsumexp[:, piece] = of_piece[0].transpose(0, 1), logsumexp_of_piece[0]
    return out, logsumexp, torch.zeros(2, dtype=torch.uint64)


def _backward(  # noqa: PLR0917
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    _cu_seqlens_of_keys: Tensor,
    _max_query: int,
    _max_key: int,
    _is_causal: bool,
    _rng_state: Tensor,
    scale: float | None = None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = (torch.empty_like(tensor) for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    for piece in _pieces(cu_seqlens):
        inputs = _heads(query[piece]), _heads(key[piece], groups), _heads(value[piece], groups)
        of_query, *of_keys = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads(grad_out[piece]), *inputs, _heads(out[piece]), logsumexp[None, :, piece], 0.0, True, scale=scale
        )
        grad_query[piece] = of_query[0].transpose(0, 1)
        for grad, of_piece in zip((grad_key, grad_value), of_keys, strict=True):
            # a key and value head gets the gradients of the query heads of its group
            grad[piece] = of_piece[0].unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
    return grad_query, grad_key, grad_value


def _pieces(cu_seqlens: Tensor) -> Iterator[slice]:
    """The pieces that have tokens."""
    return (slice(start, stop) for start, stop in pairwise(dict.fromkeys(cu_seqlens.tolist())))


def _heads(tokens_THK: Tensor, repeats: int = 1) -> Tensor:
    """[1, heads * repeats, tokens, head_dim]."""
    return tokens_THK.transpose(0, 1).repeat_interleave(repeats, 0)[None]


torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", _forward)
torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", _backward)
