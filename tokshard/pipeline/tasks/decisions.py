"""What a `Schedule` decides. Each decision is a value: whoever carries it out says so by `Schedule.carried_out`."""

from __future__ import annotations

from dataclasses import dataclass

from tokshard.pipeline.failures import BadInputError
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task

Failure = tuple[Key, Exception]
"""A failure, and the task or segment that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run a task.

    Args:
        max_documents: that it may write; no task needs more than what is missing before it. None: any number.
        done_segments: segments of a stream that have a receipt.
        num_waiting_streams: streams among the next tasks that wait for a worker, this one included.
    """

    task: Task | StreamTask
    max_documents: int | None
    done_segments: frozenset[int] = frozenset()
    num_waiting_streams: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """Stop everything, discard a receipt, and run its task once more, with the room that a run in order would give it.

    With more room it read past the last document wanted: to more documents, to records that are left out, or to the
    failure that it met.

    Args:
        key: the task, or the segment of a stream.
    """

    key: Key
    run: Run


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """Leave out damaged inputs."""

    damage: tuple[BadInputError, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Discard receipts that no longer hold, before anything else runs."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can start until something that is under way ends."""


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing that matters is left to do.

    Args:
        failure: the one that decides; None: the stage succeeded.
    """

    failure: Failure | None = None


Decision = Run | Rerun | LeaveOut | Discard | Wait | Done
