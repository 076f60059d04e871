"""The rows of a plan as batches of tensors. No other module of the runtime imports torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import pickle
import re
import signal
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from tokshard.errors import LoaderError, PlanError
from tokshard.forking import catches
from tokshard.runtime.cursor import Cursor
from tokshard.runtime.loader import BatchLoader, LoopPosition, launched, rows_of_rank, steps_laid_out
from tokshard.runtime.options import flag
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.expand import compact_batch, full_batch
from tokshard.runtime.rows.narrow import NarrowBatch
from tokshard.runtime.rows.recycling import Recycler
from tokshard.runtime.rows.steps import Deal
from tokshard.runtime.state import load_state, plan_of_run, save_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Batch = dict[str, Tensor]


class StreamingLoader(BatchLoader[Batch]):
    """Batches of a plan as CPU tensors, from a cursor on.

    The global batch of a step is the same for every world size and history of stops. The state counts the samples that
    the loop received. It is small and the same on every rank. Loading it on another world size or batch size is exact
    and replays nothing. It follows the ``Stateful`` protocol of torch.distributed.checkpoint. A thread makes batches
    ahead; if transforms are slow, use `StreamDataset` with the worker processes of a DataLoader. A loader is for one
    thread of one process. Leaving its ``with`` block closes it.

    A batch is a dict; a rank has ``rows = global_batch_size / dp_world_size``:

    - ``input_ids``, ``labels``, ``position_ids``: int64 [rows, seq_len]. A label is the document's next token, or -100
      at the end of a document and in padding. Positions start at 0 in each piece of a document.
    - ``corpus_index``, ``sample_index``: int64 [rows], the corpus in plan order and the global sample; -1 for padding.
    - ``cu_seqlens``: int32 [n], the boundaries of all pieces in the flattened batch, for attention within documents;
      the last one is repeated until n is a power of two, at least 64. ``max_seqlen``: int64 [], the longest piece.
    - ``loss_weights``: float32 [rows, seq_len], only if a corpus of the plan has loss spans: the weight of each label.
      It is 0 where the label is -100, as it is outside of the spans, and 1 if the corpus has no weights.
    - ``step_targets``: int64 [], ``step_weight``: float32 []: the labels of the whole step, over all ranks, that are
      not -100, and the sum of their weights. Absent if the plan has transforms, which may change them, and on several
      ranks if a corpus is dealt to ``num_streams``: a rank reads no windows of other ranks' streams.

    With ``compact=True`` a batch has a tenth of the size, and `tokshard.runtime.expand` makes the batch above on a
    device:

    - ``input_ids``: uint16 or uint32 [rows, seq_len], as the corpora store them; no ``labels`` and ``position_ids``.
    - ``next_tokens``: int64 [n - 1], the label of the last token of each piece, -100 for none. Padding of a row is a
      piece of its own. Where the last boundary is repeated, so is the last label.
    - ``num_tokens``: int32 [rows], tokens of each row that are not padding.
    - ``masked``: bool [n - 1], whether no token of the piece has a label; only once documents are masked.
    - ``loss_bounds``: int32 [m], and ``loss_weights``: float32 [m - 1], only if a corpus has loss spans: the labels of
      the flattened batch from ``loss_bounds[i]`` to ``loss_bounds[i + 1]`` have ``loss_weights[i]``; 0: do not count.
    - ``corpus_index``, ``sample_index``, ``cu_seqlens``, ``max_seqlen``, ``step_targets``, ``step_weight``: as above.

    Args:
        plan: the plan to read.
        global_batch_size: samples of a step over all ranks; default: from the file of `StreamPlan.load`.
        dp_rank, dp_world_size: default: from `dp_mesh`, else from torch.distributed, else 0 and 1.
        dp_mesh: the data-parallel device mesh; with several dimensions (HSDP), all count.
        prefetch_factor: batches made ahead; 0: none, and no thread.
        pin_memory: return tensors in page-locked memory. ``tensor.to(device, non_blocking=True)`` needs it: other
            memory is reused as soon as the tensor is freed, even if a device still copies from it.
        compact: return compact batches. States do not depend on it.
        uneven: ``"refuse"`` or ``"pad"``: with ranks that do not divide the batch, every rank gets
            ceil(global_batch_size / dp_world_size) rows, the surplus ones ignored (labels -100, sample_index -1).
        deal: which rank gets which rows of a step. ``"order"``: in the order of the plan. ``"cost"``: so that the cost
            of attention is nearly even, over all ranks and for the n-th micro-batch of each, the longest documents
            first. The step has the same rows and targets, and the state does not depend on it. With several streams,
            ranks that share a stream share its rows; above 4,096 rows, groups of ranks do.
        timeout_seconds: the longest wait for one batch; the error names the shard that was read.

    Raises:
        PlanError: the ranks do not divide the batch, a number is out of range, or the rank is not known.
    """

    def __init__(
        self,
        plan: StreamPlan,
        *,
        global_batch_size: int | None = None,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        dp_mesh: DeviceMesh | None = None,
        prefetch_factor: int = 4,
        pin_memory: bool = False,
        compact: bool = False,
        uneven: Literal["refuse", "pad"] = "refuse",
        deal: Deal = "order",
        timeout_seconds: float = 600.0,
    ) -> None:
        ranks = rows_of_rank(
            plan, global_batch_size, dp_rank, dp_world_size, uneven, deal=deal, otherwise=partial(_rank_in, dp_mesh)
        )
        if flag("pin_memory", pin_memory) and not torch.accelerator.is_available():
            warnings.warn("pin_memory has no effect: this process sees no accelerator", stacklevel=2)
            pin_memory = False
        super().__init__(
            plan,
            ranks=ranks,
            finish=partial(as_tensors, pin_memory=pin_memory, compact=flag("compact", compact)),
            prefetch_factor=prefetch_factor,
            timeout_seconds=timeout_seconds,
        )


class StreamDataset(Dataset[Batch]):
    """The same batches without a state, for DataLoader of torch and StatefulDataLoader of torchdata.

    Use it as follows, in a script with ``if __name__ == "__main__"``::

        DataLoader(
            dataset,
            batch_size=None,
            sampler=dataset.sampler,
            num_workers=4,
            multiprocessing_context="spawn",
            worker_init_fn=belong_to_the_loop,
        )

    The sampler runs in the process of the loop. It sends each step with its weights and masks, so any worker can make
    any step. A plain DataLoader does not tell which steps the loop received, so it has no state: a second loop is
    refused unless the first took all steps of a pass. Workers take the last ones before the loop receives them, so a
    loop that is left among these is not noticed. `StreamingLoader` and StatefulDataLoader continue.

    Args:
        plan, global_batch_size, dp_rank, dp_world_size, dp_mesh, compact, uneven, deal: as for `StreamingLoader`.

    Attributes:
        sampler: the steps of the plan. It loads states of `StreamingLoader`, and of a StatefulDataLoader with any
            number of workers.
    """

    def __init__(
        self,
        plan: StreamPlan,
        *,
        global_batch_size: int | None = None,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        dp_mesh: DeviceMesh | None = None,
        compact: bool = False,
        uneven: Literal["refuse", "pad"] = "refuse",
        deal: Deal = "order",
    ) -> None:
        self._ranks = rows_of_rank(
            plan, global_batch_size, dp_rank, dp_world_size, uneven, deal=deal, otherwise=partial(_rank_in, dp_mesh)
        )
        self._is_compact = flag("compact", compact)
        self.sampler = StepSampler(plan, self._ranks.global_batch_size)
        self._pid: int | None = os.getpid()
        self._last: Cursor | None = None

    @property
    def plan(self) -> StreamPlan:
        """The plan that is read."""
        return self.sampler.plan

    def __getitem__(self, step: Step) -> Batch:
        """The batch of a step of the sampler.

        Raises:
            LoaderError: it is no step, or one of the sampler of another data set.
        """
        if not isinstance(step, Step):
            raise LoaderError(f"{step!r:.100} is not a step of this data set, expected one of its sampler", hint=_HOW)
        orders = step.order, (self.plan.fingerprint, self._ranks.global_batch_size)
        if orders[0] != orders[1]:
            theirs, ours = ("batches of {1} of plan {0:.12}".format(*one) for one in orders)
            raise LoaderError(f"the sampler belongs to another data set: {theirs}, here {ours}", hint=_HOW)
        if self._pid not in (None, os.getpid()):
            self.sampler.plan = self.plan.copy(reopened=True)
        self._pid = os.getpid()
        # a cursor that came from another process has copies of the weights, whose samples would be counted anew
        cursor = replace(self._last or step.cursor, sample=step.cursor.sample)
        self._last = cursor if cursor == step.cursor else step.cursor
        starts = np.array([step.cursor.sample])
        layout, sums = steps_laid_out(self.plan, self._ranks, self._last, starts, step.end)
        narrow = self.plan.read(layout, 0, len(layout.samples))
        if sums is not None:
            narrow = replace(narrow, step=sums[0])
        self.sampler.num_made += 1
        return as_tensors(narrow, compact=self._is_compact)

    def __getitems__(self, _: Any) -> Any:
        """Refuse to make batches of batches."""
        raise LoaderError("a StreamDataset returns whole batches, which cannot be batched again", hint=_HOW)

    def __len__(self) -> int:
        """Refuse the default samplers of torch."""
        raise TypeError(f"the sampler of a StreamDataset determines what is read: {_HOW}")

    def __getstate__(self) -> dict[str, Any]:
        """For a worker process that is not forked; it opens the corpora itself.

        Raises:
            PlanError: names a part that does not pickle.
        """
        for part in (*self.plan.transforms, *self.plan.sources):
            try:
                pickle.dumps(part)
            except Exception as error:
                raise PlanError(
                    f"{part!r} does not pickle, so worker processes cannot receive it: {error}",
                    hint="define it in a module, not as a lambda or in a function; or use num_workers=0",
                ) from error
        return {**self.__dict__, "_pid": None}


_HOW = "give DataLoader(dataset, batch_size=None, sampler=dataset.sampler)"


class StepSampler(Sampler["Step"]):
    """The steps of a plan for a DataLoader, in the process of the loop.

    It has no length, so frameworks do not deal its steps to ranks a second time. It has no state, because a DataLoader
    reads ahead of the loop. Its iterators have one, which StatefulDataLoader saves and loads step by step.

    Attributes:
        plan: the plan that is read. If it was not given sizes of blocks and windows, it takes those of a loaded state.
        is_second: whether the current loop began before the previous one had ended.
        num_made: the batches that this process made of its steps. Workers make theirs elsewhere.
    """

    def __init__(self, plan: StreamPlan, global_batch_size: int) -> None:
        self.num_made = 0
        self.plan, self._position = plan, LoopPosition(plan, global_batch_size)
        self._global_batch_size = global_batch_size
        self._loop: weakref.ref[_Loop] | None = None
        self._is_under_way = self.is_second = False
        Finalize(None, _end_workers, exitpriority=0)

    def __iter__(self) -> Iterator[Step]:
        """Begin a loop; if the previous one reached the end of the pass, begin the pass again."""
        loop = _Loop(self)
        self.is_second = self._is_under_way
        self._loop = weakref.ref(loop)
        self._position.begin()
        return loop

    def __getattr__(self, name: str) -> Any:
        if name == "state_dict":
            raise AttributeError(
                "a sampler has no state_dict: its DataLoader reads ahead of the loop. Take the state_dict of a "
                "StatefulDataLoader, or of a StreamingLoader"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loop": None}  # a worker has no loop

    def load_state_dict(self, state: Mapping[str, Any], **choices: Any) -> None:
        """Continue from a state of `StreamingLoader` or StatefulDataLoader; call it before ``iter(dataloader)``.

        The state of a StatefulDataLoader may come from another number of workers, which its own method refuses.

        Args:
            choices: weights, corpora and seq_len, as for `StreamingLoader.load_state_dict`.

        Raises:
            LoaderError: workers are still making batches of earlier steps, which would come first; or the state was
                taken between two snapshots of a StatefulDataLoader.
            PlanMismatchError: the state belongs to another plan.
        """
        if self._num_ahead() > 0:
            raise LoaderError(
                "a state is loaded while the workers of a loop have steps under way, whose batches would come first",
                hint="load the state before iter(dataloader), or drop the iterator of that loop (with persistent "
                "workers, make a new DataLoader)",
            )
        state = _of_sampler(state)
        plan = plan_of_run(self.plan, state)
        self._position.jump(load_state(plan, state, **choices), plan)
        self.plan, self._is_under_way, self.is_second = plan, False, False

    def _num_ahead(self) -> int:
        """Steps of the current loop that went to workers, finished or not."""
        loop = self._loop() if self._loop is not None else None
        return 0 if loop is None else loop.num_given - (self.num_made - loop.num_made_before)

    def move(self, cursor: Cursor) -> None:
        """Continue the current loop from a cursor."""
        self._position.move(cursor)
        self._is_under_way = self.is_second = False

    def step(self) -> Step | None:
        """The next step, and None at the end of the pass.

        Raises:
            PlanError: the step would reach beyond sample 2**62.
        """
        self._is_under_way = self._position.has_step()
        if not self._is_under_way:
            self._position.end()
            return None
        order = self.plan.fingerprint, self._global_batch_size
        step = Step(self._position.cursor, self._position.stop.sample, order)
        self._position.advance()
        return step

    def state(self) -> dict[str, Any]:
        """The cursor after the last step that a DataLoader took."""
        return save_state(self.plan, self._position.cursor)

    def loaded(self, state: Mapping[str, Any]) -> Cursor:
        """The cursor of a state."""
        return load_state(self.plan, state)


class _Loop(Iterator["Step"]):
    """The steps of one loop. StatefulDataLoader calls `state_dict` for each step that it sends to a worker.

    Attributes:
        num_given: steps that the DataLoader took.
    """

    def __init__(self, sampler: StepSampler) -> None:
        self._sampler = sampler
        self.num_given, self.num_made_before = 0, sampler.num_made

    def __next__(self) -> Step:
        """The next step.

        Raises:
            LoaderError: the previous loop did not end. This loop would not continue it, because a DataLoader reads
                ahead.
            PlanError: the step would reach beyond sample 2**62.
        """
        if self._sampler.is_second:
            raise LoaderError(
                "a second loop over a StreamDataset does not continue the first, which did not end: "
                "StreamingLoader(plan, global_batch_size=...) does, and so does a state that "
                "dataset.sampler.load_state_dict or StatefulDataLoader loads",
                hint="use StreamingLoader, or make a new StreamDataset to begin again",
            )
        step = self._sampler.step()
        if step is None:
            raise StopIteration
        self.num_given += 1
        return step

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last step that was given to the DataLoader."""
        return self._sampler.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in this loop."""
        self._sampler.move(self._sampler.loaded(state))


def _of_sampler(state: Any) -> Any:
    """The state of a loop that a StatefulDataLoader holds, with or without workers; any other state as it is.

    Raises:
        LoaderError: the loop received more steps than the snapshot counts.
    """
    if not isinstance(state, Mapping):
        return state
    found = state
    if "_snapshot" in state:
        if state.get("_steps_since_snapshot"):
            raise LoaderError(
                f"the state of the StatefulDataLoader is {state['_steps_since_snapshot']} steps after its last "
                "snapshot, and only as many workers as before can repeat them",
                hint="give num_workers as before, and snapshot_every_n_steps=1 for the next states",
            )
        found = state["_snapshot"].get("_main_snapshot", {})
    return found.get("_sampler_iter_state", state)


class Step(NamedTuple):
    """A step that any process can make.

    Args:
        cursor: the cursor at its start.
        end: the sample that ends the pass; None: it is endless.
        order: the fingerprint of the plan, and the global batch size.
    """

    cursor: Cursor
    end: int | None
    order: tuple[str, int]


def belong_to_the_loop(worker_id: int) -> None:
    """``worker_init_fn`` of a DataLoader: makes workers end with the process of the loop, and not earlier.

    Ctrl-C and SIGTERM, which launchers and Slurm send to all processes of a job, are for the loop, which may still need
    batches before it saves. torch's workers die of SIGTERM, and miss a parent that was killed while they started.
    """
    del worker_id
    loop = multiprocessing.parent_process()
    assert loop is not None, "a worker has a parent"
    threading.Thread(target=_end_with, args=(loop,), name="tokshard-end-with-the-loop", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGRTMAX"):  # not on macOS
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGRTMAX, lambda *_: os._exit(0))


def _end_with(loop: multiprocessing.process.BaseProcess) -> None:
    loop.join()
    os._exit(1)


def _end_workers() -> None:
    """End the workers that the loop still has at its exit. multiprocessing sends them SIGTERM, and waits for ever."""
    for worker in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            if worker.pid is not None and catches(worker.pid, signal.SIGRTMAX):  # it would kill other children
                os.kill(worker.pid, signal.SIGRTMAX)


def as_tensors(
    narrow: NarrowBatch, recycler: Recycler | None = None, *, pin_memory: bool = False, compact: bool = False
) -> Batch:
    """A batch as CPU tensors; the docstring of `StreamingLoader` lists them."""
    arrays = compact_batch(narrow, recycler) if compact else full_batch(narrow, recycler)
    batch = {key: torch.from_numpy(value) for key, value in arrays.items()}
    return {key: value.pin_memory() for key, value in batch.items()} if pin_memory else batch


_OTHER_DIMENSIONS = frozenset({"tp", "cp", "pp", "ep", "sp", "tensor", "context", "pipeline", "expert", "model"})
_DATA_DIMENSIONS = frozenset({"dp", "ddp", "fsdp", "hsdp", "data", "batch", "replicate", "shard"})
"""Words in the names of dimensions of a mesh: of ranks that read the same rows, and of those that read others."""


def _is_shared(dimension: str, names: Sequence[str]) -> bool:
    """Whether ranks that differ only in a dimension read the same rows; of one alone whose name says nothing, no."""
    words = set(re.split("[^a-z]+", dimension.lower()))
    if is_of_data := bool(words & _DATA_DIMENSIONS):
        words.discard("ep")  # a part of the data-parallel ranks, such as dp_shard_mod_ep
    return bool(words & _OTHER_DIMENSIONS) or (len(names) > 1 and not is_of_data)


def _rank_in(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Data-parallel rank and world size of a mesh, else of torch.distributed, else 0 and 1.

    Raises:
        PlanError: the mesh has a dimension whose ranks share rows, this process is not in it, or a launcher started
            several processes and torch.distributed is not initialized yet, so each would read everything.
    """
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        if others := [name for name in names if _is_shared(name, names)]:
            raise PlanError(
                f"dp_mesh has the dimensions {', '.join(names)}, and ranks that differ only in {' or '.join(others)} "
                "must read the same rows",
                hint="give the data-parallel part, such as mesh['dp'] or mesh['dp_replicate', 'dp_shard'], or dp_rank "
                "and dp_world_size",
            )
        place = mesh.get_coordinate()
        if place is None:
            raise PlanError("this process is not part of dp_mesh", hint="give the data-parallel part of the mesh")
        return int(np.ravel_multi_index(place, mesh.mesh.shape)), mesh.size()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if (several := launched()) is not None:
        raise PlanError(
            f"{several}, but torch.distributed is not initialized, so the rank is not known",
            hint="make the loader after init_process_group, Accelerator() or in train_dataloader(), "
            "or give dp_rank and dp_world_size",
        )
    return 0, 1
