"""The rows of a plan as batches of tensors. No other module of the runtime imports torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tokshard.errors import LoaderError, PlanError, TokshardError
from tokshard.runtime.cursor import Cursor
from tokshard.runtime.loader import BatchLoader, Walk, launched, rows_of_rank
from tokshard.runtime.options import integer
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.expand import compact_batch, full_batch
from tokshard.runtime.rows.narrow import NarrowBatch
from tokshard.runtime.rows.recycling import Recycler
from tokshard.runtime.rows.steps import RankRows
from tokshard.runtime.state import load_state, save_state

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Batch = dict[str, Tensor]


class StreamingLoader(BatchLoader[Batch]):
    """Batches of a plan as CPU tensors, from a cursor on.

    The global batch of a step is the same for every world size, number of workers and history of stops. The state
    counts the samples that the loop received. It is small and the same on every rank. Loading it on another world size,
    batch size or number of workers is exact and replays nothing. It follows the ``Stateful`` protocol of
    torch.distributed.checkpoint. A loader is for one thread of one process. Leaving its ``with`` block closes it.

    A batch is a dict; a rank has ``rows = global_batch_size / dp_world_size``:

    - ``input_ids``, ``labels``, ``position_ids``: int64 [rows, seq_len]. A label is the document's next token, or -100
      at the end of a document and in padding. Positions start at 0 in each piece of a document.
    - ``corpus_index``, ``sample_index``: int64 [rows], the corpus in plan order and the global sample; -1 for padding.
    - ``cu_seqlens``: int32 [n], the boundaries of all pieces in the flattened batch, for attention within documents;
      the last one is repeated until n is a power of two, at least 64. ``max_seqlen``: int64 [], the longest piece.
    - ``loss_weights``: float32 [rows, seq_len], only if a corpus of the plan has loss spans: the weight of each label.
      It is 0 where the label is -100, as it is outside of the spans, and 1 if the corpus has no weights.

    With ``compact=True`` a batch has a tenth of the size, and `tokshard.runtime.expand` makes the batch above on a
    device:

    - ``input_ids``: uint16 or uint32 [rows, seq_len], as the corpora store them; no ``labels`` and ``position_ids``.
    - ``next_tokens``: int64 [n - 1], the label of the last token of each piece, -100 for none. Padding of a row is a
      piece of its own, and what repeats the last boundary repeats the last label.
    - ``num_tokens``: int32 [rows], tokens of each row that are not padding.
    - ``masked``: bool [n - 1], whether no token of the piece has a label; only once documents are masked.
    - ``loss_bounds``: int32 [m], and ``loss_weights``: float32 [m - 1], only if a corpus has loss spans: the labels of
      the flattened batch from ``loss_bounds[i]`` to ``loss_bounds[i + 1]`` have ``loss_weights[i]``; 0: do not count.
    - ``corpus_index``, ``sample_index``, ``cu_seqlens``, ``max_seqlen``: as above.

    Args:
        plan: what to read.
        global_batch_size: samples of a step over all ranks.
        dp_rank, dp_world_size: default: from `dp_mesh`, else from torch.distributed, else 0 and 1.
        dp_mesh: the data-parallel device mesh; with several dimensions (HSDP), all count.
        num_workers: reading processes of torch's DataLoader; 0: a thread reads, which is faster unless transforms are
            slow. A skip, other weights and masks restart the processes, which takes seconds.
        prefetch_factor: batches made ahead, besides two of each worker; 0: none, and no thread.
        pin_memory: return tensors in page-locked memory. ``tensor.to(device, non_blocking=True)`` needs it: other
            memory is reused as soon as the tensor is freed, even if a device still copies from it.
        compact: return compact batches. States do not depend on it.
        uneven: ``"refuse"`` or ``"pad"``: with ranks that do not divide the batch, every rank gets
            ceil(global_batch_size / dp_world_size) rows, the surplus ones ignored (labels -100, sample_index -1).
        timeout_seconds: the longest wait for one batch; the error names the shard that was read.

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
    ) -> None:
        ranks = rows_of_rank(
            plan, global_batch_size, dp_rank, dp_world_size, uneven, otherwise=partial(_rank_in, dp_mesh)
        )
        if pin_memory and not torch.accelerator.is_available():
            warnings.warn("pin_memory has no effect: this process sees no accelerator", stacklevel=2)
            pin_memory = False
        if integer("num_workers", num_workers, least=0):
            _check_pickles(plan)
        super().__init__(
            plan,
            ranks=ranks,
            finish=partial(as_tensors, pin_memory=pin_memory, compact=compact),
            prefetch_factor=prefetch_factor,
            timeout_seconds=timeout_seconds,
            steps=partial(_steps_of_workers, num_workers=num_workers) if num_workers else None,
        )


class StreamDataset(Dataset[Batch]):
    """The same batches without a state, for DataLoader of torch and StatefulDataLoader of torchdata.

    Use ``DataLoader(dataset, batch_size=None, sampler=dataset.sampler, num_workers=...)``. The sampler runs in the
    process of the loop. It sends each step with its weights and masks, so any worker can make any step. A plain
    DataLoader does not tell which steps the loop received. So a second loop is refused unless the first reached the end
    of a pass; `StreamingLoader` continues.

    Args:
        plan, global_batch_size, dp_rank, dp_world_size, dp_mesh, compact, uneven: as for `StreamingLoader`.

    Attributes:
        plan: what is read.
        sampler: the steps of the plan; it loads states of `StreamingLoader`.
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
        ranks = rows_of_rank(
            plan, global_batch_size, dp_rank, dp_world_size, uneven, otherwise=partial(_rank_in, dp_mesh)
        )
        self.plan, self._rows = plan, _Rows(plan, ranks)
        self._is_compact = compact
        self.sampler = StepSampler(plan, global_batch_size)

    def __getitem__(self, step: Step) -> Batch:
        """The batch of a step of the sampler."""
        if not isinstance(step, Step):
            raise LoaderError(f"{step!r:.100} is not a step of this data set, expected one of its sampler", hint=_HOW)
        return as_tensors(self._rows.narrow(step), compact=self._is_compact)

    def __getitems__(self, _: Any) -> Any:
        """Refuse to make batches of batches."""
        raise LoaderError("a StreamDataset returns whole batches, which cannot be batched again", hint=_HOW)

    def __len__(self) -> int:
        """Refuse the default samplers of torch."""
        raise TypeError(f"the sampler of a StreamDataset determines what is read: {_HOW}")


_HOW = "give DataLoader(dataset, batch_size=None, sampler=dataset.sampler)"


class StepSampler(Sampler["Step"]):
    """The steps of a plan for a DataLoader, in the process of the loop.

    It follows the ``Stateful`` protocol, so StatefulDataLoader saves and loads it. It has no length, so frameworks do
    not deal its steps to ranks a second time.
    """

    def __init__(self, plan: StreamPlan, global_batch_size: int) -> None:
        self._plan, self._walk = plan, Walk(plan, global_batch_size)
        self._is_under_way = self._is_second = False

    def __iter__(self) -> StepSampler:
        """Begin a loop."""
        self._is_second = self._is_under_way
        self._walk.begin()
        return self

    def __next__(self) -> Step:
        """The next step.

        Raises:
            LoaderError: the loop before did not end. This loop would not continue it, because a DataLoader reads ahead.
            PlanError: the step would reach beyond sample 2**62.
        """
        if self._is_second:
            raise LoaderError(
                "a second loop over a StreamDataset does not continue the first, which did not end: "
                "StreamingLoader(plan, global_batch_size=..., num_workers=...) does, and so does a state that "
                "dataset.sampler.load_state_dict or StatefulDataLoader loads",
                hint="use StreamingLoader, or make a new StreamDataset to begin again",
            )
        self._is_under_way = self._walk.has_step()
        if not self._is_under_way:
            self._walk.end()
            raise StopIteration
        step = Step(self._walk.cursor, self._walk.stop.sample)
        self._walk.advance()
        return step

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last step that was given to the DataLoader."""
        return save_state(self._plan, self._walk.cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of this sampler or of `StreamingLoader`.

        Raises:
            PlanMismatchError: the state belongs to another plan.
        """
        self._walk.jump(load_state(self._plan, state))
        self._is_under_way = self._is_second = False


class Step(NamedTuple):
    """A step that any process can make.

    Args:
        cursor: the cursor at its start.
        end: the sample that ends the pass; None: it is endless.
    """

    cursor: Cursor
    end: int | None


class _Rows(Dataset["NarrowBatch | TokshardError"]):
    """The narrow rows of steps, for processes of a DataLoader. Errors are returned as values, to keep their class."""

    def __init__(self, plan: StreamPlan, ranks: RankRows) -> None:
        self._plan: StreamPlan | None = plan
        self._ranks, self._pid = ranks, os.getpid()
        self._pickled = b""
        self._last: Cursor | None = None

    def narrow(self, step: Step) -> NarrowBatch:
        """The rows of a step."""
        if self._plan is None:
            self._plan = pickle.loads(self._pickled)  # noqa: S301 - from our own process
        elif self._pid != os.getpid():
            self._plan = self._plan.reopened()
        self._pid = os.getpid()
        # a cursor that came from another process has copies of the weights, whose samples would be counted anew
        cursor = replace(self._last or step.cursor, sample=step.cursor.sample)
        self._last = cursor if cursor == step.cursor else step.cursor
        samples = self._ranks.samples(np.array([step.cursor.sample]), step.end)
        return self._plan.read(self._plan.lay_out(self._last, samples), 0, len(samples))

    def __getitem__(self, step: Step) -> NarrowBatch | TokshardError:
        try:
            return self.narrow(step)
        except TokshardError as error:
            return error

    def __getstate__(self) -> dict[str, Any]:
        # the plan is opened with the first step, whose error is told
        return {**self.__dict__, "_plan": None, "_pickled": self._pickled or pickle.dumps(self._plan)}


def _steps_of_workers(
    plan: StreamPlan, ranks: RankRows, cursor: Cursor, end: int | None, *, num_workers: int
) -> Iterator[NarrowBatch]:
    """The steps from a cursor on, made in turn by processes of torch's DataLoader."""
    size = ranks.global_batch_size

    def steps() -> Iterator[Step]:
        sample = cursor.sample
        while end is None or sample < end:
            yield Step(replace(cursor, sample=sample), end)
            sample += size

    loader: DataLoader[NarrowBatch | TokshardError] = DataLoader(
        _Rows(plan, ranks),
        batch_size=None,
        sampler=steps(),
        num_workers=num_workers,
        worker_init_fn=_belong_to_the_loop,
        generator=torch.Generator(),  # or it would draw from the global one
        multiprocessing_context="spawn",  # a forked process may inherit locks, and cannot reach a store of its parent
    )
    batches: Any = ()
    try:
        with _safe_path():
            batches = iter(loader)
        for narrow in batches:
            if isinstance(narrow, TokshardError):
                raise narrow
            yield narrow
    except RuntimeError as error:
        raise LoaderError(
            f"a DataLoader worker failed: {error}",
            hint="run with num_workers=0 to see why. A killed worker often lacked memory, or read a mapped "
            "shard that was cut (CorpusSource(..., access='pread') survives that)",
        ) from error
    finally:
        # ends the processes in order: what a traceback keeps is left to the garbage collector, which takes the
        # semaphores away from processes that still start
        del batches


def _belong_to_the_loop(_: int) -> None:
    """Make a worker end with the process of the loop, and not earlier.

    Ctrl-C, and the SIGTERM that a launcher sends to the group, are for the loop, which may still need batches. torch's
    workers watch the parent that they have when they are ready, so they miss one that was killed before.
    """
    os.setsid()
    threading.Thread(target=_end_with_the_loop, name="tokshard-end-with-the-loop", daemon=True).start()


def _end_with_the_loop() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Start child processes without the current directory on their path: it may hold foreign modules."""
    name = "PYTHONSAFEPATH"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _check_pickles(plan: StreamPlan) -> None:
    """Refuse a plan that cannot be sent to a worker process.

    Raises:
        PlanError: it names the part that does not pickle.
    """
    for part in (*plan.transforms, *plan.sources):
        try:
            pickle.dumps(part)
        except Exception as error:
            raise PlanError(
                f"{part!r} does not pickle, so worker processes cannot receive it: {error}",
                hint="define it in a module, not as a lambda or in a function; or use num_workers=0",
            ) from error


def as_tensors(
    narrow: NarrowBatch, recycler: Recycler | None = None, *, pin_memory: bool = False, compact: bool = False
) -> Batch:
    """A batch as CPU tensors; the docstring of `StreamingLoader` lists them."""
    arrays = compact_batch(narrow, recycler) if compact else full_batch(narrow, recycler)
    batch = {key: torch.from_numpy(value) for key, value in arrays.items()}
    return {key: value.pin_memory() for key, value in batch.items()} if pin_memory else batch


def _rank_in(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Data-parallel rank and world size of a mesh, else of torch.distributed, else 0 and 1.

    Raises:
        PlanError: this process is not part of the mesh, or a launcher started several processes and torch.distributed
            is not initialized yet, so each would read everything.
    """
    if mesh is not None:
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
