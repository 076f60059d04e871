"""Ends of a run that are not its last step, on one rank in this process."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.trainer.runs import configuration, corpora, steps_of
from tokshard.errors import TrainerError
from tokshard.trainer.config import resolve
from tokshard.trainer.loop import train

SMALL = {"preset": "10M", "dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "hidden_dim": 16}

# DCP of torch 2.13 itself warns
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def small(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return configuration(corpora(tmp_path / "corpora"), tmp_path / "out", **changes) | {"model": SMALL}


def test_a_finite_pass_ends_after_its_short_batch_and_is_not_begun_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = small(tmp_path, train__steps=1_000, data__epochs=1, data__weights={}, data__global_batch_size=100)
    del fields["data"]["corpora"]["prose"]
    assert train(resolve(fields)) == 0
    steps = steps_of(tmp_path / "out")
    assert [step["num_samples"] for step in steps[:-1]] == [100] * (len(steps) - 1)
    assert 0 < steps[-1]["num_samples"] < 100
    assert 1 <= steps[-1]["corpora"]["code"]["epoch"] < 1.01
    capsys.readouterr()
    assert train(resolve(fields)) == 0
    assert f"step {len(steps)}: nothing is left to do" in capsys.readouterr().out
    assert steps_of(tmp_path / "out") == steps


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_that_was_made_and_is_what_the_run_returns(
    tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "out" / "metrics.jsonl"

    def stop_when_steps_are_made() -> None:
        deadline = time.monotonic() + 60
        while not (log.exists() and log.read_bytes().count(b"\n") >= 2) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    stopper = threading.Thread(target=stop_when_steps_are_made)
    stopper.start()
    try:
        assert train(resolve(small(tmp_path, train__steps=100_000, checkpoint__every=0, train__log_every=1))) == number
    finally:
        stopper.join()
    (saved,) = (tmp_path / "out" / "checkpoints").iterdir()
    assert saved.name == f"step-{steps_of(tmp_path / 'out')[-1]['step']:08d}"


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(tmp_path: Path) -> None:
    fields = small(tmp_path, optimizer__lr=1e30, optimizer__warmup_steps=0)
    with pytest.raises(TrainerError, match=r"step 2: loss is (nan|inf)"):
        train(resolve(fields))
    assert [step["step"] for step in steps_of(tmp_path / "out")] == [1]
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_steps_that_were_not_saved_are_made_again_and_stand_once_in_the_metrics(tmp_path: Path) -> None:
    fields = small(tmp_path, train__steps=7, checkpoint__every=3, optimizer__lr=1e-3)
    assert train(resolve(fields)) == 0
    straight = steps_of(tmp_path / "out")
    for name in ("step-00000007", "step-00000006"):
        (tmp_path / "out" / "checkpoints" / name / "COMPLETE").unlink()
    assert train(resolve(fields)) == 0
    again = steps_of(tmp_path / "out")
    assert [step["step"] for step in again] == [1, 2, 3, 4, 5, 6, 7]
    assert [(step["loss"], step["digest"]) for step in again] == [(step["loss"], step["digest"]) for step in straight]


def test_bf16_follows_fp32_and_keeps_its_parameters_in_fp32(tmp_path: Path) -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        changes = {"train__out": str(tmp_path / precision), "train__steps": 5, "parallel__precision": precision}
        assert train(resolve(small(tmp_path / "of" / precision, **changes))) == 0
        losses[precision] = [step["loss"] for step in steps_of(tmp_path / precision)]
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)
    (saved,) = (tmp_path / "bf16" / "checkpoints").iterdir()
    tensors = FileSystemReader(saved).read_metadata().state_dict_metadata
    assert tensors["model.head.weight"].properties.dtype == torch.float32
