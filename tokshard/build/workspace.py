"""The folder of an unfinished build: who may write, what was asked for, what is done."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokshard.build.records import RecordSpec
from tokshard.build.sources import Input
from tokshard.errors import BuildError, ConfigurationChangedError
from tokshard.format import names
from tokshard.format.manifest import BuildConfig, TokenizerInfo
from tokshard.format.storage import atomic_write


@dataclass(frozen=True, slots=True)
class Workspace:
    """Paths of a build.

    Args:
        out: the corpus directory.
    """

    out: Path

    @property
    def root(self) -> Path:
        """Everything that goes when the corpus is complete."""
        return self.out / names.WORK

    @property
    def receipts(self) -> Path:
        """One file per finished task."""
        return self.root / "receipts"

    @property
    def rejects(self) -> Path:
        """One JSON lines file per finished task that left out bad records."""
        return self.root / "rejects"

    @property
    def partial(self) -> Path:
        """Files being written."""
        return self.root / "partial"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer as workers load it."""
        return self.root / "tokenizer.json"

    @property
    def settings(self) -> Path:
        """What was asked for."""
        return self.root / "settings.json"

    def create(self) -> None:
        """Make the folders."""
        for folder in (self.root, self.receipts, self.rejects, self.partial):
            folder.mkdir(parents=True, exist_ok=True)

    def clear_partial(self) -> None:
        """Remove what attempts before this one left unfinished."""
        for path in [*self.partial.iterdir(), *self.receipts.glob(".*"), *self.rejects.glob(".*")]:
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.root, ignore_errors=True)


class SourceState(msgspec.Struct, frozen=True, kw_only=True):
    """An input as it was when the build began."""

    argument: int
    path: str
    location: str
    num_bytes: int
    mtime_ns: int


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must stay the same for a build to be continued."""

    config: BuildConfig
    tokenizer: TokenizerInfo
    on_bad_record: str
    sources: list[SourceState]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a process needs to run tasks of a build.

    Args:
        tokenizer: of the corpus; the file to load is in the workspace.
        inputs: of the build, in order.
        is_skipping: bad records are left out instead of failing the task.
    """

    workspace: Workspace
    inputs: tuple[Input, ...]
    spec: RecordSpec
    columns: dict[str, str]
    tokenizer: TokenizerInfo
    task_bytes: int
    shard_tokens: int
    is_skipping: bool


def source_states(inputs: tuple[Input, ...]) -> list[SourceState]:
    """The inputs as they are now."""
    return [
        SourceState(
            argument=source.argument,
            path=source.path,
            location=os.path.abspath(source.location),
            num_bytes=source.num_bytes,
            mtime_ns=source.mtime_ns,
        )
        for source in inputs
    ]


@contextlib.contextmanager
def lock(workspace: Workspace) -> Iterator[None]:
    """Hold the build directory alone. The lock dies with the process, so a killed build leaves none behind.

    Raises:
        BuildError: another build holds it, or the directory cannot be written.
    """
    path = workspace.root / "lock"
    while True:
        try:
            workspace.create()
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise cannot_write(workspace.out, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # the build before may have removed the folder between open and flock
            if path.exists() and os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                break
        except BlockingIOError:
            os.close(descriptor)
            raise BuildError(
                f"another build is writing to {workspace.out}",
                hint="wait for it, or give another --out",
            ) from None
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError) -> BuildError:
    """The error for a directory or disk that takes no more."""
    return BuildError(
        f"cannot write to {path}: {error.strerror or error}",
        hint="make room or give another --out; the same command goes on where this one stopped",
    )


def save_settings(workspace: Workspace, settings: Settings) -> None:
    """Remember what was asked for."""
    atomic_write(workspace.settings, msgspec.json.encode(settings))


def load_settings(workspace: Workspace) -> Settings | None:
    """What the build in this directory was asked for, or None if there is none.

    Raises:
        BuildError: the file is damaged.
    """
    try:
        return msgspec.json.decode(workspace.settings.read_bytes(), type=Settings)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise BuildError(f"{workspace.settings} is damaged: {error}", hint="start over with --force") from error


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


def _differences(before: Settings, now: Settings) -> Iterator[str]:
    for part_before, part_now in ((before.config, now.config), (before.tokenizer, now.tokenizer)):
        old, new = msgspec.to_builtins(part_before), msgspec.to_builtins(part_now)
        for key in old:
            # the size of tasks follows from the sources; naming the sources says more
            if old[key] != new[key] and not (key == "task_bytes" and before.sources != now.sources):
                yield f"{key} was {_short(old[key])}, now {_short(new[key])}"
    if before.on_bad_record == "skip" and now.on_bad_record == "fail":
        yield "on_bad_record was skip, now fail"
    old_sources = {(source.argument, source.path): source for source in before.sources}
    new_sources = {(source.argument, source.path): source for source in now.sources}
    for place, source in old_sources.items():
        if place not in new_sources:
            yield f"source {source.location} is gone"
        elif (change := _source_change(source, new_sources[place])) is not None:
            yield change
    yield from (f"source {source.location} is new" for place, source in new_sources.items() if place not in old_sources)
    if list(old_sources) != list(new_sources) and set(old_sources) == set(new_sources):
        yield "the order of the sources changed"


def _source_change(before: SourceState, now: SourceState) -> str | None:
    if before.num_bytes != now.num_bytes:
        return f"source {now.location} had {before.num_bytes} bytes, now {now.num_bytes}"
    if before.mtime_ns != now.mtime_ns:
        return f"source {now.location} was modified since (mtime_ns {before.mtime_ns}, now {now.mtime_ns})"
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
