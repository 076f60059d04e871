"""The runner of trials: what fails is recorded with its seed and can be tried alone; a run that is killed goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.examples import some
from tests.soak import __main__ as soak
from tests.soak.kinds import KINDS, Kind, Try
from tests.soak.worker import Record, Trial, UnpreparedError, Worker

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


def kind(name: str) -> Kind:
    return Kind(f"tests.soak.test_runner:{name}", num_trials=6, trial_seconds=1.0, share=1.0, limit_seconds=1)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of a soak with only one kind."""
    monkeypatch.setattr(soak, "KINDS", {"fake": kind("prepare")})
    return tmp_path / "record.jsonl"


def test_trials_that_fail_crash_and_hang_are_recorded_with_their_seeds_and_can_be_tried_alone(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert soak.main(["fake", "--jobs", "1", "--record", str(record)]) == 1
    trials = sorted(Record(record).trials, key=lambda trial: trial.seed)
    assert [trial.outcome for trial in trials] == ["held", "failed", "failed", "failed", "held", "held"]
    assert "AssertionError: one is wrong" in trials[1].what
    assert [trial.what for trial in trials[2:4]] == ["the process ended with -11", "no end in 1 s"]
    said = capsys.readouterr().out
    for words in ("0 of 6 tried, seeds from 0", "2 even, 1 odd", "failed: make soak ONLY='fake 1'"):
        assert words in said
    assert [soak.main(["fake", seed]) for seed in "41"] == [0, 1]
    held, *others = capsys.readouterr().out.splitlines()
    assert held.startswith("fake 4 held")
    assert others[-1] == "AssertionError: one is wrong"


def test_what_was_tried_is_not_tried_again(record: Path) -> None:
    before = [Trial("fake", seed, "held", "odd", 1.0) for seed in (1, 2, 3)]
    for trial in before:
        Record(record).add(trial)
    with record.open("a") as file:
        file.write('{"kind": "fake", "se')  # the run was killed while it wrote
    assert soak.main(["fake", "--jobs", "2", "--record", str(record)]) == 0
    found = Record(record).trials
    assert found[:3] == before
    assert sorted(trial.seed for trial in found[3:]) == [0, 4, 5]


def test_a_run_that_is_interrupted_ends_with_its_trials_and_its_table(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt = threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    assert soak.main(["--minutes", "3", "--jobs", "1", "--first", "4", "--record", str(record)]) == 130
    interrupt.join()
    assert f"{'fake':<10} {len(Record(record).trials):>7,} {0:>7}" in capsys.readouterr().out


def test_a_kind_that_cannot_be_prepared_is_no_trial(tmp_path: Path) -> None:
    with (
        closing(Worker("broken", kind("fail"), tmp_path / "folder")) as worker,
        pytest.raises(UnpreparedError, match="broken"),
    ):
        worker.try_(0)


@pytest.mark.slow
@some("name", ["corpora", "files", "histories", "kills"], default=2)
def test_each_kind_has_trials(name: str, tmp_path: Path) -> None:
    with closing(Worker(name, KINDS[name], tmp_path / "folder")) as worker:
        trial = worker.try_(0)
    assert trial.outcome == "held", trial.what
