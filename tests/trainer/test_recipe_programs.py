"""The programs in recipes/ around the trainer and the losses run, and continue exactly."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.examples import some
from tests.trainer.kills import assert_equal_mixes
from tests.trainer.runs import ROOT, SMALL, configuration, corpora, steps_of
from tests.trainer.test_command import as_toml
from tokshard.errors import PlanError
from tokshard.run_files import recipe
from tokshard.run_files.recipe import resolve
from tokshard.trainer.loop import train

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


@pytest.mark.soak  # test_other_weights_are_in_force_after_logged_steps_alone_whatever_stops_a_run
def test_a_mix_that_follows_the_losses_is_the_same_after_a_kill(tmp_path: Path) -> None:
    """Every step changes it; tests/trainer/kills.py has 1,000 changes, two ranks and many kills."""
    paths, command = corpora(tmp_path / "corpora"), [sys.executable, str(ROOT / "recipes/mix_from_losses.py")]

    def fields_of(name: str) -> dict[str, Any]:
        sizes: dict[str, Any] = {"train__steps": 20, "train__log_every": 1, "checkpoint__every": 7}
        return configuration(paths, tmp_path / name, **sizes) | {"model": SMALL}

    follow = runpy.run_path(command[1])["follow"]
    assert train(resolve(fields_of("straight")), on_record=follow) == 0
    path = tmp_path / "killed.toml"
    path.write_text(as_toml(fields_of("killed")))
    with subprocess.Popen([*command, str(path)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}) as job:
        log = tmp_path / "killed" / "metrics.jsonl"
        while job.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > 10):
            time.sleep(0.001)
        job.kill()
    assert job.returncode == -signal.SIGKILL
    assert train(resolve(fields_of("killed")), on_record=follow) == 0
    steps, others = steps_of(tmp_path / "straight"), steps_of(tmp_path / "killed")
    assert_equal_mixes(steps, others)
    assert len({json.dumps(step["corpora"]["code"]["weight"]) for step in steps}) == len(steps) == 20


@pytest.mark.slow
@some("log_every, stop_after", [(3, 5), (1, 5), (3, 0)], default=2)
def test_other_weights_are_in_force_after_logged_steps_alone_whatever_stops_a_run(
    tmp_path: Path, log_every: int, stop_after: int
) -> None:
    sizes: dict[str, Any] = {"train__steps": 10, "train__log_every": log_every, "train__skip": [[6, 7]]}
    paths, out, seen = corpora(tmp_path / "corpora"), tmp_path / "out", list[int]()

    def follow(record: Mapping[str, Any]) -> dict[str, float]:
        seen.append(record["step"])
        return {"code": 1.0, "prose": float(record["step"])}

    for end in (stop_after, 0) if stop_after else (0,):
        changed = sizes | {"train__stop_after": end, "data__schedule": [[90, {"code": 0.5, "prose": 0.5}]]}
        fields = configuration(paths, out, **changed, evaluation__corpora={"held out": paths["code"]})
        assert train(resolve(fields | {"model": SMALL}), on_record=follow) == 0
    weights = [step["corpora"]["prose"]["weight"] for step in steps_of(out) if "skipped" not in step]
    assert weights == [(step - 1) // log_every * log_every or 0.3 for step in range(1, 11) if step != 6]
    last = 10 // log_every * log_every
    state = json.loads((out / "checkpoints" / "step-00000010" / "state.json").read_text())["loader"]
    assert json.loads(state["cursor"])["weights"][-1] == [9 * last, [1.0, last]]
    assert sorted(set(seen)) == list(range(1, 11))


def test_weights_that_do_not_fit_the_corpora_end_the_run(tmp_path: Path) -> None:
    fields = configuration(corpora(tmp_path / "corpora"), tmp_path / "out", train__log_every=1) | {"model": SMALL}
    with pytest.raises(PlanError, match="weights are for code; the plan has code, prose"):
        train(resolve(fields), on_record=lambda _: {"code": 1.0})
