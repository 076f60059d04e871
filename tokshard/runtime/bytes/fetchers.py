"""Threads that fetch: what is waited for first, then what is read ahead."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Generic, TypeVar

Answer = TypeVar("Answer")

_EXIT_SECONDS = 5.0
"""How long the end of the interpreter waits for threads: one may hang in a dead file system for ever."""


class Task(Generic[Answer]):
    """Something to fetch, once."""

    def __init__(self, work: Callable[[], Answer]) -> None:
        self._work = work
        self._answer: Future[Answer] = Future()

    def run(self) -> None:
        """Fetch it, in this thread."""
        try:
            answer = self._work()
        except BaseException as error:  # noqa: BLE001 - who waits raises it
            self._answer.set_exception(error)
        else:
            self._answer.set_result(answer)

    def cancel(self) -> None:
        """Give up before it began."""
        self._answer.cancel()

    def result(self) -> Answer:
        """What was fetched, as soon as it is there.

        Raises:
            CancelledError: the threads were closed before it began.
        """
        return self._answer.result()


class _Queue:
    """What the threads share, so that none of them keeps `Fetchers` from being freed."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self.renew()
        _queues.add(self)

    def renew(self) -> None:
        """Begin without threads and tasks."""
        self._changed = threading.Condition()
        self._urgent: deque[Task[object]] = deque()
        self._ahead: deque[Task[object]] = deque()
        self._threads: list[threading.Thread] = []
        self._num_waiting = 0
        self._is_closed = False

    def put(self, task: Task[object], *, is_urgent: bool) -> None:
        with self._changed:
            if self._is_closed:
                raise CancelledError
            (self._urgent if is_urgent else self._ahead).append(task)
            pending = len(self._urgent) + len(self._ahead)
            if pending > self._num_waiting and len(self._threads) < self._num_threads:
                thread = threading.Thread(target=_run, args=(self,), name="tokshard-fetch", daemon=True)
                thread.start()
                self._threads.append(thread)
            self._changed.notify()

    def hurry(self, task: Task[object]) -> None:
        with self._changed, contextlib.suppress(ValueError):  # it has begun, or is urgent
            self._ahead.remove(task)
            self._urgent.append(task)

    def take(self) -> Task[object] | None:
        """Wait for the next task; None: there will be none."""
        with self._changed:
            while True:
                if self._urgent or self._ahead:
                    return (self._urgent or self._ahead).popleft()
                if self._is_closed:
                    return None
                self._num_waiting += 1
                self._changed.wait()
                self._num_waiting -= 1

    def close(self) -> None:
        """Drop what has not begun, and let the threads end."""
        with self._changed:
            self._is_closed = True
            for task in (*self._urgent, *self._ahead):
                task.cancel()
            self._urgent.clear()
            self._ahead.clear()
            self._changed.notify_all()

    def join(self, until: float) -> None:
        """Wait for the threads, up to a time of the monotonic clock."""
        for thread in self._threads:
            with contextlib.suppress(RuntimeError):  # it is this one
                thread.join(max(0.0, until - time.monotonic()))


_queues: weakref.WeakSet[_Queue] = weakref.WeakSet()


class Fetchers:
    """Threads that start when there is something to do, and end with this object. In a forked child there are none yet.

    Args:
        num_threads: how many at most.
    """

    def __init__(self, num_threads: int) -> None:
        self._queue = _Queue(num_threads)
        weakref.finalize(self, self._queue.close).atexit = False

    def start(self, work: Callable[[], Answer], *, is_urgent: bool) -> Task[Answer]:
        """Fetch something in a thread.

        Args:
            is_urgent: before all that is not.
        """
        task = Task(work)
        self._queue.put(task, is_urgent=is_urgent)  # type: ignore[arg-type]  # a queue does not look at answers
        return task

    def hurry(self, task: Task[Answer]) -> None:
        """Somebody waits for a task that was not urgent."""
        self._queue.hurry(task)  # type: ignore[arg-type]


def _run(queue: _Queue) -> None:
    while (task := queue.take()) is not None:
        task.run()
        del task  # an answer is not kept until the next one comes


def _renew_all() -> None:
    for queue in list(_queues):
        queue.renew()


def _end_all() -> None:
    """End the threads before the interpreter does: it would stop them in the middle of foreign code."""
    until = time.monotonic() + _EXIT_SECONDS
    queues = list(_queues)
    for queue in queues:
        queue.close()
    for queue in queues:
        queue.join(until)


os.register_at_fork(after_in_child=_renew_all)
atexit.register(_end_all)
