"""The loop of every stage: a pure `Schedule` decides, an executor runs, and the loop tells each what the other did."""

from __future__ import annotations

from collections.abc import Callable

from tokshard.pipeline.executors.base import Executor
from tokshard.pipeline.tasks.decisions import Discard, Done, Failure, LeaveOut, Rerun, Run, Wait
from tokshard.pipeline.tasks.events import Finished
from tokshard.pipeline.tasks.schedule import Schedule
from tokshard.pipeline.workspace.receipts import Receipt

Change = Rerun | LeaveOut | Discard
"""Decisions that change what is on disk."""


def drive(
    schedule: Schedule,
    executor: Executor,
    *,
    carry_out: Callable[[Change], None],
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
