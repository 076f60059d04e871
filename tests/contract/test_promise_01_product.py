"""Promise 1 for the whole product: whoever runs it, whatever it is and asks for, and whatever happens on the way.

Each cell of the table ends as one process ends that nothing happens to: with the same bytes in every file. By default
two cells of each kind are tried, every day others; those of Ray by `make test-ray`, and all by `make test-long`.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.contract import small
from tests.contract.commands import SKIP, Command, corpora, shards
from tests.contract.faults import Fault, kills
from tests.contract.table import (
    ACTS,
    CELLS,
    KINDS,
    LOCAL,
    NO_SUCH_OPTION,
    OPTIONS,
    OPTIONS_OF,
    TOGETHER,
    WITH_SHARDS,
    Cell,
    Table,
)
from tests.contract.test_promise_01_status import status
from tests.examples import crossed, examples
from tests.refusals import tokshard
from tokshard.format import names

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(("kind", "option"), sorted(NO_SUCH_OPTION))
def test_what_the_table_leaves_out_is_an_option_that_does_not_exist(table: Table, kind: str, option: str) -> None:
    words = table.words(kind, table.sources(kind)["good"], *OPTIONS[option])
    said = tokshard(*words)
    assert (said.exit_code, said.problem) == (2, f"no option {OPTIONS[option][0]}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_cells_of_a_kind_end_as_one_process_does(table: Table, kind: str, dice: random.Random) -> None:
    for cell in dice.sample([cell for cell in CELLS if cell.kind == kind and cell.executor in LOCAL], 2):
        table.check_cell(cell, dice.random())


@pytest.mark.soak
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.executor in LOCAL], ids=str)
def test_every_cell_ends_as_one_process_does(table: Table, cell: Cell, dice: random.Random) -> None:
    table.check_cell(cell, dice.random())


@contextlib.contextmanager
def cluster_of_two() -> Iterator[str]:
    """The address of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    yield nodes.address
    nodes.shutdown()


@pytest.fixture(scope="module")
def cluster(table: Table) -> Iterator[None]:
    with cluster_of_two() as table.ray_address:
        yield


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.executor == "ray"], ids=str)
def test_every_cell_of_ray_ends_as_one_process_does(table: Table, cell: Cell) -> None:
    table.check_cell(cell, 0.6)


# everything that may happen


@pytest.mark.slow
@crossed("act, kind, executor", ACTS, KINDS, LOCAL)
def test_whatever_happens_to_a_command_the_next_run_ends_as_one_process_does(
    table: Table, act: str, kind: str, executor: str, dice: random.Random
) -> None:
    command = table.command(kind, dice.choice([option for option in OPTIONS_OF[kind] if "source" not in option]))
    table.steps(command)
    table.begin(command)
    what = table.happen(command, executor, act, dice.random(), victim=dice.randrange(4))
    table.check_base(command)
    check_done_once(table, command, what)


def check_done_once(table: Table, command: Command, what: object) -> None:
    """Run a command to its end: no task is done again that was done before, but for sources that are left out.

    A task that failed, because a source had changed, is tried again.
    """
    before = {str(path) for path in table.out.rglob("receipts/*.receipt") if b"failure" not in path.read_bytes()}
    done = table.check(command, what)
    again = {step.partition(" -> ")[2] for step in done.steps if step.startswith("replace ")} & before
    assert not again or "--on-bad-source" in command.words, what


def check_killed(table: Table, command: Command, fault: Fault, *more: str) -> None:
    table.begin(command)
    if "--force" in more:
        assert table.run([*command.words, "--workers", "1"]).exit_code == 0
    killed = table.run([*command.words, *more, "--workers", "1"], fault)
    assert killed.exit_code == -9, f"{fault}: {killed.errors}"
    table.check_base(command)
    check_done_once(table, command, killed.steps[-1])


MOMENTS: list[tuple[str, str, Fault, tuple[str, ...]]] = [
    *[
        ("build", "plain", Fault(on=rf"open .*(?<!/{names.WORK})/\.{name}\.", is_after=True), ())
        for name in (names.TOKENIZER, names.REPORT, names.MANIFEST)
    ],
    ("build", "dedup", Fault(on=rf"open .*/\.{names.MANIFEST}"), ()),
    ("build", "split", Fault(on=rf"replace .*/{names.MANIFEST}$", is_after=True), ()),
    ("build", "append", Fault(on=rf"unlink .*/{names.WORK}/build\.json", is_after=True), ()),
    ("build", "append", Fault(on="unlink .*generation-01/", is_after=True), ("--force",)),
    ("build", "append", Fault(on=f"unlink .*generation-01/{names.MANIFEST}"), ("--force",)),
    ("copy", "append", Fault(on=rf"replace .*/{names.MANIFEST}$"), ()),
    ("build", "plain", Fault(on="unlink .*/shard-", is_after=True), ("--force",)),
]
"""Moments at which the directory is in a state of its own."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "option", "fault", "more"), MOMENTS)
def test_a_command_killed_at_a_moment_that_is_easily_got_wrong_is_right_when_it_runs_again(
    table: Table, kind: str, option: str, fault: Fault, more: tuple[str, ...]
) -> None:
    command = table.command(kind, option)
    table.steps(command)
    check_killed(table, command, fault, *more)


def test_an_append_killed_between_its_two_manifests_leaves_the_older_generation_of_both_corpora(table: Table) -> None:
    command = table.command("build", "append", *OPTIONS["split"])
    table.steps(command)
    check_killed(table, command, Fault(on=r"replace .*/manifest\.json", is_after=True))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("option", [*OPTIONS, TOGETHER])
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_killed_at_any_step_is_right_when_it_runs_again(table: Table, kind: str, option: str) -> None:
    if (kind, option) not in NO_SUCH_OPTION:
        command = table.command(kind, option)
        for fault in kills(table.steps(command)):
            check_killed(table, command, fault)


# histories


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_SHARDS)
def test_what_stopped_a_strict_array_is_left_out_by_one_that_is_not(table: Table, kind: str) -> None:
    """The first job judges hashes that the tasks of others did not leave: they failed at what it leaves out."""
    command = table.command(kind, TOGETHER)
    table.steps(command)
    table.begin(command)
    strict = table.run_by("array of 3", [word for word in command.words if word not in {*SKIP}])
    assert strict.exit_code == 1
    table.check(command, executor="array of 3")


class History(RuleBasedStateMachine):
    """A command to which one thing happens after another; then it runs to its end."""

    table: ClassVar[Table]
    kind: ClassVar[str]
    has_started_over = False

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        options = OPTIONS_OF[self.kind]
        option = data.draw(st.sampled_from([*options, TOGETHER]), label="option")
        self.command, self.happened = self.table.command(self.kind, option), [option]
        self.last = data.draw(st.sampled_from(LOCAL), label="who ends it")
        self.table.steps(self.command)
        self.table.begin(self.command)
        words = [word for word in self.command.words if word not in {*SKIP}]
        if len(words) < len(self.command.words) and data.draw(st.booleans(), label="was strict before"):
            strict = self.table.run_by(self.last, words)
            assert strict.exit_code == 1, self.happened
            assert re.search("^hint: .* --on-bad-(record|source) skip", strict.errors, re.MULTILINE), strict.errors

    @rule(moment=st.floats(0, 1, exclude_max=True), executor=st.sampled_from(LOCAL), victim=st.integers(0, 3))
    def is_killed(self, moment: float, executor: str, victim: int) -> None:
        self.happened.append(self.table.happen(self.command, executor, "kill", moment, victim))

    @rule(
        act=st.sampled_from(list(ACTS)),
        moment=st.floats(0, 1, exclude_max=True),
        executor=st.sampled_from(LOCAL),
        victim=st.integers(0, 3),
    )
    def meets(self, act: str, moment: float, executor: str, victim: int) -> None:
        if act != "change" or "--on-bad-source" not in self.command.words:
            self.happened.append(self.table.happen(self.command, executor, act, moment, victim))

    @rule(moment=st.floats(0, 1, exclude_max=True))
    def starts_over(self, moment: float) -> None:
        fault = Fault(at=1 + int(moment * len(self.table.steps(self.command))))
        self.table.run([*self.command.words, "--force", "--workers", "1"], fault)
        self.has_started_over = True
        self.happened.append(f"started over until {fault.at}")

    @rule(which=st.integers(0, 100), what=st.sampled_from(["shard", "receipt"]))
    def loses(self, which: int, what: str) -> None:
        """A file of an unfinished build goes."""
        found = shards(self.table.out) if what == "shard" else sorted(self.table.out.rglob("receipts/*.receipt"))
        if found and not self.command.base and not corpora(self.table.out):
            found[which % len(found)].unlink()
            self.happened.append(f"lost {found[which % len(found)]}")

    @rule()
    def is_asked_for_something_else(self) -> None:
        # a build that stopped before its first shard and receipt may go on with other settings
        receipts = (b"failure" not in path.read_bytes() for path in self.table.out.rglob("receipts/*.receipt"))
        has_results = bool(shards(self.table.out)) or any(receipts)
        is_there = (self.table.out / names.WORK / "build.json").exists()
        has_begun = (is_there and has_results) or corpora(self.table.out)
        other = self.table.run([*self.command.words, "--min-tokens", "3", "--workers", "1"], Fault(on=small.BEGINS))
        self.happened.append(f"another {other.exit_code} {other.errors}")
        assert other.exit_code == 2 or not has_begun or self.command.base, self.happened

    @rule()
    def continues_as_the_status_says(self) -> None:
        found = status(self.table.out)
        if found is not None and found["state"] == "unfinished" and found["command"]:
            done = self.table.run(found["command"][1:])
            is_strict = bool({*SKIP} & {*self.command.words} - {*found["command"]})  # as the last run was
            assert done.exit_code in ({0, 1} if is_strict else {0}), (self.happened, done.errors)

    @invariant()
    def can_be_asked_for(self) -> None:
        found = status(self.table.out)
        assert found is None or found["state"] != "running", self.happened
        self.table.check_base(self.command)

    def teardown(self) -> None:
        if self.has_started_over:  # one of the two corpora of a split may be gone, and nothing says why
            self.table.run([*self.command.words, "--force", "--workers", "1"], Fault(on=small.BEGINS, is_after=True))
        self.table.check(self.command, self.happened, self.last)


def try_history(table: Table, kind: str, *, seed: int | None = None, **tried: Any) -> None:
    """Try histories of commands of a kind; of a seed, or of the one of the day."""
    machine = type("HistoryOf", (History,), {"table": table, "kind": kind})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    # to shrink a history takes minutes
    found = settings(phases=[Phase.generate], suppress_health_check=checks, database=None, deadline=None, **tried)
    run_state_machine_as_test(machine if seed is None else seeded(seed)(machine), settings=found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happened_before_a_command_ends_as_one_process_does(table: Table, kind: str) -> None:
    try_history(table, kind, max_examples=1 + examples(13), stateful_step_count=5)
