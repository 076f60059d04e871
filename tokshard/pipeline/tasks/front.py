"""How far a stage has come in input order: the tasks that are done without a gap from the first one on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokshard.pipeline.failures import TooManyBadRecordsError
from tokshard.pipeline.tasks.bad_record_limit import BadRecordLimit
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task
from tokshard.pipeline.workspace.receipts import Receipt


class Front:
    """Counts the tasks that are done, from the first one on, up to the first that is not.

    Limits on documents and on bad records are judged here, so that neither depends on which task ended first.

    Attributes:
        key: the last receipt counted; None before the first.
        written: documents of all receipts counted.
        written_before: documents of all receipts counted but the last.
    """

    def __init__(self, limit: int | None, max_bad_records: BadRecordLimit | None) -> None:
        self._limit, self._max_bad_records = limit, max_bad_records
        self._position = 0
        self._segment: int | None = None
        self._records = self._bad_records = 0
        self.key: Key | None = None
        self.written = self.written_before = 0

    @property
    def is_limit_reached(self) -> bool:
        """Whether the tasks counted hold all the documents that are wanted."""
        return self._limit is not None and self.written >= self._limit

    @property
    def room(self) -> int | None:
        """Documents that are still missing; None without a limit."""
        return None if self._limit is None else self._limit - self.written

    def next_receipt(
        self,
        tasks: Sequence[Task | StreamTask],
        receipt_after: Callable[[Task | StreamTask, int | None], Receipt | None],
    ) -> Receipt | None:
        """The receipt to count next; None where it is missing, or nothing more is wanted.

        Args:
            receipt_after: of a task; of a stream, the one after this segment (None: the first).
        """
        if self._position == len(tasks) or self.is_limit_reached:
            return None
        return receipt_after(tasks[self._position], self._segment)

    def count(self, receipt: Receipt) -> None:
        """Count the next receipt."""
        self.written_before, self.key = self.written, receipt.key
        self.written += receipt.documents
        self._records += receipt.records_read
        self._bad_records += receipt.num_rejects
        if receipt.is_last:
            self._position, self._segment = self._position + 1, None
        else:
            self._segment = receipt.key[1]

    def was_cut_short(self, receipt: Receipt) -> bool:
        """Whether the task of the next receipt stopped at a number of documents that is too low by now.

        That happens when an input before it is left out after the task ran.
        """
        if self.room is None or receipt.max_documents is None:
            return False
        return receipt.documents >= receipt.max_documents and receipt.max_documents < self.room

    def excess(self, receipt: Receipt) -> TooManyBadRecordsError | None:
        """The failure of a build that has too many bad records with the next receipt.

        The task at which the limit on documents falls is not judged: with exactly the documents wanted, it may pass.
        """
        bad, records = self._bad_records + receipt.num_rejects, self._records + receipt.records_read
        if self._max_bad_records is None or not self._max_bad_records.is_exceeded(bad, records, is_end=False):
            return None
        if self.room is not None and receipt.documents >= self.room:
            return None
        return TooManyBadRecordsError(self._bad_records, bad, records)
