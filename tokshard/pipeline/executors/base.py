"""What runs tasks: the interface that a build drives, whether tasks run here, in processes, or on other machines."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, Self

from tokshard.errors import TokshardError
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task
from tokshard.pipeline.tasks.schedule import Run
from tokshard.pipeline.workspace.receipts import Progress, Receipt

OnProgress = Callable[[Progress], None]
"""Called with what was done since the last call, after every chunk."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A task or segment left a receipt."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Failed:
    """A task or segment failed, and would fail again."""

    key: Key
    error: Exception


@dataclass(frozen=True, slots=True)
class Released:
    """A task is no longer under way. What it has to say was said."""

    task: Task | StreamTask


@dataclass(frozen=True, slots=True)
class Lost:
    """A task is no longer under way because its worker died; it may succeed elsewhere.

    Args:
        error: for the user, if it is not to be tried again.
    """

    task: Task | StreamTask
    error: TokshardError


Event = Finished | Failed | Released | Lost


@dataclass(slots=True)
class Usage:
    """What an executor cost.

    Args:
        cpu_seconds: of all workers, start-up included.
        server_cpu_seconds: of the process that they are forked from, where that can be read.
        peak_worker_bytes: resident memory of the largest worker at its peak.
    """

    cpu_seconds: float = 0.0
    server_cpu_seconds: float = 0.0
    peak_worker_bytes: int = 0

    def __add__(self, other: Usage) -> Usage:
        """The cost of both; one server forks the workers of both, so its time counts once."""
        return Usage(
            cpu_seconds=self.cpu_seconds + other.cpu_seconds,
            server_cpu_seconds=max(self.server_cpu_seconds, other.server_cpu_seconds),
            peak_worker_bytes=max(self.peak_worker_bytes, other.peak_worker_bytes),
        )


class Executor(Protocol):
    """Runs tasks of one stage. Nothing is started before the context is entered; leaving it stops everything."""

    @property
    def usage(self) -> Usage:
        """The cost so far of all that has stopped."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def can_take(self, run: Run) -> bool:
        """Whether a task that is submitted now would start at once."""

    def submit(self, run: Run) -> None:
        """Start a task, or start it as soon as possible."""

    def events(self) -> Iterable[Event]:
        """What happened since the last call; waits until something has. To be used up before the next call."""

    def abandon(self) -> None:
        """Stop all tasks that are under way. No event will be about them."""


def peak_bytes() -> int:
    """Resident memory of this process at its peak."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024


def cpu_seconds() -> float:
    """CPU time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
