"""Which task runs next, when a build is done, and which error counts. Pure: no processes, no files.

Everything is ordered by `Key`. The lowest failing task decides, once all before it are done, and a limit on documents
is reached at the same task for any number of workers and any interleaving.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokshard.build.receipts import Receipt
from tokshard.build.tasks import Key, StreamTask, Task


@dataclass(frozen=True, slots=True)
class Cut:
    """A task that ran with more room than a run in order would have given it: it has to run again.

    Args:
        key: the task.
        cap: documents that it may write.
    """

    key: Key
    cap: int


class Schedule:
    """The state of a build.

    Args:
        tasks: in order.
        receipts: of tasks that are done already.
        limit: documents to write, or None for all.
    """

    def __init__(self, tasks: Sequence[Task | StreamTask], receipts: Iterable[Receipt], limit: int | None) -> None:
        self._tasks = tasks
        self._limit = limit
        self._receipts: dict[Key, Receipt] = {}
        self._successor: dict[tuple[int, int | None], Key] = {}
        self._failures: dict[Key, Exception] = {}
        self._running: set[Key] = set()
        self._next = 0
        self._front = 0
        self._front_segment: int | None = None
        self._front_key: Key | None = None
        self._written = 0
        self._before_front_key = 0
        for receipt in receipts:
            self.finished(receipt)

    # what happened

    def finished(self, receipt: Receipt) -> None:
        """A task or segment left a receipt."""
        self._receipts[receipt.key] = receipt.without_sources()
        self._failures.pop(receipt.key, None)
        self._successor[receipt.key[0], receipt.previous] = receipt.key
        self._advance()

    def failed(self, key: Key, error: Exception) -> None:
        """A task or segment failed."""
        self._failures[key] = error

    def released(self, task: Task | StreamTask) -> None:
        """Nobody works on a task any more: it is done, or it failed."""
        self._running.discard(task.key)

    # what to do

    def take(self) -> Task | StreamTask | None:
        """The lowest task that nobody has, now taken; None if there is none that can still matter."""
        task = self.peek()
        if task is not None:
            self._next += 1
            self._running.add(task.key)
        return task

    def peek(self) -> Task | StreamTask | None:
        """What `take` would give."""
        while self._next < len(self._tasks) and self._is_complete(self._tasks[self._next]):
            self._next += 1
        if self._next == len(self._tasks) or self.is_limit_reached:
            return None
        task = self._tasks[self._next]
        if self._failures and task.key > min(self._failures):
            return None
        return task

    def num_pending_streams(self) -> int:
        """Streams that nobody has; looks at a few tasks only."""
        ahead = self._tasks[self._next : self._next + 1024]
        return sum(isinstance(task, StreamTask) and not self._is_complete(task) for task in ahead)

    @property
    def cap(self) -> int | None:
        """Documents that a task started now may write: no task needs more than what is missing before it."""
        return None if self._limit is None else self._limit - self._written

    def done_segments(self, task: StreamTask) -> frozenset[int]:
        """Segments of a stream that have a receipt."""
        return frozenset(segment for first, segment in self._receipts if first == task.key[0])

    def is_wanted(self, key: Key) -> bool:
        """Whether a task or segment can still matter."""
        return not self.is_limit_reached and not (self._failures and key > min(self._failures))

    @property
    def is_limit_reached(self) -> bool:
        """Whether the tasks done from the start on without a gap hold enough documents."""
        return self._limit is not None and self._written >= self._limit

    @property
    def is_over(self) -> bool:
        """Whether nothing that can matter is left to do."""
        if self.is_limit_reached:
            return True
        if self._failures:
            lowest = min(self._failures)
            return self.peek() is None and not any(key <= lowest for key in self._running)
        return self.peek() is None and not self._running

    # the outcome

    @property
    def error(self) -> tuple[Key, Exception] | None:
        """The failure that decides, once `is_over`."""
        if self.is_limit_reached or not self._failures:
            return None
        key = min(self._failures)
        return key, self._failures[key]

    def boundary(self) -> Cut | None:
        """The task at which a limit on documents decides, if it has to run again, once `is_over`.

        With more room than a run in order would have given it, it read on behind the last document that is wanted: to
        more documents, to records that are left out, or to the record at which it failed.
        """
        if self._limit is None:
            return None
        if not self.is_limit_reached:
            return Cut(min(self._failures), self._limit - self._written) if self._failures else None
        assert self._front_key is not None
        room = self._limit - self._before_front_key
        return None if self._receipts[self._front_key].cap == room else Cut(self._front_key, room)

    def in_order(self) -> list[Key]:
        """The keys of all receipts that belong to the corpus, in order."""
        last = self._front_key if self.is_limit_reached else None
        return sorted(key for key in self._receipts if last is None or key <= last)

    def receipts_before(self, key: Key) -> list[Receipt]:
        """Receipts of the tasks before a task, in order."""
        return [self._receipts[done] for done in sorted(self._receipts) if done < key]

    def _is_complete(self, task: Task | StreamTask) -> bool:
        if isinstance(task, Task):
            return task.key in self._receipts
        segment: int | None = None
        while (key := self._successor.get((task.key[0], segment))) is not None:
            if self._receipts[key].is_last:
                return True
            segment = key[1]
        return False

    def _advance(self) -> None:
        """Count the documents of all tasks that are done from the start on without a gap."""
        while self._front < len(self._tasks) and not self.is_limit_reached:
            task = self._tasks[self._front]
            key = self._successor.get((task.key[0], self._front_segment)) if isinstance(task, StreamTask) else task.key
            receipt = None if key is None else self._receipts.get(key)
            if receipt is None:
                return
            self._before_front_key, self._front_key = self._written, receipt.key
            self._written += receipt.documents
            if isinstance(task, Task) or receipt.is_last:
                self._front, self._front_segment = self._front + 1, None
            else:
                self._front_segment = receipt.key[1]
