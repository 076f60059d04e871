"""The checkpoints of the trainer on disk: each is complete or absent.

    OUT/checkpoints/step-00000100/     files of tensors, state.json, COMPLETE

Everything is written into `step-....partial`, and one rename commits it. COMPLETE lists every file with its size and
SHA-256, so a directory that was only partly copied, or has changed since, is not loaded. A job that is killed while it
saves or deletes leaves a `.partial`, which the next start removes. Nothing here knows tensors.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from tokshard.errors import UNDECODABLE, TrainerError, UsageError
from tokshard.forking import decodable
from tokshard.store import is_uri

COMPLETE = "COMPLETE"
STATE_FILE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-(\d{8,})\.partial")


@decodable
class State(msgspec.Struct, frozen=True):
    """The contents of state.json: steps done, the loader's state, the recipe."""

    step: int
    loader: dict[str, Any]
    config: dict[str, dict[str, Any]]


@decodable
class File(msgspec.Struct, frozen=True):
    """A file of a checkpoint, as COMPLETE lists it."""

    bytes: int
    sha256: str


def is_checkpoint(location: str) -> bool:
    """Whether a directory is a checkpoint of the trainer."""
    return os.path.isfile(os.path.join(location, STATE_FILE))


def refuse_uri(path: str) -> None:
    """Refuse a checkpoint in a bucket or on a web server: reading one needs a file system."""
    if is_uri(path):
        raise UsageError(f"{path} is a URI, and checkpoints are only read on a disk", hint="copy it to this machine")


def contents(path: str) -> dict[str, File]:
    """The files of a checkpoint, by name, after checking that each is there with its size. Hashes are not checked.

    Raises:
        TrainerError: the checkpoint is damaged or incomplete.
        UsageError: there is none.
    """
    refuse_uri(path)
    if not os.path.isdir(path):
        raise UsageError(f"{path} is not a directory", hint="give a checkpoint, such as OUT/checkpoints/step-00001000")
    if inside := _entries(path, _NAME) or _entries(os.path.join(path, "checkpoints"), _NAME):
        hint = f"give one of its checkpoints, such as {inside[-1]}"
        raise UsageError(f"{path} is a run, and not a checkpoint", hint=hint)
    try:
        with open(os.path.join(path, COMPLETE), "rb") as file:
            files = msgspec.json.decode(file.read(), type=dict[str, File])
    except (OSError, *UNDECODABLE) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise damage(path, f"{COMPLETE}: {cause}") from error
    require(path, {STATE_FILE}, files)
    for name, expected in files.items():
        if os.path.basename(name) != name or not os.path.isfile(os.path.join(path, name)):
            raise damage(path, f"{name!r} is missing")
        if (size := os.path.getsize(os.path.join(path, name))) != expected.bytes:
            raise damage(path, f"{name} has {size:,} bytes, expected {expected.bytes:,}")
    return files


def require(path: str, names: Collection[str], files: Collection[str]) -> None:
    """Refuse a checkpoint whose COMPLETE does not list all of `names`.

    Raises:
        TrainerError: it lists only `files`.
    """
    if missing := set(names) - set(files):
        raise damage(path, f"{COMPLETE} does not list {min(missing)!r}")


def check_hashes(path: str, part: int = 0, num_parts: int = 1) -> None:
    """Compare every `num_parts`-th file of a checkpoint with its hash.

    Raises:
        TrainerError: the checkpoint is damaged or incomplete.
        OSError: a file cannot be read.
    """
    files = contents(path)
    for name in sorted(files)[part::num_parts]:
        if (found := _hashed(os.path.join(path, name))) != files[name]:
            raise damage(path, f"{name} has SHA-256 {found.sha256}, expected {files[name].sha256}")


def state_of(path: str) -> State:
    """The state of a checkpoint.

    Raises:
        TrainerError: it is damaged.
        OSError: it cannot be read.
    """
    try:
        with open(os.path.join(path, STATE_FILE), "rb") as file:
            return msgspec.json.decode(file.read(), type=State)
    except UNDECODABLE as error:
        raise damage(path, f"{STATE_FILE}: {error}") from error


def damage(path: str, what: str) -> TrainerError:
    """The error for a checkpoint that has changed since it was saved."""
    return TrainerError(
        f"{path} is damaged or not a complete checkpoint: {what}",
        hint="restore it from a copy, or rename it to continue from the checkpoint before it, or to start a new run",
    )


def newest(directory: str) -> str | None:
    """The newest checkpoint; None if there is none.

    Raises:
        TrainerError: a checkpoint newer than the newest intact one is damaged. Falling back silently would train its
            steps again, or start over.
    """
    found, doubts = None, []
    for path in reversed(_entries(directory, _NAME)):
        if (problem := _problem_of(path)) is None:
            found = path
            break
        doubts.append(problem)
    if doubts:
        then = f"continue from {found}" if found else "start a new run"
        raise TrainerError("; ".join(doubts), hint=f"restore what is damaged from a copy, or rename it to {then}")
    return found


def checkpoints_by_step(directory: str) -> dict[int, str]:
    """The paths of all complete checkpoints, in the order of their steps; hashes are not checked."""
    found = [path for path in _entries(directory, _NAME) if _problem_of(path) is None]
    return {int(os.path.basename(path).partition("-")[2]): path for path in found}


def remove_unfinished(directory: str) -> None:
    """Remove unfinished saves and deletions of a killed job."""
    for path in _entries(directory, _PARTIAL):
        _remove(path)


def delete_old(directory: str, keep: int) -> Iterator[str]:
    """Delete all but the newest `keep` complete checkpoints; 0 keeps all. Damaged ones are neither counted nor deleted.

    Yields:
        Checkpoints that could not be deleted, and why. The run continues.
    """
    complete = list(checkpoints_by_step(directory).values()) if keep else []
    for path in complete[:-keep]:
        try:
            os.rename(path, path + ".partial")  # never seen half deleted
            _remove(path + ".partial")
        except OSError as error:
            yield f"{path} could not be deleted: {error}"


def partial_of(directory: str, step: int) -> str:
    """The directory of a checkpoint until it is complete."""
    return os.path.join(directory, f"step-{step:08d}.partial")


def begin(partial: str) -> None:
    """Make the directory of `partial_of`, empty."""
    _remove(partial)
    os.makedirs(partial)


def commit(partial: str, state: State, files: Mapping[str, File], *, needed: Collection[str]) -> str:
    """Turn files on disk and `state` into a checkpoint, which appears at once. Returns its path.

    Args:
        files: by name, as `synced` returned them to their writers.
        needed: names that must be among them.

    Raises:
        TrainerError: a file differs from what was written.
        OSError: the disk is full, or the checkpoint exists.
    """
    for name in sorted({*needed, *files}):
        path = os.path.join(partial, name)
        if name not in files or not os.path.isfile(path) or os.path.getsize(path) != files[name].bytes:
            raise TrainerError(
                f"{partial}: rank 0 does not see {name} as another rank has written it",
                hint="give a train.out on a file system that all ranks share",
            )
    final = partial.removesuffix(".partial")
    written = {**files, STATE_FILE: _write(os.path.join(partial, STATE_FILE), state)}
    _write(os.path.join(partial, COMPLETE), written)
    _sync(partial)
    os.rename(partial, final)  # readers see the whole checkpoint or none; it fails if there is one already
    _sync(os.path.dirname(final))
    return final


def synced(path: str) -> File:
    """Flush a file to disk, and read it for its hash."""
    _sync(path)
    return _hashed(path)


def _entries(directory: str, pattern: re.Pattern[str]) -> list[str]:
    """Paths whose names match a pattern, in the order of their steps.

    Raises:
        TrainerError: the directory cannot be listed.
    """
    try:
        names = os.listdir(directory) if os.path.lexists(directory) else []
    except OSError as error:
        raise TrainerError(
            f"{directory} cannot be listed: {error.strerror}",
            hint="it has to be the directory of the checkpoints of a run: rename it, or allow reading it",
        ) from error
    found = sorted((int(match[1]), name) for name in names if (match := pattern.fullmatch(name)))
    return [os.path.join(directory, name) for _, name in found]


def _problem_of(path: str) -> str | None:
    try:
        contents(path)
        step = state_of(path).step
    except TrainerError as error:
        return error.problem
    except OSError as error:
        return damage(path, f"{STATE_FILE}: {error.strerror}").problem
    # the newest name decides where a run continues, and which checkpoints are old
    return (
        None if os.path.basename(path) == f"step-{step:08d}" else f"{path} holds step {step}, but its name says another"
    )


def _write(path: str, value: State | dict[str, File]) -> File:
    with open(path, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(value), indent=1))
    return synced(path)


def _sync(path: str) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hashed(path: str) -> File:
    with open(path, "rb") as file:
        return File(sha256=hashlib.file_digest(file, "sha256").hexdigest(), bytes=file.tell())


def _remove(path: str) -> None:
    """Remove one of our directories if it exists, or a link to one; never the target of a link."""
    if os.path.islink(path):
        os.unlink(path)
    elif os.path.lexists(path):
        shutil.rmtree(path)
