"""Checkpoints that exist wholly or not at all, for any number of ranks.

    OUT/checkpoints/step-00000100/     shards of DCP (model, optimizer, RNG), state.json, COMPLETE

All of it is written in `step-....partial`, which one rename commits. COMPLETE lists every file with its size and
SHA-256: a directory that was copied half, or has changed since, is not loaded. A `.partial` is what a job left that
was killed while it saved or deleted; the next start removes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from tokshard.errors import LoaderError, TrainerError
from tokshard.runtime.checkpoints import METADATA_FILE, load_checkpoint, read_metadata
from tokshard.trainer.directory import sync
from tokshard.trainer.parallel import together

COMPLETE = "COMPLETE"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"step-\d{8,}(\.old)?\.partial")
_RESTORE = "restore it from a copy, or rename or remove it to continue from the checkpoint before it, or anew"


class File(msgspec.Struct, frozen=True):
    """A file of a checkpoint, as COMPLETE lists it."""

    bytes: int
    sha256: str


def save(directory: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> str:
    """Commit a checkpoint; every rank calls it, and returns when it is complete.

    Args:
        state: step, cursor and configuration: JSON, the same on every rank.

    Raises:
        TrainerError: the disk is full, or another error of the file system; on all ranks the same.
    """
    final = os.path.join(directory, f"step-{step:08d}")
    partial = final + ".partial"
    rank = distributed.get_rank()
    rng = {f"rng.{name}.{rank}": value for name, value in _rng().items()}
    with together(), _saving(partial):
        if rank == 0:
            _remove(partial)
            os.makedirs(partial)
    with _saving(partial):
        writer = FileSystemWriter(partial, sync_files=False)  # `_synced` does, and also what DCP leaves in a buffer
        save_tensors({**_tensors(model, optimizer), **rng}, storage_writer=writer)  # agrees on failures by itself
    files: dict[str, File] = {}
    with together(), _saving(partial):
        starts = f"__{rank}_" if rank else ("__0_", METADATA_FILE)
        names = [name for name in os.listdir(partial) if name.startswith(starts)]
        files = {name: _synced(os.path.join(partial, name)) for name in names}
    of_ranks: list[dict[str, File]] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(of_ranks, files)
    with together(), _saving(partial):
        if rank == 0:
            _commit(partial, final, state, {name: file for each in of_ranks for name, file in each.items()})
    return final


def load(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load a checkpoint of any world size in place; returns its `state`. Every rank calls it.

    Nothing is read before its hash is checked; each rank hashes its part of the files. A rank that the saving job did
    not have keeps its random state.

    Raises:
        TrainerError: the checkpoint is damaged or not complete, or of another model; on all ranks the same.
    """
    with together():
        files = contents(path)
        for name in sorted(files)[distributed.get_rank() :: distributed.get_world_size()]:
            _check_hash(path, name, files[name])
    wanted: dict[str, Tensor] = {}
    with together():
        saved = _metadata(path)
        state = _state(path)
        if missing := _named_by(saved) - files.keys():
            raise _damaged(path, f"{COMPLETE} does not list {min(missing)!r}, which {METADATA_FILE} names")
        tensors, rng = _tensors(model, optimizer), _rng()
        keys = {name: f"rng.{name}.{distributed.get_rank()}" for name in rng}
        wanted = {**tensors, **{key: rng[name] for name, key in keys.items() if key in saved.state_dict_metadata}}
        for name, tensor in wanted.items():
            # a saved value that is not a tensor has no size
            size = getattr(saved.state_dict_metadata.get(name), "size", None)
            if size != tensor.size():
                raise TrainerError(
                    f"{path} is of another model: {name} is {size and tuple(size)} there, {tuple(tensor.size())} here",
                    hint="give the [model] of its state.json, or start a new run in another train.out",
                )
    try:
        load_checkpoint(wanted, path)  # agrees on failures by itself
    except (OSError, LoaderError) as error:
        raise _damaged(path, str(error)) from error
    if keys["cpu"] in wanted:
        torch.set_rng_state(rng["cpu"])
    if "cuda" in rng and keys["cuda"] in wanted:
        torch.cuda.set_rng_state(rng["cuda"])
    return state


def find_latest(directory: str) -> str | None:
    """The newest checkpoint, as rank 0 sees it: all ranks agree. None: there is none, and the run is a new one.

    Removes what a job that was killed left unfinished.

    Raises:
        TrainerError: one that is newer than the newest intact one is damaged. It is not passed over: the steps that it
            holds would be trained again, or all of them.
    """
    found: list[str | None] = [None]
    with together():
        if distributed.get_rank() == 0:
            remove_leftovers(directory)
            found = [_newest(directory)]
    distributed.broadcast_object_list(found)
    return found[0]


def contents(path: str) -> dict[str, File]:
    """The files of a checkpoint, by name: all are there, each with its size. Hashes are not looked at.

    Raises:
        TrainerError: it is damaged, or not complete.
    """
    try:
        with open(os.path.join(path, COMPLETE), "rb") as file:
            files = msgspec.json.decode(file.read(), type=dict[str, File])
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise _damaged(path, f"{COMPLETE}: {cause}") from error
    for name in (METADATA_FILE, STATE):
        if name not in files:
            raise _damaged(path, f"{COMPLETE} does not list {name}")
    for name, expected in files.items():
        if os.path.basename(name) != name or not os.path.isfile(os.path.join(path, name)):
            raise _damaged(path, f"{name!r} is missing")
        size = os.path.getsize(os.path.join(path, name))
        if size != expected.bytes:
            raise _damaged(path, f"{name} has {size:,} bytes, expected {expected.bytes:,}")
    return files


def delete_old(directory: str, keep: int) -> list[str]:
    """Delete all but the newest `keep` complete checkpoints; 0: none. Damaged ones are neither counted nor deleted.

    Returns:
        What could not be deleted, and why. That is no failure of the run.
    """
    problems = []
    for path in [path for path in find_all(directory) if _is_complete(path)][:-keep] if keep else []:
        try:
            os.rename(path, path + ".partial")  # never seen half deleted
            _remove(path + ".partial")
        except OSError as error:
            problems.append(f"{path} could not be deleted: {error}")
    return problems


def find_all(directory: str) -> list[str]:
    """Everything that has the name of a checkpoint, oldest first, complete or not."""
    try:
        names = os.listdir(directory)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.islink(directory):
            return []
        raise TrainerError(
            f"the checkpoints in {directory} cannot be listed: {error}",
            hint="make it readable, or give another train.out",
        ) from error
    named = [(int(match[1]), name) for name in names if (match := _NAME.fullmatch(name))]
    return [os.path.join(directory, name) for _, name in sorted(named)]


def remove_leftovers(directory: str) -> None:
    """Remove what a save or a deletion left that was killed.

    Raises:
        TrainerError: one cannot be removed.
    """
    try:
        for name in os.listdir(directory) if os.path.isdir(directory) else []:
            if _LEFTOVER.fullmatch(name):
                _remove(os.path.join(directory, name))
    except OSError as error:
        raise TrainerError(
            f"what an unfinished save left in {directory} cannot be removed: {error}", hint="remove it by hand"
        ) from error


def _newest(directory: str) -> str | None:
    passed_over = []
    for path in reversed(find_all(directory)):
        try:
            contents(path)
        except TrainerError as error:
            passed_over.append(error.problem)
            continue
        break
    else:
        path = ""
    if passed_over:
        then = f"continue from {path}" if path else "start a new run"
        raise TrainerError(
            "; ".join(passed_over), hint=f"restore from a copy, or rename or remove what is damaged to {then}"
        )
    return path or None


def _is_complete(path: str) -> bool:
    try:
        contents(path)
    except TrainerError:
        return False
    return True


def _check_hash(path: str, name: str, expected: File) -> None:
    try:
        found = _hashed(os.path.join(path, name))
    except OSError as error:
        raise _damaged(path, f"{name}: {error}") from error
    if found != expected:
        raise _damaged(path, f"{name} has SHA-256 {found.sha256}, expected {expected.sha256}")


def _metadata(path: str) -> Metadata:
    try:
        return read_metadata(path)
    except (OSError, LoaderError) as error:
        raise _damaged(path, str(error)) from error


def _named_by(metadata: Metadata) -> set[str]:
    """The files that hold the tensors."""
    return {place.relative_path for place in (metadata.storage_data or {}).values()}


def _state(path: str) -> dict[str, Any]:
    try:
        with open(os.path.join(path, STATE), encoding="utf-8") as file:
            state = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"{STATE}: {error}") from error
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise _damaged(path, f"{STATE} does not say which step it is of")
    return state


def _damaged(path: str, what: str) -> TrainerError:
    return TrainerError(f"{path} is damaged or not a complete checkpoint: {what}", hint=_RESTORE)


@contextmanager
def _saving(partial: str) -> Iterator[None]:
    try:
        yield
    except (OSError, CheckpointException) as error:  # the latter is no Exception
        raise TrainerError(
            f"{partial} could not be saved: {_causes(error)}",
            hint="make room or repair the directory; the same command continues from the checkpoint before",
        ) from error


def _causes(error: BaseException) -> str:
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return "; ".join(dict.fromkeys(map(str, causes)))


def _commit(partial: str, final: str, state: dict[str, Any], files: dict[str, File]) -> None:
    """Make what all ranks have written, and `state`, durable; then visible at once."""
    for name in sorted(_named_by(_metadata(partial)) | files.keys()):
        path = os.path.join(partial, name)
        if name not in files or not os.path.isfile(path) or os.path.getsize(path) != files[name].bytes:
            raise TrainerError(
                f"{partial}: rank 0 does not see {name} as another rank has written it",
                hint="give a train.out on a file system that all ranks share",
            )
    written = {**files, STATE: _write(os.path.join(partial, STATE), json.dumps(state, indent=1).encode())}
    _write(os.path.join(partial, COMPLETE), msgspec.json.format(msgspec.json.encode(written), indent=1))
    sync(partial)
    if os.path.lexists(final):  # an earlier attempt at this step
        os.rename(final, final + ".old.partial")
    os.rename(partial, final)  # readers see the whole checkpoint or none
    sync(os.path.dirname(final))
    _remove(final + ".old.partial")


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor under a name that depends on neither ranks nor decay groups."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        tensors |= {f"optimizer.{key}.{name}": value for key, value in optimizer.state[parameter].items()}
    return tensors


def _rng() -> dict[str, Tensor]:
    rng = {"cpu": torch.get_rng_state()}
    return {**rng, "cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else rng


def _write(path: str, data: bytes) -> File:
    with open(path, "wb") as file:
        file.write(data)
    return _synced(path)


def _synced(path: str) -> File:
    sync(path)
    return _hashed(path)


def _hashed(path: str) -> File:
    with open(path, "rb") as file:
        return File(sha256=hashlib.file_digest(file, "sha256").hexdigest(), bytes=file.tell())


def _remove(path: str) -> None:
    """A directory of ours, or a link to one, if it is there; what a link leads to is left alone."""
    if os.path.islink(path):
        os.unlink(path)
    elif os.path.lexists(path):
        shutil.rmtree(path)
