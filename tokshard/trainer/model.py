"""A Llama-family transformer: grouped-query attention, RoPE, RMSNorm, SwiGLU; no biases, untied head.

Shapes in names: B rows, S positions of a row, T = B * S, D model width, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

from tokshard.trainer.attention import Documents, attend


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    vocab_size: int
    rope_theta: float = 10_000.0


PRESETS = {
    # parameters with this vocabulary: 11.5M, 162M, 1.50B, 6.74B, 8.03B, 11.3B
    "10M": Shape(dim=256, num_layers=4, num_heads=4, num_kv_heads=2, hidden_dim=768, vocab_size=16_384),
    "160M": Shape(dim=768, num_layers=12, num_heads=12, num_kv_heads=12, hidden_dim=2_048, vocab_size=50_304),
    "1B": Shape(
        dim=2_048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=8_192,
        vocab_size=128_256,
        rope_theta=500_000.0,
    ),
    "7B": Shape(dim=4_096, num_layers=32, num_heads=32, num_kv_heads=32, hidden_dim=11_008, vocab_size=32_000),
    "8B": Shape(
        dim=4_096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=14_336,
        vocab_size=128_256,
        rope_theta=500_000.0,
    ),
    "11B": Shape(
        dim=5_120,
        num_layers=36,
        num_heads=40,
        num_kv_heads=8,
        hidden_dim=13_824,
        vocab_size=128_256,
        rope_theta=500_000.0,
    ),
}


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, within documents."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.num_heads
        kv_dim = shape.num_kv_heads * self.head_dim
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, kv_dim, bias=False)
        self.value = nn.Linear(shape.dim, kv_dim, bias=False)
        self.output = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, hidden_TD: Tensor, rotation: tuple[Tensor, Tensor], documents: Documents) -> Tensor:  # noqa: N803
        query, key, value = (
            project(hidden_TD).unflatten(-1, (-1, self.head_dim)) for project in (self.query, self.key, self.value)
        )
        mixed_THK = attend(rotate(query, *rotation), rotate(key, *rotation), value, documents)  # noqa: N806
        out: Tensor = self.output(mixed_THK.flatten(1))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.down = nn.Linear(shape.hidden_dim, shape.dim, bias=False)

    def forward(self, hidden_TD: Tensor) -> Tensor:  # noqa: N803
        out: Tensor = self.down(functional.silu(self.gate(hidden_TD)) * self.up(hidden_TD))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and around a residual. The unit of sharding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.feed_forward = FeedForward(shape)

    def forward(self, hidden_TD: Tensor, rotation: tuple[Tensor, Tensor], documents: Documents) -> Tensor:  # noqa: N803
        hidden_TD = hidden_TD + self.attention(self.attention_norm(hidden_TD), rotation, documents)  # noqa: N806
        out: Tensor = hidden_TD + self.feed_forward(self.feed_forward_norm(hidden_TD))
        return out


class Transformer(nn.Module):
    """Token ids to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)

    def forward(self, input_ids_BS: Tensor, position_ids_BS: Tensor, documents: Documents) -> Tensor:  # noqa: N803
        """Logits [T, V] in the precision of the parameters.

        Args:
            input_ids_BS, position_ids_BS: int64 [B, S].
            documents: pieces of the flattened rows.
        """
        hidden_TD = self.embedding(input_ids_BS.flatten())  # noqa: N806
        head_dim = self.shape.dim // self.shape.num_heads
        rotation = rotations(position_ids_BS.flatten(), head_dim, self.shape.rope_theta)
        for layer in self.layers:
            hidden_TD = layer(hidden_TD, rotation, documents)  # noqa: N806
        logits_TV: Tensor = self.head(self.norm(hidden_TD))  # noqa: N806
        return logits_TV


def rotations(position_ids_T: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:  # noqa: N803
    """Cosines and sines of RoPE, fp32 [T, 1, K / 2]. Not a buffer, so there is nothing to shard, cast or save."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids_T.device) / head_dim
    angles = position_ids_T[:, None].float() * theta**-exponents
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(heads_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # noqa: N803
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
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            shard = distribute_tensor(full.to(parameter.device), mesh, placements, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())
        else:
            parameter.copy_(full)
