"""Evaluation on finite plans. That its losses do not depend on ranks is in test_equality.py."""

from __future__ import annotations

import os
import pickle
import re
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.corpora import write_corpus
from tests.trainer.runs import configuration, corpora, corpus, evaluations_of, lines_of, steps_of, tokenizer
from tokshard.errors import TrainerError, UsageError
from tokshard.run_files.model_shape import Shape
from tokshard.run_files.recipe import resolve
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.narrow import IGNORED
from tokshard.runtime.tensors import StreamingLoader
from tokshard.trainer.evaluate import Evaluation, evaluation_plan
from tokshard.trainer.launcher import Interrupted
from tokshard.trainer.loop import train
from tokshard.trainer.losses import sum_of_losses
from tokshard.trainer.metrics_file import MetricsFile
from tokshard.trainer.model import Transformer, initialise
from tokshard.trainer.parallel import make_mesh, process_group, sharded_model

SHAPE = Shape(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, hidden_dim=16, vocab_size=128)  # of 64 ids
SMALL = {"preset": "10M", "dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "hidden_dim": 16}
LENGTHS = {"train__steps": 3, "checkpoint__every": 2, "optimizer__warmup_steps": 1}

# DCP of torch 2.13 itself warns
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("corpora")
    return corpora(directory) | {"held out": corpus(directory / "held-out", step=3, seed=1, num_documents=20)}


def small(paths: dict[str, str], out: Path, **changes: Any) -> dict[str, Any]:
    held_out = {"evaluation__corpora": {"held out": paths["held out"]}}
    trained = {name: paths[name] for name in ("code", "prose")}
    return configuration(trained, out, **{**LENGTHS, **held_out, **changes}) | {"model": SMALL}


def test_a_run_that_is_evaluated_trains_as_one_that_is_not(paths: dict[str, str], tmp_path: Path) -> None:
    assert train(resolve(small(paths, tmp_path / "plain", evaluation__corpora={}))) == 0
    assert train(resolve(small(paths, tmp_path / "evaluated", evaluation__every=2))) == 0
    kept = ("step", "loss", "grad_norm", "digest", "samples", "corpora")
    plain, other = (
        [[step[key] for key in kept] for step in steps_of(tmp_path / name)] for name in ("plain", "evaluated")
    )
    assert plain == other
    found = evaluations_of(tmp_path / "evaluated")
    assert list(found) == [2, 3]
    assert found[3]["held out"]["loss"] < found[2]["held out"]["loss"]
    saved = tmp_path / "evaluated" / "checkpoints"
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000002", "step-00000003"]


def test_evaluation_corpora_share_the_memory_of_the_trained_ones_also_in_another_process(paths: dict[str, str]) -> None:
    """`memory_bytes` limits a process, whatever it reads."""
    settings = resolve(small(paths, Path("out"), evaluation__corpora=paths, data__memory_bytes="1MiB"))
    trained = StreamPlan(**settings.data.arguments())
    plans = [trained, *(evaluation_plan(name, settings, trained) for name in paths)]
    for each in (plans, pickle.loads(pickle.dumps(plans))):
        caches = {id(source.cache): source.cache for plan in each for source in plan.sources}
        assert [cache.memory_bytes for cache in caches.values()] == [1 << 20]


def test_the_loss_is_that_of_every_target_of_the_corpus(paths: dict[str, str], tmp_path: Path) -> None:
    """Against a model without FSDP, in batches of another size."""
    fields = small(paths, tmp_path / "out", optimizer__lr=0.0)
    assert train(resolve(fields)) == 0
    net, sums = Transformer(SHAPE), torch.zeros(2, dtype=torch.float64)
    initialise(net, seed=0)
    plan = StreamPlan(paths["held out"], seq_len=32, epochs=1)
    with torch.no_grad(), StreamingLoader(plan, global_batch_size=7, uneven="pad") as loader:
        for batch in loader:
            sums[0] += sum_of_losses(net, batch).double().sum()
            sums[1] += (batch["labels"] != IGNORED).sum()
    found = evaluations_of(tmp_path / "out")[3]["held out"]
    assert found["targets"] == int(sums[1]) > 500
    assert found["loss"] == pytest.approx((sums[0] / sums[1]).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("asked", "num_blocks"), [(1, 1), (128, 1), (129, 2), ("0.3k", 3), (10**9, None), (None, None)]
)
def test_so_many_tokens_of_a_corpus_are_read_in_whole_blocks(
    paths: dict[str, str], asked: int | str | None, num_blocks: int | None
) -> None:
    changes = {"evaluation__tokens": asked, "data__block_tokens": 128, "data__allow_small_blocks": True}
    settings = resolve(small(paths, Path("out"), **changes if asked is not None else {}))
    plan = evaluation_plan("held out", settings, StreamPlan(**settings.data.arguments()))
    whole = StreamPlan(paths["held out"], seq_len=32, epochs=1).num_samples
    assert plan.num_samples == (whole if num_blocks is None else num_blocks * 128 // 32)


def test_an_evaluation_says_what_it_reads_and_how_far_it_is(
    paths: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take minutes, and was taken for a hang."""
    monkeypatch.setattr("tokshard.trainer.evaluate.PROGRESS_SECONDS", 0.0)
    settings = resolve(small(paths, tmp_path / "out"))
    num_samples = evaluation_plan("held out", settings, StreamPlan(**settings.data.arguments())).num_samples or 0
    assert train(settings) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 3: evaluat")]
    assert said[0] == (
        f"step 3: evaluating held out ({num_samples:,} samples, {num_samples * 32:,} tokens) in batches of 9 samples"
    )
    num_batches = -(-num_samples // 9)
    for number, line in enumerate(said[1:-1], 1):
        assert re.fullmatch(
            rf"step 3: evaluating held out: {number} of {num_batches} batches, [\d,]+ tokens/s, [\d:. a-z]+ left", line
        )
    assert len(said) == num_batches + 1
    assert said[-1].startswith("step 3: evaluation  held out ")


def test_it_is_due_every_n_steps_and_at_the_end_and_once_per_step(paths: dict[str, str], tmp_path: Path) -> None:
    settings = resolve(small(paths, tmp_path / "out", evaluation__every=2))
    with process_group(settings.parallel) as device:
        mesh = make_mesh(settings.parallel, device)
        evaluation = Evaluation(settings, StreamPlan(**settings.data.arguments()), mesh, received=())
        assert [evaluation.is_due(step, is_end=step == 5) for step in range(1, 6)] == [False, True, False, True, True]
        evaluation.losses(Transformer(SHAPE), 4)
        assert [evaluation.is_due(step, is_end=True) for step in (4, 5)] == [False, True]


def test_a_signal_ends_an_evaluation_and_leaves_the_parameters_sharded(paths: dict[str, str], tmp_path: Path) -> None:
    settings = resolve(small(paths, tmp_path / "out"))
    received: list[int] = []
    with process_group(settings.parallel) as device:
        mesh = make_mesh(settings.parallel, device)
        model = sharded_model(SHAPE, mesh, settings.parallel, settings.compute)
        initialise(model, seed=0)
        before = {name: type(value) for name, value in model.named_parameters()}
        evaluation = Evaluation(settings, StreamPlan(**settings.data.arguments()), mesh, received=received)
        model.register_forward_hook(lambda *_: received.append(15))
        with pytest.raises(Interrupted) as stop:
            evaluation.losses(model, 1)
        assert stop.value.args == (15,)
        assert received == [15]
        assert {name: type(value) for name, value in model.named_parameters()} == before


def test_a_corpus_of_another_tokenizer_is_refused(paths: dict[str, str], tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other", [[1, 2, 0]], tokenizer=tokenizer().replace(b"word63", b"other"))
    settings = resolve(small(paths, tmp_path / "out", evaluation__corpora={"other": str(other)}))
    with pytest.raises(UsageError, match="'other' has another tokenizer"):
        train(settings)
    assert os.listdir(tmp_path / "out") == ["run.lock"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "steps", "evaluated"), [(0, [1, 2, 3], [3]), (1, [1], [1, 2, 3])], ids=["of the end", "on the way"]
)
def test_an_evaluation_that_a_signal_ends_ends_the_run_and_the_same_command_makes_up_for_it_once(
    paths: dict[str, str], tmp_path: Path, every: int, steps: list[int], evaluated: list[int]
) -> None:
    settings = resolve(small(paths, tmp_path / "out", evaluation__every=every))

    def sums_and_a_signal(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return sums(*arguments)

    sums = Evaluation._sums
    with patch.object(Evaluation, "_sums", sums_and_a_signal):
        assert train(settings) == signal.SIGTERM
    assert [line["step"] for line in lines_of(tmp_path / "out")] == steps
    for _ in range(2):
        assert train(settings) == 0
        assert [line["step"] for line in lines_of(tmp_path / "out")] == sorted([1, 2, 3, *evaluated])
    assert list(evaluations_of(tmp_path / "out")) == evaluated


def test_a_run_that_cannot_write_its_metrics_ends_without_an_evaluation(paths: dict[str, str], tmp_path: Path) -> None:
    """Which nobody could read, and which may take a whole pass over its corpora."""

    def full(log: MetricsFile, _: Any) -> None:
        log.failure = TrainerError("metrics.jsonl cannot be written: No space left on device", hint="make room")

    settings = resolve(small(paths, tmp_path / "out", train__steps=9))
    with patch.object(MetricsFile, "write", full), patch.object(Evaluation, "losses", autospec=True) as losses:
        with pytest.raises(TrainerError, match="No space left"):
            train(settings)
        assert os.listdir(tmp_path / "out" / "checkpoints")
        losses.assert_not_called()


def test_a_loss_that_is_not_finite_is_null(
    paths: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(resolve(small(paths, tmp_path / "out", optimizer__lr=1e30, train__on_non_finite="skip"))) == 0
    assert "NaN" not in (tmp_path / "out" / "metrics.jsonl").read_text()  # which is not JSON
    assert evaluations_of(tmp_path / "out")[3]["held out"]["loss"] is None
    assert "evaluation  held out not finite" in capsys.readouterr().out
