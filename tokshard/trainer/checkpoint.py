"""The tensors of a run in its checkpoints: saved and loaded by any number of ranks.

`tokshard.run_files.checkpoint_directory` says what makes a checkpoint complete, and torch.distributed.checkpoint (DCP)
writes and reads the tensors.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from tokshard.errors import TrainerError, UsageError
from tokshard.run_files import checkpoint_directory
from tokshard.run_files.checkpoint_directory import File, State
from tokshard.run_files.recipe import Checkpoint
from tokshard.run_files.torch_checkpoints import METADATA_FILE, files_of, load_checkpoint, read_index, read_metadata
from tokshard.trainer.parallel import say, together


class Saver:
    """Saves the checkpoints of a run, one at a time. Every rank makes one, and calls it at the same steps.

    An asynchronous `save` copies the tensors to memory, which it keeps for the next save (from torch 2.13 on), and
    returns. Training may change the originals while a thread writes the copies. The threads of the ranks have their own
    process group, so they never mix with the collectives of training.

    Args:
        directory: of the checkpoints.
        timeout_seconds: the longest that a rank waits for another one in a save.
    """

    def __init__(self, directory: str, settings: Checkpoint, *, timeout_seconds: int) -> None:
        self.directory, self._settings = directory, settings
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
        if self._settings.asynchronous:
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
            say(f"warning: {error}")
        if self._stager is not None:
            self._stager.close()

    def _copied(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._stager is not None:
            with suppress(KeyError):  # before torch 2.13 it can be used only once (pytorch/pytorch#183413)
                return cast("dict[str, Tensor]", self._stager.stage(tensors))
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
        say(f"saved {path}")
        if distributed.get_rank() == 0:
            for problem in checkpoint_directory.delete_old(self.directory, self._settings.keep):
                say(f"warning: {problem}")


class _Writer(FileSystemWriter):
    """Raises the error of the file system, which torch.save hides behind one of its own positions in the file."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write the tensors of this rank."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def save(directory: str, tensors: dict[str, Tensor], state: State, group: ProcessGroup | None = None) -> str:
    """Commit a checkpoint, and return its path once it is complete. Every rank calls this.

    Args:
        tensors: of `tensors_of`; not changed meanwhile.
        state: the same on every rank.
        group: all ranks; default: the group of the training loop.

    Raises:
        TrainerError: the disk is full, or the file system failed otherwise; the same error on all ranks.
    """
    partial, rank = checkpoint_directory.partial_of(directory, state.step), distributed.get_rank()
    files = dict[str, File]()
    problem, hint = f"{partial} could not be saved", "make room or repair the directory, then run the same command"
    with together(problem, hint=hint, group=group):
        if rank == 0:
            checkpoint_directory.begin(partial)
    try:
        writer = _Writer(partial, sync_files=False)  # `synced` does it
        save_tensors(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # is not an Exception; it is the same on all ranks
        causes = dict.fromkeys(str(cause) for cause, _ in error.failures.values())
        raise TrainerError(f"{problem}: {'; '.join(causes)}", hint=hint) from error
    with together(problem, hint=hint, group=group):
        own = f"__{rank}_" if rank else ("__0_", METADATA_FILE)
        names = [name for name in os.listdir(partial) if name.startswith(own)]
        files = {name: checkpoint_directory.synced(os.path.join(partial, name)) for name in names}
    of_ranks: list[dict[str, File]] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(of_ranks, files, group)
    with together(problem, hint=hint, group=group):
        if rank == 0:
            files = {name: file for each in of_ranks for name, file in each.items()}
            checkpoint_directory.commit(partial, state, files, needed=files_of(read_metadata(partial)))
    return partial.removesuffix(".partial")


def load(path: str, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
    """Load a checkpoint of any world size in place, and return its `state`. Every rank calls this.

    All hashes are checked before anything is read; each rank checks a part of the files.

    Args:
        optimizer: None: only the weights are loaded.

    Raises:
        TokshardError: the checkpoint is damaged, incomplete, or of another model; the same error on all ranks.
    """
    tensors, hint = tensors_of(model, optimizer), "repair the disk, or use another checkpoint"
    with together(f"{path} cannot be read", hint=hint):
        checkpoint_directory.check_hashes(path, distributed.get_rank(), distributed.get_world_size())
    with together(f"{path} cannot be read", hint=hint):
        index, state = read_index(path)
        # a saved value that is not a tensor has no size
        there = {name: getattr(saved, "size", None) for name, saved in index.state_dict_metadata.items()}
        here = {name: tensor.size() for name, tensor in tensors.items()}
        for name in here | {name: None for name in there if name.startswith("model.")}:
            if there.get(name) != here.get(name):
                one, other = (size and tuple(size) for size in (there.get(name), here.get(name)))
                raise UsageError(
                    f"{path} is of another model: {name} is {one} there, {other} here",
                    hint="give the [model] and optimizer.name of its state.json, or another train.out for a new run",
                )
    load_checkpoint(tensors, path)
    return state


def find_latest(directory: str) -> str | None:
    """The newest checkpoint as rank 0 sees it, the same on all ranks; None if this is a new run.

    Removes unfinished files of a killed job.

    Raises:
        TrainerError: a checkpoint newer than the newest intact one is damaged.
    """
    found: list[str | None] = [None]
    with together(f"{directory} cannot be listed", hint="repair it, or give another train.out"):
        if distributed.get_rank() == 0:
            checkpoint_directory.remove_unfinished(directory)
            found = [checkpoint_directory.newest(directory)]
    distributed.broadcast_object_list(found)
    return found[0]


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Every tensor, by a name that does not depend on ranks or decay groups."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        kept = {} if optimizer is None else optimizer.state[parameter]
        tensors |= {f"optimizer.{key}.{name}": value for key, value in kept.items()}
    return tensors
