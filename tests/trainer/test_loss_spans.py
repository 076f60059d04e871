"""Training on conversations: the loss is the weighted mean over the targets of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.corpora import write_corpus
from tests.trainer.checkpoints import initialised
from tests.trainer.runs import Runs, chat, evaluations_of, tokenizer
from tokshard.run_files.model_shape import Shape
from tokshard.runtime import StreamingLoader, StreamPlan
from tokshard.trainer.attention import Documents
from tokshard.trainer.losses import micro_batches, sum_of_losses

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

    shape = Shape(dim=16, num_layers=2, num_heads=2, num_kv_heads=1, hidden_dim=32, vocab_size=64)
    packed, alone = (initialised(shape, loss_chunk=loss_chunk) for _ in range(2))
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


def test_metrics_and_evaluations_are_weighted(paths: dict[str, str], tmp_path: Path) -> None:
    chat(tmp_path / "chat", np.random.default_rng(2).integers(2, 80, 60).tolist())
    run = Runs({"chat": str(tmp_path / "chat"), "code": paths["code"]}, tmp_path)
    plan: dict[str, Any] = {"data__weights": {"chat": 0.6, "code": 0.4}, "train__steps": 3, "checkpoint__every": 1}
    plan |= {"evaluation__corpora": {"held out": run.paths["chat"]}, "optimizer__lr": 0.0}
    plan |= {"data__seq_len": 32, "data__global_batch_size": 9}
    steps = run("run", **plan)
    stream = StreamPlan(**run.recipe(**plan).data.arguments())
    for step in steps:
        rows = [stream.sample(sample) for sample in range(*step["samples"])]
        assert step["targets"] == sum(int((row["labels"] != -100).sum()) for row in rows)
        assert step["loss_weights"] == pytest.approx(sum(row["loss_weights"].sum() for row in rows))
        assert step["loss_weights"] < step["targets"]
    found = evaluations_of(tmp_path / "run")[3]["held out"]
    whole = StreamPlan({"chat": tmp_path / "chat"}, seq_len=32, epochs=1)
    rows = [whole.sample(sample) for sample in range(whole.num_samples or 0)]
    assert found["loss_weights"] == pytest.approx(sum(row["loss_weights"].sum() for row in rows))
    assert found["targets"] == sum(int((row["labels"] != -100).sum()) for row in rows)
