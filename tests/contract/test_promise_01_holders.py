"""Promise 1 for processes that meet in a directory: the writer is not disturbed, and others get an error."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.contract import small
from tests.contract.commands import Command, commit_words, job_words, messages
from tests.contract.faults import Fault, Launcher, Outcome, Running
from tests.contract.table import Table
from tokshard.format import names

pytestmark = pytest.mark.timeout(300)

STOP_AT_A_SHARD = Fault(on=r"open .*/\.shard-", act="SIGSTOP")
STOP_AT_THE_MANIFEST = Fault(on=r"open .*/\.manifest\.json", act="SIGSTOP")
JOBS = "hint: wait until all jobs have ended, or end them"
BUILD = "hint: wait for it, or give another --out"


class Meeting(Table):
    """A place where several processes build one corpus."""

    @property
    def whole(self) -> Command:
        return self.command("build", "plain")

    @property
    def alone(self) -> list[str]:
        return [*self.whole.words, "--workers", "1"]

    def job(self, index: int) -> list[str]:
        """The command of a job of two."""
        return job_words(self.whole.words, index, 2)

    def stop(self, words: list[str], fault: Fault) -> Running:
        """A command that is stopped, as by a debugger, and not gone."""
        running = self.start(words, fault)
        running.until_stopped()
        return running

    def check_refused(self, words: list[str], by: str, hint: str = BUILD) -> None:
        """A command is told who writes, and what to do."""
        refused = self.run(words)
        assert refused.exit_code == 1
        assert messages(refused, self.out) == [f"error: {by} is writing to OUT", hint]

    def check_ends(self, running: Running, *rest: list[str]) -> Outcome:
        """A command that was stopped goes on; with the rest it makes the corpus of one process."""
        running.resume()
        ended = running.end()
        assert [each.exit_code for each in (ended, *map(self.run, rest))] == [0] * (1 + len(rest))
        self.check(self.whole)
        return ended


@pytest.fixture(scope="module")
def place(launcher: Launcher, byte_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Meeting:
    place = Meeting(launcher, tmp_path_factory.mktemp("place"), byte_tokenizer)
    place.steps(place.whole)
    return place


@pytest.fixture
def bench(place: Meeting) -> Meeting:
    place.clear()
    return place


def test_a_commit_and_a_build_are_refused_while_a_job_writes(bench: Meeting) -> None:
    job = bench.stop(bench.job(1), STOP_AT_A_SHARD)
    for words in (commit_words(bench.out), bench.alone, [*bench.alone, "--force"]):
        refused = bench.run(words)
        assert refused.exit_code == 1
        assert f"job 1 of 2, process {job.pid} on " in refused.errors
        assert JOBS in refused.errors
    bench.check_ends(job, commit_words(bench.out))


def test_a_job_and_a_build_are_refused_while_a_build_writes(bench: Meeting) -> None:
    build = bench.stop(bench.alone, STOP_AT_A_SHARD)
    for words in (bench.job(0), bench.alone):
        bench.check_refused(words, "another build")
    bench.check_ends(build)


def test_a_job_and_a_commit_are_refused_while_a_commit_writes(bench: Meeting) -> None:
    assert [bench.run(bench.job(index)).exit_code for index in range(2)] == [0, 0]
    commit = bench.stop(commit_words(bench.out), STOP_AT_THE_MANIFEST)
    assert not (bench.out / names.MANIFEST).exists()
    for words in (bench.job(1), commit_words(bench.out)):
        bench.check_refused(words, "another build")
    bench.check_ends(commit)


@pytest.mark.parametrize("has_written_its_name", [True, False])
def test_a_job_that_prepares_the_build_is_waited_for_by_the_others_and_refuses_a_build(
    bench: Meeting, has_written_its_name: bool
) -> None:
    first = bench.stop(bench.job(0), Fault(on=small.PREPARES, act="SIGSTOP"))
    assert bench.run(bench.alone).exit_code == 1
    lock = bench.out / small.LOCK
    name = lock.read_text()
    if not has_written_its_name:
        lock.write_text("")
    second = bench.start(bench.job(1))
    time.sleep(0.1)
    lock.write_text(name)
    first.resume()
    assert second.end().exit_code == 0
    bench.check_ends(first, commit_words(bench.out))


def test_two_runs_of_one_job_at_once_disturb_neither_each_other_nor_the_corpus(bench: Meeting) -> None:
    job = bench.stop(bench.job(0), STOP_AT_A_SHARD)
    assert [bench.run(bench.job(index)).exit_code for index in range(2)] == [0, 0]
    bench.check_ends(job, commit_words(bench.out))


def test_a_build_that_was_killed_while_it_held_the_directory_refuses_nobody(bench: Meeting) -> None:
    for words in (bench.alone, bench.job(0), bench.job(1)):
        assert bench.run(words, Fault(on=STOP_AT_A_SHARD.on)).exit_code == -9
    bench.check(bench.whole, executor="array of 2")


def test_a_job_that_was_stopped_until_the_build_was_taken_over_changes_nothing(bench: Meeting) -> None:
    """As a machine does that was asleep: its processes are gone for the others, and then they are back."""
    job = bench.stop(bench.job(0), STOP_AT_A_SHARD)
    shutil.rmtree(bench.out)
    bench.check(bench.whole)
    job.resume()
    assert job.end().exit_code == 1
    bench.check(bench.whole)


def test_a_worker_that_outlives_its_build_changes_nothing_of_the_next(bench: Meeting) -> None:
    """It was given more documents to write than a build in order gives it, because nothing was done before."""
    words = (*bench.words("build", bench.sources("build")["good"][:1], "--max-documents", "8"),)
    command = Command(words)
    bench.steps(command)
    bench.clear()
    # one worker is slow with the first task; when another is about to leave the receipt of the second, the build dies
    slow = Fault(on="open .*shard-00-0000000-000000", act="hold", lingers=2)
    dies = Fault(on=r"open .*/\.0000000-000001\.receipt", act="orphan", lingers=0.5, outlives=3)
    killed = bench.start([*words, "--workers", "2"], [slow, dies]).end()
    assert killed.exit_code == -9
    # the next build has done that task in another way, and is about to read the receipts, when the worker continues
    late = Fault(on=r"open .*/\.shards\.arrow", act="hold", lingers=1)
    assert bench.run([*words, "--workers", "1"], late).exit_code == 0
    killed.wait()
    bench.check(command)
