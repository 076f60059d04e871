"""What happens to the tasks of a build, as an executor reports it."""

from __future__ import annotations

from dataclasses import dataclass

from tokshard.errors import TokshardError
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task
from tokshard.pipeline.workspace.receipts import Receipt


@dataclass(frozen=True, slots=True)
class Finished:
    """A task or segment left a receipt."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Failed:
    """A task or segment failed, and would fail again."""

    key: Key
    error: Exception


@dataclass(frozen=True, slots=True)
class Released:
    """A task has ended. All its receipts and failures were reported before."""

    task: Task | StreamTask


@dataclass(frozen=True, slots=True)
class Lost:
    """A task has ended because its worker died; it may succeed elsewhere.

    Args:
        error: for the user, if the task is not tried again.
        max_losses: workers that a task may cost; with the next one it is not tried again.
    """

    task: Task | StreamTask
    error: TokshardError
    max_losses: int = 1


Event = Finished | Failed | Released | Lost
