"""The bad records of a task: listed in a file, or the failure of the task."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO, Any, Self

from tokshard.errors import BuildError
from tokshard.pipeline.sources.records import BadRecord
from tokshard.pipeline.workspace.receipts import Failure, Key, TaskFailedError, rejects_path
from tokshard.store import Store, written


class RejectsFile:
    """The bad records of one task, as a file of JSON lines. Records are numbered from the task's start in their input.

    Leaving the context before `publish` removes what is unfinished.

    Args:
        is_skipping: bad records are listed; else the first one fails the task.
    """

    def __init__(self, store: Store, stage: str, key: Key, *, is_skipping: bool) -> None:
        self._is_skipping = is_skipping
        self._store, self._name = store, rejects_path(stage, key)
        self._stack = contextlib.ExitStack()
        self._file: IO[bytes] | None = None
        self.count = 0
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def add(self, source: int, base: int, bad: Sequence[BadRecord]) -> None:
        """List bad records.

        Raises:
            TaskFailedError: they are not to be skipped.
        """
        if not bad:
            return
        if not self._is_skipping:
            first = bad[0]
            raise TaskFailedError(
                Failure(
                    kind="record",
                    source=source,
                    record=base + first.position,
                    reason=first.reason,
                    problem=first.detail,
                )
            )
        if self._file is None:
            self._file = self._stack.enter_context(written(self._store, self._name))
        for record in bad:
            line = {
                "source": source,
                "record": base + record.position,
                "reason": record.reason,
                "detail": record.detail,
            }
            self.num_bytes += self._file.write(json.dumps(line).encode() + b"\n")
        self.count += len(bad)

    def publish(self) -> None:
        """Make the list visible and durable. Without bad records there is no file, as the receipt says."""
        self._stack.close()


def read_rejects(store: Store, stage: str, key: Key) -> Iterator[dict[str, Any]]:
    """The bad records of a task.

    Raises:
        BuildError: the list is gone or damaged.
    """
    name = rejects_path(stage, key)
    try:
        with store.open(name) as lines:
            for line in lines:
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise BuildError(
            f"{store.where(name)} cannot be read: {error}",
            hint="run the same command again: the task that left it runs again",
        ) from error
