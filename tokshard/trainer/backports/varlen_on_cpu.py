"""The op of `varlen_attn` on the CPU, where torch has no kernel for it: the flash kernel, a call per piece.

It gives the same bits as scaled_dot_product_attention on each piece. Importing this module registers the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

__all__ = ["varlen_attn"]


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
    """Causal attention of sequences to themselves."""
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
