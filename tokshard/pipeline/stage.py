"""One stage of a build: its tasks run until all that matter are done, or until one failure decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Protocol

from tokshard.pipeline.drive import Change, drive
from tokshard.pipeline.executors.base import Executor, OnProgress, Usage
from tokshard.pipeline.executors.choice import MakeExecutor
from tokshard.pipeline.executors.inline import InlineExecutor
from tokshard.pipeline.messages import user_error
from tokshard.pipeline.prepare import PreparedBuild
from tokshard.pipeline.progress import InputLeftOut, Observer, StageEnded, StageStarted, TaskFinished
from tokshard.pipeline.tasks.bad_record_limit import parse_bad_record_limit
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.decisions import Discard, Failure, LeaveOut, Rerun, Run
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task
from tokshard.pipeline.tasks.schedule import Schedule
from tokshard.pipeline.tasks.sorted_rows import Run as SortedRun
from tokshard.pipeline.valid_receipts import discard_receipt, valid_receipts
from tokshard.pipeline.workspace.job_records import given_up
from tokshard.pipeline.workspace.places import Stage, Workspace
from tokshard.pipeline.workspace.receipts import Progress, Receipt
from tokshard.pipeline.workspace.settings import save_bad_inputs


class Access(Enum):
    """Which tasks without a receipt a process may run."""

    RUN = auto()
    """All: it builds alone."""

    JUDGE = auto()
    """Those that jobs of an array gave up, and the one that a limit cuts."""

    LOOK = auto()
    """None, and it discards no receipt."""


class UnfinishedStageError(Exception):
    """Tasks that may not run here have not been run.

    Args:
        stage: theirs.
        tasks: the indices of those that are missing, among all tasks of the build; empty if they merge hashes.
    """

    def __init__(self, stage: Stage, tasks: Sequence[int] = ()) -> None:
        super().__init__(stage, tasks)
        self.stage, self.tasks = stage, tasks


class Share(Protocol):
    """The part of a build's tasks that a process runs, and what it may judge by their receipts alone."""

    @property
    def is_whole(self) -> bool:
        """Whether these are all tasks. Else limits on bad records wait for the process that sees all receipts."""

    def leave_out(self, key: Key, index: int, bad_inputs: Mapping[int, str]) -> None:
        """Write down that one more input is left out.

        Args:
            key: of the task that met the damage.
            index: of the input.
            bad_inputs: all that are left out by now, and what is wrong with each.
        """

    def deciding_failure(
        self, lowest: Failure, failures: Mapping[Key, Exception], *, is_passing_damage: bool
    ) -> Failure | None:
        """The failure that ends the stage, if there is one.

        Args:
            lowest: the first in input order.
            failures: all, by task or segment.
            is_passing_damage: damaged inputs do not end it: a limit may fall before them.
        """


@dataclass(frozen=True, slots=True)
class WholeBuild:
    """All tasks of a build: the lowest failure decides."""

    workspace: Workspace

    @property
    def is_whole(self) -> bool:
        return True

    def leave_out(self, key: Key, index: int, bad_inputs: Mapping[int, str]) -> None:  # noqa: ARG002 -- of `Share`
        save_bad_inputs(self.workspace, bad_inputs)

    def deciding_failure(
        self,
        lowest: Failure,
        failures: Mapping[Key, Exception],  # noqa: ARG002 -- of `Share`
        *,
        is_passing_damage: bool,  # noqa: ARG002 -- of `Share`
    ) -> Failure | None:
        return lowest


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What the tasks of a build came to.

    Args:
        receipts: those that belong to the corpus, in order.
        bad_inputs: index of each input that was left out whole, and what is wrong with it.
        num_workers: that could run at once.
        texts: of a build that looked for duplicates, the hashes of its texts.
        tokens_encoded, bytes_encoded: in this run, by tasks that were given up too.
    """

    receipts: list[Receipt] = field(default_factory=list)
    bad_inputs: dict[int, str]
    usage: Usage = field(default_factory=Usage)
    num_workers: int = 0
    texts: tuple[SortedRun, ...] = ()
    tokens_encoded: int = 0
    bytes_encoded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What all stages of a build have in common.

    Args:
        outcome: of the whole build; each stage adds to it.
        make: the executors of the stages that may run tasks.
    """

    prepared: PreparedBuild
    share: Share
    outcome: Outcome
    observer: Observer
    make: MakeExecutor

    @property
    def context(self) -> WorkerContext:
        """The context of the tasks that encode, without duplicates."""
        return self.prepared.resolved.context


class StageRunner:
    """One stage under way.

    Args:
        context: of the stage: that of the build, with duplicates, or with the workspace of hashing.
    """

    def __init__(self, work: Work, context: WorkerContext, access: Access) -> None:
        self._resolved, self._num_workers, self._share = work.prepared.resolved, work.prepared.num_workers, work.share
        # one that judges runs a task at a time: what comes after a failure may not run at all
        self._make = work.make if access is Access.RUN else _inline
        self._context, self._outcome, self._observer = context, work.outcome, work.observer
        self._access = access
        self._inputs = self._resolved.found.inputs
        options = self._resolved.options
        # everything is hashed, whatever the limit: how many records the documents take is not known yet
        self._limit = None if context.workspace.stage is Stage.HASHING else options.limit
        is_skipping = options.on_bad_source == "skip"
        # a share of the bad records is one of all records, and what a limit leaves out may be damaged
        self._max_bad_records = parse_bad_record_limit(options.max_bad_records) if work.share.is_whole else None
        self._is_passing_damage = is_skipping and not work.share.is_whole and self._limit is not None
        self._is_leaving_out = is_skipping and not self._is_passing_damage

    def run(self, tasks: Sequence[Task | StreamTask]) -> list[Receipt]:
        """Run all that is missing; returns the receipts that belong to the corpus, in order.

        Raises:
            TokshardError: the failure that decides, as the user should see it.
            UnfinishedStageError: tasks are missing that may not run here.
        """
        is_whole = self._share.is_whole
        done = list(
            valid_receipts(
                self._context,
                self._outcome.bad_inputs,
                tasks=None if is_whole else tasks,
                is_discarding=self._access is not Access.LOOK,
            )
        )
        schedule = Schedule(
            tasks,
            done,
            limit=self._limit,
            max_bad_records=self._max_bad_records,
            is_leaving_out=self._is_leaving_out,
            is_passing_damage=self._is_passing_damage,
            bad_inputs=self._outcome.bad_inputs,
        )
        executor = self._make(self._context, self._on_progress, self._num_workers)
        total_bytes = 0 if self._inputs.read_once or not is_whole else self._resolved.total_bytes
        self._observer(
            StageStarted(stage=self._context.workspace.stage, total_bytes=total_bytes, tasks=tasks, done=done)
        )
        try:
            with executor:
                failure = drive(
                    schedule,
                    executor,
                    carry_out=partial(self._carry_out, schedule),
                    on_finished=self._on_finished,
                    check=self._checking(schedule, tasks),
                )
        finally:
            self._observer(StageEnded())
        self._outcome.usage += executor.usage
        self._outcome.num_workers = executor.num_workers
        if failure is not None:
            self._judge(failure, schedule, tasks)
        return schedule.receipts_in_order()

    def _judge(self, lowest: Failure, schedule: Schedule, tasks: Sequence[Task | StreamTask]) -> None:
        """Raise the failure that ends the stage, if there is one."""
        failures = schedule.failures()
        failure = self._share.deciding_failure(lowest, failures, is_passing_damage=self._is_passing_damage)
        if failure is None:
            return
        first, segment = failure[0]
        raise user_error(
            failure,
            schedule,
            inputs=self._inputs,
            workspace=self._context.workspace,
            max_bad_records=self._max_bad_records,
            # other jobs may have read what comes before a part of an input
            is_counted=self._share.is_whole or not segment or StreamTask(key=(first, 0)) in tasks,
        )

    def _checking(self, schedule: Schedule, tasks: Sequence[Task | StreamTask]) -> Callable[[Run], None]:
        """A function that refuses to run what may not run here."""
        if self._access is Access.RUN:
            return lambda _: None
        stage = self._context.workspace.stage
        failed = given_up(self._resolved.context.workspace, stage) if self._access is Access.JUDGE else frozenset()
        streams = {first for first, _ in failed}

        def may_run(task: Task | StreamTask) -> bool:
            return task.key in failed or (isinstance(task, StreamTask) and task.key[0] in streams)

        def check(run: Run) -> None:
            if not may_run(run.task):
                missing = {task.key for task in schedule.waiting() if not may_run(task)}
                raise UnfinishedStageError(stage, [t for t, task in enumerate(tasks) if task.key in missing])

        return check

    def _carry_out(self, schedule: Schedule, decision: Change) -> None:
        match decision:
            case Rerun(key=key):
                discard_receipt(self._context.workspace, key)
            case Discard(keys):
                for key in keys:
                    discard_receipt(self._context.workspace, key)
            case LeaveOut(damage):
                for found in damage:
                    source, bad_inputs = self._inputs[found.source], self._outcome.bad_inputs
                    bad_inputs[source.index] = found.error.problem.removeprefix(f"{source.location} ")
                    self._share.leave_out(min(schedule.failures()), source.index, bad_inputs)
                    self._observer(InputLeftOut(found.error.problem))

    def _on_finished(self, receipt: Receipt) -> None:
        self._observer(TaskFinished(receipt, self._inputs[receipt.key[0]].location))

    def _on_progress(self, progress: Progress) -> None:
        if self._context.workspace.stage is Stage.ENCODING:
            self._outcome.bytes_encoded += progress.input_bytes
            self._outcome.tokens_encoded += progress.tokens
        self._observer(progress)


def _inline(context: WorkerContext, on_progress: OnProgress, _: int) -> Executor:
    return InlineExecutor(context, on_progress)
