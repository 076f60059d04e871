"""Items made ahead of a loop, in a thread."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import Generic, TypeVar

from tokshard.errors import LoaderError

Item = TypeVar("Item")

STOP_SECONDS = 5.0
"""A thread that hangs longer than this is abandoned: its storage may be dead."""

_EXIT_PRIORITY = 100
"""The thread ends before multiprocessing ends its processes, and waits for them."""


class Prefetch(Generic[Item]):
    """The items of one iterator, in order. A thread starts with the first request.

    Args:
        items: makes the iterator, in the thread.
        depth: items that are made ahead; 0: each is made when it is requested, without a thread.
        timeout_seconds: the longest wait for one item.
        reading: names the files being read, for the error after a time-out.

    Attributes:
        pid: the process that the thread runs in.
    """

    def __init__(
        self, items: Callable[[], Iterator[Item]], *, depth: int, timeout_seconds: float, reading: Callable[[], str]
    ) -> None:
        self.pid = os.getpid()
        self._timeout_seconds, self._reading = timeout_seconds, reading
        # an entry is room for one more item. Not a semaphore: the finalizer may run while this thread is inside of it,
        # and only a SimpleQueue accepts an entry then
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Item | BaseException] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        for _ in range(depth):
            self._room.put(None)
        arguments = (items, self._room, self._ready, self._is_closed)  # not self, which could then not be freed
        self._thread = threading.Thread(target=_run, args=arguments, name="tokshard-prefetch", daemon=True)
        # also when it is forgotten without close, or the interpreter ends; in a forked child it does nothing
        self._finalizer = Finalize(
            self, _stop, (self._room, self._is_closed, self._thread), exitpriority=_EXIT_PRIORITY
        )
        self._inline = None if depth else items()

    @property
    def num_ready(self) -> int:
        """Items that are ready."""
        return self._ready.qsize()

    def next(self) -> Item:
        """The next item. After an error, it is closed.

        Raises:
            LoaderError: no item came in time, it was closed meanwhile, or the system starts no more threads.
            BaseException: the iterator raised it.
        """
        if self._inline is not None:
            return next(self._inline)
        if self._thread.ident is None:  # not earlier, so that whoever has this object can close it
            try:
                self._thread.start()
            except RuntimeError as cause:
                hint = "raise the limit of the system (ulimit -u, or pids of a container), or give prefetch_factor=0"
                raise LoaderError(f"no batches can be made ahead: {cause}", hint=hint) from cause
        item = self._awaited()
        if item is None:
            error = LoaderError(
                f"no batch came for {self._timeout_seconds:g} s; the last reads were in {self._reading()}",
                hint="check that storage, or raise timeout_seconds",
            )
            self.close()
            raise error
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._room.put(None)
        return item

    def _awaited(self) -> Item | BaseException | None:
        """The next item or error; None if it does not come in time.

        Seconds are counted one by one, because a clock goes on while the job is suspended.
        """
        left = self._timeout_seconds
        while left > 0:
            seconds = min(left, 1.0)
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=seconds)
            left -= seconds
        return None

    def close(self) -> bool:
        """Stop the thread, and a `next` of another thread.

        Returns:
            Whether the thread has ended, and so uses nothing any more.
        """
        self._finalizer()
        error = LoaderError("the loader was closed while a batch was awaited", hint="iterate it again, if at all")
        self._ready.put(error)
        return self.pid == os.getpid() and not self._thread.is_alive()


def _run(
    items: Callable[[], Iterator[Item]],
    room: queue.SimpleQueue[None],
    ready: queue.SimpleQueue[Item | BaseException],
    is_closed: threading.Event,
) -> None:
    try:
        made = items()
        while True:
            room.get()
            if is_closed.is_set() or (item := next(made, None)) is None:
                return
            ready.put(item)
    except BaseException as error:  # noqa: BLE001 - the edge of a thread: the loop raises it
        ready.put(error)


def _stop(room: queue.SimpleQueue[None], is_closed: threading.Event, thread: threading.Thread) -> None:
    is_closed.set()
    room.put(None)  # wakes a thread that waits for room, which then ends
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(STOP_SECONDS)
