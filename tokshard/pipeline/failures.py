"""How a task fails, counted from its own start. The coordinator knows what comes before, and writes the message."""

from __future__ import annotations

from tokshard.errors import BadSourceError


class TaskError(Exception):
    """A failure of a task that crosses processes unchanged."""


class RejectedRecordError(TaskError):
    """A bad record under ``--on-bad-record fail``. Its number counts from the task's start in the input."""

    def __init__(self, source: int, record: int, reason: str, detail: str) -> None:
        super().__init__(source, record, reason, detail)
        self.source, self.record, self.reason, self.detail = source, record, reason, detail


class BadInputError(TaskError):
    """An input is damaged or gone; `error` says how.

    Args:
        others: damaged inputs after it in the same task; they are looked for only if they are to be left out.
    """

    def __init__(self, source: int, error: BadSourceError, others: tuple[BadInputError, ...] = ()) -> None:
        super().__init__(source, error, others)
        self.source, self.error, self.others = source, error, others


class TooManyBadRecordsError(TaskError):
    """With the bad records of a task, there are more than ``--max-bad-records`` allows.

    Args:
        bad_before: bad records of the tasks before it.
        bad, records: so far, those of the task included.
    """

    def __init__(self, bad_before: int, bad: int, records: int) -> None:
        super().__init__(bad_before, bad, records)
        self.bad_before, self.bad, self.records = bad_before, bad, records


class SegmentError(Exception):
    """A segment of a stream failed; `error` says why."""

    def __init__(self, segment: int, error: Exception) -> None:
        super().__init__(segment, error)
        self.segment, self.error = segment, error
