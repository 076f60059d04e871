"""The third step of a build: run its tasks, in one stage, or with ``--dedup exact`` in two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tokshard.pipeline.executors.base import Event, Executor, Failed, Finished, Lost, Usage
from tokshard.pipeline.executors.inline import InlineExecutor
from tokshard.pipeline.executors.processes import ProcessExecutor
from tokshard.pipeline.failures import BadInputError
from tokshard.pipeline.messages import user_error
from tokshard.pipeline.progress import FileCount, PartitionDisplay, ProgressDisplay
from tokshard.pipeline.resolve import ResolvedBuild
from tokshard.pipeline.tasks.bad_record_limit import parse_bad_record_limit
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.duplicates import DropLists, find_duplicates
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task
from tokshard.pipeline.tasks.schedule import Discard, Done, LeaveOut, Rerun, Run, Schedule, Wait
from tokshard.pipeline.valid_receipts import discard_receipt, valid_receipts
from tokshard.pipeline.workspace.receipts import Progress, Receipt, progress_of
from tokshard.pipeline.workspace.settings import load_bad_inputs, save_bad_inputs

_MAX_LOSSES = 1
"""Workers that a task may cost; the next one ends the build."""


@dataclass(slots=True, kw_only=True)
class StagesOutcome:
    """What the tasks of a build came to.

    Args:
        receipts: those that belong to the corpus, in order.
        bad_inputs: index of each input that was left out whole, and what is wrong with it.
        tokens_encoded, bytes_encoded: in this run, by tasks that were given up too.
    """

    receipts: list[Receipt] = field(default_factory=list)
    bad_inputs: dict[int, str]
    usage: Usage = field(default_factory=Usage)
    tokens_encoded: int = 0
    bytes_encoded: int = 0


def run_stages(resolved: ResolvedBuild, tasks: Sequence[Task | StreamTask], *, num_workers: int) -> StagesOutcome:
    """Run the tasks that left no receipt yet.

    Raises:
        TokshardError: the failure that decides, as the user should see it.
    """
    outcome = StagesOutcome(bad_inputs=load_bad_inputs(resolved.context.workspace))
    while True:
        context = resolved.context
        if resolved.options.dedup == "exact":
            drops = _find_duplicates(resolved, tasks, outcome, num_workers=num_workers)
            context = replace(context, drops=drops)
        known = set(outcome.bad_inputs)
        outcome.receipts = _Stage(resolved, context, tasks, outcome).run(num_workers)
        # of an input that went bad after it was hashed, texts may have counted as the first of their kind
        if context.drops is None or known == set(outcome.bad_inputs):
            return outcome


def _find_duplicates(
    resolved: ResolvedBuild, tasks: Sequence[Task | StreamTask], outcome: StagesOutcome, *, num_workers: int
) -> DropLists:
    workspace = resolved.context.workspace.hashing
    receipts = _Stage(resolved, replace(resolved.context, workspace=workspace), tasks, outcome).run(num_workers)
    return find_duplicates(workspace, receipts, PartitionDisplay(is_quiet=resolved.options.quiet))


class _Stage:
    """One stage under way.

    Args:
        context: of the stage: that of the build, with duplicates, or with the workspace of hashing.
        outcome: of the whole build; the stage adds what it costs, and the inputs that it leaves out.
    """

    def __init__(
        self,
        resolved: ResolvedBuild,
        context: WorkerContext,
        tasks: Sequence[Task | StreamTask],
        outcome: StagesOutcome,
    ) -> None:
        self._context, self._outcome = context, outcome
        self._inputs = resolved.found.inputs
        self._workspace = resolved.context.workspace
        self._is_hashing = bool(context.workspace.stage)
        self._max_bad_records = parse_bad_record_limit(resolved.options.max_bad_records)
        self._losses: Counter[Key] = Counter()
        done = list(valid_receipts(context, outcome.bad_inputs))
        self._schedule = Schedule(
            tasks,
            done,
            # everything is hashed, whatever the limit: how many records the documents take is not known yet
            limit=None if self._is_hashing else resolved.options.limit,
            max_bad_records=self._max_bad_records,
            is_leaving_out=resolved.options.on_bad_source == "skip",
            bad_inputs=outcome.bad_inputs,
        )
        files = FileCount(tasks)
        for receipt in done:
            files.add(receipt)
        self._display = ProgressDisplay(
            0 if self._inputs.read_once else resolved.total_bytes,
            files,
            progress_of(done),
            is_quiet=resolved.options.quiet,
            is_verbose=resolved.options.verbose,
            label="hashing" if self._is_hashing else "",
        )

    def run(self, num_workers: int) -> list[Receipt]:
        """Run all that is missing; returns the receipts that belong to the corpus, in order."""
        executor: Executor = (
            InlineExecutor(self._context, self._on_progress)
            if num_workers == 1
            else ProcessExecutor(self._context, self._on_progress, num_workers=num_workers)
        )
        with self._display, executor:
            failure = self._drive(executor)
        self._outcome.usage += executor.usage
        if failure is not None:
            raise user_error(
                failure,
                self._schedule,
                inputs=self._inputs,
                workspace=self._context.workspace,
                max_bad_records=self._max_bad_records,
            )
        return self._schedule.receipts_in_order()

    def _drive(self, executor: Executor) -> tuple[Key, Exception] | None:
        """Do what the schedule decides until it is done; returns the failure that decides, if there is one."""
        schedule = self._schedule
        while True:
            match schedule.decide():
                case Done(failure):
                    return failure
                case Discard(keys):
                    for key in keys:
                        discard_receipt(self._context.workspace, key)
                    schedule.discarded(keys)
                case LeaveOut(damage):
                    self._leave_out(damage)
                    schedule.leave_out(damage)
                case Rerun(key=key, run=run) as rerun:
                    executor.abandon()
                    discard_receipt(self._context.workspace, key)
                    schedule.restarted(rerun)
                    executor.submit(run)
                case Run() as run if executor.can_take(run):
                    schedule.started(run)
                    executor.submit(run)
                case Run() | Wait():
                    for event in executor.events():
                        self._take_in(event)

    def _take_in(self, event: Event) -> None:
        match event:
            case Finished(receipt):
                self._display.finished(receipt, self._inputs[receipt.key[0]].location)
                self._schedule.finished(receipt)
            case Failed(key, error):
                self._schedule.failed(key, error)
            case Lost(task, error):
                self._losses[task.key] += 1
                is_read_once = isinstance(task, StreamTask) and task.is_here
                if is_read_once or self._losses[task.key] > _MAX_LOSSES:
                    raise error
                self._schedule.released(task, is_lost=True)
            case _:
                self._schedule.released(event.task)

    def _leave_out(self, damage: Sequence[BadInputError]) -> None:
        for found in damage:
            source = self._inputs[found.source]
            self._outcome.bad_inputs[source.index] = found.error.problem.removeprefix(f"{source.location} ")
            save_bad_inputs(self._workspace, self._outcome.bad_inputs)
            self._display.say(f"left out: {found.error.problem}")

    def _on_progress(self, progress: Progress) -> None:
        if not self._is_hashing:
            self._outcome.bytes_encoded += progress.input_bytes
            self._outcome.tokens_encoded += progress.tokens
        self._display(progress)
