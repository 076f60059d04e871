"""Evaluation on finite plans. That its losses do not depend on ranks is in test_equality.py."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.trainer.checkpoints import initialised
from tests.trainer.runs import Runs, chat, corpus, evaluations_of, lines_of
from tokshard.errors import DamagedCorpusError
from tokshard.run_files.model_shape import Shape
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamingLoader
from tokshard.trainer.evaluate import Evaluation, evaluation_plan
from tokshard.trainer.losses import sum_of_losses
from tokshard.trainer.model import Transformer

SHAPE = Shape(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, hidden_dim=16, vocab_size=128)  # of 64 ids


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> str:
    return corpus(tmp_path_factory.mktemp("held-out") / "corpus", step=3, seed=1, num_documents=20)


@pytest.fixture
def run(paths: dict[str, str], held_out: str, tmp_path: Path) -> Runs:
    """Three steps and an evaluation, unless a test says otherwise."""
    return Runs(paths, tmp_path, {"train__steps": 3, "evaluation__corpora": {"held out": held_out}})


def test_a_run_is_evaluated_every_n_steps_and_once_at_its_end_and_trains_as_one_that_is_not(
    run: Runs, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"train__steps": 5, "checkpoint__every": 2}
    assert run("evaluated", **changes, evaluation__every=2) == run("plain", **changes, evaluation__corpora={})
    run("even", train__steps=4, evaluation__every=2)
    assert [line["step"] for line in lines_of(tmp_path / "even") if "evaluation" in line] == [2, 4]
    found = evaluations_of(tmp_path / "evaluated")
    assert list(found) == [2, 4, 5]
    assert found[5]["held out"]["loss"] < found[2]["held out"]["loss"]


def test_evaluation_corpora_share_the_memory_of_the_trained_ones_also_in_another_process(run: Runs) -> None:
    """`memory_bytes` limits a process, whatever it reads."""
    settings = run.recipe(evaluation__corpora=run.paths, data__memory_bytes="1MiB")
    trained = StreamPlan(**settings.data.arguments())
    plans = [trained, *(evaluation_plan(name, settings, trained) for name in run.paths)]
    for each in (plans, pickle.loads(pickle.dumps(plans))):
        caches = {id(source.cache): source.cache for plan in each for source in plan.sources}
        assert [cache.memory_bytes for cache in caches.values()] == [1 << 20]


def test_the_loss_is_that_of_every_target_of_the_corpus(run: Runs, held_out: str, tmp_path: Path) -> None:
    """Against a model without FSDP, in batches of another size."""
    run(optimizer__lr=0.0)
    net, sums = initialised(SHAPE), torch.zeros(2, dtype=torch.float64)
    with (
        torch.no_grad(),
        StreamingLoader(StreamPlan(held_out, seq_len=16, epochs=1), global_batch_size=7, uneven="pad") as loader,
    ):
        for batch in loader:
            sums[0] += sum_of_losses(net, batch).double().sum()
            sums[1] += (batch["labels"] != -100).sum()
    found = evaluations_of(tmp_path / "out")[3]["held out"]
    assert found["targets"] == int(sums[1]) > 500
    assert found["loss"] == pytest.approx((sums[0] / sums[1]).item(), rel=1e-6)


def test_so_many_tokens_of_a_corpus_are_read_in_whole_blocks(run: Runs, tmp_path: Path) -> None:
    """Whatever the blocks of the training corpora are; of conversations, too."""
    large, spans = corpus(tmp_path / "large", step=3, seed=1, num_documents=5000), tmp_path / "chat"
    chat(spans, [12] * 20)
    block, whole = 65_536, StreamPlan(large, seq_len=16, epochs=1).num_samples
    for asked, samples in ((1, block), (block, block), ("66k", 2 * block), (10**9, None), (None, None)):
        evaluation = {"evaluation__corpora": {"large": large, "chat": str(spans)}, "evaluation__tokens": asked}
        settings = run.recipe(data__block_tokens=64, **{key: value for key, value in evaluation.items() if value})
        trained = StreamPlan(**settings.data.arguments())
        plans = [evaluation_plan(name, settings, trained) for name in ("large", "chat")]
        assert [plan.num_samples for plan in plans] == [samples // 16 if samples else whole, 21]


def test_an_evaluation_says_what_it_reads_and_how_far_it_is(
    run: Runs, held_out: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take minutes, and was taken for a hang."""
    monkeypatch.setattr("tokshard.trainer.evaluate.PROGRESS_SECONDS", 0.0)
    num_samples = StreamPlan(held_out, seq_len=16, epochs=1).num_samples or 0
    run()
    first, *said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 3: evaluat")]
    size = f"{num_samples:,} samples, {num_samples * 16:,} tokens"
    assert first == f"step 3: evaluating held out ({size}) in batches of 4 samples"
    num_batches = -(-num_samples // 4)
    *progress, last = said
    for number, line in enumerate(progress, 1):
        assert re.fullmatch(
            rf"step 3: evaluating held out: {number} of {num_batches} batches, [\d,]+ tokens/s, [\d:. a-z]+ left", line
        )
    assert len(progress) == num_batches - 1
    assert last.startswith("step 3: evaluation  held out ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "steps", "evaluated"), [(0, [1, 2, 3], [3]), (1, [1], [1, 2, 3])], ids=["of the end", "on the way"]
)
def test_an_evaluation_that_a_signal_ends_ends_the_run_and_the_same_command_makes_up_for_it_once(
    run: Runs, tmp_path: Path, every: int, steps: list[int], evaluated: list[int]
) -> None:
    models, sums = list[Transformer](), Evaluation._sums

    def sums_and_a_signal(evaluation: Evaluation, model: Transformer, *rest: Any) -> Any:
        models.append(model)
        with model.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGTERM)):
            return sums(evaluation, model, *rest)

    with patch.object(Evaluation, "_sums", sums_and_a_signal):
        assert run.end_of(evaluation__every=every) == signal.SIGTERM
    assert all(isinstance(value, DTensor) for value in models[0].parameters()), "a save finds shards"
    assert [line["step"] for line in lines_of(tmp_path / "out")] == steps
    for _ in range(2):
        run(evaluation__every=every)
        assert [line["step"] for line in lines_of(tmp_path / "out")] == sorted([1, 2, 3, *evaluated])
    assert list(evaluations_of(tmp_path / "out")) == evaluated


def test_an_evaluation_corpus_that_is_damaged_ends_the_run_with_the_shard(
    run: Runs, held_out: str, tmp_path: Path
) -> None:
    (shard,) = Path(shutil.copytree(held_out, tmp_path / "broken")).glob("shard-*")
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(DamagedCorpusError, match=shard.name):
        run(evaluation__corpora={"held out": str(tmp_path / "broken")})
    assert [line["step"] for line in lines_of(tmp_path / "out")] == [1, 2, 3]


def test_a_loss_that_is_not_finite_is_null(run: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(optimizer__lr=1e30, train__on_non_finite="skip")
    assert "NaN" not in (tmp_path / "out" / "metrics.jsonl").read_text()  # which is not JSON
    assert evaluations_of(tmp_path / "out")[3]["held out"]["loss"] is None
    assert "evaluation  held out not finite" in capsys.readouterr().out
