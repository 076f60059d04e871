"""The reports of a build while it runs. The values go to one observer, which may show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokshard.pipeline.request import Build
from tokshard.pipeline.tasks.planning import AnyTask, StepTask
from tokshard.pipeline.workspace.receipts import Progress, Receipt


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the user should know, before the work begins or during it."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarted:
    """The tasks of a stage are about to run.

    Args:
        name: the name of the stage.
        tasks: all that this process may run.
        done: receipts of the tasks that earlier runs of the same build finished.
    """

    build: Build
    name: str
    tasks: Sequence[AnyTask]
    done: Sequence[Receipt]

    @property
    def total_bytes(self) -> int:
        """Bytes of all inputs; 0 if that says nothing of these tasks, which are a share, or read no inputs."""
        is_share = (
            self.build.is_array or self.build.inputs.read_once or isinstance(next(iter(self.tasks), None), StepTask)
        )
        return 0 if is_share else self.build.inputs.num_bytes


@dataclass(frozen=True, slots=True)
class InputLeftOut:
    """An input is left out, because it is damaged or gone."""

    location: str
    problem: str


@dataclass(frozen=True, slots=True)
class StageEnded:
    """No task of the stage runs any more, whether it succeeded or not."""


Report = Note | StageStarted | Progress | Receipt | InputLeftOut | StageEnded

Observer = Callable[[Report], None]
"""Called in the process and thread that build, which wait for it. `Progress` comes after every chunk."""
