"""What a build reports while it runs. The values go to one observer, which may show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tokshard.pipeline.sources.division import Whole
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task
from tokshard.pipeline.workspace.places import Stage
from tokshard.pipeline.workspace.receipts import Progress, Receipt


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the user should know before the work begins."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarted:
    """The tasks of a stage are about to run.

    Args:
        total_bytes: of all inputs; 0 if it is unknown.
        tasks: all.
        done: receipts of the tasks that earlier runs of the same build finished.
    """

    stage: Stage
    total_bytes: int
    tasks: Sequence[Task | StreamTask]
    done: Sequence[Receipt]


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """A task or segment left a receipt.

    Args:
        location: of its first input.
    """

    receipt: Receipt
    location: str


@dataclass(frozen=True, slots=True)
class InputLeftOut:
    """An input is left out, because it is damaged or gone."""

    problem: str


@dataclass(frozen=True, slots=True)
class StageEnded:
    """No task of the stage runs any more, whether it succeeded or not."""


@dataclass(frozen=True, slots=True)
class MergesFinished:
    """So many of the tasks of one step of the search for duplicates are done."""

    done: int
    count: int


Report = Note | StageStarted | Progress | TaskFinished | InputLeftOut | StageEnded | MergesFinished

Observer = Callable[[Report], None]
"""Called in the process and thread that build, which wait for it. `Progress` comes after every chunk."""


def ignore(report: Report) -> None:
    """An observer that drops every report."""


class FileCount:
    """How many of the inputs of a build are done.

    Args:
        tasks: all.
    """

    def __init__(self, tasks: Iterable[Task | StreamTask]) -> None:
        self._whole: dict[Key, int] = {}
        self._parts: Counter[int] = Counter()  # of inputs that are cut
        self._seen: set[Key] = set()
        self.done = 0
        streams = 0
        for task in tasks:
            if isinstance(task, StreamTask):
                streams += 1
            elif isinstance(task.parts[0][1], Whole):
                self._whole[task.key] = len(task.parts)
            else:
                self._parts[task.key[0]] += 1
        self.total = streams + sum(self._whole.values()) + len(self._parts)

    def add(self, receipt: Receipt) -> None:
        """Count what a task has done; again, if it runs again, is nothing new."""
        key = receipt.key
        if key in self._seen:
            return
        self._seen.add(key)
        if key in self._whole:
            self.done += self._whole[key]
        elif key[0] in self._parts:
            self._parts[key[0]] -= 1
            self.done += not self._parts[key[0]]
        else:
            self.done += receipt.is_last
