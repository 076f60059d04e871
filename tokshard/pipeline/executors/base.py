"""The interface of executors, which run tasks: in this process, in worker processes, or on other machines."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self

from tokshard.pipeline.tasks.decisions import Run
from tokshard.pipeline.tasks.events import Event
from tokshard.pipeline.tasks.planning import StreamTask, Task
from tokshard.pipeline.workspace.places import Workspace
from tokshard.pipeline.workspace.receipts import Progress, Receipt

OnProgress = Callable[[Progress], None]
"""Called after every chunk, with what was done since the last call."""


class TaskContext(Protocol):
    """What a process needs to run the tasks of a stage; it is sent to every worker."""

    @property
    def workspace(self) -> Workspace: ...

    def purpose(self, task: Task | StreamTask) -> str:
        """What a worker does with a task, in the past tense."""


class Runner(Protocol):
    """Runs tasks of a stage in one process."""

    def run_task(self, task: Task, max_documents: int | None) -> Receipt:
        """Run a task of known extent, and leave its receipt."""


MakeRunner = Callable[[Any, OnProgress], Runner]
"""Makes the runner of a process from the context of the stage; it is sent to every worker, too."""


@dataclass(slots=True)
class Usage:
    """What an executor cost.

    Args:
        cpu_seconds: of all workers, without the process that they are forked from.
        peak_worker_bytes: resident memory of the largest worker at its peak.
    """

    cpu_seconds: float = 0.0
    peak_worker_bytes: int = 0

    def __add__(self, other: Usage) -> Usage:
        """The cost of both, one after the other."""
        return Usage(
            cpu_seconds=self.cpu_seconds + other.cpu_seconds,
            peak_worker_bytes=max(self.peak_worker_bytes, other.peak_worker_bytes),
        )


class Executor(Protocol):
    """Runs tasks of one stage. Nothing starts before the context is entered, and leaving it stops everything."""

    @property
    def num_workers(self) -> int:
        """Tasks that can run at once."""

    @property
    def usage(self) -> Usage:
        """The cost of all workers that have stopped."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def can_take(self, run: Run) -> bool:
        """Whether a task that is submitted now would start at once."""

    def submit(self, run: Run) -> None:
        """Run a task, now or as soon as a worker is free."""

    def events(self) -> Iterable[Event]:
        """What happened since the last call; waits until something happens. To be used up before the next call."""

    def abandon(self) -> None:
        """Stop all tasks that are under way. No later event is about them."""


def peak_bytes() -> int:
    """Resident memory of this process at its peak."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024


def cpu_seconds() -> float:
    """CPU time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
