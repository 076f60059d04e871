"""Running tasks in this process, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from tokshard.pipeline.executors.base import MakeRunner, OnProgress, Runner, TaskContext, Usage, peak_bytes
from tokshard.pipeline.failures import SegmentError
from tokshard.pipeline.tasks.decisions import Run
from tokshard.pipeline.tasks.events import Event, Failed, Finished, Released
from tokshard.pipeline.tasks.planning import Task
from tokshard.pipeline.tasks.runner import TaskRunner


class InlineExecutor:
    """An `Executor` without workers: a task runs while its events are asked for."""

    num_workers = 1

    def __init__(self, context: TaskContext, on_progress: OnProgress, *, make_runner: MakeRunner = TaskRunner) -> None:
        self._context, self._on_progress, self._make_runner = context, on_progress, make_runner
        self._runner: Runner | None = None
        self._run: Run | None = None

    @property
    def usage(self) -> Usage:
        """The peak of memory only: CPU time is counted as the caller's."""
        return Usage(peak_worker_bytes=peak_bytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner = None

    def can_take(self, run: Run) -> bool:  # noqa: ARG002 - all tasks are alike here
        """Whether no task waits to run."""
        return self._run is None

    def submit(self, run: Run) -> None:
        """Run the task when the next events are asked for."""
        self._run = run

    def abandon(self) -> None:
        """Forget the task that was submitted; between events nothing runs."""
        self._run = None

    def events(self) -> Iterator[Event]:
        """Run the task that was submitted."""
        run, self._run = self._run, None
        assert run is not None, "a schedule waits only while something runs"
        task = run.task
        try:
            if self._runner is None:
                self._runner = self._make_runner(self._context, self._on_progress)
            if isinstance(task, Task):
                yield Finished(self._runner.run_task(task, run.max_documents))
            else:
                assert isinstance(self._runner, TaskRunner), "only builds have streams"
                yield from map(Finished, self._runner.run_stream(task, run.max_documents, run.done_segments))
        except SegmentError as failure:
            yield Failed((task.key[0], failure.segment), failure.error)
        except Exception as error:  # noqa: BLE001 - the lowest failing task decides, not the first
            yield Failed(task.key, error)
        yield Released(task)
