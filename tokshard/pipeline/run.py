"""The third step of a build: run its tasks, in one stage, or with ``--dedup exact`` in three."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from tokshard.pipeline.append import earlier_texts
from tokshard.pipeline.drive import Change, drive
from tokshard.pipeline.executors.choice import executors
from tokshard.pipeline.prepare import PreparedBuild
from tokshard.pipeline.progress import MergesFinished, Observer, ignore
from tokshard.pipeline.stage import Access, Outcome, StageRunner, UnfinishedStageError, WholeBuild, Work
from tokshard.pipeline.tasks.duplicates import DropLists, find_duplicates
from tokshard.pipeline.tasks.planning import Task
from tokshard.pipeline.tasks.schedule import Schedule
from tokshard.pipeline.valid_receipts import valid_merges
from tokshard.pipeline.workspace.job_records import known_bad_inputs
from tokshard.pipeline.workspace.places import Stage
from tokshard.pipeline.workspace.receipts import Receipt


def run(prepared: PreparedBuild, *, observer: Observer = ignore, access: Access = Access.RUN) -> Outcome:
    """Run the tasks that have no receipt yet; failures, damage and limits are judged in input order.

    Raises:
        SourceError: an input is damaged, gone, or holds a bad record.
        BuildError: a worker died twice on the same task, or the disk takes no more.
        UnfinishedStageError: tasks are missing that may not run here.
    """
    workspace = prepared.resolved.context.workspace
    outcome = Outcome(bad_inputs=known_bad_inputs(workspace))
    with executors(prepared.resolved.options, observer) as make:
        work = Work(prepared=prepared, share=WholeBuild(workspace), outcome=outcome, observer=observer, make=make)
        while True:
            context = work.context
            if prepared.resolved.options.dedup == "exact":
                context = replace(context, drops=find_drops(work, hashing=access, merging=access))
            known = set(outcome.bad_inputs)
            outcome.receipts = StageRunner(work, context, access).run(prepared.tasks)
            # of an input that went bad after it was hashed, texts may have counted as the first of their kind
            is_settled = context.drops is None or known == set(outcome.bad_inputs)
            if not has_more_bad_inputs(work) and is_settled:
                return outcome


def has_more_bad_inputs(work: Work) -> bool:
    """Take in what jobs left out after a task that one of them gave up, which has passed now."""
    before = work.outcome.bad_inputs
    work.outcome.bad_inputs = {**known_bad_inputs(work.context.workspace), **before}
    return len(work.outcome.bad_inputs) > len(before)


def find_drops(work: Work, *, hashing: Access, merging: Access) -> DropLists:
    """The first two stages of ``--dedup exact``: hash the texts, and find the duplicates."""
    prepared, outcome = work.prepared, work.outcome
    hashing_context = replace(work.context, workspace=work.context.workspace.hashing)
    receipts = StageRunner(work, hashing_context, hashing).run(prepared.tasks)
    context = replace(work.context, workspace=work.context.workspace.duplicates)

    def run_merges(merges: Sequence[Task]) -> list[Receipt]:
        done = list(valid_merges(context.workspace, merges))
        if merging is not Access.RUN and len(done) < len(merges):
            raise UnfinishedStageError(Stage.DUPLICATES)
        finished = itertools.count(len(done) + 1)
        schedule = Schedule(merges, done)
        with work.make(context, ignore, min(prepared.num_workers, max(1, len(merges) - len(done)))) as executor:
            failure = drive(
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


def _refuse(decision: Change) -> None:
    raise AssertionError(f"{decision} is about an input, and these tasks read none")
