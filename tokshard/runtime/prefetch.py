"""Batches made ahead of the training loop, in a thread.

A job says where a rank starts to read, and with which weights. The thread makes the steps itself, or takes them from
worker processes in turn: each of W workers makes every W-th step. After a change of weights or a skip, a new job
replaces the one before.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any, Generic, TypeVar

from tokshard.errors import LoaderError
from tokshard.runtime.batches import Packed
from tokshard.runtime.masks import MaskedTokens
from tokshard.runtime.order.mixture import Mixture
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.steps import Ranks
from tokshard.runtime.stop import Stop
from tokshard.runtime.workers import STOP_SECONDS, Job, Worker, check_pickles, steps_of_workers

Batch = TypeVar("Batch")

_EXIT_PRIORITY = 100
"""Workers ignore SIGTERM, so they must end before multiprocessing ends its processes with it and waits for them."""


@dataclass(frozen=True, slots=True)
class _Result:
    job: int
    value: Any
    error: BaseException | None = None


class _Inbox:
    """What the thread knows of its messages: the latest job, and how many more batches there is room for."""

    def __init__(self, messages: queue.SimpleQueue[Job | int | None], depth: int) -> None:
        self._messages, self._depth = messages, depth
        self._job: Job | None = None
        self._free = 0
        self._is_closed = False

    def next_job(self, last: int) -> Job | None:
        """Wait for a job newer than `last`; None: stop."""
        while not self._is_closed and (self._job is None or self._job.number == last):
            self._read(self._messages.get())
        return None if self._is_closed else self._job

    def may_continue(self, job: int) -> bool:
        """Wait until there is room for a batch of a job; False: another job replaced it."""
        while not self._is_closed and self._job is not None and self._job.number == job:
            if self._free and self._messages.empty():
                self._free -= 1
                return True
            self._read(self._messages.get())
        return False

    def _read(self, message: Job | int | None) -> None:
        if message is None:
            self._is_closed = True
        elif isinstance(message, Job):
            self._job, self._free = message, self._depth
        elif self._job is not None and message == self._job.number:
            self._free += 1


class Prefetcher(Generic[Batch]):
    """Makes the batches of a job in order.

    Args:
        plan: reads the rows.
        finish: makes a batch of rows; called in the thread.
        num_workers: processes that read; 0: the thread itself does.
        depth: batches that are made ahead.
        timeout_seconds: the longest wait for one batch.
        start_method: of the processes: ``fork``, ``spawn`` or ``forkserver``.

    Raises:
        PlanError: the plan does not pickle, so worker processes cannot have it.
    """

    def __init__(
        self,
        plan: StreamPlan,
        finish: Callable[[Packed], Batch],
        *,
        num_workers: int,
        depth: int,
        timeout_seconds: float,
        start_method: str,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._messages: queue.SimpleQueue[Job | int | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._job = -1
        self._plan = plan
        if num_workers:
            check_pickles(plan)
        self._workers: list[Worker] = []
        self._thread = threading.Thread(
            target=_run,
            args=(_Inbox(self._messages, depth), self._results, plan, self._workers, finish),
            name="tokshard-prefetch",
            daemon=True,
        )
        # also when the loader is forgotten without close, or the interpreter ends; in a forked child it does nothing
        self._finalizer = Finalize(
            self, _stop, (self._messages, self._thread, self._workers), exitpriority=_EXIT_PRIORITY
        )
        self.pid = os.getpid()
        try:
            for number in range(num_workers):
                self._workers.append(Worker(plan, number, num_workers, start_method))
        except BaseException:
            self.close()  # those that have started
            raise
        self._thread.start()

    def start(self, mixture: Mixture, masked: MaskedTokens | None, ranks: Ranks, sample: int, stop: Stop) -> None:
        """Make the batches from a sample on, and drop those of the job before."""
        self._job += 1
        self._messages.put(Job(self._job, mixture, masked, ranks, sample, stop))

    @property
    def num_ready(self) -> int:
        """Batches that can be had at once, those of earlier jobs included."""
        return self._results.qsize()

    def next_batch(self) -> Batch:
        """The next batch.

        Raises:
            LoaderError: a worker died, or no batch came in time.
            CorpusError: a shard is missing or damaged.
        """
        while True:
            try:
                result = self._results.get(timeout=self._timeout_seconds)
            except queue.Empty:
                raise self._timed_out() from None
            if result.job != self._job:
                continue
            if result.error is not None:
                self.close()
                raise result.error
            self._messages.put(self._job)  # there is room for one more
            batch: Batch = result.value
            return batch

    def close(self) -> None:
        """Stop thread and workers, and a `next_batch` that another thread waits in."""
        self._finalizer()
        error = LoaderError("the loader was closed while a batch was awaited", hint="iterate it again, or not at all")
        self._results.put(_Result(self._job, None, error))

    def _timed_out(self) -> LoaderError:
        if self._workers:
            reading = [worker.reading() for worker in self._workers]
        else:
            reading = [getattr(source, "reading", None) or "" for source in self._plan.sources]
        self.close()
        shards = ", ".join(sorted({name for name in reading if name})) or "no shard yet"
        return LoaderError(
            f"no batch came for {self._timeout_seconds:g} s; the last reads were in {shards}",
            hint="check that storage, or raise timeout_seconds",
        )


def _run(
    inbox: _Inbox,
    results: queue.SimpleQueue[_Result],
    plan: StreamPlan,
    workers: list[Worker],
    finish: Callable[[Packed], Any],
) -> None:
    last, plan = -1, plan.reader()
    while (job := inbox.next_job(last)) is not None:
        last = job.number
        try:
            steps = steps_of_workers(workers, job) if workers else job.steps(plan)
            while inbox.may_continue(job.number) and (packed := next(steps, None)) is not None:
                results.put(_Result(job.number, finish(packed)))
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: the loop raises it
            results.put(_Result(job.number, None, error))


def _stop(messages: queue.SimpleQueue[Job | int | None], thread: threading.Thread, workers: list[Worker]) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    for worker in workers:
        worker.kill()
    messages.put(None)
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(STOP_SECONDS)
    for worker in workers:
        worker.leave(max(0.0, deadline - time.monotonic()), may_close=not thread.is_alive())
