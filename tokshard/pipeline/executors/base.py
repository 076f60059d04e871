"""The interface of executors, and the simplest one: it runs tasks in this process, one after another."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, Self

from tokshard.errors import BuildError, TokshardError
from tokshard.pipeline.request import Build
from tokshard.pipeline.tasks.planning import AnyTask, Run
from tokshard.pipeline.tasks.running import Stage, TaskRunner
from tokshard.pipeline.workspace.receipts import Progress, Receipt


@dataclass(frozen=True, slots=True)
class Ended:
    """A task has ended. All its receipts were reported before.

    Args:
        error: its worker died, and it may succeed elsewhere: the error for the user, if it is not tried again.
        max_losses: workers that a task may lose; after the next loss it is not tried again.
    """

    task: AnyTask
    error: TokshardError | None = None
    max_losses: int = 1


Event = Receipt | Ended

OnProgress = Callable[[Progress], None]
"""Called after every chunk, with what was done since the last call."""


def cpu_time() -> float:
    """CPU time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@dataclass(slots=True)
class WorkerUsage:
    """The cost of workers.

    Args:
        cpu_seconds: CPU time of all, without the process that they are forked from.
        peak_bytes: peak resident memory of the largest.
        num_workers: processes that could run at once.
    """

    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    num_workers: int = 0

    def add(self, other: WorkerUsage) -> None:
        """Add the cost of later workers."""
        self.cpu_seconds += other.cpu_seconds
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.num_workers = max(self.num_workers, other.num_workers)


@dataclass(slots=True)
class RunUsage:
    """The cost of a run of a build.

    Args:
        workers: their cost, over all stages.
        tokens: tokens written.
        started: start on the monotonic clock.
        cpu_before: CPU-seconds of this process when it began.
    """

    workers: WorkerUsage = field(default_factory=WorkerUsage)
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)
    cpu_before: float = field(default_factory=cpu_time)


class Executor(Protocol):
    """Runs tasks of one stage, and reports progress through a callback.

    Nothing starts before the context is entered, and leaving it stops everything.
    """

    @property
    def run_shared(self) -> Callable[[Run], Iterator[Receipt]] | None:
        """Runs a stream in this process while all workers prepare its chunks and no other task runs.

        None: this executor has no workers for chunks.
        """

    @property
    def num_workers(self) -> int:
        """The number of tasks that can run at once."""

    @property
    def usage(self) -> WorkerUsage:
        """The cost of all workers that have stopped."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def has_room(self) -> bool:
        """Whether a task that is submitted now would start at once."""

    def submit(self, run: Run) -> None:
        """Run a task, now or as soon as a worker is free."""

    def events(self) -> Iterable[Event]:
        """The events since the last call; waits for at least one. Exhaust the iterator before the next call.

        Raises:
            TokshardError: a task failed in a way that may not recur.
        """


class InlineExecutor:
    """An `Executor` without workers: a task runs when its events are requested."""

    num_workers = 1
    run_shared: None = None

    def __init__(self, build: Build, stage: Stage, on_progress: OnProgress) -> None:
        self._runner = TaskRunner(build, stage, on_progress)
        self._run: Run | None = None

    @property
    def usage(self) -> WorkerUsage:
        """Only the peak of memory: the CPU time is the caller's."""
        return WorkerUsage(peak_bytes=peak_bytes(), num_workers=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def has_room(self) -> bool:
        """Whether no task waits to run."""
        return self._run is None

    def submit(self, run: Run) -> None:
        """Run the task when the next events are requested."""
        self._run = run

    def events(self) -> Iterator[Event]:
        """Run the task that was submitted."""
        run, self._run = self._run, None
        assert run is not None, "there are events only while a task runs"
        yield from self._runner.run(run)
        yield Ended(run.task)


MakeExecutor = Callable[[Build, Stage, int, OnProgress], Executor]
"""Makes the executor of a stage, given the number of tasks to run."""


def portable(error: Exception) -> Exception:
    """The error in a form that can cross processes."""
    if isinstance(error, TokshardError):
        return error
    return BuildError(
        f"a worker failed: {type(error).__name__}: {error}",
        hint="this is a bug in tokshard: run again with --workers 1 --debug and report what it prints",
    )


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024
