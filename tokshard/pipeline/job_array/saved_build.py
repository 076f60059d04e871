"""A resolved build on disk: jobs of an array and the commit take it from there instead of resolving it again."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence

import msgspec

from tokshard.errors import BuildError
from tokshard.pipeline.append import Place
from tokshard.pipeline.encode.tokenizer_file import TokenizerFile
from tokshard.pipeline.options import LOCAL, BuildOptions, checked_options
from tokshard.pipeline.resolve import ResolvedBuild, derive
from tokshard.pipeline.sources.discover import Discovery
from tokshard.pipeline.sources.inputs import saved_inputs
from tokshard.pipeline.tasks.planning import StreamTask, Task
from tokshard.pipeline.tasks.saved_plan import load_tasks, save_tasks
from tokshard.pipeline.workspace.places import INPUTS, RESOLVED, TASKS, Workspace
from tokshard.store import is_uri


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file; the inputs are in a file of their own, which `digest` names.

    Args:
        sources, directory: as given, and where.
        roots: of the inputs, as they follow from the sources.
        place: of an append.
    """

    sources: list[str]
    directory: str
    options: BuildOptions
    roots: list[str]
    arguments: list[str]
    digest: str
    ignored: dict[str, int]
    notes: tuple[str, ...]
    read: TokenizerFile
    place: Place | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedBuild:
    """A build that was prepared, here or on another machine.

    Args:
        tasks: all.
        directory: where its command was given.
    """

    resolved: ResolvedBuild
    tasks: Sequence[Task | StreamTask]
    directory: str

    def has_options(self, options: BuildOptions) -> bool:
        """Whether checked options ask for the same, but for what may differ from one run to the next."""
        return _comparable(options) == _comparable(self.resolved.options)

    def is_asked_for_by(self, sources: Sequence[str], options: BuildOptions) -> bool:
        """Whether the command at hand is the one that was given then, in the same directory."""
        is_here = self.directory == os.getcwd()
        return is_here and list(sources) == self.resolved.arguments and self.has_options(options)


def save_build(resolved: ResolvedBuild, tasks: Sequence[Task | StreamTask]) -> None:
    """Save what a build has resolved and planned; nothing if only this process can read its inputs."""
    workspace, inputs = resolved.context.workspace, resolved.found.inputs
    if inputs.read_once:
        return
    save_tasks(workspace.store, TASKS, tasks)
    save_resolved(resolved)


def save_resolved(resolved: ResolvedBuild) -> None:
    """Save what a build has resolved, whose tasks are saved."""
    inputs = resolved.found.inputs
    saved = _Saved(
        sources=list(map(str, resolved.arguments)),
        directory=os.getcwd(),
        options=_comparable(resolved.options),
        roots=inputs.roots,
        arguments=list(resolved.found.arguments),
        digest=inputs.digest,
        ignored=dict(resolved.found.ignored),
        notes=resolved.found.notes,
        read=resolved.read,
        place=Place.of(resolved.settings) if resolved.options.append else None,
    )
    resolved.context.workspace.store.put(RESOLVED, msgspec.json.encode(saved))


def load_build(workspace: Workspace, *, workers: int | None) -> SavedBuild | None:
    """The build that was prepared in a directory; None if none was. Looks at no source.

    Args:
        workspace: of this attempt.
        workers: processes of this run.

    Raises:
        BuildError: a file is damaged.
    """
    started = time.monotonic()
    try:
        saved = msgspec.json.decode(workspace.store.get(RESOLVED), type=_Saved)
        tasks = load_tasks(workspace.store, TASKS)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.MsgspecError as error:
        raise BuildError(
            f"{workspace.store.where(RESOLVED)} is damaged: {error}", hint="start over with --force"
        ) from error
    is_here = saved.directory == os.getcwd()
    roots = [root if is_here or is_uri(root) else os.path.join(saved.directory, root) for root in saved.roots]
    inputs = saved_inputs(roots, workspace.store, INPUTS, saved.digest)
    resolved = derive(
        saved.sources,
        checked_options(dataclasses.replace(saved.options, out=str(workspace.out), workers=workers)),
        workspace,
        found=Discovery(inputs=inputs, arguments=tuple(saved.arguments), ignored=saved.ignored, notes=saved.notes),
        read=saved.read,
        place=saved.place,
        started=started,
    )
    return SavedBuild(resolved=resolved, tasks=tasks, directory=saved.directory)


def _comparable(options: BuildOptions) -> BuildOptions:
    """The options without what may differ from one run to the next."""
    return dataclasses.replace(
        options, keep=tuple(options.keep), out="", workers=None, executor=LOCAL, ray_address=None, force=False
    )
