"""Attention within documents on a device, against a loop over the documents in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokshard.trainer.attention import Documents, attend

PACKINGS = ([256], [1] * 7 + [249], [1, 254, 1], [100, 1, 1, 154], [64, 64, 128], [3, 90, 1, 27, 135])
"""Lengths of documents."""

LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Of the largest value. A wrong document or head gives about 1."""


class WrongError(Exception):
    """A check found something wrong."""


def varlen(device: str) -> dict[str, Any]:
    """The trainer's attention and its gradients, in bf16 on CUDA, against a loop over documents in fp32."""
    dtypes = (torch.bfloat16,) if device == "cuda" else (torch.float32, torch.bfloat16)
    worst = dict.fromkeys(map(str, dtypes), 0.0)
    for dtype in dtypes:
        for lengths, kv_heads, head_dim in ((of, *sizes) for of in PACKINGS for sizes in ((4, 64), (2, 64), (1, 128))):
            inputs = drawn(sum(lengths), 4, kv_heads, head_dim, dtype, device)
            ends = np.cumsum([0, *lengths, 0, 0])  # the last end is repeated, as in a padded batch
            bounds = torch.tensor(ends, dtype=torch.int32, device=device)
            out = attend(*inputs, Documents(cu_seqlens=bounds, max_seqlen=sum(lengths)))
            error = error_of(out, inputs, lengths)
            worst[str(dtype)] = max(worst[str(dtype)], error)
            if not error < LARGEST_ERROR[dtype]:
                raise WrongError(f"{error:.3g} off: documents of {lengths}, {kv_heads} of 4 heads, {dtype}")
    return {"cases": 3 * len(PACKINGS), "largest_error": worst}


def flex(device: str) -> dict[str, Any]:
    """FlexAttention with a mask of documents against the same loop, compiled and with gradients on CUDA alone."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    worst, dtype = 0.0, torch.bfloat16 if device == "cuda" else torch.float32
    attention: Any = torch.compile(flex_attention) if device == "cuda" else flex_attention
    for lengths in PACKINGS:
        total = sum(lengths)
        of_document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
        mask = create_block_mask(causal_within(of_document), None, None, total, total, device=device)
        inputs = drawn(total, 4, 2, 64, dtype, device)
        heads = [(tensor if device == "cuda" else tensor.detach()).transpose(0, 1)[None] for tensor in inputs]
        out = attention(*heads, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        error = error_of(out, inputs, lengths)
        worst = max(worst, error)
        if not error < LARGEST_ERROR[dtype]:
            raise WrongError(f"{error:.3g} off: documents of {lengths}, {dtype}")
    return {"cases": len(PACKINGS), "largest_error": worst}


def causal_within(of_document: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Which keys a query sees: the earlier tokens of its document, and itself."""

    def is_seen(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (of_document[query] == of_document[key])

    return is_seen


def drawn(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Query, key and value: [tokens, heads, head_dim]."""
    generator = torch.Generator().manual_seed(tokens + kv_heads)
    shapes = [(tokens, number, head_dim) for number in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def error_of(out: Tensor, inputs: list[Tensor], lengths: list[int]) -> float:
    """The largest difference of `out`, and of its gradients if it has any, from the loop, over the largest value."""
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    expected = loop_over_documents(*exact, lengths)
    pairs = [(out, expected)]
    if out.requires_grad:
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
        got = torch.autograd.grad(out, inputs, weights)
        pairs += zip(got, torch.autograd.grad(expected, exact, weights.float()), strict=True)
    errors = [(found.float() - of).abs().max() / of.abs().max() for found, of in pairs]
    return torch.stack(errors).max().item()  # NaN if one of them is


def loop_over_documents(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Softmax attention as in the textbook."""
    groups = query.shape[1] // key.shape[1]
    parts = []
    repeated = [query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)]
    for q, k, v in zip(*(torch.split(tensor, lengths) for tensor in repeated), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[2] ** 0.5
        is_later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(is_later, -torch.inf).softmax(2), v))
    return torch.cat(parts)
