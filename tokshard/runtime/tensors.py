"""The rows of a plan as batches of tensors. No other module of the runtime imports torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from tokshard.errors import LoaderError, PlanError
from tokshard.runtime.batches import IGNORED, Packed, widen
from tokshard.runtime.compact import compact_batch
from tokshard.runtime.feed import HELD_BATCHES
from tokshard.runtime.loader import (
    BatchLoader,
    given_place,
    load_state,
    ranks_of,
    save_state,
)
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.recycling import Recycler
from tokshard.runtime.steps import packed_steps
from tokshard.runtime.stop import stop_of, used_up, warn_of_stop, warn_of_use

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Batch = dict[str, Tensor]

_MAX_LOOP_WORKERS = 1 << 12
"""DataLoader workers that a dataset tells apart."""

_WORKER_KEY = "is_under_way"


class StreamingLoader(BatchLoader[Batch]):
    """Batches of a plan as CPU tensors, from a cursor on.

    The global batch of a step is the same for every world size, number of workers and history of stops. The state
    counts what the loop received. It is small and the same on every rank; loading it on another world size, batch size
    or number of workers is exact and replays nothing. It follows the ``Stateful`` protocol of
    torch.distributed.checkpoint. A loader is for one thread of one process; leaving its ``with`` block closes it.

    A batch is a dict; a rank has ``rows = global_batch_size / dp_world_size``:

    - ``input_ids``, ``labels``, ``position_ids``: int64 [rows, seq_len]. A label is the document's next token, or -100
      at the end of a document and in padding. Positions start at 0 in each piece of a document.
    - ``corpus_index``, ``sample_index``: int64 [rows], the corpus in plan order and the global sample; -1 for padding.
    - ``cu_seqlens``: int32 [n], the boundaries of all pieces in the flattened batch, for attention within documents;
      the last one is repeated until n is a power of two, at least 64. ``max_seqlen``: int64 [], the longest piece.

    With ``compact=True`` it is a tenth of that, and `tokshard.runtime.expand` makes the batch above of it on a device:

    - ``input_ids``: uint16 or uint32 [rows, seq_len], as the corpora store them; no ``labels`` and ``position_ids``.
    - ``next_tokens``: int64 [n - 1], the label of the last token of each piece, -100 for none. Padding of a row is a
      piece of its own, and what repeats the last boundary repeats the last label.
    - ``num_tokens``: int32 [rows], tokens of each row that are not padding.
    - ``masked``: bool [n - 1], whether no token of the piece has a label; only once documents are masked.
    - ``corpus_index``, ``sample_index``, ``cu_seqlens``, ``max_seqlen``: as above.

    Args:
        plan: what to read.
        global_batch_size: samples of a step over all ranks.
        dp_rank, dp_world_size: default: from `dp_mesh`, else from torch.distributed, else 0 of 1.
        dp_mesh: the data-parallel device mesh; of several dimensions (HSDP), all count.
        num_workers: processes that read; 0: a thread reads, which is faster except for very short documents.
        prefetch_factor: batches made ahead per worker.
        pin_memory: give tensors in page-locked memory, which ``tensor.to(device, non_blocking=True)`` needs: other
            memory is reused as soon as the tensor is freed, even if a device still copies from it.
        compact: give compact batches. States do not depend on it.
        uneven: ``"refuse"`` or ``"pad"``: with ranks that do not divide the batch, every rank gets
            ceil(global_batch_size / dp_world_size) rows, the surplus ones ignored (labels -100, sample_index -1).
        timeout_seconds: longest wait for one batch; the error names the shard that was read.
        multiprocessing_context: start method of the workers; default: forkserver where it exists, else
            spawn; spawn if a corpus is not on this machine.

    Raises:
        PlanError: the ranks do not divide the batch, a number is out of range, or the rank is not known.
    """

    def __init__(
        self,
        plan: StreamPlan,
        *,
        global_batch_size: int,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        dp_mesh: DeviceMesh | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 4,
        pin_memory: bool = False,
        compact: bool = False,
        uneven: Literal["refuse", "pad"] = "refuse",
        timeout_seconds: float = 600.0,
        multiprocessing_context: str | None = None,
    ) -> None:
        ranks = ranks_of(plan, global_batch_size, data_parallel_place(dp_rank, dp_world_size, dp_mesh), uneven)
        if pin_memory and not torch.accelerator.is_available():
            warnings.warn("pin_memory has no effect: this process sees no accelerator", stacklevel=2)
            pin_memory = False
        super().__init__(
            plan,
            ranks=ranks,
            finish=partial(as_tensors, pin_memory=pin_memory, compact=compact),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            timeout_seconds=timeout_seconds,
            multiprocessing_context=multiprocessing_context,
        )


class StreamDataset(IterableDataset[Batch]):
    """The same batches, for ``DataLoader(dataset, batch_size=None)`` of torch and ``StatefulDataLoader`` of torchdata.

    DataLoader worker w of W makes the steps w, w + W, ..., which DataLoader hands out in turn, so the order is that of
    `StreamingLoader`. Resuming through ``StatefulDataLoader`` needs the same number of workers, as it always does. A
    plain ``DataLoader`` with workers is exact for one loop, and for each whole pass of a finite plan. If a loop ends
    earlier, the place of its workers is lost, so a second loop is refused.

    Args:
        plan, global_batch_size, dp_rank, dp_world_size, dp_mesh, compact, uneven: as for `StreamingLoader`.
    """

    def __init__(
        self,
        plan: StreamPlan,
        *,
        global_batch_size: int,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        dp_mesh: DeviceMesh | None = None,
        compact: bool = False,
        uneven: Literal["refuse", "pad"] = "refuse",
    ) -> None:
        self.plan = plan
        self._is_compact = compact
        place = data_parallel_place(dp_rank, dp_world_size, dp_mesh)
        self._ranks = ranks_of(plan, global_batch_size, place, uneven)
        self._cursor = plan.cursor()
        self._warned: set[str] = set()  # corpora whose end was reported
        self._is_under_way = False
        self._pid = os.getpid()
        self._is_loaded = False
        self._loops = RawArray("B", _MAX_LOOP_WORKERS)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if get_spawning_popen() is None:  # a copy, not a worker, has loops of its own
            del state["_loops"]
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._pid = os.getpid()
        self.__dict__.setdefault("_loops", RawArray("B", _MAX_LOOP_WORKERS))

    def __iter__(self) -> Iterator[Batch]:
        """The steps of this DataLoader worker, from its cursor on; after a finished pass, from the start.

        Raises:
            LoaderError: with DataLoader workers, a second loop after one that did not end: it would start over.
        """
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None:
            self._begin(worker)
        plan, size, since = self.plan.reader(), self._ranks.global_batch_size, self._cursor.sample
        if self._is_under_way:
            if plan.on_max_epochs == "stop":  # steps of other workers may be missing, and all workers stop at one place
                since = max(since - (num_workers - 1) * size, self._cursor.segments[0].start)
        else:
            self._advance(worker)  # to the first step of this worker
            self._is_under_way = True
        stop = stop_of(plan, self._cursor, since=since)
        found = used_up(plan, self._cursor, since=since) if plan.on_max_epochs == "warn" else []
        mixture, sample, recycler = plan.mixture(self._cursor), self._cursor.sample, Recycler(HELD_BATCHES)
        masked = plan.masked(self._cursor)
        for packed in packed_steps(plan, mixture, self._ranks, sample, masked=masked, stop=stop, stride=num_workers):
            if plan.on_max_epochs == "warn":
                warn_of_use(found, self._cursor.sample, self._cursor.sample + size, self._warned)
            self._advance(num_workers)
            yield as_tensors(packed, recycler, compact=self._is_compact)
        if not stop.pads_last_step:
            warn_of_stop(stop, self._cursor.sample)
        else:
            self._cursor, self._is_under_way = self._cursor.restarted(plan.cursor()), False
            self._loops[worker % _MAX_LOOP_WORKERS] = 0

    def _begin(self, worker: int) -> None:
        """Begin a loop in a DataLoader worker."""
        if self._pid != os.getpid():
            self.plan, self._pid = self.plan.reopened(), os.getpid()
        place = worker % _MAX_LOOP_WORKERS
        if self._loops[place] and not self._is_loaded:
            # the problem names the way out: DataLoader shows no more of an error
            raise LoaderError(
                "a second loop over a StreamDataset in a DataLoader with workers would not continue the first, which "
                "did not end: use StreamingLoader, or load_state_dict of StatefulDataLoader, or num_workers=0; a new "
                "StreamDataset starts over",
                hint="StreamingLoader(plan, global_batch_size=..., num_workers=...) continues",
            )
        self._loops[place], self._is_loaded = 1, False

    def state_dict(self) -> dict[str, Any]:
        """The cursor of this DataLoader worker: its next step, once it has made one."""
        return {**save_state(self.plan, self._cursor), _WORKER_KEY: self._is_under_way}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state of the same DataLoader worker was taken, or one of `StreamingLoader`.

        Raises:
            PlanMismatchError: the state is of another plan.
        """
        self._cursor, self._is_loaded = load_state(self.plan, state), True
        self._is_under_way = bool(state.get(_WORKER_KEY))

    def _advance(self, num_steps: int) -> None:
        self._cursor = self._cursor.advanced(num_steps * self._ranks.global_batch_size)


def as_tensors(
    packed: Packed, recycler: Recycler | None = None, *, pin_memory: bool = False, compact: bool = False
) -> Batch:
    """A batch as CPU tensors; the docstring of `StreamingLoader` lists them."""
    arrays = compact_batch(packed, recycler) if compact else widen(packed, recycler)
    batch = {key: torch.from_numpy(value) for key, value in arrays.items()}
    return {key: value.pin_memory() for key, value in batch.items()} if pin_memory else batch


def expand_tensors(batch: Mapping[str, Tensor], device: torch.device | str | int | None = None) -> Batch:
    """The full batch of a compact one, made on a device (default: where the tensors are) without waiting for it."""
    here = {key: value.to(device, non_blocking=value.is_pinned()) for key, value in batch.items()}
    num_tokens, next_tokens, cu_seqlens = here.pop("num_tokens"), here.pop("next_tokens"), here["cu_seqlens"]
    input_ids = here["input_ids"].to(torch.int64)
    rows, seq_len = input_ids.shape
    labels = input_ids.view(-1).roll(-1)
    labels[cu_seqlens[1:].to(torch.int64) - 1] = next_tokens
    if "masked" in here:
        masked = here.pop("masked").repeat_interleave(cu_seqlens.diff(), output_size=rows * seq_len)
        labels.masked_fill_(masked, IGNORED)
    is_padding = torch.arange(seq_len, device=input_ids.device) >= num_tokens[:, None]
    # a given output_size spares asking the device for it
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff(), output_size=rows * seq_len)
    position_ids = torch.arange(rows * seq_len, device=input_ids.device) - starts
    return here | {
        "input_ids": input_ids,
        "labels": labels.view(rows, seq_len).masked_fill_(is_padding, IGNORED),
        "position_ids": position_ids.view(rows, seq_len),
    }


def data_parallel_place(rank: int | None, world_size: int | None, mesh: DeviceMesh | None) -> tuple[int, int]:
    """Data-parallel rank and world size: as given, else of a mesh, else of torch.distributed, else 0 of 1.

    Raises:
        PlanError: only one of the two is given, this process is not part of the mesh, or a launcher says that the job
            has several processes and torch.distributed is not set up yet: each would read everything.
    """
    if (given := given_place(rank, world_size)) is not None:
        return given
    if mesh is not None:
        place = mesh.get_coordinate()
        if place is None:
            raise PlanError("this process is not part of dp_mesh", hint="give the data-parallel part of the mesh")
        index = 0
        for coordinate, size in zip(place, mesh.mesh.shape, strict=True):
            index = index * size + coordinate
        return index, mesh.size()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if (launched := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise PlanError(
            f"WORLD_SIZE is {launched}, but torch.distributed is not set up, so the rank is not known",
            hint="make the loader after init_process_group, Accelerator() or in train_dataloader(), "
            "or give dp_rank and dp_world_size",
        )
    return 0, 1
