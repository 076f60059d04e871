"""A transformer like Llama 3 and Qwen3: grouped-query attention, RoPE, RMSNorm, SwiGLU, no biases.

Shapes in names: B rows, S positions of a row, T = B * S, D model width, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tokshard.run_files.model_shape import Shape
from tokshard.trainer.attention import Documents, attend
from tokshard.trainer.backports.chunked_loss import TokenLosses, chunked_losses, token_losses

Recompute = Literal["none", "selective", "full"]

EXPENSIVE = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default, torch.ops.torch_attn._varlen_attn.default)
"""Operators whose results selective recomputation keeps: it repeats norms, rotations and activations."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, within documents."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_size
        self.query = nn.Linear(shape.dim, shape.query_dim, bias=False)
        self.key = nn.Linear(shape.dim, shape.kv_dim, bias=False)
        self.value = nn.Linear(shape.dim, shape.kv_dim, bias=False)
        self.output = nn.Linear(shape.query_dim, shape.dim, bias=False)
        self.query_norm, self.key_norm = (
            nn.RMSNorm(shape.head_size, eps=shape.norm_eps) if shape.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, hidden_TD: Tensor, rotation: tuple[Tensor, Tensor], documents: Documents) -> Tensor:
        query, key, value = (
            project(hidden_TD).unflatten(-1, (-1, self.head_dim)) for project in (self.query, self.key, self.value)
        )
        query, key = rotate(self.query_norm(query), *rotation), rotate(self.key_norm(key), *rotation)
        mixed_THK = attend(query, key, value, documents)
        out: Tensor = self.output(mixed_THK.flatten(1))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.down = nn.Linear(shape.hidden_dim, shape.dim, bias=False)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(hidden_TD)) * self.up(hidden_TD))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and around a residual. The unit of sharding and compilation.

    Args:
        recompute: the results that the backward pass computes again instead of keeping them. The block does this
            without a wrapper, which would change the names of parameters, and with them initial values and checkpoints.
    """

    def __init__(self, shape: Shape, recompute: Recompute = "none") -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.feed_forward = FeedForward(shape)

    def forward(self, hidden_TD: Tensor, rotation: tuple[Tensor, Tensor], documents: Documents) -> Tensor:
        if self.recompute == "none":
            return self._forward(hidden_TD, rotation, documents)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing here is random
        if self.recompute == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, list(EXPENSIVE))
        out: Tensor = checkpoint(self._forward, hidden_TD, rotation, documents, **options)
        return out

    def _forward(self, hidden_TD: Tensor, rotation: tuple[Tensor, Tensor], documents: Documents) -> Tensor:
        hidden_TD = hidden_TD + self.attention(self.attention_norm(hidden_TD), rotation, documents)
        out: Tensor = hidden_TD + self.feed_forward(self.feed_forward_norm(hidden_TD))
        return out


class Head(nn.Module):
    """Logits [T, V], or the loss of each token.

    Args:
        loss_chunk: tokens whose logits are in memory at a time; 0: all.

    Attributes:
        weight: None if the embedding is given in its place. A parameter of two modules would have to be tied again
            whenever one of them is moved, sharded or loaded.
    """

    weight: nn.Parameter | None

    def __init__(self, shape: Shape, loss_chunk: int = 0) -> None:
        super().__init__()
        weight = None if shape.tied_embeddings else nn.Parameter(torch.empty(shape.vocab_size, shape.dim))
        self.register_parameter("weight", weight)
        self.loss_chunk = loss_chunk
        self.token_losses: TokenLosses = token_losses

    def forward(
        self,
        hidden_TD: Tensor,
        labels_T: Tensor | None = None,
        loss_weights_T: Tensor | None = None,
        *,
        embedding_VD: Tensor | None = None,
    ) -> Tensor:
        weight_VD = embedding_VD if self.weight is None else self.weight
        assert weight_VD is not None, "an untied head has weights"
        if labels_T is None:
            return functional.linear(hidden_TD, weight_VD)
        return chunked_losses(
            hidden_TD, weight_VD, labels_T, loss_weights_T, chunk=self.loss_chunk, function=self.token_losses
        )


class Transformer(nn.Module):
    """Token ids to logits or losses.

    Args:
        recompute: of each block.
        loss_chunk: of the head.
    """

    def __init__(self, shape: Shape, *, recompute: Recompute = "none", loss_chunk: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape, recompute) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.head = Head(shape, loss_chunk)

    def forward(
        self,
        input_ids_BS: Tensor,
        position_ids_BS: Tensor,
        documents: Documents,
        labels_BS: Tensor | None = None,
        loss_weights_BS: Tensor | None = None,
    ) -> Tensor:
        """Logits [T, V] in the precision of the parameters; with labels the cross-entropy of each token, fp32 [T].

        Args:
            input_ids_BS, position_ids_BS, labels_BS: int64 [B, S].
            documents: pieces of the flattened rows.
            loss_weights_BS: fp32 [B, S], the factors of the cross-entropies.
        """
        hidden_TD = self.embedding(input_ids_BS.flatten())
        rotation = rotations(position_ids_BS.flatten(), self.shape)
        for layer in self.layers:
            hidden_TD = layer(hidden_TD, rotation, documents)
        targets = (None if of is None else of.flatten() for of in (labels_BS, loss_weights_BS))
        tied = {"embedding_VD": self.embedding.weight} if self.shape.tied_embeddings else {}
        out: Tensor = self.head(self.norm(hidden_TD), *targets, **tied)
        return out


def rotations(position_ids_T: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE, fp32 [T, 1, K / 2]. Not a buffer, so there is nothing to shard, cast or save."""
    exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float32, device=position_ids_T.device)
    frequencies = shape.rope_theta ** -(exponents / shape.head_size)
    if shape.rope_factor > 1:  # Llama 3.1: slow ones become slower, with a line between those and the others
        low, high = shape.rope_low_freq_factor, shape.rope_high_freq_factor
        turns = frequencies * shape.rope_original_length / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / shape.rope_factor)
    angles = position_ids_T[:, None].float() * frequencies
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(heads_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the two halves of each head (the convention of Hugging Face's Llama), computed in fp32."""
    first, second = heads_THK.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads_THK.dtype)


@torch.no_grad()
def initialise(model: Transformer, *, seed: int) -> None:
    """Give every parameter a value that depends only on the seed and its name, not on ranks or sharding.

    Each rank draws the full tensor and keeps its shard: one tensor at a time in host memory, no communication.
    (Random init of the shards themselves gives the same numbers on every rank.)
    """
    residual_std = 0.02 / math.sqrt(2 * model.shape.num_layers)
    for name, parameter in model.named_parameters():
        full = torch.empty(parameter.shape)
        if parameter.ndim < 2:
            full.fill_(1.0)
        else:
            digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            is_residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            full.normal_(std=residual_std if is_residual else 0.02, generator=generator)
        fill(parameter, full)


@torch.no_grad()
def fill(parameter: Tensor, full: Tensor) -> None:
    """Give a parameter, or this rank's shard of it, the values of the whole tensor. Without communication."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        shard = distribute_tensor(full.to(parameter.device), mesh, placements, src_data_rank=None)
        parameter.to_local().copy_(shard.to_local())
    else:
        parameter.copy_(full)


def num_parameters(model: nn.Module) -> int:
    """Parameters of the whole model, not only of this rank's shards."""
    return sum(parameter.numel() for parameter in model.parameters())


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, or the tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
