"""The messages between the coordinator, the threads that read streams for it, and worker processes."""

from __future__ import annotations

from dataclasses import dataclass

from tokshard.errors import BuildError, TokshardError
from tokshard.pipeline.executors.base import Usage
from tokshard.pipeline.failures import TaskError
from tokshard.pipeline.tasks.planning import StreamTask
from tokshard.pipeline.workspace.receipts import Receipt


@dataclass(frozen=True, slots=True)
class RunSegment:
    """To a worker. Chunks follow, then `EndOfSegment` or `BrokenSegment`."""

    task: StreamTask
    number: int
    previous: int | None
    max_documents: int | None


@dataclass(frozen=True, slots=True)
class EndOfSegment:
    """To a worker: the segment has no more chunks."""

    is_last: bool


@dataclass(frozen=True, slots=True)
class BrokenSegment:
    """To a worker: nothing follows the chunks that were sent, because the input is damaged or gone."""

    error: Exception


@dataclass(frozen=True, slots=True)
class TaskDone:
    """From a worker: a receipt, and the cost of the worker so far. It may be the last message before it is stopped."""

    receipt: Receipt
    usage: Usage


@dataclass(frozen=True, slots=True)
class Idle:
    """From a worker: it has ended the task or segment that it was given."""


@dataclass(frozen=True, slots=True)
class SegmentReady:
    """From a feeder: it has reached a segment and waits for a worker."""

    feeder: int
    segment: int


@dataclass(frozen=True, slots=True)
class FeederFailed:
    """From a feeder: the input cannot be opened or read."""

    feeder: int
    segment: int
    error: Exception


@dataclass(frozen=True, slots=True)
class FeederEnded:
    """From a feeder: nothing more comes, because its input ended or cannot be read further."""

    feeder: int


def portable(error: Exception) -> Exception:
    """The error in a form that can cross processes."""
    if isinstance(error, TokshardError | TaskError):
        return error
    return BuildError(
        f"a worker failed: {type(error).__name__}: {error}",
        hint="this is a bug in tokshard: run again with --workers 1 --debug and report what it prints",
    )
