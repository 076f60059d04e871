"""One stage of a build: tasks that may run side by side, and what they need of the stages before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tokshard.pipeline.tasks.duplicates import Drops
from tokshard.pipeline.tasks.planning import AnyTask, StepTask
from tokshard.pipeline.tasks.shuffle import Dealt, Levels


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a build.

    Args:
        name: the folder of its receipts; the constants of `tokshard.pipeline.workspace.places`, or one with a number.
        tasks: all, in order.
        limit: documents to write; None: all.
        made_of: digest of what every task reads besides inputs.
        left_out: index of each input that is known to be damaged and left out, and what is wrong with it.
        drops: which texts are duplicates; None if all are wanted.
        levels: of a shuffle, how documents are dealt.
        dealt: of a shuffle, the files of the level before.
        has_files: what its tasks left for later stages has to be there.
    """

    name: str
    tasks: Sequence[AnyTask]
    limit: int | None = None
    made_of: str = ""
    left_out: Mapping[int, str] = field(default_factory=dict)
    drops: Drops | None = None
    levels: Levels | None = None
    dealt: Sequence[Dealt] = ()
    has_files: bool = True

    def made_of_task(self, task: AnyTask) -> str:
        """The digest that a receipt of a task needs to hold."""
        return task.made_of if isinstance(task, StepTask) else self.made_of

    def for_workers(self) -> Stage:
        """The stage without its tasks, which workers are given one by one."""
        return replace(self, tasks=())
