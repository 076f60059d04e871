"""The command line of the trainer under torchrun, with signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.trainer import gated
from tests.trainer.runs import ROOT, SMALL, configuration, corpora, steps_of
from tokshard.trainer.__main__ import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # DCP of torch 2.13 itself warns
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def as_toml(fields: dict) -> str:
    lines = []
    for section, values in fields.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {inline(value)}" for key, value in values.items()]
    return "\n".join(lines)


def inline(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {json.dumps(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_a_signal_while_the_loop_waits_for_data_saves_on_all_ranks_and_the_same_command_goes_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    recipe, out, gate, log = (tmp_path / name for name in ("run.toml", "out", "gate", "log"))
    changes = {"train__steps": 100_000, "checkpoint__every": 0, "optimizer__warmup_steps": 0, "train__log_every": 1}
    fields = configuration(corpora(tmp_path / "corpora"), out, **changes)
    recipe.write_text(as_toml(fields | {"model": SMALL}))

    def wait_for(count: int, what: str, path: Path) -> None:
        deadline = time.monotonic() + 200
        while not (path.exists() and path.read_text().count(what) >= count):
            assert time.monotonic() < deadline, log.read_text()
            assert job.poll() is None, log.read_text()
            time.sleep(0.1)

    command = [*LAUNCH, "-m", "tests.trainer.gated", str(recipe)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GATE": str(gate)}
    with log.open("w") as said, subprocess.Popen(command, env=env, cwd=ROOT, stdout=said, stderr=said) as job:
        try:
            wait_for(gated.NUM_STEPS, "\n", out / "metrics.jsonl")
        finally:
            job.send_signal(number)
        try:
            wait_for(2, f"closing signal {number.name}", log)
        finally:
            gate.touch()
            try:
                job.wait(timeout=150)  # torchrun kills ranks that have not ended after 30 seconds
            except subprocess.TimeoutExpired:
                pytest.fail(log.read_text())
    said = log.read_text()
    (saved,) = [path for path in (out / "checkpoints").iterdir() if path.suffix != ".partial"]
    last = steps_of(out)[-1]["step"]
    assert saved.name == f"step-{last:08d}", said
    assert f"stopped by {number.name} after step {last}" in said
    assert (saved / "COMPLETE").exists()
    assert {path.name[:4] for path in saved.glob("*.distcp")} == {"__0_", "__1_"}  # both ranks wrote

    assert main([str(recipe), f"train.stop_after={last + 1}"]) == 0
    assert [step["step"] for step in steps_of(out)] == list(range(1, last + 2))


def test_a_ctrl_c_while_ranks_wait_for_each_other_ends_the_command_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("tokshard.trainer.loop.train", interrupted)
    recipe = tmp_path / "run.toml"
    recipe.write_text(as_toml(configuration({"code": "nowhere"}, tmp_path / "out")))
    assert main([str(recipe)]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_wrong_recipe_exits_2_with_a_hint(tmp_path: Path) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_text(as_toml(configuration({"code": "nowhere"}, tmp_path / "out")))
    command = [sys.executable, "-m", "tokshard.trainer", str(recipe), "train.stepz=3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: {recipe}: no key train.stepz\nhint: did you mean train.steps?\n"
