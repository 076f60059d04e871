"""The rows of a plan as batches of numpy arrays, and what all loaders have in common."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, Literal, TypeVar

from numpy.typing import NDArray

from tokshard.errors import PlanError
from tokshard.runtime.batches import Packed, widen
from tokshard.runtime.cache import fetched
from tokshard.runtime.compact import compact_batch
from tokshard.runtime.cursor import Cursor
from tokshard.runtime.cursor_json import adopt_cursor, load_cursor, save_cursor
from tokshard.runtime.feed import Feed
from tokshard.runtime.growth import check_growth
from tokshard.runtime.locality import warn_of_windows
from tokshard.runtime.options import Weights, checked_weights, integer, real
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.recycling import Recycler
from tokshard.runtime.steps import Ranks
from tokshard.runtime.stop import Stop, UsedUp, check_pass, stop_of, used_up, warn_of_stop, warn_of_use
from tokshard.runtime.workers import start_method_of

NumpyBatch = dict[str, NDArray[Any]]
Batch = TypeVar("Batch")

_MAX_AHEAD = 1 << 16
_STATE_KEY = "cursor"
_LAUNCHERS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Environment variables in which torchrun, srun and mpirun give the number of processes."""


class BatchLoader(AbstractContextManager["BatchLoader[Batch]"], Generic[Batch]):
    """Batches of a plan, from a cursor on: what `NumpyLoader` and `StreamingLoader` have in common.

    The global batch of a step is the same for every world size, number of workers and history of stops. The state
    counts what the loop received. It is small and the same on every rank; loading it on another world size, batch size
    or number of workers is exact and replays nothing. It follows the ``Stateful`` protocol of
    torch.distributed.checkpoint. A loader is for one thread of one process; leaving its ``with`` block closes it.

    Args:
        plan: what to read.
        ranks: which rows of a step.
        finish: turns rows into a batch, in memory of the recycler.
        num_workers, prefetch_factor, timeout_seconds, multiprocessing_context: as for `NumpyLoader`.
    """

    def __init__(
        self,
        plan: StreamPlan,
        *,
        ranks: Ranks,
        finish: Callable[[Packed, Recycler], Batch],
        num_workers: int,
        prefetch_factor: int,
        timeout_seconds: float,
        multiprocessing_context: str | None,
    ) -> None:
        num_workers = integer("num_workers", num_workers, most=_MAX_AHEAD)
        prefetch_factor = integer("prefetch_factor", prefetch_factor, most=_MAX_AHEAD)
        if num_workers < 0 or prefetch_factor < 1:
            raise PlanError(
                f"num_workers is {num_workers}, prefetch_factor {prefetch_factor}",
                hint="give num_workers of 0 or more and prefetch_factor of 1 or more",
            )
        warn_of_windows(plan, ranks.global_batch_size, ranks.world_size, stacklevel=3)
        self._ranks = ranks
        self._feed = Feed(
            plan,
            ranks,
            finish,
            num_workers=num_workers,
            depth=prefetch_factor * max(1, num_workers),
            timeout_seconds=_seconds(timeout_seconds),
            start_method=start_method_of(multiprocessing_context, plan.sources),
        )
        self._warned: set[str] = set()  # corpora whose end was reported
        self._num_batches = 0
        self._cursor: Cursor = plan.cursor()
        self._stop: Stop = stop_of(plan, self._cursor)
        self._used_up: list[UsedUp] = _worth_a_warning(plan, self._cursor)

    def __iter__(self) -> Iterator[Batch]:
        """Continue from the cursor; after a finished pass, from the start."""
        if self.plan.num_samples is not None and self._cursor.sample >= self.plan.num_samples:
            with self._feed.alone():
                self._read_from(self._cursor.restarted(self.plan.cursor()))
        size = self._ranks.global_batch_size
        while self._stop.has_step(self._cursor.sample, size):
            with self._feed.alone():
                batch = self._feed.next(self._cursor, self._stop)
                self._num_batches += 1
                end = self._stop.end_of_step(self._cursor.sample, size)
                if self.plan.on_max_epochs == "warn":
                    warn_of_use(self._used_up, self._cursor.sample, end, self._warned)
                self._cursor = self._cursor.advanced(end - self._cursor.sample)
            yield batch
        if not self._stop.pads_last_step:
            warn_of_stop(self._stop, self._cursor.sample)

    def __len__(self) -> int:
        """Steps of a finite pass, counted from its start.

        Raises:
            TypeError: the plan is endless.
        """
        if self.plan.num_samples is None:
            raise TypeError("the plan is endless: it has no length")
        return math.ceil(self.plan.num_samples / self._ranks.global_batch_size)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        ranks = self._ranks
        return (
            f"<{type(self).__name__} of {self.plan!r} at sample {self._cursor.sample}: "
            f"global batches of {ranks.global_batch_size}, rank {ranks.rank} of {ranks.world_size}>"
        )

    @property
    def plan(self) -> StreamPlan:
        """What is read."""
        return self._feed.plan

    @property
    def cursor(self) -> Cursor:
        """The position of the loop in the plan."""
        return self._cursor

    def state_dict(self) -> dict[str, Any]:
        """The cursor as a line of JSON under one key, the same on every rank."""
        return save_state(self.plan, self._cursor)

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        weights: Literal["cursor", "plan"] = "cursor",
        corpora: Literal["same", "plan"] = "same",
    ) -> None:
        """Continue where a state was taken.

        Args:
            weights: ``"cursor"``: the weights that were in force stay so, and the planned changes still to come must be
                those of this plan; ``"plan"``: the weights of this plan are in force from here on.
            corpora: ``"same"``: other corpora than before are refused; ``"plan"``: read those of this plan, with its
                weights. A corpus of both plans continues where it was; what was added and removed is kept in the
                state. If the corpora are the same, this does what ``"same"`` does.

        Raises:
            PlanMismatchError: the state is of another plan, or not of a tokshard loader.
        """
        cursor = load_state(self.plan, state, weights=weights, corpora=corpora)
        with self._feed.alone():
            self._read_from(cursor)

    def set_weights(self, weights: Weights) -> None:
        """Read with other weights from the next batch on. The plan does not change; earlier shares are not made up for.

        Raises:
            PlanError: the weights do not fit the plan.
        """
        checked = checked_weights(self.plan.names, weights)
        with self._feed.alone():
            self._read_from(compacted(self.plan, self._cursor.weighted(checked)))

    def skip(self, num_samples: int) -> None:
        """Leave out the next samples, on record in the state; a multiple of the batch keeps steps aligned.

        Raises:
            PlanError: it is not an integer, or negative, or leads beyond sample 2**62.
        """
        num_samples = integer("num_samples", num_samples, least=0)
        with self._feed.alone():
            if self.plan.num_samples is not None:
                num_samples = min(num_samples, self.plan.num_samples - self._cursor.sample)
            integer("the sample to skip to", self._cursor.sample + num_samples)
            if num_samples:
                self._read_from(self._cursor.skipping(num_samples))

    def mask(
        self, corpus: str, documents: Iterable[int] | str | os.PathLike[str], *, inputs: Literal["keep", "eos"] = "keep"
    ) -> None:
        """Take documents out of the loss from the next batch on, on record in the state. Every rank has to call it.

        All labels of their tokens are -100; order, positions and all other labels stay. It cannot be undone, and the
        same documents once more change nothing, so that a program may mask whenever it starts. Costs
        a look at the bounds of each document: a request where a corpus is read by range.

        Args:
            corpus: its name in the plan. Other corpora of the plan with the same content are masked, too.
            documents: their numbers in the corpus; or a file with one in each line, or a .npy file of integers. The
                state keeps up to 10,000; of more, path and hash of the file, which every resume has to find unchanged.
            inputs: ``"eos"``: their input tokens become EOS, too; ``"keep"``: a model may still see them.

        Raises:
            PlanError: the corpus or a document does not exist, or the documents cannot be read.
        """
        with self._feed.alone():
            self._read_from(self.plan.masking(self._cursor, corpus, documents, inputs=inputs))

    def stats(self) -> dict[str, Any]:
        """Figures of the loader since it was made, and of its position.

        Returns:
            batches and wait_seconds since it was made; queue, the number of batches that are ready; bytes_read, token
            ids in their stored width; samples of the plan so far and skipped_samples among them; per corpus samples,
            tokens and epoch (tokens over tokens in the corpus), skipped ones included. fetched: what this
            process, without workers, read of corpora that are not mapped, as `ReadCounts` has it. masked_documents of
            the plan's corpora, and masked_tokens among the inputs of the batches since it was made.
        """
        plan, masked = self.plan, self.plan.masked(self._cursor)
        counts = plan.mixture(self._cursor).counts_before(self._cursor.sample)
        tokens = [count * plan.seq_len for count in counts]
        batch_bytes = self._ranks.rows_per_rank * plan.seq_len * plan.sources[0].dtype.itemsize
        return {
            "batches": self._num_batches,
            "wait_seconds": self._feed.wait_seconds,
            "queue": self._feed.num_ready,
            "bytes_read": self._num_batches * batch_bytes,
            "samples": self._cursor.sample,
            "skipped_samples": sum(stop - start for start, stop in self._cursor.skipped),
            "fetched": fetched(plan.sources),
            "masked_documents": 0 if masked is None else masked.num_documents,
            "masked_tokens": self._feed.num_masked_tokens,
            "corpora": {
                name: {"samples": count, "tokens": read, "epoch": read / corpus.num_tokens}
                for name, count, read, corpus in zip(plan.names, counts, tokens, plan.corpora, strict=True)
            },
        }

    def close(self) -> None:
        """Stop the thread and the workers. The loader can be iterated again."""
        self._feed.close()

    def _read_from(self, cursor: Cursor) -> None:
        """Continue from another cursor; the batches made ahead are out of date."""
        self._cursor = cursor
        self._stop, self._used_up = stop_of(self.plan, cursor), _worth_a_warning(self.plan, cursor)
        self._feed.discard()


class NumpyLoader(BatchLoader[NumpyBatch]):
    """Batches of a plan as numpy arrays, from a cursor on, without torch: for JAX, and for tests.

    Batches, state and options are those of `StreamingLoader`, whose docstring lists the arrays of a batch. Only the
    rank has to be given here.

    Args:
        plan: what to read.
        global_batch_size: samples of a step over all ranks.
        dp_rank, dp_world_size: data-parallel; default: 0 of 1.
        num_workers: processes that read; 0: a thread reads, which is faster except for very short documents.
        prefetch_factor: batches made ahead per worker.
        compact: give compact batches. States do not depend on it.
        uneven: ``"refuse"`` or ``"pad"``: with ranks that do not divide the batch, every rank gets
            ceil(global_batch_size / dp_world_size) rows, the surplus ones ignored (labels -100, sample_index -1).
        timeout_seconds: longest wait for one batch; the error names the shard that was read.
        multiprocessing_context: start method of the workers; default: forkserver where it exists, else
            spawn; spawn if a corpus is not on this machine.

    Raises:
        PlanError: the ranks do not divide the batch, a number is out of range, or a launcher started several processes
            and no rank is given: each would read everything.
    """

    def __init__(
        self,
        plan: StreamPlan,
        *,
        global_batch_size: int,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 4,
        compact: bool = False,
        uneven: Literal["refuse", "pad"] = "refuse",
        timeout_seconds: float = 600.0,
        multiprocessing_context: str | None = None,
    ) -> None:
        place = given_place(dp_rank, dp_world_size) or _single_process()
        super().__init__(
            plan,
            ranks=ranks_of(plan, global_batch_size, place, uneven),
            finish=compact_batch if compact else widen,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            timeout_seconds=timeout_seconds,
            multiprocessing_context=multiprocessing_context,
        )


def compacted(plan: StreamPlan, cursor: Cursor) -> Cursor:
    """The cursor without all but the recent past of its weights."""
    return cursor.compacted(plan.mixture(cursor))


def save_state(plan: StreamPlan, cursor: Cursor) -> dict[str, Any]:
    """The state of a loader that is at a cursor."""
    return {_STATE_KEY: save_cursor(compacted(plan, cursor), plan.identity, plan.names, plan.schedule)}


def load_state(
    plan: StreamPlan,
    state: Mapping[str, Any],
    *,
    weights: Literal["cursor", "plan"] = "cursor",
    corpora: Literal["same", "plan"] = "same",
) -> Cursor:
    """The cursor of a state; arguments and errors as for `BatchLoader.load_state_dict`."""
    if weights not in ("cursor", "plan"):
        raise ValueError(f"weights must be 'cursor' or 'plan', got {weights!r}")
    if corpora not in ("same", "plan"):
        raise ValueError(f"corpora must be 'same' or 'plan', got {corpora!r}")
    text = state.get(_STATE_KEY) if isinstance(state, Mapping) else state  # type: ignore[redundant-expr]
    check_growth(text, plan.names, plan.sources)
    if corpora == "plan":
        cursor = adopt_cursor(text, plan.identity, plan.names, plan.schedule, weights=weights)
    else:
        cursor = load_cursor(text, plan.identity, plan.schedule, weights=weights)
    check_pass(plan, cursor)
    return cursor


def given_place(dp_rank: int | None, dp_world_size: int | None) -> tuple[int, int] | None:
    """Data-parallel rank and world size if they are given, else None.

    Raises:
        PlanError: only one of them is.
    """
    if (dp_rank is None) != (dp_world_size is None):
        raise PlanError(
            f"dp_rank is {dp_rank}, dp_world_size {dp_world_size}: only one is given", hint="give both, or neither"
        )
    return None if dp_rank is None or dp_world_size is None else (dp_rank, dp_world_size)


def _single_process() -> tuple[int, int]:
    for name in _LAUNCHERS:
        if (launched := os.environ.get(name, "1")) != "1":
            raise PlanError(
                f"{name} is {launched}: the job has several processes, and the rank of this one is not known",
                hint="give dp_rank and dp_world_size, such as jax.process_index() and jax.process_count()",
            )
    return 0, 1


def ranks_of(plan: Any, global_batch_size: int, place: tuple[int, int], uneven: Literal["refuse", "pad"]) -> Ranks:
    """The rows that a loader of a plan reads.

    Raises:
        PlanError: it is not a plan, or the numbers do not fit each other.
    """
    if not isinstance(plan, StreamPlan):
        raise PlanError(f"the plan is {plan!r:.100}", hint="give StreamPlan(corpora, seq_len=...)")
    ranks = Ranks(
        global_batch_size=global_batch_size,
        rank=place[0],
        world_size=place[1],
        uneven=uneven,
        num_streams=plan.num_streams,
    )
    ranks.check_size(plan.seq_len)
    return ranks


def _worth_a_warning(plan: StreamPlan, cursor: Cursor) -> list[UsedUp]:
    return used_up(plan, cursor) if plan.on_max_epochs == "warn" else []


def _seconds(timeout_seconds: Any) -> float:
    seconds = real("timeout_seconds", timeout_seconds)
    if not seconds > 0:
        raise PlanError(f"timeout_seconds is {timeout_seconds}", hint="give a number above 0")
    return min(seconds, threading.TIMEOUT_MAX)
