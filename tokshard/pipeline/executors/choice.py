"""The executors of a build: this process or worker processes by default, or Ray on request."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tokshard.errors import UsageError
from tokshard.pipeline.executors.base import Executor, InlineExecutor, MakeExecutor, OnProgress
from tokshard.pipeline.executors.processes import ProcessExecutor
from tokshard.pipeline.executors.worker import prepare_workers
from tokshard.pipeline.options import BuildOptions
from tokshard.pipeline.progress import Observer
from tokshard.pipeline.request import Build
from tokshard.pipeline.tasks.planning import StreamTask
from tokshard.pipeline.tasks.running import Stage


@contextlib.contextmanager
def executors(options: BuildOptions, observer: Observer) -> Iterator[MakeExecutor]:
    """A factory for the executor of each stage, connected to a Ray cluster if Ray runs the tasks.

    Raises:
        UsageError: Ray cannot be reached.
    """
    if options.ray is None:
        yield _local
        return
    from tokshard.pipeline.executors.ray import RayExecutor
    from tokshard.pipeline.executors.ray_cluster import connected

    with connected(options.ray, num_workers=options.workers, observer=observer):
        yield lambda build, stage, _, on_progress: RayExecutor(build, stage, on_progress, most_tasks=options.workers)


def _local(build: Build, stage: Stage, num_tasks: int, on_progress: OnProgress) -> Executor:
    num_workers = build.options.workers or cpu_count()
    if build.options.max_documents is not None and build.inputs.read_once:
        num_workers = 1  # several read past the limit and then again up to it, and such inputs cannot be read again
    has_streams = any(isinstance(task, StreamTask) for task in stage.tasks)
    num_workers = num_workers if has_streams else min(num_workers, num_tasks)
    if num_workers == 1:
        return InlineExecutor(build, stage, on_progress)
    prepare_workers()
    return ProcessExecutor(build, stage, on_progress, num_workers=num_workers)


def check_executor(options: BuildOptions) -> None:
    """Refuse an executor whose package is missing.

    Raises:
        UsageError: Ray is requested, but not installed.
    """
    if options.ray is None:
        return
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--ray needs the package ray: {error}", hint="pip install 'tokshard[ray]'") from error


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
