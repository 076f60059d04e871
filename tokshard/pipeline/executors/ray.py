"""Running tasks on a Ray cluster: placement, resources, and the life of nodes and workers are Ray's.

A Ray task runs one task of a stage, whole: a stream too. It asks for one CPU. What it leaves comes through a streaming
generator: each receipt, and an error of tokshard as a value, so that Ray never takes one for its own.

A task whose worker or node was lost is started again by the loop of every stage, and not by Ray (``max_retries=0``):
Ray would call it with the same arguments, and a stream would begin at its first segment, though most have a receipt.

Nodes share no memory with the driver and may share no disk either. So each node is checked before the first task, and
each worker checks again before its own: a node may have joined since.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Self

import ray
from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError

from tokshard.errors import BuildError
from tokshard.pipeline.executors.base import Ended, Event, Lost, OnProgress, Usage, portable
from tokshard.pipeline.executors.ray_cluster import RayCluster, check_nodes, first_line
from tokshard.pipeline.executors.ray_worker import run_task, set_up
from tokshard.pipeline.executors.worker import ENVIRONMENT, Broken, Idle
from tokshard.pipeline.request import Build
from tokshard.pipeline.tasks.planning import AnyTask, Run
from tokshard.pipeline.tasks.stage import Stage
from tokshard.pipeline.workspace.receipts import Receipt, progress_of

_QUEUED_PER_CPU = 2
"""Tasks under way per CPU. One of them waits, so that a node that joins finds work, and an autoscaler sees a need."""
_MAX_LOSSES = 3
"""Workers that a task may cost, as many as Ray allows by default: on a cluster, nodes go for reasons of their own."""
_CPUS_SECONDS = 10.0
"""How long the number of CPUs of the cluster counts as known."""
_STOP_SECONDS = 60.0


class RayExecutor:
    """An `Executor` over the workers of a cluster, after a check of all its nodes.

    Args:
        cluster: which this process is connected to as long as the executor is used.
    """

    can_map = False

    def __init__(self, build: Build, stage: Stage, on_progress: OnProgress, *, cluster: RayCluster) -> None:
        self._build, self._stage, self._on_progress, self._cluster = build, stage, on_progress, cluster
        self._running: dict[Any, AnyTask] = {}
        self._num_cpus, self._counted = 0, -_CPUS_SECONDS
        self.usage = Usage()

    @property
    def num_workers(self) -> int:
        """Tasks that can run at once now."""
        if time.monotonic() - self._counted >= _CPUS_SECONDS:
            self._num_cpus, self._counted = max(1, self._cluster.num_cpus()), time.monotonic()
        return min(self._num_cpus, self._cluster.num_workers or self._num_cpus)

    def __enter__(self) -> Self:
        self._setup = ray.put(set_up(self._build, self._stage))
        check_nodes(self._setup)
        self._run = ray.remote(run_task).options(
            num_cpus=1, num_returns="streaming", max_retries=0, runtime_env={"env_vars": ENVIRONMENT}
        )
        self.usage.num_workers = self.num_workers
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all tasks, and remove what they left unfinished if all have ended."""
        ends = [values.completed() for values in self._running]
        for values in self._running:
            ray.cancel(values, force=True)
        self._running.clear()
        if not ends or not ray.wait(ends, num_returns=len(ends), timeout=_STOP_SECONDS, fetch_local=False)[1]:
            self._build.workspace.clear_partial()

    def has_room(self) -> bool:
        """Whether few enough tasks are under way: those that run, and some that wait for a CPU to become free."""
        return len(self._running) < (self._cluster.num_workers or _QUEUED_PER_CPU * self.num_workers)

    def submit(self, run: Run) -> None:
        """Hand a task to Ray."""
        self._running[self._run.remote([self._setup], run)] = run.task

    def events(self) -> Iterator[Event]:
        """What the tasks report next."""
        running = list(self._running)
        ray.wait(running, num_returns=1, fetch_local=False)
        ready, _ = ray.wait(running, num_returns=len(running), timeout=0, fetch_local=False)
        for values in ready:
            task = self._running[values]
            try:
                message = ray.get(next(values))
            except StopIteration:
                del self._running[values]
                yield Ended(task)
            except (RayTaskError, RuntimeEnvSetupError) as error:  # it would happen again
                raise portable(error) from error
            except RayError as error:
                del self._running[values]
                yield Lost(task, self._loss(task, error), _MAX_LOSSES)
            else:
                if isinstance(message, Broken):
                    raise message.error
                if isinstance(message, Idle):
                    self.usage.add(message.usage)
                else:
                    self._on_progress(progress_of([message]))
                    yield message

    def run_mapped(self, run: Run) -> Iterator[Receipt]:
        """Never called: tasks are not divided further on a cluster."""
        raise NotImplementedError(run)

    def _loss(self, task: AnyTask, error: RayError) -> BuildError:
        return BuildError(
            f"Ray lost {_MAX_LOSSES + 1} workers, one after another, with the task {task.key[0]}-{task.key[1]}: "
            f"{first_line(error)}",
            hint="run the same command again: finished tasks are kept; if memory ran out, check with 'ray memory'",
        )
