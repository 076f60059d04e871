"""Running tasks on a Ray cluster: placement, resources, and the life of nodes and workers are Ray's.

A Ray task runs one task of the schedule, whole: a stream too. It asks for one CPU. What it has to say comes through a
streaming generator: progress now and then, each receipt, and a failure of tokshard as a value, so that Ray never takes
one for its own.

A task whose worker or node was lost is started again by the schedule, as in every executor, and not by Ray
(``max_retries=0``). Ray would call it with the same arguments: a stream would begin at its first segment, though most
have a receipt by now. And it refuses a generator that yields another number of values the second time.

Nodes share no memory with the driver and may share no disk either. So each node is looked at before the first task, and
each worker looks again before its own: a node may have joined since.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Self

import ray
from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError

from tokshard.errors import BuildError
from tokshard.pipeline.executors.base import OnProgress, Usage
from tokshard.pipeline.executors.messages import TaskDone, portable
from tokshard.pipeline.executors.ray_cluster import RayCluster, first_line, look_at_nodes
from tokshard.pipeline.executors.ray_worker import run_task, set_up
from tokshard.pipeline.executors.worker import ENVIRONMENT
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.decisions import Run
from tokshard.pipeline.tasks.events import Event, Failed, Finished, Lost, Released
from tokshard.pipeline.tasks.planning import StreamTask, Task
from tokshard.pipeline.workspace.receipts import Progress

_QUEUED_PER_CPU = 2
"""Tasks under way per CPU. One of them waits, so that a node that joins finds work, and an autoscaler sees a need."""
_MAX_LOSSES = 3
"""Workers that a task may cost, as many as Ray allows by default: on a cluster, nodes go for reasons of their own."""
_CPUS_SECONDS = 10.0
"""How long the number of CPUs of the cluster counts as known."""
_STOP_SECONDS = 60.0


class RayExecutor:
    """An `Executor` over the workers of a cluster, after a look at all its nodes.

    Args:
        cluster: which this process is connected to as long as the executor is used.
    """

    def __init__(self, context: WorkerContext, on_progress: OnProgress, *, cluster: RayCluster) -> None:
        self._context, self._on_progress, self._cluster = context, on_progress, cluster
        self._running: dict[Any, Task | StreamTask] = {}
        self._usage = Usage()
        self._num_cpus, self._counted = 0, -_CPUS_SECONDS

    @property
    def usage(self) -> Usage:
        """The cost of the tasks that have ended; the start of the workers is Ray's."""
        return self._usage

    @property
    def num_workers(self) -> int:
        """Tasks that can run at once now."""
        if time.monotonic() - self._counted >= _CPUS_SECONDS:
            self._num_cpus, self._counted = max(1, self._cluster.num_cpus()), time.monotonic()
        return min(self._num_cpus, self._cluster.num_workers or self._num_cpus)

    def __enter__(self) -> Self:
        self._setup = ray.put(set_up(self._context))
        look_at_nodes(self._setup)
        self._run = ray.remote(run_task).options(
            num_cpus=1, num_returns="streaming", max_retries=0, runtime_env={"env_vars": ENVIRONMENT}
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def can_take(self, run: Run) -> bool:  # noqa: ARG002 - Ray places any
        """Whether few enough tasks are under way: those that run, and some that wait for a CPU to become free."""
        return len(self._running) < (self._cluster.num_workers or _QUEUED_PER_CPU * self.num_workers)

    def submit(self, run: Run) -> None:
        """Hand a task to Ray."""
        self._running[self._run.remote([self._setup], run)] = run.task

    def events(self) -> Iterator[Event]:
        """What the tasks that have something to say say next."""
        running = list(self._running)
        ray.wait(running, num_returns=1, fetch_local=False)
        ready, _ = ray.wait(running, num_returns=len(running), timeout=0, fetch_local=False)
        for values in ready:
            task = self._running[values]
            try:
                message = ray.get(next(values))
            except StopIteration:
                del self._running[values]
                yield Released(task)
            except (RayTaskError, RuntimeEnvSetupError) as error:  # it would happen again
                del self._running[values]
                yield Failed(task.key, portable(error))
                yield Released(task)
            except RayError as error:
                del self._running[values]
                yield Lost(task, self._loss(task, error), _MAX_LOSSES)
            else:
                yield from self._hear(message)

    def abandon(self) -> None:
        """Stop all tasks, and remove what they left unfinished.

        Raises:
            BuildError: a node does not say that it stopped; its task could still write.
        """
        if not self._stop():
            raise BuildError(
                f"a task could not be stopped within {_STOP_SECONDS:.0f} s", hint="run the same command again"
            )
        self._context.workspace.clear_partial()

    def _stop(self) -> bool:
        """Cancel all tasks; whether they have ended."""
        ends = [values.completed() for values in self._running]
        for values in self._running:
            ray.cancel(values, force=True)
        self._running.clear()
        return not ends or not ray.wait(ends, num_returns=len(ends), timeout=_STOP_SECONDS, fetch_local=False)[1]

    def _hear(self, message: Progress | TaskDone | Failed) -> Iterator[Event]:
        match message:
            case Progress():
                self._on_progress(message)
            case TaskDone(receipt, usage):
                self._usage += usage
                yield Finished(receipt)
            case Failed():
                yield message

    def _loss(self, task: Task | StreamTask, error: RayError) -> BuildError:
        return BuildError(
            f"Ray lost {_MAX_LOSSES + 1} workers, one after another, while they {self._context.purpose(task)}: "
            f"{first_line(error)}",
            hint="run the same command again: finished tasks are kept; if memory ran out, look with 'ray memory'",
        )
