"""The bad records of a task: listed in a file, or the failure of the task."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any, Self

from tokshard.errors import BuildError
from tokshard.pipeline.failures import RejectedRecordError
from tokshard.pipeline.sources.records import BadRecord
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.planning import Key
from tokshard.pipeline.workspace.places import Workspace
from tokshard.pipeline.workspace.receipts import receipt_name
from tokshard.store import written


class RejectsFile:
    """The bad records of one task, as a file of JSON lines. Records are numbered from the task's start in their input.

    Leaving the context before `publish` removes what is unfinished.
    """

    def __init__(self, context: WorkerContext, key: Key) -> None:
        self._is_skipping = context.is_skipping
        self._store, self._name = context.workspace.store, rejects_path(context.workspace, key)
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

    def add(self, source: int, base: int, bad: list[BadRecord]) -> None:
        """List bad records, or raise `RejectedRecordError` for the first if they are not to be skipped."""
        if not self._is_skipping:
            raise RejectedRecordError(source, base + bad[0].position, bad[0].reason, bad[0].detail)
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


def rejects_path(workspace: Workspace, key: Key) -> str:
    """File name of the list of a task."""
    return f"{workspace.rejects}/{receipt_name(key)}.jsonl"


def read_rejects(workspace: Workspace, key: Key) -> Iterator[dict[str, Any]]:
    """The bad records of a task.

    Raises:
        BuildError: the list is gone or damaged.
    """
    name = rejects_path(workspace, key)
    try:
        with workspace.store.open(name) as lines:
            for line in lines:
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise BuildError(
            f"{workspace.store.where(name)} cannot be read: {error}",
            hint="run the same command again: the task that left it runs again",
        ) from error
