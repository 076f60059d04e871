"""Training on conversations: the loss is the weighted mean over the targets of a whole step, with or without text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.corpora import write_corpus
from tests.forks import Forks
from tests.trainer.runs import SMALL, chat, configuration, corpus, evaluations_of, steps_of, tokenizer, train_on
from tokshard.run_files.model_shape import Shape
from tokshard.run_files.recipe import resolve
from tokshard.runtime import StreamingLoader, StreamPlan
from tokshard.trainer.attention import Documents
from tokshard.trainer.batches import padding
from tokshard.trainer.document_losses import main as write_document_losses
from tokshard.trainer.loop import train
from tokshard.trainer.losses import micro_batches, sum_of_losses
from tokshard.trainer.model import Transformer, initialise

# DCP of torch 2.13 itself warns
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]
CPU, TOLERANCE = torch.device("cpu"), 1e-5
LENGTHS = [17, 2, 40, 9, 31, 29]


@pytest.mark.parametrize("loss_chunk", [0, 50])
def test_the_loss_of_packed_rows_is_the_weighted_mean_of_the_documents_one_by_one(
    tmp_path: Path, loss_chunk: int
) -> None:
    """A row of conversations and one of text, of six whole documents each."""
    documents, weights = chat(tmp_path / "chat", LENGTHS)
    text = [[*range(1, length), 0] for length in LENGTHS]
    write_corpus(tmp_path / "text", text, tokenizer=tokenizer())
    documents, weights = documents + text, weights + [[1.0] * len(document) for document in text]
    size = sum(LENGTHS)
    paths = {name: tmp_path / name for name in ("chat", "text")}
    sizes: dict[str, Any] = {"seq_len": size, "block_tokens": size, "allow_small_blocks": True, "pack": "cut"}
    plan = StreamPlan(paths, weights={"chat": 0.5, "text": 0.5}, **sizes)
    with StreamingLoader(plan, global_batch_size=2, compact=True) as loader:
        batch = next(iter(loader))
    assert sorted(batch["corpus_index"].tolist()) == [0, 1]

    def net() -> Transformer:
        shape = Shape(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, hidden_dim=32, vocab_size=64)
        made = Transformer(shape, loss_chunk=loss_chunk)
        initialise(made, seed=0)
        return made

    packed, alone = net(), net()
    (full,) = micro_batches(batch, 0, CPU)
    loss = sum_of_losses(packed, full).sum() / full["loss_weights"].sum()
    loss.backward()
    total, weight = torch.zeros(()), 0.0
    for document, of_tokens in zip(documents, weights, strict=True):
        ids, bounds = torch.tensor(document), torch.tensor([0, len(document) - 1], dtype=torch.int32)
        boundaries = Documents(cu_seqlens=bounds, max_seqlen=size)
        logits = alone(ids[None, :-1], torch.arange(len(document) - 1)[None], boundaries)
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        total, weight = total + losses @ torch.tensor(of_tokens[1:]), weight + sum(of_tokens[1:])
    expected = total / weight
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=TOLERANCE)
    for one, other in zip(packed.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=TOLERANCE)


def mixed(directory: Path, out: str, **changes: Any) -> dict[str, Any]:
    """A recipe for conversations and text, evaluated on the conversations."""
    paths = {"chat": str(directory / "chat"), "code": str(directory / "code")}
    if not (directory / "chat").exists():
        chat(directory / "chat", np.random.default_rng(2).integers(2, 80, 60).tolist())
        corpus(directory / "code", step=3, seed=3, num_documents=60)
    sizes = {"train__steps": 3, "checkpoint__every": 1, "optimizer__warmup_steps": 1, **changes}
    sizes |= {"data__weights": {"chat": 0.6, "code": 0.4}, "evaluation__corpora": {"held out": paths["chat"]}}
    return configuration(paths, directory / out, **sizes) | {"model": SMALL}


def test_metrics_and_losses_of_documents_are_weighted_and_an_evaluation_is(tmp_path: Path) -> None:
    fields = mixed(tmp_path, "run", optimizer__lr=0.0)
    assert train(resolve(fields)) == 0
    steps, settings = steps_of(tmp_path / "run"), resolve(fields)
    plan = StreamPlan(**settings.data.arguments())
    for step in steps:
        rows = [plan.sample(sample) for sample in range(*step["samples"])]
        assert step["targets"] == sum(int((row["labels"] != -100).sum()) for row in rows)
        assert step["loss_weights"] == pytest.approx(sum(row["loss_weights"].sum() for row in rows))
        assert step["loss_weights"] < step["targets"]
    out = tmp_path / "losses.parquet"
    assert write_document_losses([str(tmp_path / "run"), "--steps", "2:4", "--out", str(out)]) == 0
    of_documents = pq.read_table(out).to_pylist()
    for step in steps[1:]:
        mine = [row for row in of_documents if row["step"] == step["step"] and row["targets"]]
        for name in ("chat", "code"):
            parts = [row for row in mine if row["corpus"] == name]
            weight = sum(row["loss_weights"] for row in parts)
            mean = sum(row["loss_weights"] * row["loss"] for row in parts) / weight
            assert mean == pytest.approx(step["loss_by_corpus"][name], abs=TOLERANCE)
        mean = sum(row["loss_weights"] * row["loss"] for row in mine) / sum(row["loss_weights"] for row in mine)
        assert mean == pytest.approx(step["loss"], abs=TOLERANCE)
        assert sum(row["targets"] for row in mine) == step["targets"]
    found = evaluations_of(tmp_path / "run")[3]["held out"]
    whole = StreamPlan({"chat": tmp_path / "chat"}, seq_len=32, epochs=1)
    rows = [whole.sample(sample) for sample in range(whole.num_samples or 0)]
    assert found["loss_weights"] == pytest.approx(sum(row["loss_weights"].sum() for row in rows))
    assert found["targets"] == sum(int((row["labels"] != -100).sum()) for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_and_micro_batches_change_no_weighted_step(tmp_path: Path, forks: Forks) -> None:
    changes: dict[str, dict[str, Any]] = {"one": {}, "micro": {"train__micro_batch_size": 3}}
    for name, changed in changes.items():
        assert train(resolve(mixed(tmp_path, name, **changed))) == 0
    train_on([(2, [mixed(tmp_path, "two")])], tmp_path, forks)
    expected = steps_of(tmp_path / "one")
    assert all(0 < step["loss_weights"] < step["targets"] for step in expected)
    for name in ("micro", "two"):
        for found, wanted in zip(steps_of(tmp_path / name), expected, strict=True):
            for key in ("digest", "targets", "samples"):
                assert found[key] == wanted[key]
            for key in ("loss", "loss_weights", "grad_norm"):
                assert found[key] == pytest.approx(wanted[key], rel=TOLERANCE)
        held_out = evaluations_of(tmp_path / name)[3]["held out"]
        assert held_out == pytest.approx(evaluations_of(tmp_path / "one")[3]["held out"], rel=TOLERANCE)


def test_what_a_rank_without_data_trains_on_has_the_form_of_the_other_batches(tmp_path: Path) -> None:
    chat(tmp_path / "chat", LENGTHS)
    plan = StreamPlan(tmp_path / "chat", seq_len=16, epochs=1, allow_small_blocks=True)
    with StreamingLoader(plan, global_batch_size=2, compact=True) as loader:
        (real,) = micro_batches(next(iter(loader)), 0, CPU)
    (made,) = micro_batches(padding(2, 16, has_spans=True), 0, CPU)
    assert {key: (of.dtype, of.shape[1:]) for key, of in made.items()} == {
        key: (of.dtype, of.shape[1:]) for key, of in real.items()
    }
    assert not made["loss_weights"].any()
    assert (made["labels"] == -100).all()
