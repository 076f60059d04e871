"""What runs on the nodes of a Ray cluster: a check that a node can take part in a build, and its tasks."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray

from tokshard.errors import BuildError, StoreError, UsageError
from tokshard.format import names
from tokshard.pipeline.executors.base import Usage, cpu_seconds, peak_bytes, portable
from tokshard.pipeline.executors.worker import Broken, Idle
from tokshard.pipeline.request import Build, other_versions
from tokshard.pipeline.tasks.planning import Run
from tokshard.pipeline.tasks.reading import InputReader
from tokshard.pipeline.tasks.running import TaskRunner
from tokshard.pipeline.tasks.stage import Stage
from tokshard.pipeline.workspace.receipts import Receipt, TaskFailedError

_FOLDER = f"{names.WORK}/nodes"
_MARK = f"{_FOLDER}/mark"
"""The file by which a node knows the output directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a worker process of the cluster needs; put into the object store once.

    Args:
        directory: the current one of the driver, from which relative paths start.
        mark: what the file in the output directory holds.
    """

    build: Build
    stage: Stage
    directory: str
    mark: bytes


def set_up(build: Build, stage: Stage) -> Setup:
    """Mark the output directory, so that nodes can tell whether theirs is the same."""
    mark = secrets.token_hex(8).encode()
    build.workspace.store.put(_MARK, mark)
    return Setup(build=build, stage=stage.for_workers(), directory=os.getcwd(), mark=mark)


def check_node(setup: list[Any]) -> BuildError | None:
    """What keeps this node from taking part in a build, as the end of a sentence; None if nothing does.

    Args:
        setup: reference to a `Setup`; in a list, because Ray would fetch a bare one for each task.
    """
    found: Setup = ray.get(setup[0])
    try:
        return _problem(found)
    except (StoreError, UsageError) as error:  # of a bucket that the driver reaches
        return BuildError(
            f"cannot take part: {error.problem}",
            hint=f"{error.hint}; nodes get variables from the env_vars of Ray's runtime environment",
        )


def _problem(found: Setup) -> BuildError | None:
    build = found.build
    others = other_versions(build)
    if others:
        return BuildError(
            f"has other packages: {'; '.join(others)}: the bytes could differ",
            hint="install the same versions on all nodes",
        )
    with contextlib.suppress(OSError):  # absolute paths do not need it
        os.chdir(found.directory)
    store, out = build.workspace.store, build.workspace.out
    shared = "on a file system that all nodes have at the same path"
    try:
        is_same = store.get(_MARK) == found.mark
    except OSError:
        is_same = False
    if not is_same:
        return BuildError(f"does not have the files of --out {out}", hint=f"give an --out {shared}")
    mine = f"{_FOLDER}/{secrets.token_hex(8)}"
    try:
        store.put(mine, found.mark)
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
            f"cannot take part: {error.failure.problem}",
            hint=f"give sources {shared}; for data sets of the hub set HF_HOME to one",
        )
    return None


def run_task(setup: list[Any], run: Run) -> Iterator[Receipt | Idle | Broken]:
    """Run one task in this worker process. Yields its receipts, and what it cost or why it broke."""
    before = cpu_seconds()
    try:
        yield from _runner(setup[0]).run(run)
    except Exception as error:  # noqa: BLE001 - a process edge
        yield Broken(portable(error))
    yield Idle(Usage(cpu_seconds() - before, peak_bytes()))


@functools.lru_cache(maxsize=1)
def _runner(setup: Any) -> TaskRunner:
    """What this process keeps between the tasks of a stage: a loaded tokenizer costs more than a small task."""
    problem = check_node([setup])  # the node may have joined since the first check
    if problem is not None:
        raise BuildError(f"node {os.uname().nodename} {problem.problem}", hint=problem.hint)
    found: Setup = ray.get(setup)
    return TaskRunner(found.build, found.stage, lambda _: None)
