"""The programs in recipes/ around the trainer and the losses run, and continue exactly."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.trainer.runs import ROOT, SMALL, configuration, corpora, steps_of
from tokshard.run_files import recipe

# DCP of torch 2.13 itself warns
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def test_wandb_gets_every_step_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B itself needs an account."""
    logged: dict[int, dict[str, float]] = {}
    begun: list[dict[str, Any]] = []
    fake: Any = ModuleType("wandb")
    fake.init = lambda **options: begun.append(options)
    fake.log = lambda values, *, step: logged.__setitem__(step, values)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    fields = configuration(corpora(tmp_path / "corpora"), tmp_path / "out", train__stop_after=3) | {"model": SMALL}
    monkeypatch.setattr(recipe, "load_config", lambda *_: recipe.resolve(fields))
    monkeypatch.setattr(sys, "argv", ["log_to_wandb.py", "recipe.toml", "first"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "recipes/log_to_wandb.py"), run_name="__main__")
    assert ended.value.code == 0
    assert begun == [{"project": "tokshard", "id": "first", "resume": "allow"}]
    steps = steps_of(tmp_path / "out")
    assert {step["step"]: step["loss"] for step in steps} == {step: of["loss"] for step, of in logged.items()}
    assert logged[3]["loss_by_corpus/code"] == steps[2]["loss_by_corpus"]["code"]


def test_a_mix_that_follows_the_losses_is_the_same_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    main, paths = importlib.import_module("mix_from_losses").main, corpora(tmp_path)

    def run(name: str, steps: int) -> list[str]:
        main(str(tmp_path / name), steps, paths)
        return capsys.readouterr().out.splitlines()

    whole = run("whole", 30)
    assert len(whole) == 30
    assert run("stopped", 17) == whole[:17]  # saved after step 15
    assert run("stopped", 30) == whole[15:]
    (step, means, states), (other_step, other_means, other_states) = map(
        torch.load, (tmp_path / "whole", tmp_path / "stopped")
    )
    assert (step, means.tolist()) == (other_step, other_means.tolist())
    assert states["loader"] == other_states["loader"]
    assert torch.equal(states["model"]["0.weight"], other_states["model"]["0.weight"])
