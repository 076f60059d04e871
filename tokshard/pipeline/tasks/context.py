"""What a process needs to run tasks of a build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokshard.format.manifest import TokenizerInfo
from tokshard.pipeline.encode.documents import DocumentRules
from tokshard.pipeline.sources.inputs import InputTable
from tokshard.pipeline.sources.records import RecordSpec
from tokshard.pipeline.tasks.planning import StreamTask, Task
from tokshard.pipeline.workspace.places import Output, Workspace

if TYPE_CHECKING:
    from tokshard.pipeline.tasks.duplicates import DropLists


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a process needs to run tasks of a build.

    Args:
        tokenizer: what the manifest says of it; the file to load is in the workspace.
        inputs: of the build, in order.
        is_skipping: bad records are left out instead of failing the task.
        is_leaving_out: damaged inputs are left out, and no limit on documents can be reached before one of them.
        outputs: the corpora to write.
        rules: which documents are written, and into which of them.
        drops: which texts are duplicates; None if all are wanted, or before it is known.
    """

    workspace: Workspace
    inputs: InputTable
    spec: RecordSpec
    columns: dict[str, str]
    tokenizer: TokenizerInfo
    task_bytes: int
    shard_tokens: int
    is_skipping: bool
    is_leaving_out: bool
    outputs: tuple[Output, ...]
    rules: DocumentRules
    drops: DropLists | None = None

    def purpose(self, task: Task | StreamTask) -> str:
        """What a worker does with a task, in the past tense."""
        if isinstance(task, Task) and task.merge is not None:
            return "looked for duplicates"
        return f"read {self.inputs[task.key[0]].location}"
