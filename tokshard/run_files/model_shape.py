"""The sizes of the trainer's models: presets, changes by a recipe, and the cost of a step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from msgspec import Meta

from tokshard.errors import UsageError
from tokshard.numbers import ceil_div

Positive = Annotated[int, Meta(ge=1)]
Real = Annotated[float, Meta(gt=0, le=1e38)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model, and how it differs from the first Llama; `Model` says what each means."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    vocab_size: int
    head_dim: int | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tied_embeddings: bool = False
    rope_theta: float = 10_000.0
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_length: int = 8_192

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def query_dim(self) -> int:
        """Width of the queries of all heads."""
        return self.head_size * self.num_heads

    @property
    def kv_dim(self) -> int:
        """Width of the keys, and of the values, of all heads."""
        return self.head_size * self.num_kv_heads


_of_llama_3 = partial(Shape, num_kv_heads=8, vocab_size=128_256, rope_theta=500_000.0)
PRESETS = {
    # parameters with this vocabulary: 11.5M, 162M, 1.50B, 6.74B, 8.03B, 11.2B
    "10M": Shape(dim=256, num_layers=4, num_heads=4, num_kv_heads=2, hidden_dim=768, vocab_size=16_384),
    "160M": Shape(dim=768, num_layers=12, num_heads=12, num_kv_heads=12, hidden_dim=2_048, vocab_size=50_304),
    "1B": _of_llama_3(dim=2_048, num_layers=16, num_heads=32, hidden_dim=8_192),
    "7B": Shape(dim=4_096, num_layers=32, num_heads=32, num_kv_heads=32, hidden_dim=11_008, vocab_size=32_000),
    "8B": _of_llama_3(dim=4_096, num_layers=32, num_heads=32, hidden_dim=14_336),
    "11B": _of_llama_3(dim=5_120, num_layers=36, num_heads=40, hidden_dim=13_824),
}


PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "B200": 2250, "A100": 312, "MI300X": 1307}
"""Dense bf16, by a part of the device's name; the first that fits counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The ``[model]`` table of a recipe: a preset, and the sizes that differ from it.

    Args:
        preset: the sizes to begin with: 10M, 160M, 1B, 7B, 8B or 11B.
        vocab_size: ids of the model; default: those of the corpora, rounded up to a multiple of 128.
        dim: width; default of all that follow: as in the preset.
        num_layers: transformer blocks.
        num_heads: heads of attention.
        num_kv_heads: heads of keys and values, a divisor of `num_heads`.
        hidden_dim: width of the feed-forward layers.
        head_dim: width of a head; default: dim / num_heads.
        norm_eps: added to the mean square in norms; default: 1e-5.
        qk_norm: norms of each head's query and key, as in Qwen3; default: none.
        tied_embeddings: the head is the embedding; default: it has weights of its own.
        rope_theta: base of the rotary embedding.
        rope_factor: for longer texts, as in Llama 3.1: divides the frequency of slow rotations; default: 1.
        rope_low_freq_factor: rotations with fewer turns than this in `rope_original_length` are slow; default: 1.
        rope_high_freq_factor: rotations with more turns than this stay as they are; default: 4.
        rope_original_length: tokens of a text before rotations were made slower; default: 8,192.
    """

    preset: str = "10M"
    vocab_size: Positive | None = None
    dim: Positive | None = None
    num_layers: Positive | None = None
    num_heads: Positive | None = None
    num_kv_heads: Positive | None = None
    hidden_dim: Positive | None = None
    head_dim: Positive | None = None
    norm_eps: Real | None = None
    qk_norm: bool | None = None
    tied_embeddings: bool | None = None
    rope_theta: Real | None = None
    rope_factor: Annotated[float, Meta(ge=1, le=1e38)] | None = None
    rope_low_freq_factor: Real | None = None
    rope_high_freq_factor: Real | None = None
    rope_original_length: Positive | None = None


def model_shape(settings: Model, needed: int) -> Shape:
    """A preset with the changes of the recipe.

    By default the vocabulary has the size of the corpora's, rounded up to a multiple of 128, because matrix products of
    other sizes are slow. The additional ids never occur.

    Args:
        needed: ids that the corpora may hold.

    Raises:
        UsageError: no such preset, sizes that do not divide, or a vocabulary that is too small.
    """
    if settings.preset not in PRESETS:
        raise UsageError(f"no preset {settings.preset!r}", hint=f"known: {', '.join(PRESETS)}")
    changes = {name: value for name, value in dataclasses.asdict(settings).items() if value is not None}
    del changes["preset"]
    shape = dataclasses.replace(PRESETS[settings.preset], **{"vocab_size": ceil_div(needed, 128) * 128, **changes})
    if shape.vocab_size < needed:
        raise UsageError(
            f"model.vocab_size is {shape.vocab_size}, the corpora have {needed} ids", hint="leave it out, or raise it"
        )
    is_whole = shape.head_dim is not None or shape.dim % shape.num_heads == 0
    if not is_whole or shape.head_size % 2 or shape.num_heads % shape.num_kv_heads:
        raise UsageError(
            f"{shape.dim} wide, {shape.num_heads} heads, {shape.num_kv_heads} KV heads do not divide",
            hint="model.dim is an even multiple of num_heads, or model.head_dim an even number; "
            "num_heads a multiple of num_kv_heads",
        )
    if shape.rope_low_freq_factor >= shape.rope_high_freq_factor:
        raise UsageError(
            f"model.rope_low_freq_factor is {shape.rope_low_freq_factor}, rope_high_freq_factor "
            f"{shape.rope_high_freq_factor}",
            hint="give the low factor the smaller number, such as 1 and 4",
        )
    return shape


def training_flops(shape: Shape, tokens: float, pairs: float) -> float:
    """Floating-point operations of forward and backward pass, without recomputation.

    Args:
        pairs: of a token and a token that it attends to. In a piece of n tokens there are n (n + 1) / 2; the
            figure that is usually given counts full rows without the causal mask, which makes it tokens x seq_len.
    """
    per_layer = 2 * shape.dim * (shape.query_dim + shape.kv_dim) + 3 * shape.dim * shape.hidden_dim
    weights = shape.num_layers * per_layer + shape.vocab_size * shape.dim
    return 6.0 * weights * tokens + 12.0 * shape.num_layers * shape.query_dim * pairs


def peak_tflops(device_name: str) -> float | None:
    """The peak of a GPU; None if it is not known."""
    return next((float(peak) for part, peak in PEAK_TFLOPS.items() if part in device_name), None)
