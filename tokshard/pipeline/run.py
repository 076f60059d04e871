"""The third step of a build: run its tasks, in one stage, or with ``--dedup exact`` in three.

One loop drives every stage: `_drive`. A pure `Schedule` decides, an executor runs, and what happens is told to the
schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial

from tokshard.pipeline.append import earlier_texts
from tokshard.pipeline.executors.base import Executor, OnProgress, Usage
from tokshard.pipeline.executors.choice import MakeExecutor, executors
from tokshard.pipeline.executors.inline import InlineExecutor
from tokshard.pipeline.job_log import JobLog, given_up, known_bad_inputs
from tokshard.pipeline.messages import user_error
from tokshard.pipeline.prepare import PreparedBuild
from tokshard.pipeline.progress import (
    InputLeftOut,
    MergesFinished,
    Observer,
    Report,
    StageEnded,
    StageStarted,
    TaskFinished,
    ignore,
)
from tokshard.pipeline.tasks.bad_record_limit import parse_bad_record_limit
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.decisions import Discard, Done, Failure, LeaveOut, Rerun, Run, Wait
from tokshard.pipeline.tasks.duplicates import DropLists, find_duplicates
from tokshard.pipeline.tasks.events import Finished
from tokshard.pipeline.tasks.planning import StreamTask, Task
from tokshard.pipeline.tasks.schedule import Schedule
from tokshard.pipeline.tasks.sorted_rows import Run as SortedRun
from tokshard.pipeline.valid_receipts import discard_receipt, valid_merges, valid_receipts
from tokshard.pipeline.workspace.places import Stage
from tokshard.pipeline.workspace.receipts import Progress, Receipt
from tokshard.pipeline.workspace.settings import save_bad_inputs

_Change = Rerun | LeaveOut | Discard
"""Decisions that change what is on disk."""


class Access(Enum):
    """What a process may do for tasks that no receipt is there of."""

    RUN = auto()
    """Run all: it builds alone."""

    JUDGE = auto()
    """Run what jobs of an array gave up, and what a limit cuts."""

    LOOK = auto()
    """Run nothing and discard nothing."""


class UnfinishedStageError(Exception):
    """Tasks that may not run here have not been run.

    Args:
        stage: theirs.
        tasks: the indices of those that are missing, among all tasks of the build; empty if they merge hashes.
    """

    def __init__(self, stage: Stage, tasks: Sequence[int] = ()) -> None:
        super().__init__(stage, tasks)
        self.stage, self.tasks = stage, tasks


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
class _Work:
    """What all stages of a build share.

    Args:
        outcome: of the whole build; each stage adds to it.
        make: the executors of the stages that may run tasks.
    """

    prepared: PreparedBuild
    outcome: Outcome
    observer: Observer
    make: MakeExecutor

    @property
    def context(self) -> WorkerContext:
        return self.prepared.resolved.context

    def has_more_bad_inputs(self) -> bool:
        """Take in what jobs left out after a task that one of them gave up, which has passed now."""
        found, before = known_bad_inputs(self.context.workspace), self.outcome.bad_inputs
        self.outcome.bad_inputs = {**found, **before}
        return len(self.outcome.bad_inputs) > len(before)


def run(prepared: PreparedBuild, *, observer: Observer = ignore, access: Access = Access.RUN) -> Outcome:
    """Run the tasks that have no receipt yet; failures, damage and limits are judged in input order.

    Raises:
        SourceError: an input is damaged, gone, or holds a bad record.
        BuildError: a worker died twice on the same task, or the disk takes no more.
        UnfinishedStageError: tasks are missing that may not run here.
    """
    outcome = Outcome(bad_inputs=known_bad_inputs(prepared.resolved.context.workspace))
    with executors(prepared.resolved.options, observer) as make:
        work = _Work(prepared=prepared, outcome=outcome, observer=observer, make=make)
        while True:
            context = work.context
            if prepared.resolved.options.dedup == "exact":
                context = replace(context, drops=_find_drops(work, hashing=access, merging=access))
            known = set(outcome.bad_inputs)
            outcome.receipts = _Stage(work, context, access).run(prepared.tasks)
            # of an input that went bad after it was hashed, texts may have counted as the first of their kind
            is_settled = context.drops is None or known == set(outcome.bad_inputs)
            if not work.has_more_bad_inputs() and is_settled:
                return outcome


def run_job(prepared: PreparedBuild, tasks: Sequence[Task | StreamTask], log: JobLog, *, observer: Observer) -> None:
    """Run the tasks of one job that have no receipt yet, in the stage of its log.

    Failures are raised, and those that would come again are left to the commit to judge, with all that only the
    receipts of all jobs decide.

    Raises:
        TokshardError: as `run`.
    """

    def observe(report: Report) -> None:
        log(report)
        observer(report)

    outcome = Outcome(bad_inputs=log.bad_inputs())
    with executors(prepared.resolved.options, observer) as make:
        work = _Work(prepared=prepared, outcome=outcome, observer=observe, make=make)
        context = work.context
        if log.stage is Stage.HASHING:
            context = replace(context, workspace=context.workspace.hashing)
        elif prepared.resolved.options.dedup == "exact":
            looking = replace(work, observer=ignore)
            context = replace(context, drops=_find_drops(looking, hashing=Access.LOOK, merging=Access.LOOK))
        _Stage(work, context, Access.RUN, log).run(tasks)


def find_duplicates_of_jobs(prepared: PreparedBuild, *, observer: Observer) -> Outcome:
    """The second stage of ``--dedup exact`` where jobs have hashed: judge their failures, and find the duplicates.

    Raises:
        TokshardError, UnfinishedStageError: as `run`.
    """
    outcome = Outcome(bad_inputs=known_bad_inputs(prepared.resolved.context.workspace))
    with executors(prepared.resolved.options, observer) as make:
        work = _Work(prepared=prepared, outcome=outcome, observer=observer, make=make)
        _find_drops(work, hashing=Access.JUDGE, merging=Access.RUN)
        while work.has_more_bad_inputs():
            _find_drops(work, hashing=Access.JUDGE, merging=Access.RUN)
    return outcome


def _find_drops(work: _Work, *, hashing: Access, merging: Access) -> DropLists:
    """The first two stages of ``--dedup exact``: hash the texts, and find the duplicates."""
    prepared, outcome = work.prepared, work.outcome
    hashing_context = replace(work.context, workspace=work.context.workspace.hashing)
    receipts = _Stage(work, hashing_context, hashing).run(prepared.tasks)
    context = replace(work.context, workspace=work.context.workspace.duplicates)

    def run_merges(merges: Sequence[Task]) -> list[Receipt]:
        done = list(valid_merges(context.workspace, merges))
        if merging is not Access.RUN and len(done) < len(merges):
            raise UnfinishedStageError(Stage.DUPLICATES)
        finished = itertools.count(len(done) + 1)
        schedule = Schedule(merges, done)
        with work.make(context, ignore, min(prepared.num_workers, max(1, len(merges) - len(done)))) as executor:
            failure = _drive(
                schedule,
                executor,
                carry_out=_refuse,
                on_finished=lambda _: work.observer(MergesFinished(next(finished), len(merges))),
            )
        outcome.usage += executor.usage
        if failure is not None:
            raise failure[1]
        return schedule.receipts_in_order()

    earlier = earlier_texts(context.outputs, is_checked=merging is Access.RUN)
    drops = find_duplicates(context.workspace.hashing, receipts, run_merges, earlier)
    outcome.texts = drops.texts
    return drops


def _refuse(decision: _Change) -> None:
    raise AssertionError(f"{decision} is about an input, and these tasks read none")


def _inline(context: WorkerContext, on_progress: OnProgress, _: int) -> Executor:
    return InlineExecutor(context, on_progress)


def _drive(
    schedule: Schedule,
    executor: Executor,
    *,
    carry_out: Callable[[_Change], None],
    on_finished: Callable[[Receipt], None],
    check: Callable[[Run], None] = lambda _: None,
) -> Failure | None:
    """Carry out what the schedule decides until it is done; returns the failure that decides, if there is one.

    Args:
        check: raises where a task may not run here.
    """
    while not isinstance(decision := schedule.decide(), Done):
        if isinstance(decision, Wait) or (isinstance(decision, Run) and not executor.can_take(decision)):
            for event in executor.events():
                schedule.happened(event)
                if isinstance(event, Finished):
                    on_finished(event.receipt)
            continue
        match decision:
            case Run():
                check(decision)
                executor.submit(decision)
            case Rerun(run=run):
                executor.abandon()
                carry_out(decision)
                executor.submit(run)
            case _:
                carry_out(decision)
        schedule.carried_out(decision)
    return decision.failure


class _Stage:
    """One stage under way.

    Args:
        context: of the stage: that of the build, with duplicates, or with the workspace of hashing.
        job: whose tasks these are; None if they are all.
    """

    def __init__(self, work: _Work, context: WorkerContext, access: Access, job: JobLog | None = None) -> None:
        self._resolved, self._num_workers = work.prepared.resolved, work.prepared.num_workers
        # one that judges runs a task at a time: what comes after a failure may not run at all
        self._make = work.make if access is Access.RUN else _inline
        self._context, self._outcome, self._observer = context, work.outcome, work.observer
        self._access, self._job = access, job
        self._inputs = self._resolved.found.inputs
        self._is_hashing = context.workspace.stage is Stage.HASHING

    def run(self, tasks: Sequence[Task | StreamTask]) -> list[Receipt]:
        """Run all that is missing; returns the receipts that belong to the corpus, in order.

        Raises:
            TokshardError: the failure that decides, as the user should see it.
            UnfinishedStageError: tasks are missing that may not run here.
        """
        options, bad_inputs = self._resolved.options, self._outcome.bad_inputs
        # a share of the bad records is one of all records, and what a limit leaves out may be damaged
        max_bad_records = None if self._job else parse_bad_record_limit(options.max_bad_records)
        is_limited = options.limit is not None and not self._is_hashing
        is_passing_damage = options.on_bad_source == "skip" and self._job is not None and is_limited
        done = list(
            valid_receipts(
                self._context,
                bad_inputs,
                tasks=tasks if self._job else None,
                is_discarding=self._access is not Access.LOOK,
            )
        )
        schedule = Schedule(
            tasks,
            done,
            # everything is hashed, whatever the limit: how many records the documents take is not known yet
            limit=None if self._is_hashing else options.limit,
            max_bad_records=max_bad_records,
            is_leaving_out=options.on_bad_source == "skip" and not is_passing_damage,
            is_passing_damage=is_passing_damage,
            bad_inputs=bad_inputs,
        )
        executor = self._make(self._context, self._on_progress, self._num_workers)
        total_bytes = 0 if self._inputs.read_once or self._job else self._resolved.total_bytes
        stage = self._context.workspace.stage
        self._observer(StageStarted(stage=stage, total_bytes=total_bytes, tasks=tasks, done=done))
        try:
            with executor:
                failure = _drive(
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
        if failure is not None and self._job is not None:
            failure = self._job.failed(schedule.failures(), is_passing_damage=is_passing_damage)
        if failure is not None:
            key = failure[0]
            raise user_error(
                failure,
                schedule,
                inputs=self._inputs,
                workspace=self._context.workspace,
                max_bad_records=max_bad_records,
                # other jobs may have read what comes before a part of an input
                is_counted=self._job is None or not key[1] or StreamTask(key=(key[0], 0)) in tasks,
            )
        return schedule.receipts_in_order()

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

    def _carry_out(self, schedule: Schedule, decision: _Change) -> None:
        match decision:
            case Rerun(key=key):
                discard_receipt(self._context.workspace, key)
            case Discard(keys):
                for key in keys:
                    discard_receipt(self._context.workspace, key)
            case LeaveOut(damage):
                for found in damage:
                    source = self._inputs[found.source]
                    problem = found.error.problem.removeprefix(f"{source.location} ")
                    self._outcome.bad_inputs[source.index] = problem
                    if self._job is None:
                        save_bad_inputs(self._resolved.context.workspace, self._outcome.bad_inputs)
                    else:
                        self._job.left_out(min(schedule.failures()), source.index, problem)
                    self._observer(InputLeftOut(found.error.problem))

    def _on_finished(self, receipt: Receipt) -> None:
        self._observer(TaskFinished(receipt, self._inputs[receipt.key[0]].location))

    def _on_progress(self, progress: Progress) -> None:
        if not self._is_hashing:
            self._outcome.bytes_encoded += progress.input_bytes
            self._outcome.tokens_encoded += progress.tokens
        self._observer(progress)
