"""What is known of the tasks of a stage: which are done, under way, failed, or left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from tokshard.pipeline.failures import BadInputError
from tokshard.pipeline.tasks.bad_record_limit import BadRecordLimit
from tokshard.pipeline.tasks.front import Front
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task
from tokshard.pipeline.workspace.receipts import Receipt

_LOOKAHEAD = 1024
"""Tasks among which waiting streams are counted."""


class StageState:
    """The tasks of a stage, and what happened to them. Each method takes in one thing that happened.

    Args:
        tasks: in order.
        limit: documents to write, or None for all.
        max_bad_records: None: any number.
        bad_inputs: inputs that were left out before.
        is_passing_damage: tasks after a damaged input run all the same.

    Attributes:
        plan: the tasks, without the inputs that are left out.
        front: the tasks that are done from the first one on.
        failures: of tasks and segments, and not forgiven since.
        running: keys of the tasks that are under way.
        stale: receipts that no longer hold and are still on disk, in the order in which they turned out to be.
    """

    def __init__(
        self,
        tasks: Sequence[Task | StreamTask],
        *,
        limit: int | None,
        max_bad_records: BadRecordLimit | None,
        bad_inputs: Collection[int],
        is_passing_damage: bool = False,
    ) -> None:
        self._is_passing_damage = is_passing_damage
        self._limit, self._max_bad_records = limit, max_bad_records
        self._bad_inputs = set(bad_inputs)
        self._next = 0
        self.plan = Plan(tasks, self._bad_inputs)
        self.receipts = Receipts()
        self.front = Front(limit, max_bad_records)
        self.failures: dict[Key, Exception] = {}
        self.running: set[Key] = set()
        self.stale: dict[Key, None] = {}

    # what is next

    def next_task(self) -> Task | StreamTask | None:
        """The lowest task that waits for a worker; None if no waiting task can still matter."""
        if self._next == len(self.plan.tasks):
            return None
        task = self.plan.tasks[self._next]
        stopping = (
            key
            for key, error in self.failures.items()
            if not (self._is_passing_damage and isinstance(error, BadInputError))
        )
        return None if task.key > min(stopping, default=task.key) else task

    def num_waiting_streams(self) -> int:
        """Streams among the next tasks that wait for a worker."""
        ahead = self.plan.tasks[self._next : self._next + _LOOKAHEAD]
        return sum(isinstance(task, StreamTask) and not self._is_settled(task) for task in ahead)

    def waiting(self) -> list[Task | StreamTask]:
        """All tasks that wait for a worker, in order."""
        return [task for task in self.plan.tasks if not self._is_settled(task)]

    # what happened

    def started(self, task: Task | StreamTask) -> None:
        """A task is under way."""
        self.running.add(task.key)
        self._pass_settled()

    def restarted(self, key: Key, task: Task | StreamTask) -> None:
        """Everything was stopped; the receipt with this key is discarded, and its task is under way again, alone."""
        self.running = {task.key}
        self.failures = _without_those_of(task, self.failures)
        self.receipts.remove(key)
        self._recount()

    def finished(self, receipt: Receipt) -> None:
        """A task or segment left a receipt."""
        if not self._bad_inputs.isdisjoint(receipt.inputs):
            self.stale[receipt.key] = None  # its input turned out to be damaged meanwhile
            return
        self.receipts.add(receipt)
        self.failures.pop(receipt.key, None)
        self._advance()

    def failed(self, key: Key, error: Exception) -> None:
        """A task or segment failed."""
        if self.plan.task_of(key) is not None:
            self.failures[key] = error
            self._pass_settled()

    def released(self, task: Task | StreamTask, *, is_lost: bool = False) -> None:
        """A task has ended: it is done, it failed, or its worker was lost and it has to run again."""
        self.running.discard(task.key)
        if is_lost:
            self.failures = _without_those_of(task, self.failures)
        if is_lost or (self._bad_inputs and self._limit is not None):
            self._next = 0  # in the second case it may have had too little room, before an input was left out
        self._pass_settled()

    def left_out(self, damage: Iterable[BadInputError]) -> None:
        """Inputs are left out: they are forgotten, with all that came of them."""
        bad = {found.source for found in damage}
        self._bad_inputs |= bad
        stale = self.plan.keys_that_read(bad)
        self.plan = self.plan.without(bad)
        self.failures = {
            key: error
            for key, error in self.failures.items()
            if self.plan.task_of(key) is not None and not (isinstance(error, BadInputError) and error.source in bad)
        }
        for key in self.receipts.sorted_keys():
            if key in stale or (key[0] in bad and self.plan.task_of(key) is None):
                self._forget(key)
        self._recount()

    # what follows

    def _is_settled(self, task: Task | StreamTask) -> bool:
        """Whether a task is done, under way, or failed."""
        if task.key in self.running:
            return True
        if isinstance(task, Task):
            return task.key in self.failures or task.key in self.receipts
        return any(first == task.key[0] for first, _ in self.failures) or self.receipts.is_complete(task)

    def _pass_settled(self) -> None:
        tasks = self.plan.tasks
        while self._next < len(tasks) and self._is_settled(tasks[self._next]):
            self._next += 1

    def _recount(self) -> None:
        self._next = 0
        self.front = Front(self._limit, self._max_bad_records)
        self._advance()

    def _advance(self) -> None:
        """Count the receipts that have become the next in order."""
        while (receipt := self.front.next_receipt(self.plan.tasks, self.receipts.after)) is not None:
            if self.front.was_cut_short(receipt):
                self._forget(receipt.key)
                self._next = 0
                break
            if (excess := self.front.excess(receipt)) is not None:
                self.failures[receipt.key] = excess
                break
            self.front.count(receipt)
        self._pass_settled()

    def _forget(self, key: Key) -> None:
        self.receipts.remove(key)
        self.stale[key] = None


class Plan:
    """The tasks of a stage, without the inputs that were left out."""

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

    def without(self, bad_inputs: Collection[int]) -> Plan:
        """The tasks without more inputs."""
        return Plan(self.tasks, bad_inputs)


class Receipts:
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


def _without_those_of(task: Task | StreamTask, failures: Mapping[Key, Exception]) -> dict[Key, Exception]:
    """The failures without those of a task that runs again, and will meet them again."""
    if isinstance(task, StreamTask):
        return {key: error for key, error in failures.items() if key[0] != task.key[0]}
    return {key: error for key, error in failures.items() if key != task.key}


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
