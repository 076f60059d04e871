"""A worker process: takes runs of tasks, or chunks to prepare, from a pipe, and answers with the results."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from typing import Any

from tokshard.errors import BuildError
from tokshard.forking import ForkLock, environment, not_started
from tokshard.pipeline.executors.base import WorkerUsage, cpu_time, peak_bytes, portable
from tokshard.pipeline.request import Build, check_versions
from tokshard.pipeline.sources.records import Chunk
from tokshard.pipeline.tasks.planning import Run
from tokshard.pipeline.tasks.running import Stage, TaskRunner

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # without it, modules in the current directory, which may be someone else's data, come before those of Python
    "PYTHONSAFEPATH": "1",
    # encodings come and go in megabytes: giving them back to the kernel each time costs a fifth of the throughput
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
}

# a server that has imported everything once forks workers from a process without threads: safe in a program that has
# some, and each worker costs milliseconds instead of the third of a second that the imports take
START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"

# environment, main module and fork server belong to the process, and its threads may run several builds at once
_lock, _builds, _changes = ForkLock(), list[None](), contextlib.ExitStack()


def worker_main(connection: Connection, build: Build, stage: Stage) -> None:
    """Run each run of a task, or prepare each chunk, from the coordinator, until it closes the pipe or dies.

    The answers are progress and receipts, or the prepared chunk, and at the end the cost of the worker so far. If a
    failure may not recur, the answer is the error.
    """
    os.environ.update(ENVIRONMENT)  # a fork server of the caller's program was started without it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the coordinator decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    inbox: queue.SimpleQueue[Run | Chunk] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    runner: TaskRunner | None = None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            message = inbox.get()
            try:
                if runner is None:  # here, because it may fail like a task
                    check_versions(build)
                    runner = TaskRunner(build, stage, connection.send)
                for answer in runner.run(message) if isinstance(message, Run) else [runner.prepare(message)]:
                    connection.send(answer)
                connection.send(WorkerUsage(cpu_time(), peak_bytes()))
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:  # noqa: BLE001 - a process edge
                connection.send(portable(error))


def _receive(connection: Connection, inbox: queue.SimpleQueue[Run | Chunk]) -> None:
    """Receive in a thread: the coordinator never waits for a busy worker, and its end is noticed at once."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(connection.recv())
    end_with_coordinator()


def end_with_coordinator() -> None:
    """End this process: a worker that outlives its build would write next to the workers of the next one."""
    os._exit(1)


def prepare_workers() -> None:
    """Start the process that workers are forked from. It imports their modules, which takes half a second of CPU.

    Raises:
        BuildError: it cannot be started.
    """
    if START_METHOD == "forkserver":
        from multiprocessing import forkserver

        multiprocessing.set_forkserver_preload([worker_main.__module__])
        try:
            with _lock.now, environment(ENVIRONMENT), _interrupts_blocked():
                try:
                    forkserver.ensure_running()
                except ChildProcessError:  # the server belongs to the parent of this forked process
                    vars(forkserver)["_forkserver"]._forkserver_pid = None  # noqa: SLF001
                    forkserver.ensure_running()
        except OSError as error:  # it listens on a socket in the temporary directory
            problem, hint = not_started(error)
            raise BuildError(problem, hint=hint) from error


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C, which a process that is started inside inherits: it would end its imports with a traceback."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # its start would unblock signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def restoring_environment() -> Iterator[None]:
    """Restore at the end the environment and the fork server of the calling program; of several builds, the last does.

    A server that ran before belongs to the program, and stays.
    """
    with _lock.now:
        if not _builds:
            _changes.enter_context(_changed_program())
        _builds.append(None)
    try:
        yield
    finally:
        with _lock.now:
            _builds.pop()
            if not _builds:
                _changes.close()


@contextlib.contextmanager
def _changed_program() -> Iterator[None]:
    from multiprocessing import forkserver

    server: Any = vars(forkserver)["_forkserver"]  # no public function stops it
    was_running, preload = server._forkserver_pid is not None, server._preload_modules  # noqa: SLF001
    with environment({"TOKENIZERS_PARALLELISM": "false", "FASTOKENS_BPE_THREADS": "1"}):
        try:
            yield
        finally:
            if not was_running and server._forkserver_pid is not None:  # noqa: SLF001
                # by itself it ends only after all workers, and Ctrl-C may leave a starting worker that nobody waits for
                os.kill(server._forkserver_pid, signal.SIGKILL)  # noqa: SLF001
                with contextlib.suppress(ChildProcessError):  # a program that ignores SIGCHLD cannot wait for it
                    server._stop()  # noqa: SLF001
                server._forkserver_pid, server._preload_modules = None, preload  # noqa: SLF001


@contextlib.contextmanager
def starting_worker() -> Iterator[None]:
    """Processes started inside have the environment of workers, and do not import the program's main module.

    Nothing of it is sent to them, and it may lack a guard, take seconds, change the directory, or be no file at all.
    Ctrl-C waits: it would leave half-made objects of multiprocessing, whose end prints a traceback.
    """
    main = sys.modules["__main__"]
    with _lock.now, environment(ENVIRONMENT), _interrupts_blocked():
        before, main.__spec__ = main.__spec__, ModuleSpec("tokshard.__main__", None)  # which multiprocessing leaves out
        try:
            yield
        finally:
            main.__spec__ = before
