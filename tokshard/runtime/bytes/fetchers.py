"""A pool of threads with two queues: urgent tasks come before reads ahead."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

Answer = TypeVar("Answer")

_EXIT_SECONDS = 5.0
"""How long the end of the interpreter waits for threads: one may hang in a dead file system for ever."""


class _Queue:
    """The state that the threads share, apart from `Fetchers`, so that `Fetchers` can be freed."""

    def __init__(self, num_threads: int) -> None:
        self.changed = threading.Condition()
        self.urgent: dict[Future[Any], Callable[[], Any]] = {}  # in order
        self.ahead: dict[Future[Any], Callable[[], Any]] = {}
        self.threads: list[threading.Thread] = []
        self.num_threads, self.num_free, self.is_closed = num_threads, 0, False
        self._pid = os.getpid()
        _queues.add(self)

    def run(self) -> None:
        """Run tasks until it is closed."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.urgent or self.ahead or self.is_closed)
                tasks = self.urgent or self.ahead
                if not tasks:
                    return
                self.num_free -= 1
                future = next(iter(tasks))
                work = tasks.pop(future)
            answer, failure = None, None
            try:
                answer = work()
            except BaseException as error:  # noqa: BLE001 - the thread that waits for it raises it
                failure = error
            with self.changed:
                self.num_free += 1  # before the answer wakes a thread that starts the next task: it needs no new one
            if failure is None:
                future.set_result(answer)
            else:
                future.set_exception(failure)
            del future, work, answer, failure  # an answer is not kept until the next one comes

    def close(self) -> None:
        """Drop tasks that have not begun, and let the threads end."""
        if self._pid != os.getpid():  # the threads are the parent's, and one may have held the lock at the fork
            return
        with self.changed:
            self.is_closed = True
            for future in (*self.urgent, *self.ahead):
                future.cancel()
            self.urgent.clear()
            self.ahead.clear()
            self.changed.notify_all()


_queues: weakref.WeakSet[_Queue] = weakref.WeakSet()


class Fetchers:
    """Threads that start with the first task, and end with this object.

    Args:
        num_threads: the most threads.
    """

    def __init__(self, num_threads: int) -> None:
        self._queue = _Queue(num_threads)
        weakref.finalize(self, self._queue.close).atexit = False

    def start(self, work: Callable[[], Answer], *, is_urgent: bool) -> Future[Answer]:
        """Run a task in a thread.

        Args:
            is_urgent: run before all tasks that are not.
        """
        queue, future = self._queue, Future[Answer]()
        with queue.changed:
            if queue.is_closed:
                raise CancelledError
            if len(queue.urgent) + len(queue.ahead) >= queue.num_free and len(queue.threads) < queue.num_threads:
                thread = threading.Thread(target=queue.run, name="tokshard-fetch", daemon=True)
                try:
                    thread.start()
                    queue.threads.append(thread)
                    queue.num_free += 1
                except RuntimeError:  # the system starts no more: those that run do the work
                    if not queue.threads:
                        raise
            (queue.urgent if is_urgent else queue.ahead)[future] = work
            queue.changed.notify()
        return future

    def hurry(self, future: Future[Any]) -> None:
        """Make a task urgent: somebody waits for it."""
        with self._queue.changed:
            if (work := self._queue.ahead.pop(future, None)) is not None:
                self._queue.urgent[future] = work


def _end_all() -> None:
    """End the threads before the interpreter does: it would stop them in the middle of foreign code."""
    until = time.monotonic() + _EXIT_SECONDS
    queues = list(_queues)
    for queue in queues:
        queue.close()
    for queue in queues:
        for thread in queue.threads:
            with contextlib.suppress(RuntimeError):  # it is this one
                thread.join(max(0.0, until - time.monotonic()))


atexit.register(_end_all)
