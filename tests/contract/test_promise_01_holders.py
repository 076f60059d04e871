"""Promise 1 for processes that meet in a directory: the writer is not disturbed, and others get an error."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract import small
from tests.contract.arrays import commit_words, job_words, run_array
from tests.contract.faults import Fault, Launcher, Outcome, Running
from tests.contract.outcomes import State, build_words, messages, state
from tokshard.format import names

pytestmark = pytest.mark.timeout(300)

STOP_AT_A_SHARD = Fault(on=r"open .*/\.shard-", act="SIGSTOP")
STOP_AT_THE_MANIFEST = Fault(on=r"open .*/\.manifest\.json", act="SIGSTOP")


@dataclass
class Bench:
    """A place where several processes build one corpus."""

    launcher: Launcher
    place: Path
    words: list[str]
    reference: State

    @property
    def out(self) -> Path:
        return self.place / "out"

    def start(self, words: list[str], *, fault: Fault | None = None) -> Running:
        return self.launcher.start(words, out=self.out, fault=fault)

    def run(self, words: list[str]) -> Outcome:
        return self.start(words).end()

    def job(self, index: int) -> list[str]:
        """The command of a job of two."""
        return job_words(self.words, index, 2)

    def array(self) -> Outcome:
        """Run the two jobs and the commit."""
        found: Outcome = run_array(self.words, self.out, lambda commands: [*map(self.run, commands)], jobs=2)
        return found

    def check(self) -> None:
        """The corpus is complete, and that of one process."""
        assert state(self.out) == self.reference


@pytest.fixture(scope="module")
def place(launcher: Launcher, byte_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    place = tmp_path_factory.mktemp("place")
    source = place / "a.jsonl"
    source.write_bytes(b"".join(json.dumps({"text": f"text {n}"}).encode().ljust(199) + b"\n" for n in range(12)))
    words = build_words([source], place / "out", byte_tokenizer, "--task-bytes", "512", "--workers", "1")
    bench = Bench(launcher, place, words, {})
    assert bench.run(words).exit_code == 0
    bench.reference = state(bench.out)
    return bench


@pytest.fixture
def bench(place: Bench) -> Bench:
    for folder in (place.out, place.launcher.directory):
        shutil.rmtree(folder, ignore_errors=True)
    return place


def is_refused(outcome: Outcome, by: str, out: Path) -> bool:
    """Whether a command was told who writes, and what to do."""
    problem, hint = messages(outcome, out)
    return outcome.exit_code == 1 and f"{by} is writing to OUT" in problem and "hint: wait" in hint


def test_a_commit_and_a_build_are_refused_while_a_job_writes(bench: Bench) -> None:
    job = bench.start(bench.job(1), fault=STOP_AT_A_SHARD)
    job.until_stopped()
    process = f"job 1 of 2, process {job.pid} on "
    for words in (commit_words(bench.out), bench.words, [*bench.words, "--force"]):
        refused = bench.run(words)
        assert refused.exit_code == 1
        assert process in refused.errors
        assert "hint: wait until all jobs have ended, or end them" in refused.errors
    job.resume()
    assert job.end().exit_code == 0
    assert bench.run(commit_words(bench.out)).exit_code == 0
    bench.check()


def test_a_job_is_refused_while_a_build_writes(bench: Bench) -> None:
    build = bench.start(bench.words, fault=STOP_AT_A_SHARD)
    build.until_stopped()
    assert is_refused(bench.run(bench.job(0)), "another build", bench.out)
    assert is_refused(bench.run(bench.words), "another build", bench.out)
    build.resume()
    assert build.end().exit_code == 0
    bench.check()


def test_a_job_is_refused_while_a_commit_writes(bench: Bench) -> None:
    for index in range(2):
        assert bench.run(bench.job(index)).exit_code == 0
    commit = bench.start(commit_words(bench.out), fault=STOP_AT_THE_MANIFEST)
    commit.until_stopped()
    assert not (bench.out / names.MANIFEST).exists()
    for words in (bench.job(1), commit_words(bench.out)):
        assert is_refused(bench.run(words), "another build", bench.out)
    commit.resume()
    assert commit.end().exit_code == 0
    bench.check()


def test_a_job_that_prepares_the_build_is_waited_for_by_the_others_and_refuses_a_build(bench: Bench) -> None:
    first = bench.start(bench.job(0), fault=Fault(on=small.PREPARES, act="SIGSTOP"))
    first.until_stopped()
    assert bench.run(bench.words).exit_code == 1
    second = bench.start(bench.job(1))
    first.resume()
    assert [first.end().exit_code, second.end().exit_code] == [0, 0]
    assert bench.run(commit_words(bench.out)).exit_code == 0
    bench.check()


def test_two_runs_of_one_job_at_once_disturb_neither_each_other_nor_the_corpus(bench: Bench) -> None:
    job = bench.start(bench.job(0), fault=STOP_AT_A_SHARD)
    job.until_stopped()
    assert bench.run(bench.job(0)).exit_code == 0
    assert bench.run(bench.job(1)).exit_code == 0
    job.resume()
    assert job.end().exit_code == 0
    assert bench.run(commit_words(bench.out)).exit_code == 0
    bench.check()


def test_a_build_that_was_killed_while_it_held_the_directory_refuses_nobody(bench: Bench) -> None:
    for words in (bench.words, bench.job(0), bench.job(1)):
        assert bench.start(words, fault=Fault(on=STOP_AT_A_SHARD.on)).end().exit_code == -9
    assert bench.array().exit_code == 0
    bench.check()


def test_a_job_that_was_stopped_until_the_build_was_taken_over_changes_nothing(bench: Bench) -> None:
    """As a machine does that was asleep: its processes are gone for the others, and then they are back."""
    job = bench.start(bench.job(0), fault=STOP_AT_A_SHARD)
    job.until_stopped()
    shutil.rmtree(bench.out)
    assert bench.run(bench.words).exit_code == 0
    bench.check()
    job.resume()
    assert job.end().exit_code == 1
    bench.check()
