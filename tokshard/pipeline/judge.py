"""Judges a stage: one walk over its receipts, in input order.

It finds the result of a run without workers, failures and jobs: where the limit on documents falls, which
inputs are left out as damaged, when there are too many bad records, and which failure comes first. It takes receipts
in any order, counts them in the order of the tasks, and stops where one is missing. Pure: it reads no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tokshard.pipeline.options import MIN_RECORDS, BadRecordLimit
from tokshard.pipeline.tasks.planning import AnyTask, Run, StreamTask, Task
from tokshard.pipeline.workspace.receipts import Key, Receipt

_LOUD_RECORDS = 1_000
"""Records that must have been read before a running build warns that half of them are bad."""


def is_exceeded(limit: BadRecordLimit, bad: int, records: int, *, is_end: bool) -> bool:
    """Whether `bad` of `records` records are too many."""
    if isinstance(limit, int):
        return bad > limit
    return (is_end or records >= MIN_RECORDS) and bad > limit * records


def loss_warning(bad: int, records: int, example: str = "", *, is_end: bool) -> str | None:
    """A warning if half of the records read, or more, are left out as bad; else None.

    Args:
        example: the problem of one of them.
        is_end: all records were read; else there is no warning before `_LOUD_RECORDS`.
    """
    if 2 * bad < records or records < (1 if is_end else _LOUD_RECORDS):
        return None
    so_far = "" if is_end else " read so far"
    such_as = f", such as: {example}" if example else ""
    return f"{bad / records:.0%} of the records{so_far} are bad and left out ({bad:,} of {records:,}){such_as}"


@dataclass(slots=True, kw_only=True)
class Judge:
    """The walk over the receipts of one stage.

    Args:
        tasks: all, or the share of a job, in order.
        limit: documents to write; None: all.
        max_bad_records: None: any number.
        is_leaving_out: damaged inputs are left out; else they are failures.
        left_out: inputs that are known to be damaged; the walk adds those that it finds.

    Attributes:
        counted: the receipts that belong to the corpus, in order, without their details.
        failure: the receipt at which the stage fails: of the first task that failed; or one without a failure, with
            whose bad records there are more than ``--max-bad-records`` allows.
        records, bad: records, and bad ones, of the receipts counted.
        rerun: a run that has to replace a receipt, because its exact room is known only now.
    """

    tasks: Sequence[AnyTask]
    limit: int | None = None
    max_bad_records: BadRecordLimit | None = None
    is_leaving_out: bool = False
    left_out: dict[int, str] = field(default_factory=dict)
    counted: list[Receipt] = field(default_factory=list)
    failure: Receipt | None = None
    rerun: Run | None = None
    records: int = 0
    bad: int = 0
    _waiting: dict[Key, Receipt] = field(default_factory=dict)
    _position: int = 0
    _segment: int = 0
    _documents: int = 0
    _stops: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._walk()  # over inputs that are left out: if all are, no receipt comes

    def add(self, receipt: Receipt) -> None:
        """Take in the receipt of a task. It replaces an earlier receipt of the same task."""
        failure = receipt.failure
        if failure is not None and not (self.is_leaving_out and failure.kind == "input"):
            self._stops.add(receipt.key)
        self._waiting[receipt.key] = receipt.without_details()
        self._walk()
        if not self.is_done:  # what failed before the next task was left out with its input
            self._stops = {key for key in self._stops if key >= self.tasks[self._position].key}

    @property
    def room(self) -> int | None:
        """Documents that are still missing; None without a limit."""
        return None if self.limit is None else self.limit - self._documents

    @property
    def is_full(self) -> bool:
        """Whether the receipts counted hold all documents that are wanted."""
        return self.limit is not None and self._documents >= self.limit

    @property
    def is_done(self) -> bool:
        """Whether nothing more can matter: the stage succeeded or failed."""
        return self.failure is not None or self.is_full or self._position == len(self.tasks)

    def is_pointless(self, task: AnyTask) -> bool:
        """Whether a task can no longer matter, as far as is known: the failure that stops it may be left out later."""
        # a run that has to take the place of another one either fails or writes all that is wanted
        if self.is_done or self.rerun is not None or (self._stops and task.key > min(self._stops)):
            return True
        return task.key[0] in self.left_out and is_divided(task)

    def num_done(self, task: AnyTask) -> int:
        """Segments of a stream that have a receipt, without a gap from the first one on."""
        if not isinstance(task, StreamTask):
            return 0
        first, number = task.key[0], 0
        if self._position < len(self.tasks) and self.tasks[self._position].key == task.key:
            number = self._segment
        while (first, number) in self._waiting:
            number += 1
        return number

    def next_run(self, task: AnyTask) -> Run:
        """A run of a task with the room that is left, as far as is known."""
        return Run(task=task, max_documents=self.room, num_done=self.num_done(task))

    def missing(self) -> Iterator[AnyTask]:
        """The tasks from the first one on that has no receipt, as far as they can matter."""
        for task in self.tasks[self._position :] if not self.is_done and self.rerun is None else ():
            found = self._waiting.get(
                (task.key[0], self.num_done(task) - 1) if isinstance(task, StreamTask) else task.key
            )
            is_there = found is not None and (found.is_last or found.failure is not None)
            if not is_there and not self.is_pointless(task):
                yield task

    def _walk(self) -> None:
        """Count the receipts that have become the next in order."""
        self.rerun = None
        while not self.is_done:
            task = self.tasks[self._position]
            if task.key[0] in self.left_out and is_divided(task):
                self._next_task()
                continue
            key = (task.key[0], self._segment) if isinstance(task, StreamTask) else task.key
            receipt = self._waiting.get(key)
            if receipt is None:
                return
            if not receipt.holds_for(self.room):
                num_done = key[1] if isinstance(task, StreamTask) else 0
                self.rerun = Run(task=task, max_documents=self.room, num_done=num_done)
                return
            if receipt.failure is not None:
                if not (self.is_leaving_out and receipt.failure.kind == "input"):
                    self.failure = receipt
                    return
                self._leave_out(receipt.failure.source, receipt.failure.problem)
                continue
            self._count(receipt)
        if self.failure is None:
            self.failure = self._excess(is_end=True)

    def _count(self, receipt: Receipt) -> None:
        self._sum(receipt, 1)
        self.counted.append(self._waiting.pop(receipt.key))
        self.left_out.update(receipt.left_out)
        if receipt.is_last:
            self._next_task()
        else:
            self._segment += 1
        self.failure = self._excess(is_end=False)

    def _excess(self, *, is_end: bool) -> Receipt | None:
        """The last receipt, if with it there are too many bad records."""
        limit = self.max_bad_records
        if limit is None or not self.counted or not is_exceeded(limit, self.bad, self.records, is_end=is_end):
            return None
        return self.counted[-1]

    def _leave_out(self, index: int, problem: str) -> None:
        """Leave out a damaged input that several tasks read: drop its receipts, and continue without it."""
        self.left_out[index] = problem
        while self.counted and self.counted[-1].key[0] == index:
            self._sum(self.counted.pop(), -1)
        self._next_task()

    def _next_task(self) -> None:
        self._position, self._segment = self._position + 1, 0

    def _sum(self, receipt: Receipt, sign: int) -> None:
        self._documents += sign * receipt.documents
        self.records += sign * receipt.records_read
        self.bad += sign * receipt.num_rejects

    def records_before(self, key: Key, source: int) -> int:
        """Records of a source in the tasks before a given one."""
        return sum(receipt.records_of(source) for receipt in self.counted if receipt.key < key)


def is_divided(task: AnyTask) -> bool:
    """Whether a task reads a part of one input. A group of inputs leaves out the damaged ones by itself."""
    return isinstance(task, StreamTask) or (isinstance(task, Task) and not task.is_group)
