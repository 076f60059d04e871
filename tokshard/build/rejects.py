"""The bad records of a task, listed or refused."""

from __future__ import annotations

import json
import os
from typing import IO, Self

from tokshard.build.failures import RejectedRecordError
from tokshard.build.receipts import receipt_name
from tokshard.build.records import BadRecord
from tokshard.build.tasks import Key
from tokshard.build.workspace import WorkerContext


class RejectsFile:
    """The bad records of one task, on disk, as JSON lines; records are counted within the task and its input."""

    def __init__(self, context: WorkerContext, key: Key) -> None:
        self._is_skipping = context.is_skipping
        name = f"{receipt_name(key)}.jsonl"
        self._final = context.workspace.rejects / name
        self._partial = context.workspace.partial / f".{name}.{os.getpid()}.partial"
        self._file: IO[str] | None = None
        self.count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def add(self, source: int, base: int, bad: list[BadRecord]) -> None:
        """List bad records, or refuse the first of them if they are not to be skipped."""
        if not self._is_skipping:
            raise RejectedRecordError(source, base + bad[0].position, bad[0].reason, bad[0].detail)
        if self._file is None:
            self._file = self._partial.open("w", encoding="utf-8", errors="backslashreplace")
        for record in bad:
            line = {
                "source": source,
                "record": base + record.position,
                "reason": record.reason,
                "detail": record.detail,
            }
            self._file.write(json.dumps(line) + "\n")
        self.count += len(bad)

    def publish(self) -> None:
        """Make the list visible under its name, durable; without a bad record there is none, as the receipt says."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._partial, self._final)
