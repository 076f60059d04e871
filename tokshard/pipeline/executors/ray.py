"""Runs tasks on a Ray cluster. Ray handles placement, resources, nodes and workers.

A Ray task runs one whole task of a stage, even if that is a stream. It requests one CPU. A streaming generator returns
each receipt. An error of tokshard is returned as a value, so Ray never treats it as its own.

If a worker or node is lost, the loop of the stage restarts the task, not Ray (``max_retries=0``). Ray would call it
with the same arguments, and a stream would begin at its first segment, although most have a receipt.

Nodes share no memory with the driver, and perhaps no disk. So each node is checked before the first task, and each
worker checks again before its own first task: a node may have joined since.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import ray
from ray.exceptions import NodeDiedError, RayError, RayTaskError, RuntimeEnvSetupError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tokshard.errors import BuildError, StoreError, UsageError
from tokshard.format import names
from tokshard.pipeline.executors.base import Ended, Event, OnProgress, WorkerUsage, cpu_time, peak_bytes, portable
from tokshard.pipeline.executors.ray_cluster import num_cpus
from tokshard.pipeline.executors.worker import ENVIRONMENT
from tokshard.pipeline.request import Build, other_versions
from tokshard.pipeline.tasks.planning import AnyTask, Run
from tokshard.pipeline.tasks.running import InputReader, Stage, TaskRunner
from tokshard.pipeline.workspace.receipts import Receipt, TaskFailedError, progress_of
from tokshard.wording import first_line

_QUEUED_PER_CPU = 2
"""Tasks under way per CPU. One of them waits, so that a node that joins finds work, and an autoscaler sees a need."""
_MAX_LOSSES = 3
"""Workers that a task may lose, as many as Ray allows by default: a cluster loses nodes for other reasons, too."""
_CPUS_SECONDS = 10.0
"""How long a number of CPUs of the cluster is used before Ray is asked again."""
_STOP_SECONDS = 60.0
_NODE_SECONDS = 120.0
"""A node has this long to answer; it may have to start a Python process first."""


class RayExecutor:
    """An `Executor` over the workers of a cluster, after a check of all its nodes.

    Args:
        most_tasks: the most tasks in flight; None: enough to keep all CPUs busy.
    """

    run_shared: None = None

    def __init__(self, build: Build, stage: Stage, on_progress: OnProgress, *, most_tasks: int | None) -> None:
        self._build, self._stage, self._on_progress, self._most_tasks = build, stage, on_progress, most_tasks
        self._running: dict[Any, AnyTask] = {}
        self._num_cpus, self._counted = 0, -_CPUS_SECONDS
        self.usage = WorkerUsage()

    @property
    def num_workers(self) -> int:
        """The number of tasks that can run at once now."""
        if time.monotonic() - self._counted >= _CPUS_SECONDS:
            self._num_cpus, self._counted = max(1, num_cpus()), time.monotonic()
        return min(self._num_cpus, self._most_tasks or self._num_cpus)

    def __enter__(self) -> Self:
        self._setup = ray.put(set_up(self._build, self._stage))
        check_nodes(self._setup)
        self._run = ray.remote(run_task).options(
            num_cpus=1, num_returns="streaming", max_retries=0, runtime_env={"env_vars": ENVIRONMENT}
        )
        self.usage.num_workers = self.num_workers
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all tasks, and remove their unfinished files if all have ended."""
        ends = [values.completed() for values in self._running]
        for values in self._running:
            ray.cancel(values, force=True)
        self._running.clear()
        if not ends or not ray.wait(ends, num_returns=len(ends), timeout=_STOP_SECONDS, fetch_local=False)[1]:
            self._build.workspace.run.discard_spooled()

    def has_room(self) -> bool:
        """Whether few enough tasks are in flight: running tasks, and some that wait for a CPU."""
        return len(self._running) < (self._most_tasks or _QUEUED_PER_CPU * self.num_workers)

    def submit(self, run: Run) -> None:
        """Hand a task to Ray."""
        self._running[self._run.remote([self._setup], run)] = run.task

    def events(self) -> Iterator[Event]:
        """The next reports of the tasks."""
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
                yield Ended(task, self._loss(task, error), _MAX_LOSSES)
            else:
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, WorkerUsage):
                    self.usage.add(message)
                else:
                    self._on_progress(progress_of([message]))
                    yield message

    def _loss(self, task: AnyTask, error: RayError) -> BuildError:
        return BuildError(
            f"Ray lost {_MAX_LOSSES + 1} workers, one after another, with the task {task.key[0]}-{task.key[1]}: "
            f"{_said(error)}",
            hint="run the same command again: finished tasks are kept; if memory ran out, check with 'ray memory'",
        )


_FOLDER = f"{names.WORK}/nodes"
_MARK = f"{_FOLDER}/mark"
"""The file by which a node knows the output directory."""


Setup = tuple[Build, Stage, str, bytes]
"""Data for the workers of the cluster, put into the object store once: the last two are the driver's current
directory, where relative paths start, and the content of the mark."""


def set_up(build: Build, stage: Stage) -> Setup:
    """Mark the output directory, so nodes can check that they see the same one."""
    mark = secrets.token_hex(8).encode()
    build.workspace.store.put(_MARK, mark)
    return build, replace(stage, tasks=()), os.getcwd(), mark


def check_node(setup: list[Any]) -> BuildError | None:
    """Why this node cannot take part in a build, as the end of a sentence; None if it can.

    Args:
        setup: reference to a `Setup`; in a list, because Ray would fetch a bare one for each task.
    """
    try:
        return _problem(ray.get(setup[0]))
    except (StoreError, UsageError) as error:  # of a bucket that the driver reaches
        return BuildError(
            f"cannot take part: {error.problem}",
            hint=f"{error.hint}; nodes get variables from the env_vars of Ray's runtime environment",
        )


def _problem(found: Setup) -> BuildError | None:
    build, _, directory, mark = found
    others = other_versions(build)
    if others:
        return BuildError(
            f"has other packages: {'; '.join(others)}: the bytes could differ",
            hint="install the same versions on all nodes",
        )
    with contextlib.suppress(OSError):  # absolute paths do not need it
        os.chdir(directory)
    store, out = build.workspace.store, build.workspace.out
    shared = "on a file system that all nodes have at the same path"
    try:
        is_same = store.get(_MARK) == mark
    except OSError:
        is_same = False
    if not is_same:
        return BuildError(f"does not have the files of --out {out}", hint=f"give an --out {shared}")
    mine = f"{_FOLDER}/{secrets.token_hex(8)}"
    try:
        store.put(mine, mark)
        store.delete(mine)
    except OSError as error:
        return BuildError(
            f"cannot write to --out {out}: {error.strerror or error}",
            hint="let the user that Ray runs as write there, or give another --out",
        )
    try:
        InputReader(build).check(0)
    except TaskFailedError as error:
        return BuildError(
            f"cannot take part: {error.failure.place}{error.failure.problem}",
            hint=f"give sources {shared}; for data sets of the hub set HF_HOME to one",
        )
    return None


def run_task(setup: list[Any], run: Run) -> Iterator[Receipt | WorkerUsage | Exception]:
    """Run one task in this worker process. Yields its receipts, then its cost or its error."""
    before = cpu_time()
    try:
        yield from _runner(setup[0]).run(run)
    except Exception as error:  # noqa: BLE001 - a process edge
        yield portable(error)
    yield WorkerUsage(cpu_time() - before, peak_bytes())


@functools.lru_cache(maxsize=1)
def _runner(setup: Any) -> TaskRunner:
    """The runner that this process keeps between tasks of a stage: loading a tokenizer costs more than a small task."""
    problem = check_node([setup])  # the node may have joined since the first check
    if problem is not None:
        raise BuildError(f"node {os.uname().nodename} {problem.problem}", hint=problem.hint)
    build, stage, *_ = ray.get(setup)
    return TaskRunner(build, stage, lambda _: None)


def check_nodes(setup: Any) -> None:
    """Have every node that can run tasks check the output directory, the first input and its packages.

    Args:
        setup: reference to a `Setup`.

    Raises:
        BuildError: a node cannot take part in the build; the message names it.
    """
    asked = {}
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("CPU"):
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            checks = ray.remote(check_node).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
            asked[checks.remote([setup])] = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    _, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_NODE_SECONDS) if asked else ([], [])
    for answer, node in asked.items():
        if answer in silent:
            raise BuildError(
                f"{node} did not answer within {_NODE_SECONDS:.0f} s", hint="check the node with 'ray status'"
            )
        try:
            problem = ray.get(answer)
        except (NodeDiedError, TaskUnschedulableError):
            continue  # it has left meanwhile
        except RayError as error:
            raise BuildError(
                f"{node} cannot run tasks of tokshard: {_said(error)}",
                hint="install on all nodes the same Python, ray and tokshard as here",
            ) from error
        if problem is not None:
            raise BuildError(f"{node} {problem.problem}", hint=problem.hint)


def _said(error: Exception) -> str:
    """What an error of Ray says, or its cause."""
    return first_line(getattr(error, "cause", None) or error)
