"""The folder of an unfinished build: who may write, what was asked for, what is done."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tokshard.errors import BuildError, ConfigurationChangedError, UsageError
from tokshard.format import names
from tokshard.format.manifest import BuildConfig, TokenizerInfo
from tokshard.format.storage import atomic_write
from tokshard.pipeline.encode.documents import DocumentRules
from tokshard.pipeline.options import change_text
from tokshard.pipeline.sources.inputs import Input, InputTable, read_once_name
from tokshard.pipeline.sources.records import RecordSpec
from tokshard.store import Store
from tokshard.store.posix import PosixStore

if TYPE_CHECKING:
    from tokshard.pipeline.tasks.duplicates import DropLists


T = TypeVar("T")

LOCK = "lock"
"""Name of the file that a running build holds."""

_UNFINISHED_SETTINGS = re.compile(r"inputs\.arrow|\.(settings\.json|inputs\.arrow)\.[0-9]+\.partial")
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LOCK_TRIES = 5
_LOCK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Workspace:
    """Paths of a build.

    Args:
        out: the directory that the build was given: a corpus, or the place of two with a validation split.
        stage: folder of the receipts of a stage before encoding; empty for encoding itself.
        attempt: a name that no other run of the build has; empty for those who only look.
    """

    out: Path
    stage: str = ""
    attempt: str = ""

    @property
    def root(self) -> Path:
        """Everything that goes when the corpus is complete."""
        return self.out / names.WORK

    @property
    def receipts(self) -> Path:
        """One file per finished task."""
        return self.root / self.stage / "receipts"

    @property
    def rejects(self) -> Path:
        """One JSON lines file per finished task that left out bad records."""
        return self.root / self.stage / "rejects"

    @property
    def hashes(self) -> Path:
        """What a hashing stage leaves: a file per task, and the places of duplicates."""
        return self.root / self.stage / "hashes"

    @property
    def hashing(self) -> Workspace:
        """Of the stage that hashes texts, for ``--dedup exact``."""
        return replace(self, stage="hashing")

    @property
    def bad_inputs(self) -> Path:
        """Inputs that are left out whole, and why."""
        return self.root / "bad-inputs.json"

    @property
    def command(self) -> Path:
        """The command that continues the build, and how much it has to do."""
        return self.root / "command.json"

    @property
    def partial(self) -> Path:
        """Files that this attempt is writing, each to be renamed when it is whole."""
        return self.root / "partial" / self.attempt

    @property
    def tokenizer(self) -> Path:
        """The tokenizer as workers load it."""
        return self.root / "tokenizer.json"

    @property
    def settings(self) -> Path:
        """What was asked for. A folder without it is not ours, so it is the first file to come and the last to go."""
        return self.root / "settings.json"

    @property
    def inputs(self) -> Path:
        """The table of the inputs, which workers map."""
        return self.root / "inputs.arrow"

    @property
    def assembled(self) -> Path:
        """The files beside shards that the build wrote, or is about to write."""
        return self.root / "assembled.json"

    @property
    def removing(self) -> Path:
        """The files that starting over removes; while it is there, they may be gone in part."""
        return self.root / "removing.json"

    def outputs(self, *, is_split: bool) -> tuple[Output, ...]:
        """The corpora that the build writes."""
        if not is_split:
            return (Output(name="", directory=self.out, partial=self.partial),)
        return tuple(
            Output(name=name, directory=self.out / name, partial=self.partial / name)
            for name in (names.TRAIN, names.VALIDATION)
        )

    def create(self) -> None:
        """Make the folders that every build has."""
        for folder in (self.root, self.receipts, self.rejects, self.partial):
            folder.mkdir(parents=True, exist_ok=True)

    def take_over(self) -> None:
        """Remove what attempts before this one left unfinished, and make the folders of this one.

        A worker that gets no CPU may outlive a coordinator that was killed. When this returns it can publish nothing
        more, because the folder that it would rename a file from is gone.
        """
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.root / "partial", self.root / f"stale-{self.attempt}")  # it opens no file there from now on
        for path in self.root.glob("stale-*"):
            _remove(path)
        self.create()

    def clear_partial(self) -> None:
        """Remove what workers of this attempt left unfinished."""
        for path in self.partial.rglob("*"):
            if not path.is_dir():
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove every file but the lock, the settings, and the list of what starting over removes."""
        for path in _files_below(self.root):
            if path not in (self.root / LOCK, self.settings, self.inputs, self.removing):
                path.unlink()

    def remove(self) -> None:
        """Remove the folder. The lock is last, so that no other build begins in it; before it the settings."""
        with contextlib.suppress(OSError):
            for path in self.root.iterdir():
                if path not in (self.settings, self.root / LOCK):
                    _remove(path, is_tolerant=True)
            self.settings.unlink(missing_ok=True)
            (self.root / LOCK).unlink()
            self.root.rmdir()

    def check_own(self) -> None:
        """Refuse a work folder that no build made. Ours has settings, or nothing yet but its lock and empty folders.

        Raises:
            UsageError: it is a link or a file, or has files and no settings.
            BuildError: its settings are damaged.
        """
        if not os.path.lexists(self.root):
            return
        hint = "move it away, or give another --out"
        if self.root.is_symlink() or not self.root.is_dir():
            what = "a link" if self.root.is_symlink() else "a file"
            raise UsageError(f"{self.root} is {what}, and a build needs a folder of its own there", hint=hint)
        if load_settings(self) is not None:
            return
        for path in _files_below(self.root):
            if path != self.root / LOCK and _UNFINISHED_SETTINGS.fullmatch(path.name) is None:
                raise UsageError(
                    f"{self.root} was not made by a build: it holds {path.relative_to(self.root)} and no "
                    f"{self.settings.name}",
                    hint=hint,
                )


def _files_below(directory: Path) -> Iterator[Path]:
    """Everything below a directory that is not a directory itself. Links are not followed."""
    for folder, directories, files in os.walk(directory):
        links = [name for name in directories if os.path.islink(os.path.join(folder, name))]
        yield from (Path(folder, name) for name in (*files, *links))


def _remove(path: Path, *, is_tolerant: bool = False) -> None:
    """Remove a file, a link or a folder with all that it holds."""
    with contextlib.suppress(OSError) if is_tolerant else contextlib.nullcontext():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=is_tolerant)
        else:
            path.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A corpus that a build writes.

    Args:
        name: ``train`` or ``validation``; empty if the build writes one corpus.
        directory: of the corpus.
        partial: for shards being written.
    """

    name: str
    directory: Path
    partial: Path

    @property
    def store(self) -> Store:
        """Of the corpus."""
        return PosixStore(str(self.directory), scratch=str(self.partial))

    def create(self) -> None:
        """Make the folders."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.partial.mkdir(parents=True, exist_ok=True)


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
    """

    config: BuildConfig
    tokenizer: TokenizerInfo
    on_bad_record: str
    on_bad_source: str
    sources: InputTable
    arguments: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a process needs to run tasks of a build.

    Args:
        tokenizer: of the corpus; the file to load is in the workspace.
        inputs: of the build, in order.
        is_skipping: bad records are left out instead of failing the task.
        is_leaving_out: damaged inputs are left out, wherever they are: no limit may fall before one.
        outputs: the corpora to write.
        rules: which documents are written, and into which of them.
        drops: which texts are duplicates; None if all are wanted, or nobody knows yet.
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


@contextlib.contextmanager
def lock(workspace: Workspace) -> Iterator[bool]:
    """Hold the build directory alone. The lock dies with the process, so a killed build leaves none behind.

    Yields:
        False where the file system has no locks: two builds at once do work twice then, and the later one wins.

    Raises:
        BuildError: another build holds it, or the directory cannot be written.
    """
    path = workspace.root / LOCK
    tries = 0
    while True:
        try:
            workspace.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            tries += 1
            if isinstance(error, FileNotFoundError) and tries < _LOCK_TRIES:
                continue  # the build before removed the folder just now
            raise cannot_write(workspace.out, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError:
            os.close(descriptor)
            tries += 1
            if tries < _LOCK_TRIES:  # `tokshard status` holds it for a moment
                time.sleep(_LOCK_SECONDS)
                continue
            raise BuildError(
                f"another build is writing to {workspace.out}",
                hint="wait for it, or give another --out",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise cannot_write(workspace.out, error) from error
            is_locked = False
        if _is_at(path, descriptor):
            break
        os.close(descriptor)
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
        yield is_locked
    finally:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is still in its place: the build before may have removed it between open and flock."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def lock_holder(workspace: Workspace) -> str | None:
    """The process that builds into a directory, as it calls itself; None if there is none."""
    try:
        descriptor = os.open(workspace.root / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(descriptor, 256).decode("utf-8", "replace") or "a process"
    except OSError:  # a file system without locks, on which nothing says whether a build runs
        return None
    else:
        return None
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> BuildError:
    """The error for a directory or disk that takes no more."""
    way_out = "make room" if error.errno in _NO_ROOM else "check the disk and its permissions"
    return BuildError(
        f"cannot write to {path}: {error.strerror or error}",
        hint=f"{way_out}, or give another --out; the same command continues where this one stopped",
    )


def save_settings(workspace: Workspace, settings: Settings) -> None:
    """Remember what was asked for, and of which inputs."""
    settings.sources.save(workspace.inputs)
    atomic_write(workspace.settings, msgspec.json.encode(settings, enc_hook=_reference))


def _reference(inputs: InputTable) -> _InputsReference:
    return _InputsReference(roots=inputs.roots, digest=inputs.digest)


def load_settings(workspace: Workspace) -> Settings | None:
    """What the build in this directory was asked for, or None if there is none.

    Raises:
        BuildError: the file is damaged.
    """

    def inputs(_: type, reference: object) -> InputTable:
        found = msgspec.convert(reference, _InputsReference)
        return InputTable.saved(found.roots, workspace.inputs, found.digest)

    try:
        return msgspec.json.decode(workspace.settings.read_bytes(), type=Settings, dec_hook=inputs)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.MsgspecError as error:
        raise BuildError(
            f"{workspace.settings} is damaged, so nothing says which files the build wrote: {error}",
            hint=f"remove {workspace.out}, or give another --out",
        ) from error


def save_bad_inputs(workspace: Workspace, problems: Mapping[int, str]) -> None:
    """Remember which inputs are left out, and why; by index."""
    atomic_write(workspace.bad_inputs, msgspec.json.encode(problems))


def load_bad_inputs(workspace: Workspace) -> dict[int, str]:
    """The inputs that earlier runs of a build left out.

    Raises:
        BuildError: the file is damaged.
    """
    return _load(workspace.bad_inputs, dict[int, str]) or {}


def save_command(workspace: Workspace, command: Command) -> None:
    """Remember how to continue."""
    atomic_write(workspace.command, msgspec.json.encode(command))


def load_command(workspace: Workspace) -> Command | None:
    """How to continue; None if a build has not come so far.

    Raises:
        BuildError: the file is damaged.
    """
    return _load(workspace.command, Command)


def check_same_settings(before: Settings, now: Settings, *, out: Path) -> None:
    """Refuse to continue a build with other settings. From fail to skip is allowed, the other way is not.

    Raises:
        ConfigurationChangedError: it says what differs.
    """
    differences = list(_differences(before, now))
    if differences:
        shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        raise ConfigurationChangedError(
            f"{out} belongs to another build: {shown}",
            hint="give the settings of that build, another --out, or --force to start over",
        )


def _load(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise BuildError(f"{path} is damaged: {error}", hint="start over with --force") from error


def save_paths(path: Path, paths: Iterable[Path], *, below: Path) -> None:
    """Remember files of a build."""
    atomic_write(path, msgspec.json.encode(sorted(str(found.relative_to(below)) for found in paths)))


def load_paths(path: Path, *, below: Path) -> set[Path]:
    """Files of a build that were remembered; none if there is no such list.

    Raises:
        BuildError: the list is damaged.
    """
    found = _load(path, list[str]) or []
    return {below / name for name in found if _is_name_of_ours(Path(name))}


def _is_name_of_ours(path: Path) -> bool:
    """Whether a relative path can be a file of a build; whatever a list says, it leads nowhere else."""
    folders = path.parts[:-1]
    is_file = path.name in names.SIDE_FILES or names.is_shard_name(path.name)
    return is_file and folders in ((), (names.TRAIN,), (names.VALIDATION,))


def _differences(before: Settings, now: Settings) -> Iterator[str]:
    for part_before, part_now in ((before.config, now.config), (before.tokenizer, now.tokenizer)):
        old, new = msgspec.structs.asdict(part_before), msgspec.structs.asdict(part_now)
        for key in old:
            # the size of tasks follows from the sources; naming the sources says more
            follows = (key == "task_bytes" and before.sources != now.sources) or (
                key == "name" and isinstance(part_now, TokenizerInfo)  # of its folder: what it does is its hash
            )
            if old[key] != new[key] and not follows:
                change = change_text(key, old[key], new[key])
                if change is not None:
                    yield change
    for policy in ("on_bad_record", "on_bad_source"):
        if getattr(before, policy) == "skip" and getattr(now, policy) == "fail":
            yield f"--{policy.replace('_', '-')} was skip, now fail"
    yield from _differences_of_sources(before, now)


def _differences_of_sources(before: Settings, now: Settings) -> Iterator[str]:
    if now.sources.read_once:
        yield f"{', '.join(map(read_once_name, now.sources.read_once))} cannot be read again"
    elif _is_reordered(before.arguments, now.arguments) or _is_reordered(before.sources.roots, now.sources.roots):
        yield "the order of the sources changed"
    else:
        if before.arguments != now.arguments:
            yield f"the sources were {', '.join(before.arguments)}, now {', '.join(now.arguments)}"
        if before.sources != now.sources:
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
        then, since = _date(before.version), _date(now.version)
        return f"source {now.location} was modified since: at {since}, and before at {then}"
    return None


def _date(version: str) -> str:
    try:
        return datetime.fromtimestamp(int(version) / 1e9, tz=UTC).astimezone().isoformat(sep=" ")
    except (OverflowError, OSError, ValueError):  # the clock of a file may say anything
        return f"{version} ns"
