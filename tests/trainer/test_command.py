"""The command line of the trainer under torchrun, with signals; its place among ranks; the programs around it."""

from __future__ import annotations

import io
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.trainer.runs import ROOT, SMALL, Runs, as_toml, configuration, corpora, steps_of
from tokshard.trainer.__main__ import main
from tokshard.trainer.launcher import device_index, exit_code_of, rank_of, show
from tokshard.trainer.parallel import say

pytestmark = pytest.mark.timeout(300)
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_a_signal_saves_on_all_ranks_and_the_same_command_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    recipe, out, log = (tmp_path / name for name in ("run.toml", "out", "log"))
    changes = {"train__steps": 100_000, "checkpoint__every": 0, "optimizer__warmup_steps": 0, "train__log_every": 1}
    fields = configuration(corpora(tmp_path / "corpora"), out, **changes)
    recipe.write_text(as_toml(fields | {"model": SMALL}))
    command = [*LAUNCH, "-m", "tokshard.trainer", str(recipe)]
    with log.open("w") as said, subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said) as job:
        try:
            while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_text().count("\n") < 6:
                assert job.poll() is None, log.read_text()
                time.sleep(0.1)
        finally:
            job.send_signal(number)
            job.wait(timeout=150)  # torchrun kills ranks that have not ended after 30 seconds
    (saved,) = [path for path in (out / "checkpoints").iterdir() if path.suffix != ".partial"]
    last = steps_of(out)[-1]["step"]
    assert saved.name == f"step-{last:08d}", log.read_text()
    assert f"stopped by {number.name} after step {last}" in log.read_text()
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


def test_names_that_a_terminal_cannot_show_are_written_as_escapes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken, output = [], io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, "ascii"))
    monkeypatch.setattr("tokshard.trainer.parallel.distributed.get_rank", lambda: 0)

    def said() -> Iterator[str]:
        yield "wrote caf\u00e9 \x1b[31m"
        taken.append("the end")

    assert exit_code_of(lambda: show(said())) == 0
    say("saved caf\u00e9 \x1b[31m")
    assert output.getvalue() == b"wrote caf\\xe9 \\x1b[31m\nsaved caf\\xe9 \\x1b[31m\n"
    assert taken
    assert main(["no\x1b[31m.toml"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_wandb_gets_every_step_by_name(run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B itself needs an account."""
    logged: dict[int, dict[str, float]] = {}
    begun: list[dict[str, Any]] = []
    fake: Any = ModuleType("wandb")
    fake.init = lambda **options: begun.append(options)
    fake.log = lambda values, *, step: logged.__setitem__(step, values)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(as_toml(run.fields(train__stop_after=3)))
    monkeypatch.setattr(sys, "argv", ["log_to_wandb.py", str(recipe), "first"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "recipes/log_to_wandb.py"), run_name="__main__")
    assert ended.value.code == 0
    assert begun == [{"project": "tokshard", "id": "first", "resume": "allow"}]
    steps = steps_of(tmp_path / "out")
    assert {step["step"]: step["loss"] for step in steps} == {step: of["loss"] for step, of in logged.items()}
    assert logged[3]["loss_by_corpus/code"] == steps[2]["loss_by_corpus"]["code"]
    assert {type(value) for values in logged.values() for value in values.values()} == {int, float}
    assert "step" not in logged[3]


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "1", "PMI_SIZE": "1"}, None),
        (TORCHRUN, 3),
        ({**TORCHRUN, "SLURM_NTASKS": "8"}, 3),
    ],
)
def test_a_process_is_alone_or_has_the_rank_that_torchrun_gave_it(environment: dict[str, str], rank: int) -> None:
    assert rank_of(environment) == rank


def test_a_rank_has_its_own_gpu_or_the_only_one_that_its_launcher_shows() -> None:
    assert [device_index(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert device_index(3, 1) == 0
