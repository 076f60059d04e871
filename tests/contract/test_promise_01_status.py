"""``tokshard status`` at any moment: an answer that can be true, nothing changed, and a command that continues."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contract import small
from tests.contract.arrays import job_words
from tests.contract.faults import Fault, Launcher, Outcome, Running, kills
from tests.contract.outcomes import State, build_words, state
from tests.contract.test_promise_01_faults import write_sources
from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tokshard import build_corpus
from tokshard.cli import main
from tokshard.format import names
from tokshard.format.opening import read_manifest
from tokshard.pipeline import request
from tokshard.pipeline.progress import Progress, StageEnded, StageStarted
from tokshard.pipeline.request import Request
from tokshard.pipeline.workspace.places import Workspace
from tokshard.store import open_store

pytestmark = pytest.mark.timeout(900)

SMALL = ("--task-bytes", "1024", "--shard-tokens", "1200")
SKIP = ("--on-bad-record", "skip", "--on-bad-source", "skip")


@dataclass(frozen=True)
class Command:
    """A command whose status is asked for.

    Args:
        steps: of one process that it is undisturbed in.
        reference: what that makes.
    """

    launcher: Launcher
    words: list[str]
    out: Path
    steps: list[str]
    reference: State

    def start(self, *more: str, fault: Fault | None = None) -> Running:
        return self.launcher.start([*self.words, *more], out=self.out, fault=fault)

    def run(self, *more: str, fault: Fault | None = None) -> Outcome:
        return self.start(*more, fault=fault).end()

    def clear(self) -> None:
        for folder in (self.out, self.launcher.directory):
            shutil.rmtree(folder, ignore_errors=True)


def undisturbed(launcher: Launcher, words: list[str], out: Path) -> Command:
    shutil.rmtree(out, ignore_errors=True)
    done = launcher.start(words, out=out).end()
    assert done.exit_code == 0, done.errors
    return Command(launcher, words, out, done.steps, state(out))


COMMANDS, MORE_COMMANDS = ["build --dedup exact", "copy --shuffle"], ["build", "copy"]


@pytest.fixture(
    scope="module",
    params=[*COMMANDS, *(pytest.param(command, marks=pytest.mark.soak) for command in MORE_COMMANDS)],
)
def command(
    request: pytest.FixtureRequest, launcher: Launcher, byte_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Command:
    place = tmp_path_factory.mktemp("place")
    out = place / "out"
    if request.param.startswith("build"):
        sources = write_sources(place / "sources", documents=20)
        dedup = request.param.split()[1:]
        return undisturbed(
            launcher, build_words(sources, out, byte_tokenizer, *SMALL, *SKIP, *dedup, "--workers", "1"), out
        )
    lengths = [1 + 7 * n % 29 for n in range(40)]
    corpus = write_corpus(place / "corpus", documents_of(lengths), tokenizer=TINY_TOKENIZER, shard_tokens=60)
    shuffle = ["--shuffle", "7"] if "--shuffle" in request.param else []
    words = ["copy", str(corpus), "--out", str(out), "--shard-tokens", "60", *shuffle, "--workers", "1"]
    return undisturbed(launcher, words, out)


def status(out: Path) -> dict[str, Any] | None:
    """What the command says, if it says that there is a build or a corpus."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()) as errors:
        exit_code = main.run(["status", str(out), "--json"])
    answer: dict[str, Any] = json.loads(said.getvalue())
    if exit_code:
        assert re.search("holds (neither a build nor a corpus|an unfinished build)", answer["error"]), answer
        return None
    assert errors.getvalue() == ""
    return answer


def check(found: dict[str, Any]) -> None:
    """A status can be true."""
    assert found["state"] in ("complete", "running", "unfinished")
    if found["stage"] != "writing":  # see the test of shuffled copies
        assert 0 <= found["bytes_done"] <= (found["total_bytes"] or found["bytes_done"])
    assert 0 <= found["tasks_done"] <= (found["num_tasks"] or found["tasks_done"])
    assert all(found[name] >= 0 for name in ("documents", "tokens", "records", "bad_records", "damaged_inputs"))


def check_killed(command: Command, fault: Fault) -> None:
    command.clear()
    killed = command.run(fault=fault)
    assert killed.exit_code == -9
    before = state(command.out) if command.out.exists() else {}
    found = status(command.out)
    assert (state(command.out) if command.out.exists() else {}) == before, "it changes nothing"
    has_begun = any(re.search(small.BEGINS, step) for step in killed.steps[:-1])
    if found is None:
        assert not has_begun, killed.steps[-1]
        return
    check(found)
    assert found["state"] != "running", "its process is dead"
    assert (found["state"] == "complete") <= (command.out / names.MANIFEST).exists()
    if found["state"] == "unfinished":
        words = found["command"][1:] or command.words  # it was killed before it had written down the command, or after
        again = command.launcher.start(words, out=command.out).end()
        assert again.exit_code == 0, again.errors
        assert state(command.out) == command.reference


@pytest.mark.slow
def test_the_status_of_a_build_that_was_killed_says_how_it_continues(command: Command) -> None:
    for fault in random.Random(1).sample(kills(command.steps), 2):
        check_killed(command, fault)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_status_of_a_build_that_was_killed_at_any_step_says_how_it_continues(command: Command) -> None:
    for fault in kills(command.steps):
        check_killed(command, fault)


@pytest.mark.slow
def test_the_status_of_a_build_that_is_stopped_for_a_while_names_its_process(command: Command) -> None:
    numbers = []
    begun = next(at for at, step in enumerate(command.steps) if re.search(small.BEGINS, step)) + 2
    for at in range(begun, len(command.steps), len(command.steps) // 6):
        if command.steps[at].endswith(names.MANIFEST) or any(
            step.endswith(names.MANIFEST) for step in command.steps[:at] if step.startswith("replace")
        ):
            break  # it is complete
        command.clear()
        running = command.start(fault=Fault(at=at + 1, act="SIGSTOP"))
        running.until_stopped()
        found = status(command.out)
        running.resume()
        assert running.end().exit_code == 0
        assert found is not None, command.steps[at]
        check(found)
        assert found["state"] == "running"
        (holder,) = found["holders"]
        assert holder.startswith(f"process {running.pid} on ")
        numbers.append(found["documents"])
    assert len(numbers) >= 4
    assert numbers == sorted(numbers)
    assert state(command.out) == command.reference


@pytest.mark.slow
def test_the_status_may_be_asked_for_all_the_time(command: Command) -> None:
    """While a build runs, ends, and starts over: files that it is about to read go."""
    seen = Counter[str]()
    command.clear()
    for more in ((), ("--force",)):
        pauses = Fault(pauses=0.001, pause_share=0.5, in_coordinator=True)
        running = command.start(*more, fault=pauses)
        has_ended = False
        while not has_ended:
            has_ended = running.has_ended
            found = status(command.out)
            if found is not None:
                seen[found["state"]] += 1
                check(found)
        assert running.end().exit_code == 0
        assert found is not None
        assert found["state"] == "complete"
        assert found["documents"] == read_manifest(open_store(command.out)).num_documents
    assert seen["running"] > 5
    assert state(command.out) == command.reference


def test_a_shuffled_copy_has_not_read_more_than_there_is(launcher: Launcher, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", documents_of([9] * 40), tokenizer=TINY_TOKENIZER, shard_tokens=60)
    words = ["copy", str(corpus), "--out", str(tmp_path / "out"), "--shuffle", "7", "--workers", "1"]
    fault = Fault(on=r"open .*/\.manifest\.json")
    assert launcher.start(words, out=tmp_path / "out", fault=fault).end().exit_code == -9
    found = status(tmp_path / "out")
    assert found is not None
    assert 0 < found["bytes_done"] <= found["total_bytes"]


@pytest.mark.parametrize("call", [1, 2])
def test_a_build_may_end_while_its_status_is_asked_for(
    launcher: Launcher, byte_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """At the moments after what was asked for is read, which the tests above hit now and then."""
    out = tmp_path / "out"
    words = build_words(write_sources(tmp_path / "sources", documents=20), out, byte_tokenizer, *SKIP, "--workers", "1")
    assert launcher.start(words, out=out, fault=Fault(on=r"open .*/\.manifest\.json")).end().exit_code == -9
    calls = []

    def load_request(workspace: Workspace) -> Request | None:
        found = request.load_request(workspace)
        calls.append(found)
        if len(calls) == call:
            assert launcher.start(words, out=out).end().exit_code == 0
        return found

    monkeypatch.setattr("tokshard.pipeline.status.load_request", load_request)
    found = status(out)
    assert found is not None
    assert found["state"] == "complete"


def test_the_status_of_an_array_counts_what_its_jobs_have_done_and_names_those_that_run(
    launcher: Launcher, byte_tokenizer: Path, tmp_path: Path
) -> None:
    sources = write_sources(tmp_path / "sources", documents=20)
    out = tmp_path / "out"
    words = build_words(sources, out, byte_tokenizer, *SMALL, *SKIP, "--workers", "1")
    killed = launcher.start(job_words(words, 0, 3), out=out, fault=Fault(on=r"open .*/\.shard-.*-0001\.")).end()
    assert killed.exit_code == -9
    left = status(out)
    running = launcher.start(job_words(words, 1, 3), out=out, fault=Fault(on=r"open .*/\.shard-", act="SIGSTOP"))
    running.until_stopped()
    found = status(out)
    running.resume()
    assert running.end().exit_code == 0
    assert left is not None
    assert found is not None
    assert (left["state"], found["state"]) == ("unfinished", "running")
    assert 0 < left["tasks_done"] <= found["tasks_done"] < found["num_tasks"]
    (holder,) = found["holders"]
    assert holder.startswith(f"job 1 of 3, process {running.pid} on ")
    last = status(out)
    assert last is not None
    assert last["tasks_done"] == last["num_tasks"], "it has done what the others left"
    assert last["documents"] > found["documents"]


def test_what_an_observer_is_told_adds_up_to_the_corpus(byte_tokenizer: Path, tmp_path: Path) -> None:
    sources = write_sources(tmp_path / "sources", documents=20)
    reports: list[Any] = []
    result = build_corpus(
        sources,
        tokenizer=byte_tokenizer,
        out=tmp_path / "out",
        workers=1,
        on_bad_record="skip",
        on_bad_source="skip",
        observer=reports.append,
    )
    assert sum(isinstance(report, StageStarted) for report in reports) == 1
    assert isinstance(reports[-1], StageEnded)
    progress = [report for report in reports if isinstance(report, Progress)]
    manifest = result.manifest
    # of the group that had damaged inputs, what was read before them is read again
    assert sum(report.tokens for report in progress) == result.tokens_written >= manifest.num_tokens
    assert all(report.documents <= report.records for report in progress)
