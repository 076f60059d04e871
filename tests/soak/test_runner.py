"""The runner of trials: what fails is recorded with its seed and can be tried alone; a run that is killed goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.examples import some
from tests.soak import __main__ as soak
from tests.soak.kinds import KINDS, Kind, Try
from tests.soak.record import Record, Trial
from tests.soak.worker import ROOT, UnpreparedError, Worker

pytestmark = pytest.mark.soak  # whoever changes the runner runs it


def prepare(folder: Path, stack: ExitStack) -> Try:
    """Trials of which each fails in another way."""
    (folder / "prepared").touch(exist_ok=False)  # the folder of a process is empty

    def try_(seed: int) -> str:
        if seed == 1:
            raise AssertionError("one is wrong")
        if seed == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        if seed == 3:
            time.sleep(60)
        print("noise")  # noqa: T201 - what a trial prints is no answer
        return "even" if seed % 2 == 0 else "odd"

    return try_


def fail(folder: Path, stack: ExitStack) -> Try:
    raise OSError("no place")


def kind(place: str) -> Kind:
    return Kind(
        place=f"tests.soak.test_runner:{place}",
        about="seeds",
        num_trials=6,
        trial_seconds=1.0,
        share=1.0,
        limit_seconds=1,
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package path with only one kind, for this process and those that it starts."""
    monkeypatch.setattr(soak, "KINDS", {"fake": kind("prepare")})
    start = subprocess.Popen

    def started(words: list[str], **options: object) -> object:
        program = (
            "import sys; from tests.soak import worker, test_runner; from pathlib import Path;"
            "worker.KINDS['fake'] = test_runner.kind('prepare'); worker.KINDS['broken'] = test_runner.kind('fail');"
            "worker.main(sys.argv[1], Path(sys.argv[2]))"
        )
        return start([sys.executable, "-c", program, *words[3:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", started)
    return tmp_path / "record.jsonl"


def test_trials_that_fail_crash_and_hang_are_recorded_with_their_seeds(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert soak.main(["fake", "--jobs", "1", "--record", str(fake)]) == 1
    trials = {trial.seed: trial for trial in Record(fake).trials}
    assert sorted(trials) == [0, 1, 2, 3, 4, 5]
    assert [trials[seed].outcome for seed in range(6)] == ["held", "failed", "failed", "failed", "held", "held"]
    assert "AssertionError: one is wrong" in trials[1].what
    assert trials[2].what == "the process ended with -11"
    assert trials[3].what == "no end in 1 s"
    said = capsys.readouterr().out
    assert "seeds (0 of 6 tried, seeds from 0)" in said
    assert "2 even, 1 odd" in said
    assert "failed: make soak ONLY='fake 1'" in said


def test_one_seed_is_tried_alone(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["fake", "4"]) == 0
    assert soak.main(["fake", "1"]) == 1
    held, *failed = capsys.readouterr().out.splitlines()
    assert held.startswith("fake 4 held")
    assert failed[-1] == "AssertionError: one is wrong"


def test_what_was_tried_is_not_tried_again(fake: Path) -> None:
    before = [Trial(kind="fake", seed=seed, outcome="held", what="odd", seconds=1.0) for seed in (1, 2, 3)]
    record = Record(fake)
    for trial in before:
        record.add(trial)
    with fake.open("a") as file:
        file.write('{"kind": "fake", "se')  # the run was killed while it wrote
    assert soak.main(["fake", "--jobs", "2", "--record", str(fake)]) == 0
    found = Record(fake).trials
    assert found[:3] == before
    assert sorted(trial.seed for trial in found[3:]) == [0, 4, 5]
    assert all(json.loads(line) for line in fake.read_text().splitlines())


def test_a_run_that_is_interrupted_ends_with_its_trials_and_its_table(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt = threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    assert soak.main(["--minutes", "3", "--jobs", "1", "--first", "4", "--record", str(fake)]) == 130
    interrupt.join()
    said = capsys.readouterr().out
    assert "interrupted" in said
    assert f"{'fake':<10} {len(Record(fake).trials):>7,} {0:>7}" in said


def test_a_kind_that_cannot_be_prepared_is_no_trial(fake: Path, tmp_path: Path) -> None:
    with Worker("broken", kind("fail"), tmp_path / "folder") as worker, pytest.raises(UnpreparedError, match="broken"):
        worker.try_(0)


@pytest.mark.slow
@some("name", ["unfinished", "corpora", "files", "histories", "kills"], default=2)
def test_each_kind_has_trials(name: str, tmp_path: Path) -> None:
    with Worker(name, KINDS[name], tmp_path / "folder") as worker:
        trial = worker.try_(0)
    assert trial.outcome == "held", trial.what
    assert ROOT.exists()
