"""Which task runs next, when a build is done, and which error counts. Pure: no processes, no files, no callbacks.

Everything is ordered by `Key`. The lowest failing task decides, once all before it are done, and a limit on documents
is reached at the same task for any number of workers and any interleaving.

If damaged inputs are to be left out, that happens at the same moment, when the damage is the failure that decides: its
input and all that came of it are forgotten, as if it had not been an input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from tokshard.pipeline.failures import BadInputError, TooManyBadRecordsError
from tokshard.pipeline.tasks.bad_record_limit import BadRecordLimit
from tokshard.pipeline.tasks.front import Front
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task
from tokshard.pipeline.workspace.receipts import Receipt

_LOOKAHEAD = 1024
"""Tasks among which waiting streams are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run a task; say so by `Schedule.started`.

    Args:
        max_documents: that it may write; no task needs more than what is missing before it. None: any number.
        done_segments: segments of a stream that have a receipt.
        num_waiting_streams: streams among the next tasks that wait for a worker, this one included.
    """

    task: Task | StreamTask
    max_documents: int | None
    done_segments: frozenset[int] = frozenset()
    num_waiting_streams: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """Stop everything and run the task once more, with exactly the documents that a run in order would give it.

    With more room it read past the last document wanted: to more documents, to records that are left out, or to the
    failure that it met. Say so by `Schedule.restarted`, and discard its receipt first.

    Args:
        key: the task, or the segment of a stream.
    """

    key: Key
    run: Run


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """Leave out the damaged inputs; say so by `Schedule.leave_out`."""

    damage: tuple[BadInputError, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Discard receipts that no longer hold, before anything else runs; say so by `Schedule.discarded`."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can start until something that is under way ends."""


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing that matters is left to do.

    Args:
        failure: what decides, and of which task; None: the build succeeded.
    """

    failure: tuple[Key, Exception] | None = None


Decision = Run | Rerun | LeaveOut | Discard | Wait | Done


class Schedule:
    """The state of one stage of a build. `decide` says what to do; the other methods take in what happened.

    Args:
        tasks: in order.
        receipts: of tasks that are done already.
        limit: documents to write, or None for all.
        max_bad_records: None: any number.
        is_leaving_out: damaged inputs are left out; else they are failures.
        bad_inputs: inputs that were left out before.
    """

    def __init__(
        self,
        tasks: Sequence[Task | StreamTask],
        receipts: Iterable[Receipt],
        *,
        limit: int | None = None,
        max_bad_records: BadRecordLimit | None = None,
        is_leaving_out: bool = False,
        bad_inputs: Collection[int] = (),
    ) -> None:
        self._limit, self._max_bad_records, self._is_leaving_out = limit, max_bad_records, is_leaving_out
        self._bad_inputs = set(bad_inputs)
        self._plan = _Plan(tasks, self._bad_inputs)
        self._receipts = _Receipts()
        self._failures: dict[Key, Exception] = {}
        self._running: set[Key] = set()
        self._rerunning: Key | None = None
        self._had_exact_room: set[Key] = set()
        self._stale: dict[Key, None] = {}
        self._next = 0
        self._front = Front(limit, max_bad_records)
        for receipt in receipts:
            self.finished(receipt)

    def decide(self) -> Decision:
        """What to do next. Changes nothing: until something happens, the answer stays the same."""
        if self._stale:
            return Discard(tuple(self._stale))
        if self._rerunning is not None:
            return Wait()
        if self._front.is_limit_reached:
            return self._at_limit()
        task = self._next_task()
        if task is not None:
            return self._run(task)
        lowest = min(self._failures, default=None)
        if any(lowest is None or key <= lowest for key in self._running):
            return Wait()
        return Done(self._excess_at_end()) if lowest is None else self._at_failure(lowest)

    # what happened

    def started(self, run: Run) -> None:
        """A task is under way."""
        self._running.add(run.task.key)
        self._pass_settled()

    def restarted(self, rerun: Rerun) -> None:
        """Everything was stopped, and a task runs again with exact room. Its receipt is discarded."""
        self._running = {rerun.run.task.key}
        self._rerunning = rerun.key
        self._had_exact_room.add(rerun.key)
        self._forgive(rerun.run.task)
        self._receipts.remove(rerun.key)
        self._recount()

    def finished(self, receipt: Receipt) -> None:
        """A task or segment left a receipt."""
        if not self._bad_inputs.isdisjoint(receipt.inputs):
            self._stale[receipt.key] = None  # its input turned out to be damaged meanwhile
            return
        self._receipts.add(receipt)
        self._failures.pop(receipt.key, None)
        self._advance()

    def failed(self, key: Key, error: Exception) -> None:
        """A task or segment failed."""
        if self._plan.task_of(key) is not None:
            self._failures[key] = error
            self._pass_settled()

    def released(self, task: Task | StreamTask, *, is_lost: bool = False) -> None:
        """A task is no longer under way: it is done, it failed, or its worker was lost and it has to run again."""
        self._running.discard(task.key)
        if self._rerunning is not None and self._plan.task_of(self._rerunning) == task:
            self._rerunning = None
        if is_lost:
            self._forgive(task)
        if is_lost or (self._bad_inputs and self._limit is not None):
            self._next = 0  # in the second case it may have had too little room, before an input was left out
        self._pass_settled()

    def leave_out(self, damage: Iterable[BadInputError]) -> None:
        """Forget damaged inputs and all that came of them."""
        bad = {found.source for found in damage}
        self._bad_inputs |= bad
        stale = self._plan.keys_that_read(bad)
        self._plan = self._plan.without(bad)
        self._failures = {
            key: error
            for key, error in self._failures.items()
            if self._plan.task_of(key) is not None and not (isinstance(error, BadInputError) and error.source in bad)
        }
        for key in self._receipts.sorted_keys():
            if key in stale or (key[0] in bad and self._plan.task_of(key) is None):
                self._forget(key)
        self._recount()

    def discarded(self, keys: Iterable[Key]) -> None:
        """Receipts are discarded."""
        for key in keys:
            self._stale.pop(key, None)

    def _forgive(self, task: Task | StreamTask) -> None:
        """Forget the failures of a task that runs again, and meets them again."""
        if isinstance(task, StreamTask):
            self._failures = {key: error for key, error in self._failures.items() if key[0] != task.key[0]}
        self._failures.pop(task.key, None)

    # the outcome

    def receipts_in_order(self) -> list[Receipt]:
        """All receipts that belong to the corpus, in order."""
        last = self._front.key if self._front.is_limit_reached else None
        return [self._receipts[key] for key in self._receipts.sorted_keys() if last is None or key <= last]

    def receipts_before(self, key: Key) -> list[Receipt]:
        """Receipts of the tasks before a task, in order."""
        return [self._receipts[done] for done in self._receipts.sorted_keys() if done < key]

    # decisions

    def _run(self, task: Task | StreamTask) -> Run:
        if isinstance(task, Task):
            return Run(task=task, max_documents=self._front.room)
        ahead = self._plan.tasks[self._next : self._next + _LOOKAHEAD]
        return Run(
            task=task,
            max_documents=self._front.room,
            done_segments=self._receipts.segments_of(task),
            num_waiting_streams=sum(isinstance(other, StreamTask) and not self._is_settled(other) for other in ahead),
        )

    def _at_limit(self) -> Rerun | Done:
        key = self._front.key
        assert key is not None
        assert self._limit is not None
        room = self._limit - self._front.written_before
        return Done(self._excess_at_end()) if self._receipts[key].cap == room else self._rerun(key, room)

    def _at_failure(self, key: Key) -> Rerun | LeaveOut | Done:
        error, task = self._failures[key], self._plan.task_of(key)
        # what can be read once only is read in order by one worker, so its room was exact
        is_read_once = isinstance(task, StreamTask) and task.is_here
        had_exact_room = is_read_once or key in self._had_exact_room or isinstance(error, TooManyBadRecordsError)
        if self._front.room is not None and not had_exact_room:
            return self._rerun(key, self._front.room)
        if self._is_leaving_out and isinstance(error, BadInputError):
            return LeaveOut((error, *error.others))
        return Done((key, error))

    def _rerun(self, key: Key, room: int) -> Rerun:
        task = self._plan.task_of(key)
        assert task is not None
        done = self._receipts.segments_of(task) - {key[1]} if isinstance(task, StreamTask) else frozenset()
        return Rerun(key=key, run=Run(task=task, max_documents=room, done_segments=done))

    def _excess_at_end(self) -> tuple[Key, Exception] | None:
        return None if self._max_bad_records is None else self._max_bad_records.check(self.receipts_in_order())

    def _next_task(self) -> Task | StreamTask | None:
        """The lowest task that waits for a worker; None if there is none that can still matter."""
        if self._next == len(self._plan.tasks):
            return None
        task = self._plan.tasks[self._next]
        return None if self._failures and task.key > min(self._failures) else task

    # state

    def _is_settled(self, task: Task | StreamTask) -> bool:
        """Whether a task is done, under way, or failed."""
        if task.key in self._running:
            return True
        if isinstance(task, Task):
            return task.key in self._failures or task.key in self._receipts
        return any(first == task.key[0] for first, _ in self._failures) or self._receipts.is_complete(task)

    def _pass_settled(self) -> None:
        tasks = self._plan.tasks
        while self._next < len(tasks) and self._is_settled(tasks[self._next]):
            self._next += 1

    def _recount(self) -> None:
        self._next = 0
        self._front = Front(self._limit, self._max_bad_records)
        self._advance()

    def _advance(self) -> None:
        """Count the receipts that have become the next in order."""
        while (receipt := self._front.next_receipt(self._plan.tasks, self._receipts.after)) is not None:
            if self._front.was_cut_short(receipt):
                self._forget(receipt.key)
                self._next = 0
                break
            if (excess := self._front.excess(receipt)) is not None:
                self._failures[receipt.key] = excess
                break
            self._front.count(receipt)
        self._pass_settled()

    def _forget(self, key: Key) -> None:
        self._receipts.remove(key)
        self._stale[key] = None


class _Plan:
    """The tasks of a stage, without the inputs that are left out."""

    def __init__(self, tasks: Iterable[Task | StreamTask], bad_inputs: Collection[int]) -> None:
        self.tasks = [left for task in tasks if (left := _without(task, bad_inputs)) is not None]
        self._by_key = {task.key: task for task in self.tasks if isinstance(task, Task)}
        self._streams = {task.key[0]: task for task in self.tasks if isinstance(task, StreamTask)}

    def task_of(self, key: Key) -> Task | StreamTask | None:
        """The task with a key, or the stream of a segment; None if it is left out."""
        return self._by_key.get(key) or self._streams.get(key[0])

    def keys_that_read(self, inputs: Collection[int]) -> set[Key]:
        """The tasks, streams excepted, that read one of these inputs."""
        return {key for key, task in self._by_key.items() if any(_reads(task, index) for index in inputs)}

    def without(self, bad_inputs: Collection[int]) -> _Plan:
        """The tasks without more inputs."""
        return _Plan(self.tasks, bad_inputs)


class _Receipts:
    """The receipts of a stage, by key, and in the order of the segments of each stream."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Receipt] = {}
        self._successor: dict[tuple[int, int | None], Key] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def __getitem__(self, key: Key) -> Receipt:
        return self._by_key[key]

    def sorted_keys(self) -> list[Key]:
        """The keys of all receipts, in order."""
        return sorted(self._by_key)

    def add(self, receipt: Receipt) -> None:
        self._by_key[receipt.key] = receipt.without_sources()
        self._successor[receipt.key[0], receipt.previous] = receipt.key  # only looked at where key[0] is a stream

    def remove(self, key: Key) -> None:
        receipt = self._by_key.pop(key, None)
        if receipt is not None:
            self._successor.pop((key[0], receipt.previous), None)

    def after(self, task: Task | StreamTask, segment: int | None) -> Receipt | None:
        """The receipt of a task; of a stream, the one after this segment (None: the first)."""
        key = self._successor.get((task.key[0], segment)) if isinstance(task, StreamTask) else task.key
        return None if key is None else self._by_key.get(key)

    def is_complete(self, stream: StreamTask) -> bool:
        """Whether every segment of a stream has a receipt."""
        receipt = self.after(stream, None)
        while receipt is not None and not receipt.is_last:
            receipt = self.after(stream, receipt.key[1])
        return receipt is not None

    def segments_of(self, stream: StreamTask) -> frozenset[int]:
        """Segments of a stream that have a receipt."""
        return frozenset(segment for first, segment in self._by_key if first == stream.key[0])


def _without(task: Task | StreamTask, bad_inputs: Collection[int]) -> Task | StreamTask | None:
    """A task without the inputs that are left out; None if no input remains."""
    if isinstance(task, StreamTask):
        return None if task.key[0] in bad_inputs else task
    if not any(_reads(task, index) for index in bad_inputs):
        return task
    parts = tuple(part for part in task.parts if part[0] not in bad_inputs)
    return replace(task, parts=parts) if parts else None


def _reads(task: Task, index: int) -> bool:
    """Whether a task reads an input. Parts are in order, and there may be many."""
    first, last = task.parts[0][0], task.parts[-1][0]
    return first <= index <= last and any(found == index for found, _ in task.parts)
