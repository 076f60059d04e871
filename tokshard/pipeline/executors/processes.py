"""Running tasks in worker processes of this machine.

A stream (an input that can only be read from its start) goes to one worker as a whole as long as there are streams for
all workers. Otherwise a `StreamFeeder` reads it and hands its segments to free workers, so that one big file uses all
cores. Text crosses processes; token ids never do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from tokshard.pipeline.executors.base import MakeRunner, OnProgress, TaskContext, Usage
from tokshard.pipeline.executors.messages import FeederFailed, Idle, SegmentReady, TaskDone
from tokshard.pipeline.executors.stream_feeder import StreamFeeder
from tokshard.pipeline.executors.worker_process import WorkerPool, WorkerProcess
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.decisions import Run
from tokshard.pipeline.tasks.events import Event, Failed, Finished, Lost, Released
from tokshard.pipeline.tasks.planning import StreamTask
from tokshard.pipeline.tasks.runner import TaskRunner
from tokshard.pipeline.workspace.receipts import Progress


class ProcessExecutor:
    """An `Executor` that starts worker processes when there is work for them.

    Args:
        num_workers: processes at a time, at most.
    """

    def __init__(
        self, context: TaskContext, on_progress: OnProgress, *, num_workers: int, make_runner: MakeRunner = TaskRunner
    ) -> None:
        self._context, self._on_progress, self.num_workers = context, on_progress, num_workers
        self._pool = WorkerPool(context, make_runner, num_workers=num_workers)
        self._lock = threading.Lock()
        self._feeders: dict[int, StreamFeeder] = {}
        self._num_feeders = 0

    @property
    def usage(self) -> Usage:
        """The cost of the workers that have stopped."""
        return self._pool.usage

    def __enter__(self) -> Self:
        self._events, self._events_in = multiprocessing.Pipe(duplex=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()
        self._events.close()

    def can_take(self, run: Run) -> bool:
        """Whether a worker is free or may be started. A stream to be fed waits until a worker is on the one before."""
        if not self._pool.has_free():
            return False
        if not self._is_to_be_fed(run):
            return True
        busy = {worker.feeder for worker in self._pool.running}
        return all(feeder.offered is not None or feeder in busy for feeder in self._feeders.values())

    def submit(self, run: Run) -> None:
        """Give a task to a free worker, or start to feed a stream.

        Raises:
            BuildError: no worker can be started.
        """
        if self._is_to_be_fed(run):
            assert isinstance(self._context, WorkerContext), "only builds have streams"
            self._num_feeders += 1
            feeder = StreamFeeder(self._context, run, number=self._num_feeders, events=self._events_in, lock=self._lock)
            self._feeders[self._num_feeders] = feeder
            feeder.start()
            return
        worker = self._pool.take_free()
        worker.task = run.task
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died, which `events` sees as well
            worker.connection.send(run)

    def events(self) -> Iterator[Event]:
        """What workers and feeders report."""
        by_handle: dict[Any, WorkerProcess] = {}
        for worker in self._pool.running:
            by_handle[worker.connection] = worker
            by_handle[worker.process.sentinel] = worker
        for handle in wait([self._events, *by_handle]):
            if handle is self._events:
                yield from self._hear_feeder(self._events.recv())
            elif by_handle[handle] not in self._pool.running:
                continue  # it was found dead before in this loop
            elif isinstance(handle, Connection):
                yield from self._hear_worker(by_handle[handle])
            elif not by_handle[handle].connection.poll():  # else its last messages are received first
                yield from self._bury(by_handle[handle])
        self._assign_segments()

    def abandon(self) -> None:
        """Stop all workers and feeders, and remove what they left unfinished."""
        for feeder in self._feeders.values():
            feeder.stop()
        self._feeders.clear()
        self._pool.stop()
        self._context.workspace.clear_partial()

    def _hear_worker(self, worker: WorkerProcess) -> Iterator[Event]:
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

    def _bury(self, worker: WorkerProcess) -> Iterator[Event]:
        """Remove a worker that died. Its task is lost; of a stream that it had a segment of, all that is not done."""
        error = self._pool.bury(worker)
        if worker.feeder is not None:
            worker.feeder.loss = error
            worker.feeder.stop()
            yield from self._retire(worker.feeder)
        elif worker.task is not None:
            yield Lost(worker.task, error)

    # streams

    def _is_to_be_fed(self, run: Run) -> bool:
        if not isinstance(run.task, StreamTask):
            return False
        return run.task.is_here or 0 < run.num_waiting_streams < self.num_workers

    def _assign_segments(self) -> None:
        """Hand segments that wait for a worker to free workers, the lowest stream first."""
        offers = [feeder for feeder in self._feeders.values() if feeder.offered is not None]
        for feeder in sorted(offers, key=lambda feeder: feeder.task.key):
            if not self._pool.has_free():
                return
            worker = self._pool.take_free()
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
        """Release a stream once nothing more of it is read and no worker has a segment of it."""
        if not feeder.is_ended or any(worker.feeder is feeder for worker in self._pool.running):
            return
        for number, known in list(self._feeders.items()):
            if known is feeder:
                del self._feeders[number]
                yield Released(feeder.task) if feeder.loss is None else Lost(feeder.task, feeder.loss)
