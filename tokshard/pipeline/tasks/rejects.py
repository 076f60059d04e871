"""The bad records of a task, listed or refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tokshard.errors import BuildError
from tokshard.format.storage import atomic_file
from tokshard.pipeline.failures import RejectedRecordError
from tokshard.pipeline.sources.records import BadRecord
from tokshard.pipeline.tasks.planning import Key
from tokshard.pipeline.workspace.receipts import receipt_name
from tokshard.pipeline.workspace.workspace import WorkerContext, Workspace


class RejectsFile:
    """The bad records of one task, on disk, as JSON lines; records are counted within the task and its input.

    Leaving the context before `publish` removes what is unfinished.
    """

    def __init__(self, context: WorkerContext, key: Key) -> None:
        self._is_skipping = context.is_skipping
        self._final = rejects_path(context.workspace, key)
        self._partial_directory = context.workspace.partial
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
        """List bad records, or refuse the first of them if they are not to be skipped."""
        if not self._is_skipping:
            raise RejectedRecordError(source, base + bad[0].position, bad[0].reason, bad[0].detail)
        if self._file is None:
            self._file = self._stack.enter_context(atomic_file(self._final, partial_directory=self._partial_directory))
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
        """Make the list visible under its name, durable; without a bad record there is none, as the receipt says."""
        self._stack.close()


def rejects_path(workspace: Workspace, key: Key) -> Path:
    """The list of a task."""
    return workspace.rejects / f"{receipt_name(key)}.jsonl"


def read_rejects(workspace: Workspace, key: Key) -> Iterator[dict[str, Any]]:
    """The bad records of a task.

    Raises:
        BuildError: the list is gone or damaged.
    """
    path = rejects_path(workspace, key)
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise BuildError(
            f"{path} cannot be read: {error}", hint="run the same command again: the task that left it runs again"
        ) from error
