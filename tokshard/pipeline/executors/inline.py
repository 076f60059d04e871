"""Running tasks in this process, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from tokshard.pipeline.executors.base import Ended, Event, OnProgress, Usage, peak_bytes
from tokshard.pipeline.request import Build
from tokshard.pipeline.tasks.planning import Run
from tokshard.pipeline.tasks.running import Stage, TaskRunner


class InlineExecutor:
    """An `Executor` without workers: a task runs while its events are asked for."""

    num_workers = 1
    run_mapped: None = None

    def __init__(self, build: Build, stage: Stage, on_progress: OnProgress) -> None:
        self._runner = TaskRunner(build, stage, on_progress)
        self._run: Run | None = None

    @property
    def usage(self) -> Usage:
        """The peak of memory only: CPU time is counted as the caller's."""
        return Usage(peak_worker_bytes=peak_bytes(), num_workers=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def has_room(self) -> bool:
        """Whether no task waits to run."""
        return self._run is None

    def submit(self, run: Run) -> None:
        """Run the task when the next events are asked for."""
        self._run = run

    def events(self) -> Iterator[Event]:
        """Run the task that was submitted."""
        run, self._run = self._run, None
        assert run is not None, "there are events only while a task runs"
        yield from self._runner.run(run)
        yield Ended(run.task)
