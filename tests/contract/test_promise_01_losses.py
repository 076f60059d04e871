"""Promise 1 where workers die: one that is lost costs one more run of what it did, and a second one ends the build."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest

from tests.contract import small
from tests.contract.commands import Command, messages, shards, state
from tests.contract.faults import Fault, kills
from tests.contract.table import WITH_SHARDS, Table
from tokshard.format import names

pytestmark = pytest.mark.timeout(300)

STREAMS = "build of streams"


def command_of(table: Table, kind: str, option: str) -> Command:
    """A row of the table; or a build of two streams, as a single one is read and written by the first process."""
    if kind != STREAMS:
        return table.command(kind, option)
    stream = next(path for path in table.sources("build")["good"] if path.suffix == ".bz2")
    second = Path(shutil.copy(stream, stream.with_name("second.jsonl.bz2")))
    return Command(table.words("build", [stream, second]))


def task_of(table: Table, command: Command) -> str:
    """What the names of the shards of an early task or segment begin with, which a worker writes."""
    found = sorted(path for name in table.reference(command)[0] if names.is_shard_name(path := Path(name).name))
    table.begin(command)
    return found[2].rpartition("-")[0]


EARLY = [rf"open .*/\.shard-00-0000000-00000{segment}-" for segment in range(4)]


LOST = {
    "writing": ("build", "plain", EARLY),
    "finding": ("build", "dedup", [small.HASHES, small.MERGED_HASHES]),
    "of a stream": (STREAMS, "plain", EARLY[1:2]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "option", "on"), LOST.values(), ids=LOST)
def test_a_task_whose_worker_dies_runs_again_and_losses_of_different_tasks_end_no_build(
    table: Table, kind: str, option: str, on: list[str]
) -> None:
    command = command_of(table, kind, option)
    table.steps(command)
    table.begin(command)
    done = table.run([*command.words, "--workers", "2"], [Fault(on=each, act="die") for each in on])
    assert done.exit_code == 0, done.errors
    assert sum(re.search(on[0], step) is not None for step in done.steps) >= 2
    table.check(command)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*WITH_SHARDS, STREAMS])
def test_a_task_that_costs_a_second_worker_ends_the_build_and_the_next_run_continues(table: Table, kind: str) -> None:
    command = command_of(table, kind, "plain")
    twice = Fault(on=rf"open .*/\.{task_of(table, command)}-", times=2, act="die")
    ended = table.run([*command.words, "--workers", "2"], twice)
    assert ended.exit_code == 1, ended.errors
    problem, hint = messages(ended, table.out)
    assert "was killed by SIGKILL while it " in problem
    assert hint.startswith("hint: run the same command again: finished tasks are kept")
    assert not (table.out / names.MANIFEST).exists()
    # a task that the end stopped between its shard and its receipt runs again
    done = {path.stem for path in table.out.glob(f"{names.WORK}/{small.RECEIPTS}/*")}
    kept = {path: path.stat().st_mtime_ns for path in shards(table.out) if any(f"-{key}-" in path.name for key in done)}
    assert kept or kind != "build"  # of the others, the second loss may come before the first receipt
    table.check(command)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 4])
def test_a_build_of_standard_input_that_costs_two_workers_continues_without_it(table: Table, times: int) -> None:
    """The first process reads its copy and writes. A chunk of which two workers die ends the build."""
    words = [*table.words("build", [Path("-")]), "--format", "jsonl", "--workers", "2"]
    content = table.sources("build")["good"][0].read_bytes()
    table.clear()
    assert table.run(words, stdin=content).exit_code == 0
    reference = state(table.out)
    table.clear()
    loads_the_tokenizer = r"read .*/\.tokshard-build/tokenizer\.json"
    ended = table.run(words, Fault(on=loads_the_tokenizer, times=times, act="die", reads=True), stdin=content)
    if times > 1:
        assert ended.exit_code == 1, ended.errors
        problem, hint = messages(ended, table.out)
        assert "was killed by SIGKILL" in problem
        assert hint.startswith("hint: run the same command again")
        ended = table.run(words)
    assert ended.exit_code == 0, ended.errors
    assert state(table.out) == reference


@pytest.mark.slow
def test_a_build_of_standard_input_is_killed_and_continues(table: Table, dice: random.Random) -> None:
    words = [*table.words("build", [Path("-")]), "--format", "jsonl", "--workers", "1"]
    content = table.sources("build")["good"][0].read_bytes()
    table.clear()
    done = table.run(words, Fault(), stdin=content)
    assert done.exit_code == 0, done.errors
    reference, found = state(table.out), kills(done.steps)
    reading = [fault for fault in found if f"{names.WORK}/spool/" in done.steps[fault.at - 1]]
    assert len(reading) >= 3
    for fault in [*reading, *dice.sample(found, 3)]:
        table.clear()
        assert table.run(words, fault, stdin=content).exit_code == -9, fault
        is_complete = (table.out / names.MANIFEST).exists()
        ended = table.run(words, stdin=content)
        if is_complete:  # what came then is gone, so it is not known to be the same
            assert "belongs to another build: standard input cannot be read again\n" in ended.errors, fault
            ended = table.run([*words, "--force"], stdin=content)
        assert ended.exit_code == 0, fault
        assert state(table.out) == reference, fault
