"""The rows of a plan as batches of tensors for a training loop."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from tokshard.errors import LoaderError, PlanError
from tokshard.runtime.arguments import integer, real
from tokshard.runtime.batches import Packed, widen
from tokshard.runtime.cursor import Cursor, adopt_cursor, load_cursor, save_cursor
from tokshard.runtime.plan import MIN_WINDOW_STEPS, Limit, StreamPlan, Weights
from tokshard.runtime.prefetch import Prefetcher
from tokshard.runtime.recycling import Recycler
from tokshard.runtime.steps import Ranks, is_last, packed_steps

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Batch = dict[str, Tensor]
_HELD_BATCHES = 4
"""Batches that a loop is expected to hold at a time; more only cost memory that is new."""

_MAX_AHEAD = 1 << 16

_MAX_LOOP_WORKERS = 1 << 12
"""DataLoader workers that a dataset tells apart."""

STATE_KEY = "cursor"
WORKER_KEY = "is_under_way"


class StreamingLoader:
    """Batches of a plan, from a cursor on.

    The global batch of a step is the same for every world size, number of workers and history of stops. The state
    counts what the loop received, is the same on every rank and small, whatever the plan has in store; loading it on
    another world size, batch size or number of workers is exact and replays nothing. It follows the ``Stateful``
    protocol of torch.distributed.checkpoint. A loader is for one thread of one process.

    A batch is a dict of CPU tensors; a rank has ``rows = global_batch_size / dp_world_size``:

    - ``input_ids``, ``labels``, ``position_ids``: int64 [rows, seq_len]. A label is the document's next token, or -100
      where there is none, at the end of a document and in padding. Positions start at 0 in each piece of a document.
    - ``corpus_index``, ``sample_index``: int64 [rows], the corpus in plan order and the global sample; -1 for padding.
    - ``cu_seqlens``: int32 [n], the boundaries of all pieces in the flattened batch, for attention within documents;
      its end is repeated up to a multiple of 64 entries. ``max_seqlen``: int64 [], the longest piece.

    Args:
        plan: what to read.
        global_batch_size: samples of a step over all ranks.
        dp_rank, dp_world_size: default: from `dp_mesh`, else from torch.distributed, else 0 of 1.
        dp_mesh: the data-parallel device mesh; of several dimensions (HSDP), all count.
        num_workers: processes that read; 0: a thread does, which is quicker for all but very short documents.
        prefetch_factor: batches made ahead per worker.
        pin_memory: give tensors in page-locked memory, which ``tensor.to(device, non_blocking=True)`` needs: other
            memory is used again as soon as the tensor is gone, even if a device still copies from it.
        uneven: ``"refuse"`` or ``"pad"``: with ranks that do not divide the batch, every rank gets
            ceil(global_batch_size / dp_world_size) rows, the surplus ones ignored (labels -100, sample_index -1).
        timeout_seconds: longest wait for one batch; the error names the shard that was read.
        multiprocessing_context: start method of the workers; default: forkserver where there is one, else spawn.

    Raises:
        PlanError: the ranks do not divide the batch, or a number is out of range.
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
        uneven: Literal["refuse", "pad"] = "refuse",
        timeout_seconds: float = 600.0,
        multiprocessing_context: str | None = None,
    ) -> None:
        num_workers = integer("num_workers", num_workers, most=_MAX_AHEAD)
        prefetch_factor = integer("prefetch_factor", prefetch_factor, most=_MAX_AHEAD)
        if num_workers < 0 or prefetch_factor < 1:
            raise PlanError(
                f"num_workers is {num_workers}, prefetch_factor {prefetch_factor}",
                hint="give num_workers of 0 or more and prefetch_factor of 1 or more",
            )
        self.plan = plan
        self._ranks = _ranks(plan, global_batch_size, dp_rank, dp_world_size, dp_mesh, uneven)
        self._num_workers, self._depth = num_workers, prefetch_factor * max(1, num_workers)
        if pin_memory and not torch.accelerator.is_available():
            warnings.warn("pin_memory has no effect: this process sees no accelerator", stacklevel=2)
            pin_memory = False
        _warn_of_small_windows(plan, self._ranks.global_batch_size)
        self._pin_memory, self._timeout_seconds = pin_memory, _seconds(timeout_seconds)
        self._start_method = _start_method(multiprocessing_context)
        self._cursor = plan.cursor()
        self._limits = plan.limits(self._cursor)
        self._used_up: set[str] = set()  # corpora that were told of
        self._prefetcher: Prefetcher | None = None
        self._is_stale = True
        self._pid = os.getpid()
        self._users: dict[str, int] = {}  # the thread that is in here
        self._wait_seconds, self._num_batches, self._token_bytes = 0.0, 0, 0

    def __iter__(self) -> Iterator[Batch]:
        """Go on from the cursor; after a finished pass, from the start."""
        if self.plan.num_samples is not None and self._cursor.sample >= self.plan.num_samples:
            with self._alone():
                self._go_on_from(self.plan.cursor())
        return self._batches()

    def __len__(self) -> int:
        """Steps of a finite pass, wherever the cursor is.

        Raises:
            TypeError: the plan is endless.
        """
        if self.plan.num_samples is None:
            raise TypeError("the plan is endless: it has no length")
        return math.ceil(self.plan.num_samples / self._ranks.global_batch_size)

    @property
    def cursor(self) -> Cursor:
        """Where the loop is."""
        return self._cursor

    def state_dict(self) -> dict[str, Any]:
        """The cursor as a line of JSON under one key, the same on every rank."""
        return _saved(self.plan, self._cursor)

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        weights: Literal["cursor", "plan"] = "cursor",
        corpora: Literal["same", "plan"] = "same",
    ) -> None:
        """Go on where a state was taken.

        Args:
            weights: ``"cursor"``: the weights that were in force go on, and changes that the plan had in store must be
                those of this plan; ``"plan"``: the weights of this plan are in force from here on.
            corpora: ``"same"``: other corpora than before are refused; ``"plan"``: those of this plan go on, with its
                weights. A corpus that is in both goes on where it was; what was added and removed is kept in the state.
                If the corpora are the same, nothing is different from ``"same"``.

        Raises:
            PlanMismatchError: the state is of another plan, or of no tokshard loader.
        """
        cursor = _loaded(self.plan, state, weights=weights, corpora=corpora)
        with self._alone():
            self._go_on_from(cursor)

    def set_weights(self, weights: Weights) -> None:
        """Read with other weights from the next batch on. The plan is not changed, nothing is caught up.

        Raises:
            PlanError: the weights do not fit the plan.
        """
        checked = self.plan.checked_weights(weights)
        with self._alone():
            self._go_on_from(self.plan.compacted(self._cursor.weighted(checked)))

    def skip(self, num_samples: int) -> None:
        """Pass over the next samples, on record in the state; a multiple of the batch keeps steps aligned.

        Raises:
            PlanError: it is not an integer, or negative, or leads beyond sample 2**62.
        """
        num_samples = integer("num_samples", num_samples, least=0)
        with self._alone():
            if self.plan.num_samples is not None:
                num_samples = min(num_samples, self.plan.num_samples - self._cursor.sample)
            integer("the sample to skip to", self._cursor.sample + num_samples)
            if num_samples:
                self._go_on_from(self._cursor.skipping(num_samples))

    def stats(self) -> dict[str, Any]:
        """What the loader did and where it is.

        Returns:
            batches and wait_seconds since it was made; queue, batches that are ready; bytes_read, token ids in
            their stored width; samples of the plan so far and skipped_samples among them; per corpus samples, tokens
            and epoch (tokens over tokens in the corpus), skipped ones included.
        """
        plan = self.plan
        counts = plan.mixture(self._cursor).counts_before(self._cursor.sample)
        tokens = [count * plan.seq_len for count in counts]
        return {
            "batches": self._num_batches,
            "wait_seconds": self._wait_seconds,
            "queue": 0 if self._prefetcher is None else self._prefetcher.num_ready,
            "bytes_read": self._token_bytes,
            "samples": self._cursor.sample,
            "skipped_samples": sum(stop - start for start, stop in self._cursor.skipped),
            "corpora": {
                name: {"samples": count, "tokens": read, "epoch": read / stream.num_tokens}
                for name, count, read, stream in zip(plan.names, counts, tokens, plan.streams, strict=True)
            },
        }

    def close(self) -> None:
        """Stop the thread and the workers. The loader can be iterated again."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
        if self._pid != os.getpid():
            self._users.clear()  # a thread of the parent

    def _batches(self) -> Iterator[Batch]:
        size = self._ranks.global_batch_size
        while not is_last(self._cursor.sample, self.plan.num_samples, self._limit, size):
            with self._alone():
                batch = self._next()
                following = self._cursor.sample + size
                if self.plan.num_samples is not None:
                    following = min(following, self.plan.num_samples)
                if self.plan.on_max_epochs == "warn":
                    _warn_of_use(self._limits, self._cursor.sample, following, self._used_up)
                self._cursor = self._cursor.advanced(following - self._cursor.sample)
            yield batch
        if self.plan.num_samples is None or self._cursor.sample < self.plan.num_samples:
            _warn_of_stop(self._limits[0], self._cursor.sample)

    def _next(self) -> Batch:
        prefetcher = self._started()
        started = time.perf_counter()
        try:
            batch: Batch = prefetcher.take()
        except BaseException:
            self.close()
            raise
        self._wait_seconds += time.perf_counter() - started
        self._num_batches += 1
        self._token_bytes += batch["input_ids"].numel() * self.plan.sources[0].dtype.itemsize
        return batch

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse two threads at once, and a forked child that would read what its parent reads."""
        if self._prefetcher is not None and self._prefetcher.pid != os.getpid():
            raise LoaderError(
                f"process {self._prefetcher.pid} reads from this loader, and this is process {os.getpid()}, forked "
                "from it",
                hint="make a loader in each process, or close this one here first",
            )
        me = threading.get_ident()
        if self._users.setdefault("thread", me) != me:  # one step, which no other thread interrupts
            raise LoaderError(
                "this loader is used by two threads at once",
                hint="use it from one thread, or make one loader per thread",
            )
        try:
            yield
        finally:
            self._users.clear()

    def _started(self) -> Prefetcher:
        if self._prefetcher is None:
            if self._pid != os.getpid():
                self.plan, self._pid = self.plan.reopened(), os.getpid()
            self._prefetcher = Prefetcher(
                self.plan,
                partial(as_tensors, recycler=Recycler(self._depth + _HELD_BATCHES), pin_memory=self._pin_memory),
                num_workers=self._num_workers,
                depth=self._depth,
                timeout_seconds=self._timeout_seconds,
                start_method=self._start_method,
            )
            self._is_stale = True
        if self._is_stale:
            mixture = self.plan.mixture(self._cursor).since(self._cursor.sample)
            self._prefetcher.start(mixture, self._ranks, self._cursor.sample, self._limit)
            self._is_stale = False
        return self._prefetcher

    def _go_on_from(self, cursor: Cursor) -> None:
        """Read from another place or with other weights: what was made ahead is not what comes next any more."""
        self._cursor = cursor
        self._limits = self.plan.limits(cursor)
        self._is_stale = True

    @property
    def _limit(self) -> int | None:
        """The global sample at which the pass stops because a corpus is used up."""
        return self._limits[0].sample if self._limits and self.plan.on_max_epochs == "stop" else None


class StreamDataset(IterableDataset[Batch]):
    """The same batches, for ``DataLoader(dataset, batch_size=None)`` of torch and ``StatefulDataLoader`` of torchdata.

    DataLoader worker w of W makes the steps w, w + W, ..., which DataLoader hands out in turn, so the order is that of
    `StreamingLoader`. Resuming through ``StatefulDataLoader`` needs the same number of workers, as it always does. A
    plain ``DataLoader`` with workers is exact for one loop, and for each whole pass of a finite plan: where its workers
    are is lost with a loop that ends before, so that a second one is refused.

    Args:
        plan, global_batch_size, dp_rank, dp_world_size, dp_mesh, uneven: as for `StreamingLoader`.
    """

    def __init__(
        self,
        plan: StreamPlan,
        *,
        global_batch_size: int,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        dp_mesh: DeviceMesh | None = None,
        uneven: Literal["refuse", "pad"] = "refuse",
    ) -> None:
        self.plan = plan
        self._ranks = _ranks(plan, global_batch_size, dp_rank, dp_world_size, dp_mesh, uneven)
        self._cursor = plan.cursor()
        self._used_up: set[str] = set()  # corpora that were told of
        self._is_under_way = False
        self._pid = os.getpid()
        self._is_loaded = False
        self._loops = RawArray("B", _MAX_LOOP_WORKERS)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if get_spawning_popen() is None:  # a copy, not a worker: its loops are its own
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
        limits = plan.limits(self._cursor, since=since)
        limit = limits[0].sample if limits and plan.on_max_epochs == "stop" else None
        mixture, sample, recycler = plan.mixture(self._cursor), self._cursor.sample, Recycler(_HELD_BATCHES)
        for packed in packed_steps(plan, mixture, self._ranks, sample, limit=limit, stride=num_workers):
            if plan.on_max_epochs == "warn":
                _warn_of_use(limits, self._cursor.sample, self._cursor.sample + size, self._used_up)
            self._advance(num_workers)
            yield as_tensors(packed, recycler=recycler)
        if plan.num_samples is None or self._cursor.sample < plan.num_samples:
            _warn_of_stop(limits[0], self._cursor.sample)
        else:
            self._cursor, self._is_under_way = plan.cursor(), False
            self._loops[worker % _MAX_LOOP_WORKERS] = 0

    def _begin(self, worker: int) -> None:
        """The beginning of a loop of a DataLoader worker."""
        if self._pid != os.getpid():
            self.plan, self._pid = self.plan.reopened(), os.getpid()
        place = worker % _MAX_LOOP_WORKERS
        if self._loops[place] and not self._is_loaded:
            # the way out stands in the problem: DataLoader shows no more of an error
            raise LoaderError(
                "a second loop over a StreamDataset in a DataLoader with workers would not continue the first, which "
                "did not end: use StreamingLoader, or load_state_dict of StatefulDataLoader, or num_workers=0; a new "
                "StreamDataset starts over",
                hint="StreamingLoader(plan, global_batch_size=..., num_workers=...) continues",
            )
        self._loops[place], self._is_loaded = 1, False

    def state_dict(self) -> dict[str, Any]:
        """The cursor of this DataLoader worker: the step that it makes next, if it has made one."""
        return {**_saved(self.plan, self._cursor), WORKER_KEY: self._is_under_way}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state of the same DataLoader worker was taken, or one of `StreamingLoader`.

        Raises:
            PlanMismatchError: the state is of another plan.
        """
        self._cursor, self._is_loaded = _loaded(self.plan, state), True
        self._is_under_way = bool(state.get(WORKER_KEY))

    def _advance(self, num_steps: int) -> None:
        self._cursor = self._cursor.advanced(num_steps * self._ranks.global_batch_size)


def _saved(plan: StreamPlan, cursor: Cursor) -> dict[str, Any]:
    return {STATE_KEY: save_cursor(plan.compacted(cursor), plan.identity, plan.names, plan.schedule)}


def _loaded(
    plan: StreamPlan,
    state: Mapping[str, Any],
    *,
    weights: Literal["cursor", "plan"] = "cursor",
    corpora: Literal["same", "plan"] = "same",
) -> Cursor:
    if weights not in ("cursor", "plan"):
        raise ValueError(f"weights must be 'cursor' or 'plan', got {weights!r}")
    if corpora not in ("same", "plan"):
        raise ValueError(f"corpora must be 'same' or 'plan', got {corpora!r}")
    text = state.get(STATE_KEY) if isinstance(state, Mapping) else state  # type: ignore[redundant-expr]
    if corpora == "plan":
        cursor = adopt_cursor(text, plan.identity, plan.names, plan.schedule, weights=weights)
    else:
        cursor = load_cursor(text, plan.identity, plan.schedule, weights=weights)
    plan.check_pass(cursor)
    return cursor


def _ranks(  # noqa: PLR0917 - the arguments of both loaders
    plan: Any,
    global_batch_size: int,
    dp_rank: int | None,
    dp_world_size: int | None,
    dp_mesh: DeviceMesh | None,
    uneven: Literal["refuse", "pad"],
) -> Ranks:
    if not isinstance(plan, StreamPlan):
        raise PlanError(f"the plan is {plan!r:.100}", hint="give StreamPlan(corpora, seq_len=...)")
    rank, world_size = data_parallel_place(dp_rank, dp_world_size, dp_mesh)
    ranks = Ranks(global_batch_size, rank, world_size, uneven)
    ranks.check_size(plan.seq_len)
    return ranks


def _seconds(timeout_seconds: Any) -> float:
    seconds = real("timeout_seconds", timeout_seconds)
    if not seconds > 0:
        raise PlanError(f"timeout_seconds is {timeout_seconds}", hint="give a number above 0")
    return min(seconds, threading.TIMEOUT_MAX)


def _warn_of_small_windows(plan: StreamPlan, global_batch_size: int) -> None:
    if not plan.has_default_windows:
        return  # they were chosen
    few = {name: steps for name, steps in plan.steps_per_window(global_batch_size).items() if steps < MIN_WINDOW_STEPS}
    if few:
        name, steps = min(few.items(), key=lambda item: item[1])
        warnings.warn(
            f"a window of corpus {name!r} lasts {steps:.1f} steps: documents meet only those of so few steps; "
            f"window_blocks={math.ceil(plan.shape.window_blocks * MIN_WINDOW_STEPS / steps)} makes it "
            f"{MIN_WINDOW_STEPS}, for 8 bytes per document of a window",
            stacklevel=3,
        )


def _warn_of_use(limits: Sequence[Limit], start: int, stop: int, told: set[str]) -> None:
    """Warn once of each corpus that is used up among the samples ``[start, stop)``."""
    for limit in limits:
        if start <= limit.sample < stop and limit.corpus not in told:
            told.add(limit.corpus)
            warnings.warn(
                f"corpus {limit.corpus!r} is used up at sample {limit.sample}: it was read max_epochs times, and is "
                "read again; set_weights with 0 leaves it out",
                stacklevel=3,
            )


def _warn_of_stop(limit: Limit, sample: int) -> None:
    warnings.warn(
        f"the pass ends before sample {sample}: the step there would read corpus {limit.corpus!r} more than max_epochs "
        "times; set_weights with 0 leaves it out, on_max_epochs='warn' reads on",
        stacklevel=3,
    )


def as_tensors(packed: Packed, *, recycler: Recycler | None = None, pin_memory: bool = False) -> Batch:
    """A batch as CPU tensors; input_ids, labels and position_ids int64 [rows, seq_len]."""
    batch = {key: torch.from_numpy(value) for key, value in widen(packed, recycler).items()}
    return {key: value.pin_memory() for key, value in batch.items()} if pin_memory else batch


def data_parallel_place(rank: int | None, world_size: int | None, mesh: DeviceMesh | None) -> tuple[int, int]:
    """Data-parallel rank and world size: as given, else of a mesh, else of torch.distributed, else 0 of 1.

    Raises:
        PlanError: only one of the two is given, this process is not part of the mesh, or a launcher says that the job
            has several processes and torch.distributed is not set up yet: each would read everything.
    """
    if (rank is None) != (world_size is None):
        raise PlanError(
            f"dp_rank is {rank}, dp_world_size {world_size}: only one is given", hint="give both, or neither"
        )
    if rank is not None and world_size is not None:
        return rank, world_size
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


def _start_method(given: str | None) -> str:
    methods = multiprocessing.get_all_start_methods()
    if given is None:
        return "forkserver" if "forkserver" in methods else "spawn"
    if given not in methods:
        raise PlanError(f"multiprocessing_context is {given!r:.100}", hint=f"give one of {', '.join(methods)}")
    return given
