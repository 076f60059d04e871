"""Running tasks in worker processes of this machine.

A stream (an input that can only be read from its start) goes to one worker as a whole while there are streams for all
workers; else a `StreamFeeder` hands its segments to whichever worker is free, so that one big file uses all cores. Text
crosses processes, ids never do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from tokshard.errors import BuildError
from tokshard.pipeline.executors.base import Event, Failed, Finished, Lost, OnProgress, Released, Usage
from tokshard.pipeline.executors.messages import FeederFailed, Idle, SegmentReady, TaskDone
from tokshard.pipeline.executors.stream_feeder import StreamFeeder
from tokshard.pipeline.executors.worker import ENVIRONMENT, START_METHOD, worker_main
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.planning import StreamTask, Task
from tokshard.pipeline.tasks.schedule import Run
from tokshard.pipeline.workspace.receipts import Progress

_STOP_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class _Worker:
    number: int
    process: Any
    connection: Connection
    task: Task | StreamTask | None = None
    feeder: StreamFeeder | None = None
    usage: Usage = field(default_factory=Usage)


class ProcessExecutor:
    """An `Executor` over worker processes, which are started when there is something for them to do.

    Args:
        num_workers: at most so many at a time.
    """

    def __init__(self, context: WorkerContext, on_progress: OnProgress, *, num_workers: int) -> None:
        self._context, self._on_progress, self._num_workers = context, on_progress, num_workers
        self._lock = threading.Lock()
        self._feeders: dict[int, StreamFeeder] = {}
        self._workers: list[_Worker] = []
        self._num_started = self._num_feeders = 0
        self._usage = Usage()

    @property
    def usage(self) -> Usage:
        """The cost of the workers that have stopped."""
        return self._usage

    def __enter__(self) -> Self:
        self._events, self._events_in = multiprocessing.Pipe(duplex=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()
        self._events.close()

    def can_take(self, run: Run) -> bool:
        """Whether a worker is free, or may be started; but while a stream is fed, not for another one."""
        if not self._has_free_worker():
            return False
        if not self._is_to_be_fed(run):
            return True
        busy = {worker.feeder for worker in self._workers}
        return all(feeder.offered is not None or feeder in busy for feeder in self._feeders.values())

    def submit(self, run: Run) -> None:
        """Give a task to a free worker, or start to feed a stream.

        Raises:
            BuildError: no worker can be started.
        """
        if self._is_to_be_fed(run):
            self._num_feeders += 1
            feeder = StreamFeeder(self._context, run, number=self._num_feeders, events=self._events_in, lock=self._lock)
            self._feeders[self._num_feeders] = feeder
            feeder.start()
            return
        worker = self._free_worker()
        worker.task = run.task
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died; `events` sees that, too
            worker.connection.send(run)

    def events(self) -> Iterator[Event]:
        """What workers and feeders have to say."""
        by_handle: dict[Any, _Worker] = {}
        for worker in self._workers:
            by_handle[worker.connection] = worker
            by_handle[worker.process.sentinel] = worker
        for handle in wait([self._events, *by_handle]):
            if handle is self._events:
                yield from self._hear_feeder(self._events.recv())
            elif by_handle[handle] not in self._workers:
                continue  # its end was seen already
            elif isinstance(handle, Connection):
                yield from self._hear_worker(by_handle[handle])
            elif not by_handle[handle].connection.poll():  # else hear its last words first
                yield from self._bury(by_handle[handle])
        self._assign_segments()

    def abandon(self) -> None:
        """Stop all workers and feeders, and remove what they left unfinished."""
        for feeder in self._feeders.values():
            feeder.stop()
        self._feeders.clear()
        for worker in self._workers:
            worker.process.terminate()
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(_STOP_SECONDS)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            self._usage += worker.usage
        self._workers.clear()
        self._context.workspace.clear_partial()

    # workers

    def _has_free_worker(self) -> bool:
        return len(self._workers) < self._num_workers or any(worker.task is None for worker in self._workers)

    def _free_worker(self) -> _Worker:
        for worker in self._workers:
            if worker.task is None:
                return worker
        worker = self._start_worker()
        self._workers.append(worker)
        return worker

    def _start_worker(self) -> _Worker:
        number = self._num_started
        self._num_started += 1
        ours, theirs = multiprocessing.Pipe()
        process: Any = multiprocessing.get_context(START_METHOD).Process(  # type: ignore[attr-defined]
            target=worker_main, args=(theirs, self._context), name=f"tokshard-worker-{number}", daemon=True
        )
        try:
            with environment(ENVIRONMENT):
                process.start()
        except (EOFError, OSError) as error:  # the process that they are forked from was killed, or nothing forks
            ours.close()
            raise BuildError(
                f"worker {number} cannot be started: {type(error).__name__}: {error}",
                hint="run the same command again: finished tasks are kept; if memory ran out, try fewer --workers",
            ) from error
        finally:
            theirs.close()  # so that the pipe ends when the worker does
        return _Worker(number=number, process=process, connection=ours)

    def _hear_worker(self, worker: _Worker) -> Iterator[Event]:
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            yield from self._bury(worker)
            return
        if isinstance(message, Progress):
            self._on_progress(message)
        elif isinstance(message, TaskDone):
            worker.usage = message.usage
            yield Finished(message.receipt)
        elif isinstance(message, Failed):
            if worker.feeder is not None:
                worker.feeder.stop()  # nothing after a failure counts
            yield message
        elif isinstance(message, Idle):
            feeder, task = worker.feeder, worker.task
            worker.feeder = worker.task = None
            if feeder is not None:
                yield from self._retire(feeder)
            elif task is not None:
                yield Released(task)

    def _bury(self, worker: _Worker) -> Iterator[Event]:
        """Take leave of a worker that died. What it was on is lost; a stream that it had a segment of, whole."""
        worker.process.join(_STOP_SECONDS)
        worker.process.kill()  # if only its pipe was closed
        error = self._death(worker)
        worker.connection.close()
        self._workers.remove(worker)
        self._usage += worker.usage
        if worker.feeder is not None:
            worker.feeder.loss = error
            worker.feeder.stop()
            yield from self._retire(worker.feeder)
        elif worker.task is not None:
            yield Lost(worker.task, error)

    def _death(self, worker: _Worker) -> BuildError:
        code = worker.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        what = ""
        if worker.task is not None:
            first = self._context.inputs[worker.task.key[0]]
            what = f" while it read {first.location}"
        memory = "; SIGKILL often means that memory ran out: try fewer --workers" if code == -signal.SIGKILL else ""
        return BuildError(
            f"worker {worker.number} (pid {worker.process.pid}) {how}{what}",
            hint=f"run the same command again: finished tasks are kept{memory}",
        )

    # streams

    def _is_to_be_fed(self, run: Run) -> bool:
        if not isinstance(run.task, StreamTask):
            return False
        return run.task.is_here or 0 < run.num_waiting_streams < self._num_workers

    def _assign_segments(self) -> None:
        """Give the segments that are offered to free workers, the lowest stream first."""
        offers = [feeder for feeder in self._feeders.values() if feeder.offered is not None]
        for feeder in sorted(offers, key=lambda feeder: feeder.task.key):
            if not self._has_free_worker():
                return
            worker = self._free_worker()
            worker.feeder, worker.task = feeder, feeder.task
            feeder.give(worker.connection)

    def _hear_feeder(self, message: Any) -> Iterator[Event]:
        feeder = self._feeders.get(message.feeder)
        if feeder is None:
            return  # it was stopped
        if isinstance(message, SegmentReady):
            if not feeder.is_ended:
                feeder.offered = message.segment
        elif isinstance(message, FeederFailed):
            yield Failed((feeder.task.key[0], message.segment), message.error)
        else:
            feeder.is_ended = True
            yield from self._retire(feeder)

    def _retire(self, feeder: StreamFeeder) -> Iterator[Event]:
        """Let a stream go when nothing more of it is read and no worker is on a segment of it."""
        if not feeder.is_ended or any(worker.feeder is feeder for worker in self._workers):
            return
        for number, known in list(self._feeders.items()):
            if known is feeder:
                del self._feeders[number]
                yield Released(feeder.task) if feeder.loss is None else Lost(feeder.task, feeder.loss)


def prepare_workers() -> None:
    """Start to import what workers need, in a process from which they are forked."""
    if START_METHOD == "forkserver":
        from multiprocessing import forkserver

        multiprocessing.set_forkserver_preload([worker_main.__module__])
        with environment(ENVIRONMENT):
            forkserver.ensure_running()


@contextlib.contextmanager
def leaving_the_program_alone() -> Iterator[None]:
    """Undo at the end what a build changes in the program that calls it: its environment, and the fork server.

    A server that runs already is the program's own, and stays.
    """
    from multiprocessing import forkserver

    server: Any = vars(forkserver)["_forkserver"]  # it has no public way to stop it
    was_running, preload = server._forkserver_pid is not None, server._preload_modules  # noqa: SLF001
    with environment({"TOKENIZERS_PARALLELISM": "false"}):
        try:
            yield
        finally:
            if not was_running and server._forkserver_pid is not None:  # noqa: SLF001
                server._stop()  # noqa: SLF001
                server._preload_modules = preload  # noqa: SLF001


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Variables for a child that is started inside; spawned processes read them before they load any library."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
