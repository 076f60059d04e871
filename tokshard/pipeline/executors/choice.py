"""The executors of a build: by default this process or worker processes, or Ray if it is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tokshard.errors import UsageError
from tokshard.pipeline.executors.base import Executor, OnProgress
from tokshard.pipeline.executors.inline import InlineExecutor
from tokshard.pipeline.executors.processes import ProcessExecutor
from tokshard.pipeline.options import RAY, BuildOptions
from tokshard.pipeline.progress import Observer
from tokshard.pipeline.tasks.context import WorkerContext

MakeExecutor = Callable[[WorkerContext, OnProgress, int], Executor]
"""Makes the executor of one stage; the number is of processes, if they are processes of this machine."""


@contextlib.contextmanager
def executors(options: BuildOptions, observer: Observer) -> Iterator[MakeExecutor]:
    """What makes the executor of each stage of a build; connected to a Ray cluster if that runs the tasks.

    Raises:
        UsageError: Ray cannot be reached.
    """
    if options.executor != RAY:
        yield _local
        return
    from tokshard.pipeline.executors.ray import RayExecutor
    from tokshard.pipeline.executors.ray_cluster import connected

    with connected(options.ray_address, num_workers=options.workers, observer=observer) as cluster:
        yield lambda context, on_progress, _: RayExecutor(context, on_progress, cluster=cluster)


def _local(context: WorkerContext, on_progress: OnProgress, num_workers: int) -> Executor:
    if num_workers == 1:
        return InlineExecutor(context, on_progress)
    return ProcessExecutor(context, on_progress, num_workers=num_workers)


def check_executor(options: BuildOptions) -> None:
    """Refuse an executor whose package is missing.

    Raises:
        UsageError: Ray is asked for, and is not installed.
    """
    if options.executor != RAY:
        return
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"--executor ray needs the package ray: {error}", hint="pip install 'tokshard[ray]'"
        ) from error
