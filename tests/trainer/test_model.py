"""The model on packed rows, its initialisation, its optimizer and its schedules."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.runtime.sources import ListSource
from tests.trainer.runs import corpora
from tokshard.errors import UsageError
from tokshard.run_files.model_shape import PRESETS, Model, Shape, model_shape
from tokshard.run_files.recipe import Optimizer, vocabulary_of
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamingLoader
from tokshard.trainer.attention import Documents
from tokshard.trainer.losses import micro_batches, sum_of_losses
from tokshard.trainer.model import Transformer, initialise
from tokshard.trainer.optimizer import decay_groups, learning_rate

CPU = torch.device("cpu")
SHAPE = Shape(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=48, vocab_size=200)
LENGTHS = [5, 1, 12, 2, 30, 9, 17, 3, 40, 8]


def model(shape: Shape = SHAPE, *, seed: int = 0) -> Transformer:
    made = Transformer(shape)
    initialise(made, seed=seed)
    return made


def one_epoch(seq_len: int, *, compact: bool = False) -> list[dict[str, torch.Tensor]]:
    plan = StreamPlan(ListSource(LENGTHS), seq_len=seq_len, epochs=1, allow_small_blocks=True)
    loader = StreamingLoader(plan, global_batch_size=4, compact=compact)
    batches = list(loader)
    loader.close()
    return batches


def test_the_packed_loss_of_an_epoch_is_that_of_its_documents_one_by_one() -> None:
    """Samples are as long as the corpus, so that no document is cut: attention sees each whole in both ways."""
    net = model()
    (batch,) = one_epoch(sum(LENGTHS))
    alone = torch.zeros(())
    for document in ListSource(LENGTHS).documents():
        ids = torch.tensor(document)[None]
        bounds = torch.tensor([0, len(document)], dtype=torch.int32)
        documents = Documents(cu_seqlens=bounds, max_seqlen=len(document))
        logits = net(ids, torch.arange(len(document))[None], documents)
        alone += torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
    packed = sum_of_losses(net, batch)
    assert packed.sum().item() == pytest.approx(alone.item(), rel=1e-6)
    assert (packed[1:] == 0).all()  # the rows that only fill up the batch


def test_a_token_is_not_seen_by_other_documents_nor_by_earlier_tokens() -> None:
    net, (batch, *_) = model(), one_epoch(16)
    documents = Documents(cu_seqlens=batch["cu_seqlens"], max_seqlen=16)
    before = net(batch["input_ids"], batch["position_ids"], documents)
    start, stop = next((a, b) for a, b in pairwise(batch["cu_seqlens"].tolist()) if b - a > 4)
    changed = batch["input_ids"].clone()
    changed.view(-1)[start + 2] += 1
    differs = (net(changed, batch["position_ids"], documents) != before).any(1).nonzero().flatten()
    assert differs.tolist() == list(range(start + 2, stop))


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_parts_of_a_batch_have_the_losses_of_the_whole(num_rows: int) -> None:
    net = model()
    for batch, compact in zip(one_epoch(16), one_epoch(16, compact=True), strict=True):
        whole = sum_of_losses(net, batch)
        parts = [sum_of_losses(net, part) for part in micro_batches(compact, num_rows, CPU)]
        assert len(parts) == 4 // num_rows
        torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_a_compact_batch_trains_what_the_full_one_would(num_rows: int) -> None:
    """Also the last batch of a pass, which has padding."""
    for batch, compact in zip(one_epoch(16), one_epoch(16, compact=True), strict=True):
        parts = list(micro_batches(compact, num_rows, CPU))
        for name in ("input_ids", "labels", "position_ids", "corpus_index", "sample_index"):
            assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
        bounds = torch.cat([part["cu_seqlens"] for part in parts]).unique()
        assert torch.equal(bounds, batch["cu_seqlens"].unique())


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    values, torch_state = dict(model().named_parameters()), torch.get_rng_state()
    torch.manual_seed(99)
    deeper = dict(model(replace(SHAPE, vocab_size=77)).named_parameters())
    same = [name for name in values if name not in ("embedding.weight", "head.weight")]
    assert all(torch.equal(values[name], deeper[name]) for name in same)
    torch.set_rng_state(torch_state)
    matrices = [name for name, value in values.items() if value.ndim == 2]
    other = dict(model(seed=1).named_parameters())
    assert not any(torch.equal(values[name], other[name]) for name in matrices)
    first, second = (values[f"layers.{index}.attention.query.weight"] for index in (0, 1))
    assert not torch.equal(first, second)
    assert values["layers.0.attention.output.weight"].std().item() == pytest.approx(0.01, rel=0.1)
    assert first.std().item() == pytest.approx(0.02, rel=0.1)


def test_matrices_decay_and_norms_and_the_embedding_do_not() -> None:
    decayed, kept = decay_groups(model())
    assert len(decayed) == 2 * 7 + 1
    assert "head.weight" in decayed
    assert set(kept) == {
        "embedding.weight",
        "norm.weight",
        *(f"layers.{index}.{name}_norm.weight" for index in (0, 1) for name in ("attention", "feed_forward")),
    }


def test_cosine_warms_up_linearly_and_ends_at_its_final_fraction() -> None:
    settings = Optimizer(lr=1.0, warmup_steps=4, final_fraction=0.1)
    rates = [learning_rate(settings, step, 24) for step in range(24)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[13] == pytest.approx(0.55)  # half way
    assert rates[-1] == pytest.approx(0.1)
    assert all(after < before for before, after in pairwise(rates[3:]))


def test_wsd_is_stable_and_then_falls_linearly() -> None:
    settings = Optimizer(lr=1.0, schedule="wsd", warmup_steps=2, decay_steps=5, final_fraction=0.0)
    rates = [learning_rate(settings, step, 12) for step in range(12)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.0])


@pytest.mark.parametrize(
    ("preset", "millions"), [("10M", 11.5), ("160M", 162), ("1B", 1_500), ("7B", 6_740), ("8B", 8_030), ("11B", 11_200)]
)
def test_presets_have_the_size_of_their_name(preset: str, millions: float) -> None:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in Transformer(PRESETS[preset]).parameters())
    assert size / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (Model(preset="9B"), "no preset '9B'"),
        (Model(num_kv_heads=3), "do not divide"),
        (Model(dim=250), "do not divide"),
    ],
)
def test_impossible_model_sizes_are_refused(settings: Model, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        model_shape(settings, 1)


def test_the_vocabulary_is_rounded_up_to_a_multiple_of_128_unless_the_recipe_names_one(tmp_path: Path) -> None:
    plan = StreamPlan(next(iter(corpora(tmp_path).values())), seq_len=8)  # of 64 ids
    assert model_shape(Model(), vocabulary_of(plan)).vocab_size == 128
    assert model_shape(Model(vocab_size=65), vocabulary_of(plan)).vocab_size == 65
    with pytest.raises(UsageError, match="vocab_size is 63, the corpora have 64 ids"):
        model_shape(Model(vocab_size=63), vocabulary_of(plan))
