"""Which task runs next, when a build is done, and which error counts. Pure: no processes, no files.

Everything is ordered by `Key`. The lowest failing task decides, once all before it are done, and a limit on documents
is reached at the same task for any number of workers and any interleaving.

If damaged inputs are to be left out, then at the same moment, when the damage is the failure that decides: its input
and all that came of it are forgotten, as if it had not been an input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tokshard.pipeline.failures import BadInputError, TooManyBadRecordsError
from tokshard.pipeline.tasks.bad_record_limit import BadRecordLimit
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task
from tokshard.pipeline.workspace.receipts import Receipt


@dataclass(frozen=True, slots=True)
class Cut:
    """A task that ran with more room than a run in order would have given it: it has to run again.

    Args:
        key: the task.
        cap: documents that it may write.
    """

    key: Key
    cap: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a schedule does about damage and bad records, beside failing.

    Args:
        on_bad_input: is told of a damaged input that is left out, before its receipts are discarded; None: it is a
            failure.
        on_discard: is told of a receipt that is none any more.
        on_receipt: is told of each that a task leaves.
        max_bad_records: None: any number.
    """

    on_bad_input: Callable[[BadInputError], None] | None = None
    on_discard: Callable[[Key], None] = lambda _: None
    on_receipt: Callable[[Receipt], None] = lambda _: None
    max_bad_records: BadRecordLimit | None = None


class Schedule:
    """The state of a build.

    Args:
        tasks: in order.
        receipts: of tasks that are done already.
        limit: documents to write, or None for all.
        policy: default: every failure is one, and any number of records may be bad.
        bad_inputs: inputs that were left out before.
    """

    def __init__(
        self,
        tasks: Sequence[Task | StreamTask],
        receipts: Iterable[Receipt],
        limit: int | None,
        policy: Policy | None = None,
        bad_inputs: Iterable[int] = (),
    ) -> None:
        self._policy = policy or Policy()
        self._limit = limit
        self._bad_inputs = set(bad_inputs)
        self._tasks = [_without(task, self._bad_inputs) for task in tasks]
        self._receipts: dict[Key, Receipt] = {}
        self._successor: dict[tuple[int, int | None], Key] = {}
        self._failures: dict[Key, Exception] = {}
        self._running: set[Key] = set()
        self._repeated: set[Key] = set()
        self._next = 0
        self._reset_front()
        for receipt in receipts:
            self._take_in(receipt)

    # what happened

    def finished(self, receipt: Receipt) -> None:
        """A task or segment left a receipt."""
        self._policy.on_receipt(receipt)
        self._take_in(receipt)

    def failed(self, key: Key, error: Exception) -> None:
        """A task or segment failed."""
        if not self._is_gone(key):
            self._failures[key] = error

    def released(self, task: Task | StreamTask) -> None:
        """Nobody works on a task any more: it is done, or it failed."""
        self._running.discard(task.key)
        if self._bad_inputs and self._limit is not None:
            self._next = 0  # it may have been given too little room, before an input was left out

    # what to do

    def goes_on(self) -> bool:
        """Whether something is left to do. Leaves out a damaged input when that is what decides."""
        while self.is_over and (failure := self._damage_that_decides()) is not None:
            if self._limit is not None and failure[0] not in self._repeated and not self._is_read_once(failure[0]):
                # with exactly the room that is left, the limit may fall before the damage
                key = failure[0]
                self._repeated.add(key)
                # its stream is read again, and meets what follows again
                self._failures = {at: error for at, error in self._failures.items() if at[0] != key[0]}
                self._next = 0
            else:
                self._leave_out(failure[1])
        return not self.is_over

    def take(self) -> Task | StreamTask | None:
        """The lowest task that nobody has, now taken; None if there is none that can still matter."""
        task = self.peek()
        if task is not None:
            self._next += 1
            self._running.add(task.key)
        return task

    def peek(self) -> Task | StreamTask | None:
        """What `take` would give."""
        while self._next < len(self._tasks) and self._is_settled(self._tasks[self._next]):
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
        return sum(isinstance(task, StreamTask) and not self._is_settled(task) for task in ahead)

    @property
    def cap(self) -> int | None:
        """Documents that a task started now may write: no task needs more than what is missing before it."""
        return None if self._limit is None else self._limit - self._written

    def done_segments(self, task: StreamTask) -> frozenset[int]:
        """Segments of a stream that have a receipt."""
        return frozenset(segment for first, segment in self._receipts if first == task.key[0])

    def is_wanted(self, key: Key) -> bool:
        """Whether a task or segment can still matter."""
        if self.is_limit_reached or self._is_gone(key):
            return False
        return not (self._failures and key > min(self._failures))

    @property
    def is_limit_reached(self) -> bool:
        """Whether the tasks done from the start on without a gap hold enough documents."""
        return self._limit is not None and self._written >= self._limit

    @property
    def is_over(self) -> bool:
        """Whether nothing that can matter is left to do, but for leaving out a damaged input."""
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
            if not self._failures or self._is_read_once(min(self._failures)):
                return None
            return Cut(min(self._failures), self._limit - self._written)
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

    def receipts_in_order(self) -> list[Receipt]:
        """All receipts that belong to the corpus, in order."""
        return [self._receipts[key] for key in self.in_order()]

    def task(self, key: Key) -> Task | StreamTask:
        """The task of a receipt."""
        return next(task for task in reversed(self._tasks) if task.key <= key and not _is_empty(task, self._bad_inputs))

    def _take_in(self, receipt: Receipt) -> None:
        if not self._bad_inputs.isdisjoint(receipt.inputs):
            self._policy.on_discard(receipt.key)  # its input turned out to be damaged meanwhile
            return
        self._receipts[receipt.key] = receipt.without_sources()
        self._failures.pop(receipt.key, None)
        self._successor[receipt.key[0], receipt.previous] = receipt.key
        self._advance()

    def _is_read_once(self, key: Key) -> bool:
        """Whether a task cannot run again. With a limit, one worker runs all in order, so its room was exact."""
        task = self.task(key)
        return isinstance(task, StreamTask) and task.is_here

    def _is_settled(self, task: Task | StreamTask) -> bool:
        """Whether a task is done, under way, failed, or left out."""
        if task.key in self._running or _is_empty(task, self._bad_inputs):
            return True
        if self._failures and (
            task.key in self._failures
            if isinstance(task, Task)
            else any(first == task.key[0] for first, _ in self._failures)
        ):
            return True
        return self._is_complete(task)

    def _is_complete(self, task: Task | StreamTask) -> bool:
        if isinstance(task, Task):
            return task.key in self._receipts
        segment: int | None = None
        while (key := self._successor.get((task.key[0], segment))) is not None:
            if self._receipts[key].is_last:
                return True
            segment = key[1]
        return False

    def _reset_front(self) -> None:
        self._front = 0
        self._front_segment: int | None = None
        self._front_key: Key | None = None
        self._written = 0
        self._before_front_key = 0
        self._records = self._bad_records = 0

    def _advance(self) -> None:
        """Count the documents of all tasks that are done from the start on without a gap."""
        while self._front < len(self._tasks) and not self.is_limit_reached:
            task = self._tasks[self._front]
            if _is_empty(task, self._bad_inputs):
                self._front += 1
                continue
            key = self._successor.get((task.key[0], self._front_segment)) if isinstance(task, StreamTask) else task.key
            receipt = None if key is None else self._receipts.get(key)
            if receipt is None or self._was_cut_short(receipt) or self._has_too_many_bad_records(receipt):
                return
            self._before_front_key, self._front_key = self._written, receipt.key
            self._written += receipt.documents
            self._records += receipt.records_read
            self._bad_records += receipt.num_rejects
            if isinstance(task, Task) or receipt.is_last:
                self._front, self._front_segment = self._front + 1, None
            else:
                self._front_segment = receipt.key[1]

    # damaged inputs and bad records

    def _damage_that_decides(self) -> tuple[Key, BadInputError] | None:
        if self._policy.on_bad_input is None or (failure := self.error) is None:
            return None
        key, error = failure
        return (key, error) if isinstance(error, BadInputError) else None

    def _leave_out(self, damage: BadInputError) -> None:
        """Forget an input, those found with it, and all that came of them."""
        assert self._policy.on_bad_input is not None
        for found in (damage, *damage.others):
            self._policy.on_bad_input(found)
        bad = {found.source for found in (damage, *damage.others)}
        self._bad_inputs |= bad
        stale = {task.key for task in self._tasks if any(_reads(task, index) for index in bad)}
        streams = {task.key[0] for task in self._tasks if isinstance(task, StreamTask)}
        self._tasks = [_without(task, bad) for task in self._tasks]
        self._failures = {
            key: error
            for key, error in self._failures.items()
            if not self._is_gone(key) and not (isinstance(error, BadInputError) and error.source in bad)
        }
        for key, receipt in list(self._receipts.items()):
            if key in stale or (key[0] in bad and key[0] in streams):
                self._forget(receipt)
        self._next = 0
        self._reset_front()
        self._advance()

    def _was_cut_short(self, receipt: Receipt) -> bool:
        """Whether a task had less room than it has now that an input before it is left out: then it runs again."""
        if self._limit is None or receipt.cap is None:
            return False
        if receipt.documents < receipt.cap or receipt.cap >= self._limit - self._written:
            return False
        self._forget(receipt)
        self._next = 0
        return True

    def _forget(self, receipt: Receipt) -> None:
        del self._receipts[receipt.key]
        # the parts of an input that is no stream have none before them, so they share an entry that nobody looks at
        self._successor.pop((receipt.key[0], receipt.previous), None)
        self._policy.on_discard(receipt.key)

    def _is_gone(self, key: Key) -> bool:
        """Whether the input of a task or segment is left out, and no other input has its key."""
        if key[0] not in self._bad_inputs:
            return False
        return not any(task.key == key and not _is_empty(task, self._bad_inputs) for task in self._tasks)

    def _has_too_many_bad_records(self, receipt: Receipt) -> bool:
        """Whether the build fails with this task; a task in which the limit falls is judged when it was cut."""
        limit = self._policy.max_bad_records
        bad, records = self._bad_records + receipt.num_rejects, self._records + receipt.records_read
        if limit is None or not limit.is_exceeded(bad, records, is_end=False):
            return False
        if self._limit is not None and self._written + receipt.documents >= self._limit:
            return False
        self._failures[receipt.key] = TooManyBadRecordsError(self._bad_records, bad, records)
        return True


def _without(task: Task | StreamTask, bad_inputs: set[int]) -> Task | StreamTask:
    """A task without the inputs that are left out."""
    if isinstance(task, StreamTask) or not any(_reads(task, index) for index in bad_inputs):
        return task
    return replace(task, parts=tuple(part for part in task.parts if part[0] not in bad_inputs))


def _reads(task: Task | StreamTask, index: int) -> bool:
    """Whether a task reads an input."""
    if isinstance(task, StreamTask):
        return task.key[0] == index
    # parts are in order, and there may be many
    return (
        bool(task.parts) and task.parts[0][0] <= index <= task.parts[-1][0] and any(i == index for i, _ in task.parts)
    )


def _is_empty(task: Task | StreamTask, bad_inputs: set[int]) -> bool:
    """Whether all of a task is left out."""
    return not task.parts if isinstance(task, Task) else task.key[0] in bad_inputs
