"""The model on packed rows, its initialisation, its optimizer and its schedules."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.sources import ListSource
from tests.trainer.checkpoints import initialised
from tests.trainer.runs import corpora
from tokshard.run_files.model_shape import PRESETS, Model, Shape, model_shape
from tokshard.run_files.recipe import Optimizer, vocabulary_of
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamingLoader
from tokshard.trainer.attention import Documents
from tokshard.trainer.losses import micro_batches, sum_of_losses
from tokshard.trainer.model import Transformer, rotations
from tokshard.trainer.optimizer import decay_groups, learning_rate, make_optimizer

CPU = torch.device("cpu")
SHAPE = Shape(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=48, vocab_size=200)
LENGTHS = [5, 1, 12, 2, 30, 9, 17, 3, 40, 8]


def one_epoch(seq_len: int, *, compact: bool = False) -> list[dict[str, torch.Tensor]]:
    plan = StreamPlan(ListSource(LENGTHS), seq_len=seq_len, epochs=1, allow_small_blocks=True)
    loader = StreamingLoader(plan, global_batch_size=4, compact=compact)
    batches = list(loader)
    loader.close()
    return batches


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_parts_of_a_compact_batch_have_the_content_and_the_losses_of_the_full_one(num_rows: int) -> None:
    """Also the last batch of a pass, which has rows of padding."""
    net = initialised(SHAPE)
    for batch, compact in zip(one_epoch(16), one_epoch(16, compact=True), strict=True):
        parts = list(micro_batches(compact, num_rows, CPU))
        assert len(parts) == 4 // num_rows
        for name in ("input_ids", "labels", "position_ids", "corpus_index", "sample_index"):
            assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
        bounds = torch.cat([part["cu_seqlens"] for part in parts]).unique()
        assert torch.equal(bounds, batch["cu_seqlens"].unique())
        losses = sum_of_losses(net, batch)
        torch.testing.assert_close(torch.cat([sum_of_losses(net, part) for part in parts]), losses)
        assert (losses[batch["sample_index"] < 0] == 0).all()


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "tied_embeddings": True, "head_dim": 6, "norm_eps": 1e-2}])
def test_logits_are_those_of_the_formulas(options: Any) -> None:
    """Head by head, with RoPE as a product of complex numbers."""
    shape, ids = replace(SHAPE, **options), torch.arange(7) * 31 % 200
    net = initialised(shape)
    for name, norm in net.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(norm, 0.5, 1.5)
    values = dict(net.named_parameters())
    turns = torch.arange(7)[:, None] * shape.rope_theta ** -(torch.arange(0, shape.head_size, 2) / shape.head_size)

    def normed(hidden: torch.Tensor, name: str) -> torch.Tensor:
        return hidden / (hidden.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt() * values[f"{name}.weight"]

    def turned(head: torch.Tensor, name: str) -> torch.Tensor:
        head = normed(head, f"{name}_norm") if shape.qk_norm else head
        pairs = torch.complex(*head.chunk(2, dim=-1)) * torch.polar(torch.ones_like(turns), turns)
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    hidden = values["embedding.weight"][ids]
    for layer in ("layers.0", "layers.1"):
        of, inner = f"{layer}.attention", normed(hidden, f"{layer}.attention_norm")
        queries, keys, heads = (
            (inner @ values[f"{of}.{kind}.weight"].T).split(shape.head_size, -1) for kind in ("query", "key", "value")
        )
        mixed = []
        for number, query in enumerate(queries):
            scores = turned(query, f"{of}.query") @ turned(keys[number // 2], f"{of}.key").T / shape.head_size**0.5
            mixed.append(scores.masked_fill(torch.ones(7, 7).triu(1) > 0, -math.inf).softmax(-1) @ heads[number // 2])
        hidden = hidden + torch.cat(mixed, -1) @ values[f"{of}.output.weight"].T
        of, inner = f"{layer}.feed_forward", normed(hidden, f"{layer}.feed_forward_norm")
        gate, up = (inner @ values[f"{of}.{kind}.weight"].T for kind in ("gate", "up"))
        hidden = hidden + (gate * gate.sigmoid() * up) @ values[f"{of}.down.weight"].T
    head = values["embedding.weight" if shape.tied_embeddings else "head.weight"]
    whole = Documents(cu_seqlens=torch.tensor([0, 7], dtype=torch.int32), max_seqlen=7)
    torch.testing.assert_close(net(ids[None], torch.arange(7)[None], whole), normed(hidden, "norm") @ head.T)


def test_slow_rotations_of_llama_3_are_slower_by_its_factor_and_those_between_on_a_line() -> None:
    cos, sin = rotations(torch.arange(40), replace(SHAPE, rope_factor=8.0, rope_original_length=100))
    for index, kept in enumerate([1.0, (100 * 0.1 / (2 * math.pi) - 1) / (4 - 1), 0.0, 0.0]):
        angles = torch.arange(40) * 0.1**index * (kept + (1 - kept) / 8)
        torch.testing.assert_close(cos[:, 0, index], angles.cos())
        torch.testing.assert_close(sin[:, 0, index], angles.sin())


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    values, torch_state = dict(initialised(SHAPE).named_parameters()), torch.get_rng_state()
    torch.manual_seed(99)
    deeper = dict(initialised(replace(SHAPE, vocab_size=77)).named_parameters())
    same = [name for name in values if name not in ("embedding.weight", "head.weight")]
    assert all(torch.equal(values[name], deeper[name]) for name in same)
    torch.set_rng_state(torch_state)
    matrices = [name for name, value in values.items() if value.ndim == 2]
    other = dict(initialised(SHAPE, seed=1).named_parameters())
    assert not any(torch.equal(values[name], other[name]) for name in matrices)
    first, second = (values[f"layers.{index}.attention.query.weight"] for index in (0, 1))
    assert not torch.equal(first, second)
    assert values["layers.0.attention.output.weight"].std().item() == pytest.approx(0.01, rel=0.1)
    assert first.std().item() == pytest.approx(0.02, rel=0.1)


def test_matrices_decay_and_norms_and_the_embedding_do_not() -> None:
    net = initialised(SHAPE)
    decayed, kept = decay_groups(net)
    assert len(decayed) == 2 * 7 + 1
    assert "head.weight" in decayed
    assert set(kept) == {
        "embedding.weight",
        "norm.weight",
        *(f"layers.{index}.{name}_norm.weight" for index in (0, 1) for name in ("attention", "feed_forward")),
    }
    groups = make_optimizer(net, Optimizer(weight_decay=0.3)).param_groups
    assert [(len(group["params"]), group["weight_decay"], group["fused"]) for group in groups] == [
        (len(decayed), 0.3, True),
        (len(kept), 0.0, True),
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "wsd", "decay_steps": 5}, [0.5, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0]),
        (
            {"schedule": "wsd", "decay": "1-sqrt", "decay_steps": 4},
            [0.5, 1, 1, 1, 1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0],
        ),
        ({"schedule": "linear", "final_fraction": 0.3}, [0.5, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]),
        (
            {"final_fraction": 0.1},
            [0.5, 1, *(0.1 + 0.9 * (1 + math.cos(math.pi * of / 7)) / 2 for of in range(1, 7)), 0.1],
        ),
    ],
    ids=["wsd", "wsd by a square root", "linear", "cosine"],
)
def test_a_schedule_warms_up_linearly_and_ends_at_its_final_fraction(
    settings: dict[str, Any], expected: list[float]
) -> None:
    made = Optimizer(**{"lr": 1.0, "warmup_steps": 2, "final_fraction": 0.0} | settings)
    assert [learning_rate(made, step, 9) for step in range(9)] == pytest.approx(expected)


PARAMETERS = {
    "10M": (11_536_640, 10_000),
    "160M": (162_220_800, 10_000),
    "1B": (1_498_482_688, 500_000),
    "7B": (6_738_415_616, 10_000),
    "8B": (8_030_261_248, 500_000),
    "11B": (11_222_758_400, 500_000),
}
"""Of each preset, and the base of its rotary embedding."""


@pytest.mark.parametrize("preset", PARAMETERS)
def test_presets_have_the_size_of_their_name(preset: str) -> None:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in Transformer(PRESETS[preset]).parameters())
    assert (size, PRESETS[preset].rope_theta) == PARAMETERS[preset]


def test_the_vocabulary_is_rounded_up_to_a_multiple_of_128_unless_the_recipe_names_one(tmp_path: Path) -> None:
    plan = StreamPlan(next(iter(corpora(tmp_path).values())), seq_len=8)  # of 64 ids
    sizes = [model_shape(Model(), needed).vocab_size for needed in (vocabulary_of(plan), 128, 129)]
    assert sizes == [128, 128, 256]
    assert model_shape(Model(vocab_size=65), vocabulary_of(plan)).vocab_size == 65
