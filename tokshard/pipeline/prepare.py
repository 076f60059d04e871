"""The second step of a build: take the directory, save what the build is, and plan its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokshard.errors import BuildError
from tokshard.format import names
from tokshard.pipeline.executors.base import cpu_seconds
from tokshard.pipeline.executors.surroundings import prepare_workers
from tokshard.pipeline.job_array.saved_build import save_build
from tokshard.pipeline.options import LOCAL
from tokshard.pipeline.resolve import ResolvedBuild, continuing_command
from tokshard.pipeline.tasks.planning import MIN_TASK_BYTES, StreamTask, Task
from tokshard.pipeline.workspace.output_directory import has_begun, is_removing, remove_build
from tokshard.pipeline.workspace.places import REMOVING, TOKENIZER, Output, Workspace
from tokshard.pipeline.workspace.settings import (
    Settings,
    check_same_settings,
    load_settings,
    save_command,
    save_settings,
)
from tokshard.store import present


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBuild:
    """A build that owns its directory, with everything that its tasks need.

    Args:
        tasks: all, in order.
        num_workers: processes that can have something to do.
        cpu_seconds: of this process before it was prepared.
    """

    resolved: ResolvedBuild
    tasks: Sequence[Task | StreamTask]
    num_workers: int
    cpu_seconds: float


def prepare(resolved: ResolvedBuild) -> PreparedBuild:
    """Take the directory (start over, continue, or begin) and plan the tasks. Once per build, under its lock.

    Raises:
        ConfigurationChangedError: it holds an unfinished build with other settings.
        BuildError: another build completed it.
        SourceError: an input cannot be looked into.
    """
    before = cpu_seconds()
    _start_workers(resolved)
    workspace = resolved.context.workspace
    take_directory(workspace, resolved.context.outputs, resolved.settings, is_forced=resolved.options.force)
    save_settings(workspace, resolved.settings)
    workspace.store.delete(REMOVING)
    workspace.store.put(TOKENIZER, resolved.read.clean)
    tasks = resolved.plan()
    save_command(workspace, continuing_command(resolved, tasks))
    save_build(resolved, tasks)
    num_workers = min(resolved.num_workers, max(1, _parallelism(tasks)))
    if resolved.options.limit is not None and resolved.found.inputs.read_once:
        num_workers = 1  # several read past the limit and then again up to it, and such inputs cannot be read again
    return PreparedBuild(resolved=resolved, tasks=tasks, num_workers=num_workers, cpu_seconds=before)


def prepared_before(resolved: ResolvedBuild, tasks: Sequence[Task | StreamTask], num_jobs: int = 1) -> PreparedBuild:
    """A build that another process prepared, for one that runs its part of the tasks. Writes nothing.

    Args:
        tasks: all.
        num_jobs: that share them.
    """
    before = cpu_seconds()
    _start_workers(resolved)
    num_workers = min(resolved.num_workers, max(1, -(-_parallelism(tasks) // num_jobs)))
    return PreparedBuild(resolved=resolved, tasks=tasks, num_workers=num_workers, cpu_seconds=before)


def _start_workers(resolved: ResolvedBuild) -> None:
    if resolved.options.executor == LOCAL and resolved.num_workers > 1 and resolved.total_bytes > MIN_TASK_BYTES:
        prepare_workers()


def take_directory(workspace: Workspace, outputs: Sequence[Output], settings: Settings, *, is_forced: bool) -> None:
    """Take the directory, which is locked: start over if forced, continue a build with the same settings, or begin.

    Raises:
        ConfigurationChangedError: it holds an unfinished build with other settings.
        BuildError: another build completed it.
    """
    workspace.take_over()  # from here on no other process changes anything here
    if is_forced or is_removing(workspace):
        if load_settings(workspace) is None:
            save_settings(workspace, settings)
        remove_build(workspace, outputs)
        return
    if all(names.MANIFEST in present(output.store) for output in outputs):
        raise BuildError(f"{workspace.out} was completed by another build just now", hint="run the command again")
    before = load_settings(workspace)
    # a build that stopped before its first shard may be continued with other settings: often these were the mistake
    # one of an earlier generation is complete, and was stopped just before it had removed its folder
    is_unfinished = before is not None and before.generation >= settings.generation
    if before is not None and is_unfinished and has_begun(workspace):
        check_same_settings(before, settings, out=workspace.out)
    else:
        workspace.clear()


def _parallelism(tasks: Sequence[Task | StreamTask]) -> int:
    """How many workers can have something to do."""
    streams = sum(isinstance(task, StreamTask) for task in tasks[:1024])
    return len(tasks) if not streams else len(tasks) + 1024
