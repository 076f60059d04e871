"""Checkpoints that are complete or absent, for any number of ranks.

    OUT/checkpoints/step-00000100/     shards of DCP (model, optimizer), state.json, COMPLETE

Everything is written into `step-....partial`, and one rename commits it. COMPLETE lists every file with its size and
SHA-256, so a directory that was only partly copied, or has changed since, is not loaded. A job that is killed while it
saves or deletes leaves a `.partial`, which the next start removes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from tokshard.errors import TrainerError
from tokshard.jobs.torch_checkpoints import METADATA_FILE, load_checkpoint, read_metadata
from tokshard.trainer.directory import sync
from tokshard.trainer.parallel import together

COMPLETE = "COMPLETE"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"step-(\d{8,})\.partial")


class State(msgspec.Struct):
    """The contents of state.json: steps done, the loader's state, the recipe."""

    step: int
    loader: dict[str, Any]
    config: dict[str, dict[str, Any]]


class File(msgspec.Struct, frozen=True):
    """A file of a checkpoint, as COMPLETE lists it."""

    bytes: int
    sha256: str


class Saver:
    """Saves the checkpoints of a run, one at a time. Every rank makes one, and calls it at the same steps.

    If it is asynchronous, `save` copies the tensors to memory that it keeps for the next time, and returns: training
    may change the originals while a thread writes the copies. The threads of the ranks have a process group of their
    own, so they never mix with the collectives of training.

    Args:
        directory: of the checkpoints.
        keep: how many of the newest to keep; 0: all.
        timeout_seconds: the longest that a rank waits for another one in a save.
        say: takes a line for people, maybe from the thread.
    """

    def __init__(
        self, directory: str, *, keep: int, asynchronous: bool, timeout_seconds: int, say: Callable[[str], None]
    ) -> None:
        self.directory, self._keep, self._asynchronous, self._say = directory, keep, asynchronous, say
        self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokshard-save")
        self._stager: DefaultStager | None = None
        self._running: Future[None] | None = None

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the save in flight failed. All ranks then have to `wait`, which raises it."""
        return self._running is not None and self._running.done() and self._running.exception() is not None

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Save a checkpoint, after the save in flight.

        Raises:
            TrainerError: this save failed or, if it is asynchronous, the one before; the same error on all ranks.
        """
        self.wait()
        tensors = tensors_of(model, optimizer)
        if self._asynchronous:
            self._running = self._thread.submit(self._save, self._copied(tensors), state)
        else:
            self._save(tensors, state)

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            TrainerError: it failed; the same error on all ranks.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Let the save in flight end, whatever ends the run."""
        self._thread.shutdown()
        if self._running is not None and (error := self._running.exception()) is not None:
            self._say(f"warning: {error}")
        if self._stager is not None:
            self._stager.close()

    def _copied(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._stager is None:
            on_gpu = any(tensor.is_cuda for tensor in tensors.values())
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=on_gpu,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=on_gpu,  # it waits for all copies at the end
                )
            )
        return cast("dict[str, Tensor]", self._stager.stage(tensors))

    def _save(self, tensors: dict[str, Tensor], state: State) -> None:
        path = save(self.directory, tensors, state, self._group)
        self._say(f"saved {path}")
        if distributed.get_rank() == 0:
            for problem in delete_old(self.directory, self._keep):
                self._say(f"warning: {problem}")


def save(directory: str, tensors: dict[str, Tensor], state: State, group: ProcessGroup | None = None) -> str:
    """Commit a checkpoint. Every rank calls this, and it returns once the checkpoint is complete.

    Args:
        tensors: of `tensors_of`; not changed meanwhile.
        state: the same on every rank.
        group: all ranks; default: the group of the training loop.

    Raises:
        TrainerError: the disk is full, or the file system failed otherwise; the same error on all ranks.
    """
    final = os.path.join(directory, f"step-{state.step:08d}")
    partial, rank, files = final + ".partial", distributed.get_rank(), dict[str, File]()
    problem, hint = f"{partial} could not be saved", "make room or repair the directory, then run the same command"
    with together(problem, hint=hint, group=group):
        if rank == 0:
            _remove(partial)
            os.makedirs(partial)
    try:
        writer = FileSystemWriter(partial, sync_files=False)  # `_synced` does
        save_tensors(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # is not an Exception; it is the same on all ranks
        causes = dict.fromkeys(str(cause) for cause, _ in error.failures.values())
        raise TrainerError(f"{problem}: {'; '.join(causes)}", hint=hint) from error
    with together(problem, hint=hint, group=group):
        own = f"__{rank}_" if rank else ("__0_", METADATA_FILE)
        files = {name: _synced(os.path.join(partial, name)) for name in os.listdir(partial) if name.startswith(own)}
    of_ranks: list[dict[str, File]] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(of_ranks, files, group)
    with together(problem, hint=hint, group=group):
        if rank == 0:
            _commit(partial, final, state, {name: file for each in of_ranks for name, file in each.items()})
    return final


def load(path: str, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
    """Load a checkpoint of any world size in place, and return its `state`. Every rank calls this.

    All hashes are checked before anything is read; each rank checks a part of the files.

    Args:
        optimizer: None: only the weights are loaded.

    Raises:
        TokshardError: the checkpoint is damaged, incomplete, or of another model; the same error on all ranks.
    """
    tensors = tensors_of(model, optimizer)
    with together(f"{path} cannot be read", hint="repair the disk, or use another checkpoint"):
        check_hashes(path, distributed.get_rank(), distributed.get_world_size())
    with together(f"{path} cannot be read", hint="repair the disk, or use another checkpoint"):
        index, state = read_index(path)
        saved = index.state_dict_metadata
        for name, tensor in tensors.items():
            size = getattr(saved.get(name), "size", None)  # a saved value that is not a tensor has none
            if size != tensor.size():
                raise TrainerError(
                    f"{path} is of another model: {name} is {size and tuple(size)} there, {tuple(tensor.size())} here",
                    hint="give the [model] of its state.json, or start a new run in another train.out",
                )
    load_checkpoint(tensors, path)
    return state


def check_hashes(path: str, part: int = 0, num_parts: int = 1) -> None:
    """Compare every `num_parts`-th file of a checkpoint with its hash.

    Raises:
        TrainerError: the checkpoint is damaged or incomplete.
        OSError: a file cannot be read.
    """
    files = contents(path)
    for name in sorted(files)[part::num_parts]:
        if (found := _hashed(os.path.join(path, name))) != files[name]:
            raise _damaged(path, f"{name} has SHA-256 {found.sha256}, expected {files[name].sha256}")


def read_index(path: str) -> tuple[Metadata, State]:
    """The index of the tensors of a checkpoint, and its state.

    Raises:
        TokshardError: the checkpoint is damaged or incomplete.
        OSError: a file cannot be read.
    """
    files, index, state = contents(path), read_metadata(path), _state(path)
    if missing := _named_by(index) - files.keys():
        raise _damaged(path, f"{COMPLETE} does not list {min(missing)!r}, which {METADATA_FILE} names")
    return index, state


def find_latest(directory: str) -> str | None:
    """The newest checkpoint as rank 0 sees it, the same on all ranks; None if this is a new run.

    Removes what a killed job left unfinished.

    Raises:
        TrainerError: a checkpoint newer than the newest intact one is damaged. Falling back silently would train its
            steps again, or start over.
    """
    found: list[str | None] = [None]
    with together(f"{directory} cannot be looked through", hint="repair it, or give another train.out"):
        if distributed.get_rank() == 0:
            for path in _entries(directory, _PARTIAL):
                _remove(path)
            found = [_newest(directory)]
    distributed.broadcast_object_list(found)
    return found[0]


def contents(path: str) -> dict[str, File]:
    """The files of a checkpoint, by name, after checking that each is there with its size. Hashes are not checked.

    Raises:
        TrainerError: the checkpoint is damaged or incomplete.
    """
    if not os.path.isdir(path):
        raise TrainerError(
            f"{path} is not a directory", hint="give a checkpoint, such as OUT/checkpoints/step-00001000"
        )
    try:
        with open(os.path.join(path, COMPLETE), "rb") as file:
            files = msgspec.json.decode(file.read(), type=dict[str, File])
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise _damaged(path, f"{COMPLETE}: {cause}") from error
    if missing := {METADATA_FILE, STATE} - files.keys():
        raise _damaged(path, f"{COMPLETE} does not list {min(missing)}")
    for name, expected in files.items():
        if os.path.basename(name) != name or not os.path.isfile(os.path.join(path, name)):
            raise _damaged(path, f"{name!r} is missing")
        if (size := os.path.getsize(os.path.join(path, name))) != expected.bytes:
            raise _damaged(path, f"{name} has {size:,} bytes, expected {expected.bytes:,}")
    return files


def delete_old(directory: str, keep: int) -> Iterator[str]:
    """Delete all but the newest `keep` complete checkpoints; 0 keeps all. Damaged ones are neither counted nor deleted.

    Yields:
        What could not be deleted, and why. The run continues.
    """
    complete = [path for path in _entries(directory, _NAME) if _problem_of(path) is None] if keep else []
    for path in complete[:-keep]:
        try:
            os.rename(path, path + ".partial")  # never seen half deleted
            _remove(path + ".partial")
        except OSError as error:
            yield f"{path} could not be deleted: {error}"


def _newest(directory: str) -> str | None:
    newest, doubts = None, []
    for path in reversed(_entries(directory, _NAME)):
        if (problem := _problem_of(path)) is None:
            newest = path
            break
        doubts.append(problem)
    if doubts:
        then = f"continue from {newest}" if newest else "start a new run"
        raise TrainerError("; ".join(doubts), hint=f"restore what is damaged from a copy, or rename it to {then}")
    return newest


def _entries(directory: str, pattern: re.Pattern[str]) -> list[str]:
    """Paths whose names match a pattern, in the order of their steps."""
    names = os.listdir(directory) if os.path.lexists(directory) else []
    found = sorted((int(match[1]), name) for name in names if (match := pattern.fullmatch(name)))
    return [os.path.join(directory, name) for _, name in found]


def _problem_of(path: str) -> str | None:
    try:
        contents(path)
    except TrainerError as error:
        return error.problem
    return None


def _named_by(index: Metadata) -> set[str]:
    """Names of the files that hold tensors."""
    return {place.relative_path for place in (index.storage_data or {}).values()}


def _state(path: str) -> State:
    try:
        with open(os.path.join(path, STATE), "rb") as file:
            return msgspec.json.decode(file.read(), type=State)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _damaged(path, f"{STATE}: {error}") from error


def _damaged(path: str, what: str) -> TrainerError:
    return TrainerError(
        f"{path} is damaged or not a complete checkpoint: {what}",
        hint="restore it from a copy, or rename it to continue from the checkpoint before it, or to start a new run",
    )


def _commit(partial: str, final: str, state: State, files: dict[str, File]) -> None:
    """Make the files of all ranks and `state` durable, then visible at once."""
    for name in sorted(_named_by(read_metadata(partial)) | files.keys()):
        path = os.path.join(partial, name)
        if name not in files or not os.path.isfile(path) or os.path.getsize(path) != files[name].bytes:
            raise TrainerError(
                f"{partial}: rank 0 does not see {name} as another rank has written it",
                hint="give a train.out on a file system that all ranks share",
            )
    written = {**files, STATE: _write(os.path.join(partial, STATE), state)}
    _write(os.path.join(partial, COMPLETE), written)
    sync(partial)
    os.rename(partial, final)  # readers see the whole checkpoint or none; it fails if there is one already
    sync(os.path.dirname(final))


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Every tensor, by a name that does not depend on ranks or decay groups."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        kept = {} if optimizer is None else optimizer.state[parameter]
        tensors |= {f"optimizer.{key}.{name}": value for key, value in kept.items()}
    return tensors


def _write(path: str, value: State | dict[str, File]) -> File:
    with open(path, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(value), indent=1))
    return _synced(path)


def _synced(path: str) -> File:
    sync(path)
    return _hashed(path)


def _hashed(path: str) -> File:
    with open(path, "rb") as file:
        return File(sha256=hashlib.file_digest(file, "sha256").hexdigest(), bytes=file.tell())


def _remove(path: str) -> None:
    """Remove one of our directories if it exists, or a link to one; never the target of a link."""
    if os.path.islink(path):
        os.unlink(path)
    elif os.path.lexists(path):
        shutil.rmtree(path)
