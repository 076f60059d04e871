"""The batches of one loader: when they are made ahead, when they are made anew, and who may take them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from tokshard.errors import LoaderError
from tokshard.runtime.batches import Packed
from tokshard.runtime.cursor import Cursor
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.prefetch import Prefetcher
from tokshard.runtime.recycling import Recycler
from tokshard.runtime.steps import Ranks
from tokshard.runtime.stop import Stop

HELD_BATCHES = 4
"""Batches that a loop is expected to hold at a time. Holding more costs new memory for each."""

Batch = TypeVar("Batch")


class Feed(Generic[Batch]):
    """Batches of a plan in order. Threads and processes start when the first batch is asked for.

    Args:
        plan: what to read.
        ranks: which rows of a step.
        finish: turns rows into a batch, in memory of the recycler; called in the thread.
        num_workers: processes that read; 0: the thread does.
        depth: batches that are made ahead.
        timeout_seconds: the longest wait for one batch.
        start_method: of the processes.
    """

    def __init__(
        self,
        plan: StreamPlan,
        ranks: Ranks,
        finish: Callable[[Packed, Recycler], Batch],
        *,
        num_workers: int,
        depth: int,
        timeout_seconds: float,
        start_method: str,
    ) -> None:
        self.plan = plan
        self.prefetcher: Prefetcher[tuple[Batch, int]] | None = None
        self.wait_seconds, self.num_masked_tokens = 0.0, 0
        self._ranks, self._finish = ranks, finish
        self._num_workers, self._depth = num_workers, depth
        self._timeout_seconds, self._start_method = timeout_seconds, start_method
        self._is_stale = True
        self._pid = os.getpid()
        self._users: dict[str, int] = {}  # the thread that is in here

    @property
    def num_ready(self) -> int:
        """Batches that are ready."""
        return 0 if self.prefetcher is None else self.prefetcher.num_ready

    def next(self, cursor: Cursor, stop: Stop) -> Batch:
        """The next batch.

        Args:
            cursor, stop: where the next step begins and where the pass ends. Used after `discard`; else the batches
                continue.

        Raises:
            LoaderError: a worker died, or no batch came in time.
            CorpusError: a shard is missing or damaged.
        """
        prefetcher = self._started(cursor, stop)
        started = time.perf_counter()
        try:
            batch, num_masked = prefetcher.next_batch()
        except BaseException:
            self.close()
            raise
        self.wait_seconds += time.perf_counter() - started
        self.num_masked_tokens += num_masked
        return batch

    def discard(self) -> None:
        """Drop the batches that were made ahead."""
        self._is_stale = True

    def close(self) -> None:
        """Stop the thread and the workers."""
        if self.prefetcher is not None:
            self.prefetcher.close()
            self.prefetcher = None
        if self._pid != os.getpid():
            self._users.clear()  # a thread of the parent

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Refuse two threads at once, and a forked child that would read what its parent reads.

        Raises:
            LoaderError: it is either.
        """
        if self.prefetcher is not None and self.prefetcher.pid != os.getpid():
            raise LoaderError(
                f"process {self.prefetcher.pid} reads from this loader, and this is process {os.getpid()}, forked "
                "from it",
                hint="make a loader in each process, or close this one here first",
            )
        me = threading.get_ident()
        if self._users.setdefault("thread", me) != me:  # one step, which no other thread interrupts
            raise LoaderError(
                "this loader is used by two threads at once",
                hint="use it from one thread, or make one loader per thread",
            )
        try:
            yield
        finally:
            self._users.clear()

    def _started(self, cursor: Cursor, stop: Stop) -> Prefetcher[tuple[Batch, int]]:
        if self.prefetcher is None:
            if self._pid != os.getpid():
                self.plan, self._pid = self.plan.reopened(), os.getpid()
            finish, recycler = self._finish, Recycler(self._depth + HELD_BATCHES)
            self.prefetcher = Prefetcher(
                self.plan,
                # a thread that held this object would keep it from being freed
                lambda packed: (finish(packed, recycler), packed.num_masked_tokens),
                num_workers=self._num_workers,
                depth=self._depth,
                timeout_seconds=self._timeout_seconds,
                start_method=self._start_method,
            )
            self._is_stale = True
        if self._is_stale:
            mixture = self.plan.mixture(cursor).since(cursor.sample)
            self.prefetcher.start(mixture, self.plan.masked(cursor), self._ranks, cursor.sample, stop)
            self._is_stale = False
        return self.prefetcher
