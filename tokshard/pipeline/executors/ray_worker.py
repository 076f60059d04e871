"""What runs on the nodes of a Ray cluster: a look at whether a node can take part in a build, and its tasks."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray

from tokshard.errors import BuildError, SourceError, StoreError, TokshardError, UsageError
from tokshard.format import names
from tokshard.pipeline.executors.base import Usage, cpu_seconds, peak_bytes
from tokshard.pipeline.executors.messages import TaskDone, portable
from tokshard.pipeline.failures import SegmentError
from tokshard.pipeline.sources.opening import check_unchanged, open_file
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.decisions import Run
from tokshard.pipeline.tasks.events import Failed
from tokshard.pipeline.tasks.planning import Task
from tokshard.pipeline.tasks.runner import TaskRunner
from tokshard.pipeline.workspace.receipts import Progress, Receipt

_PROGRESS_SECONDS = 2.0
"""A worker says how far it is this often: the driver hears a thousand of them."""
_FOLDER = f"{names.WORK}/nodes"
_MARK = f"{_FOLDER}/mark"
"""The file by which a node knows the output directory."""
_SAME_BYTES = ("tokshard", "tokenizers", "pyarrow")
"""Packages that decide the bytes of a corpus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a worker process of the cluster needs; put into the object store once.

    Args:
        directory: the current one of the driver, from which relative paths start.
        mark: what the file in the output directory holds.
        versions: of the packages of the driver.
    """

    context: WorkerContext
    directory: str
    mark: bytes
    versions: dict[str, str]


def set_up(context: WorkerContext) -> Setup:
    """Mark the output directory, so that nodes can tell whether theirs is the same."""
    mark = secrets.token_hex(8).encode()
    context.workspace.store.put(_MARK, mark)
    return Setup(context=context, directory=os.getcwd(), mark=mark, versions=_versions())


def look(setup: list[Any]) -> BuildError | None:
    """What keeps this node from taking part in a build, as the end of a sentence; None if nothing does."""
    found: Setup = ray.get(setup[0])
    try:
        return _look(found)
    except (StoreError, UsageError) as error:  # of a bucket that the driver reaches
        return BuildError(
            f"cannot take part: {error.problem}",
            hint=f"{error.hint}; nodes get variables from the env_vars of Ray's runtime environment",
        )


def _look(found: Setup) -> BuildError | None:
    here = _versions()
    for package, version in found.versions.items():
        if here[package] != version:
            return BuildError(
                f"has {package} {here[package]}, and the driver {version}: the bytes could differ",
                hint="install the same versions on all nodes",
            )
    with contextlib.suppress(OSError):  # absolute paths do not need it
        os.chdir(found.directory)
    store = found.context.workspace.store
    shared = "on a file system that all nodes have at the same path"
    try:
        is_same = store.get(_MARK) == found.mark
    except OSError:
        is_same = False
    if not is_same:
        return BuildError(
            f"does not have the files of --out {found.context.workspace.out}", hint=f"give an --out {shared}"
        )
    mine = f"{_FOLDER}/{secrets.token_hex(8)}"
    try:
        store.put(mine, found.mark)
        store.delete(mine)
    except OSError as error:
        return BuildError(
            f"cannot write to --out {found.context.workspace.out}: {error.strerror or error}",
            hint="let the user that Ray runs as write there, or give another --out",
        )
    first = found.context.inputs[0]
    try:
        check_unchanged(first)
        with open_file(first) as file:
            file.read(1)
    except (SourceError, OSError) as error:
        problem = error.problem if isinstance(error, TokshardError) else f"{first.location} cannot be read: {error}"
        return BuildError(
            f"cannot take part: {problem}", hint=f"give sources {shared}; for data sets of the hub set HF_HOME to one"
        )
    return None


def _versions() -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in _SAME_BYTES}


def run_task(setup: list[Any], run: Run) -> Iterator[Progress | TaskDone | Failed]:
    """Run one task in this worker process. Yields what was done now and then, receipts, and a failure.

    Args:
        setup: reference to a `Setup`; in a list, because Ray would fetch a bare one for each task.
    """
    worker = _worker(setup[0])
    threading.Thread(target=worker.run, args=(run,), daemon=True).start()
    done, said = None, time.monotonic()
    while (message := worker.messages.get()) is not None:
        if not isinstance(message, Progress):
            if done is not None:
                yield done
            done = None
            yield message
            continue
        done = message if done is None else done + message
        if time.monotonic() - said >= _PROGRESS_SECONDS:
            yield done
            done, said = None, time.monotonic()


@functools.lru_cache(maxsize=1)
def _worker(setup: Any) -> _Worker:
    """What this process keeps between the tasks of a stage: a loaded tokenizer costs more than a small task."""
    return _Worker(setup)


class _Worker:
    """Runs tasks in a thread, because a generator cannot yield in the middle of a call.

    Attributes:
        messages: what it has to say; None after each task.
    """

    def __init__(self, setup: Any) -> None:
        self._setup = setup
        self._runner: TaskRunner | None = None
        self.messages: queue.SimpleQueue[Progress | TaskDone | Failed | None] = queue.SimpleQueue()

    def run(self, run: Run) -> None:
        """Run a task; nothing it does escapes but through `messages`."""
        before = cpu_seconds()
        try:
            for receipt in self._receipts(run):
                self.messages.put(TaskDone(receipt, Usage(cpu_seconds() - before, peak_bytes())))
                before = cpu_seconds()
        except SegmentError as failure:
            self.messages.put(Failed((run.task.key[0], failure.segment), portable(failure.error)))
        except Exception as error:  # noqa: BLE001 - a process edge
            self.messages.put(Failed(run.task.key, portable(error)))
        finally:
            self.messages.put(None)

    def _receipts(self, run: Run) -> Iterator[Receipt]:
        if self._runner is None:  # here, because it may fail like the task itself
            problem = look([self._setup])
            if problem is not None:
                raise BuildError(f"node {os.uname().nodename} {problem.problem}", hint=problem.hint)
            self._runner = TaskRunner(ray.get(self._setup).context, self.messages.put)
        if isinstance(run.task, Task):
            yield self._runner.run_task(run.task, run.max_documents)
        else:
            yield from self._runner.run_stream(run.task, run.max_documents, run.done_segments)
