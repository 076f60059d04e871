"""What an unfinished build was asked for, kept so that the same command continues it and another is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, TypeVar

import msgspec

from tokshard.errors import BuildError, ConfigurationChangedError
from tokshard.format import names
from tokshard.format.manifest import BuildConfig, TokenizerInfo
from tokshard.pipeline.options import change_text
from tokshard.pipeline.sources.inputs import Input, InputTable, read_once_name, saved_inputs
from tokshard.pipeline.workspace.places import BAD_INPUTS, COMMAND, INPUTS, SETTINGS, Workspace

T = TypeVar("T")


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """The command that continues a build, and how much there is to do.

    Args:
        words: of the command line.
        directory: where it was given.
        num_tasks: streams count as one each.
    """

    words: list[str]
    directory: str
    num_tasks: int
    num_streams: int
    total_bytes: int


class _InputsReference(msgspec.Struct, frozen=True, kw_only=True):
    """What settings.json says of the table in inputs.arrow."""

    roots: list[str]
    digest: str


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must stay the same for a build to be continued.

    Args:
        sources: the inputs as they were when the build began, with absolute roots; the table has a file of its own.
        arguments: what each argument is called; those on the hub with the commits that they stood for.
        generation: of the corpora that the build writes.
        previous: of an append: ``manifest_sha256`` of the generation before, for each corpus.
    """

    config: BuildConfig
    tokenizer: TokenizerInfo
    on_bad_record: str
    on_bad_source: str
    sources: InputTable
    arguments: list[str]
    generation: int = 0
    previous: list[str] = msgspec.field(default_factory=list)


def save_settings(workspace: Workspace, settings: Settings) -> None:
    """Remember what was asked for, and of which inputs."""
    settings.sources.save(workspace.store, INPUTS)
    workspace.store.put(SETTINGS, msgspec.json.encode(settings, enc_hook=_reference))


def _reference(inputs: InputTable) -> _InputsReference:
    return _InputsReference(roots=inputs.roots, digest=inputs.digest)


def load_settings(workspace: Workspace) -> Settings | None:
    """The settings of the build in this directory; None if it holds no build.

    Raises:
        BuildError: the file is damaged.
    """

    def inputs(_: type, reference: object) -> InputTable:
        found = msgspec.convert(reference, _InputsReference)
        return saved_inputs(found.roots, workspace.store, INPUTS, found.digest)

    try:
        return msgspec.json.decode(workspace.store.get(SETTINGS), type=Settings, dec_hook=inputs)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.MsgspecError as error:
        raise BuildError(
            f"{workspace.store.where(SETTINGS)} is damaged, so nothing says which files the build wrote: {error}",
            hint=f"remove {workspace.out}, or give another --out",
        ) from error


def save_bad_inputs(workspace: Workspace, problems: Mapping[int, str]) -> None:
    """Remember which inputs are left out, and why; by index."""
    workspace.store.put(BAD_INPUTS, msgspec.json.encode(problems))


def load_bad_inputs(workspace: Workspace) -> dict[int, str]:
    """The inputs that earlier runs of a build left out.

    Raises:
        BuildError: the file is damaged.
    """
    return _load(workspace, BAD_INPUTS, dict[int, str]) or {}


def save_command(workspace: Workspace, command: Command) -> None:
    """Remember how to continue."""
    workspace.store.put(COMMAND, msgspec.json.encode(command))


def load_command(workspace: Workspace) -> Command | None:
    """How to continue; None if a build has not come so far.

    Raises:
        BuildError: the file is damaged.
    """
    return _load(workspace, COMMAND, Command)


def check_same_settings(before: Settings, now: Settings, *, out: str, is_complete: bool = False) -> None:
    """Refuse to continue a build with other settings. From fail to skip is allowed, the other way is not.

    Args:
        is_complete: the build has become a corpus, which can grow and which starting over would remove.

    Raises:
        ConfigurationChangedError: it says what differs.
    """
    differences = list(_differences(before, now))
    if differences:
        shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        raise ConfigurationChangedError(
            f"{out} belongs to another build: {shown}",
            hint="give the settings of that build, another --out, "
            + (
                "--append to add sources to the corpus, or --force to replace all of it"
                if is_complete and now.config.copied is None
                else "or --force to start over"
            ),
        )


def _load(workspace: Workspace, name: str, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(workspace.store.get(name), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        where = workspace.store.where(name)
        raise BuildError(f"{where} is damaged: {error}", hint="start over with --force") from error


def save_names(workspace: Workspace, list_name: str, found: Iterable[str]) -> None:
    """Remember files of a build."""
    workspace.store.put(list_name, msgspec.json.encode(sorted(found)))


def load_names(workspace: Workspace, list_name: str) -> set[str]:
    """Files of a build that were remembered; empty if there is no such list.

    Raises:
        BuildError: the list is damaged.
    """
    return set(filter(_is_name_of_ours, _load(workspace, list_name, list[str]) or []))


def _is_name_of_ours(name: str) -> bool:
    """Whether a name can be a file of a build; whatever a list says, it leads nowhere else."""
    path = PurePosixPath(name)
    is_file = path.name in names.SIDE_FILES or names.is_shard_name(path.name)
    folders = path.parts[:-1]
    if folders and names.generation_number(folders[-1]):
        folders = folders[:-1]
    return is_file and folders in ((), (names.TRAIN,), (names.VALIDATION,))


def _differences(before: Settings, now: Settings) -> Iterator[str]:
    if (before.config.copied is None) != (now.config.copied is None):
        yield "it tokenizes texts" if before.config.copied is None else "it is a copy of other corpora"
        return
    for part_before, part_now in ((before.config, now.config), (before.tokenizer, now.tokenizer)):
        old, new = _flat(part_before), _flat(part_now)
        for key in old:
            # the size of tasks follows from the sources; naming the sources says more
            follows = (key == "task_bytes" and before.sources != now.sources) or (
                key == "name" and isinstance(part_now, TokenizerInfo)  # of its folder: what it does is its hash
            )
            if old[key] != new[key] and not follows:
                change = change_text(key, old[key], new[key])
                if change is not None:
                    yield change
    if before.generation != now.generation:
        yield f"it writes generation {before.generation}, not {now.generation}"
    elif before.previous != now.previous:
        yield "the corpus that it appends to was replaced"
    for policy in ("on_bad_record", "on_bad_source"):
        if getattr(before, policy) == "skip" and getattr(now, policy) == "fail":
            yield f"--{policy.replace('_', '-')} was skip, now fail"
    yield from _differences_of_sources(before, now)


def _flat(part: BuildConfig | TokenizerInfo) -> dict[str, Any]:
    """The fields by name; of a copy its own bounds on documents, not those of the builds that came before."""
    found = msgspec.structs.asdict(part)
    copied = found.pop("copied", None)
    return found if copied is None else found | msgspec.structs.asdict(copied)


def _differences_of_sources(before: Settings, now: Settings) -> Iterator[str]:
    if now.sources.read_once:
        yield f"{', '.join(map(read_once_name, now.sources.read_once))} cannot be read again"
    elif _is_reordered(before.arguments, now.arguments) or _is_reordered(before.sources.roots, now.sources.roots):
        yield "the order of the sources changed"
    elif before.arguments != now.arguments:
        yield f"the sources were {', '.join(before.arguments)}, now {', '.join(now.arguments)}"
    elif before.sources != now.sources:
        yield from _source_differences(before.sources, now.sources)


def _is_reordered(before: Sequence[str], now: Sequence[str]) -> bool:
    return before != now and sorted(before) == sorted(now)


def _source_differences(before: Iterable[Input], now: Iterable[Input]) -> Iterator[str]:
    old_sources = {(source.argument, source.path): source for source in before}
    new_sources = {(source.argument, source.path): source for source in now}
    for place, source in old_sources.items():
        if place not in new_sources:
            yield f"source {source.location} is gone"
        elif (change := _source_change(source, new_sources[place])) is not None:
            yield change
    yield from (f"source {source.location} is new" for place, source in new_sources.items() if place not in old_sources)


def _source_change(before: Input, now: Input) -> str | None:
    if before.num_bytes != now.num_bytes:
        return f"source {now.location} had {before.num_bytes} bytes, now {now.num_bytes}"
    if before.version != now.version:
        return f"source {now.location} was modified since: its version was {before.version}, now it is {now.version}"
    return None
