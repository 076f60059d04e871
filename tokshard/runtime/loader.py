"""The rows of a plan as batches of numpy arrays, and the common base of all loaders."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import LoaderError, PlanError
from tokshard.runtime.bytes.source import fetched
from tokshard.runtime.cursor import MAX_SAMPLE, Cursor
from tokshard.runtime.locality import warning_of_windows, warnings_of_windows
from tokshard.runtime.options import Weights, checked_weights, flag, integer, real
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.prefetch import Prefetch
from tokshard.runtime.rows.expand import compact_batch, full_batch
from tokshard.runtime.rows.narrow import Layout, NarrowBatch, StepTargets
from tokshard.runtime.rows.recycling import Recycler
from tokshard.runtime.rows.steps import Deal, RankRows, steps_of_shortest_window
from tokshard.runtime.state import load_state, plan_of_run, save_state
from tokshard.runtime.stop import stop_of, used_up, warn_of_stop, warn_of_use
from tokshard.wording import counted, listed

NumpyBatch = dict[str, NDArray[Any]]
Batch = TypeVar("Batch")

HELD_BATCHES = 4
"""Batches that a loop is expected to hold at a time. Holding more costs new memory for each."""

_MAX_AHEAD = 1 << 16
_LAUNCHERS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Environment variables with the number of processes, from torchrun, srun and mpirun."""


class LoopPosition:
    """The position of a loop in a plan, and the end of its pass.

    Args:
        plan: the plan that is read.
        global_batch_size: samples of a step over all ranks.

    Attributes:
        cursor: at the start of the next step.
        stop: the end of the pass.
    """

    def __init__(self, plan: StreamPlan, global_batch_size: int) -> None:
        self._plan, self._size = plan, global_batch_size
        self._warned: set[str] = set()  # corpora whose end was reported
        self._was_moved = False
        self.move(plan.cursor())

    def move(self, cursor: Cursor, plan: StreamPlan | None = None) -> None:
        """Continue from a cursor; arguments as for `jump`."""
        plan = plan or self._plan
        # both may read the corpora: if that fails, nothing has changed
        stop, found = stop_of(plan, cursor), used_up(plan, cursor) if plan.on_max_epochs == "warn" else []
        self._plan, self.cursor, self.stop, self._used_up = plan, cursor, stop, found

    def jump(self, cursor: Cursor, plan: StreamPlan | None = None) -> None:
        """Continue from the cursor of a state, or after a skip. If the pass ends there, the next loop is empty.

        Args:
            plan: with the sizes of the run; None: as before.
        """
        self.move(cursor, plan)
        self._was_moved = True

    def resize(self, global_batch_size: int) -> None:
        """Have steps of another size from here on."""
        self._size = global_batch_size

    def begin(self) -> None:
        """Begin a loop; after a whole pass of this loader, begin the pass again."""
        most = self._plan.at(self.cursor).num_samples
        if most is None or self.cursor.sample < most:
            return
        if not self._was_moved:
            self.move(self.cursor.restarted(self._plan.cursor()))
            return
        warnings.warn(
            f"the pass of {most} samples was over where this loader begins, so this loop is empty; the next one "
            "begins the pass again",
            stacklevel=3,
        )

    def has_step(self) -> bool:
        """Whether the pass has another step.

        Raises:
            PlanError: the step would reach beyond sample 2**62.
        """
        start = self.cursor.sample
        if not self.stop.has_step(start):
            return False
        if (last := self.stop.end_of_step(start, self._size) - 1) > MAX_SAMPLE:
            raise PlanError(
                f"the step of {self._size} samples from sample {start} on ends with sample {last}, and samples are "
                "counted up to 2**62",
                hint="give a smaller global_batch_size, or start a new run without the loader's state",
            )
        return True

    def advance(self) -> None:
        """Advance by a step that the loop receives, and warn of corpora that it uses up."""
        start, end = self.cursor.sample, self.stop.end_of_step(self.cursor.sample, self._size)
        warn_of_use(self._used_up, start, end, self._warned)
        self.cursor, self._was_moved = self.cursor.advanced(end - start), False

    def end(self) -> None:
        """End a loop that reached the end of the pass."""
        self._was_moved = False
        if self.stop.corpus is not None:
            warn_of_stop(self.stop, self.cursor.sample)


class BatchLoader(AbstractContextManager["BatchLoader[Batch]"], Generic[Batch]):
    """Batches of a plan, from a cursor on: the base of `NumpyLoader` and `StreamingLoader`.

    A thread makes batches ahead, starting with the first request. A new cursor closes it and starts another thread.

    Args:
        plan: the plan to read.
        ranks: the rows of a step that it reads.
        finish: turns rows into a batch, in memory from the recycler; called in the thread.
        prefetch_factor, timeout_seconds: as for `StreamingLoader`.
    """

    def __init__(
        self,
        plan: StreamPlan,
        *,
        ranks: RankRows,
        finish: Callable[[NarrowBatch, Recycler], Batch],
        prefetch_factor: int,
        timeout_seconds: float,
    ) -> None:
        self._depth = integer("prefetch_factor", prefetch_factor, least=0, most=_MAX_AHEAD)
        self._timeout_seconds = _seconds(timeout_seconds)
        _warn_of_windows(plan, ranks)
        self._plan, self._ranks, self._finish = plan, ranks, finish
        self._position = LoopPosition(plan, ranks.global_batch_size)
        self._prefetch: Prefetch[tuple[Batch, int, int]] | None = None
        self._memory: tuple[StreamPlan, Recycler] | None = None  # tables and arrays of the thread
        self._pid = os.getpid()
        self._lock = threading.RLock()  # held by the thread that uses the loader
        self._num_batches = self._num_masked_tokens = self._num_read_tokens = 0
        self._wait_seconds = 0.0

    def __iter__(self) -> Iterator[Batch]:
        """Continue from the cursor; after a whole pass of this loader, from the start."""
        with self._exclusive():
            before = self.cursor
            self._position.begin()
            if self.cursor is not before:
                self._discard()
        while self._position.has_step():
            with self._exclusive():
                try:
                    batch = self._next()
                    self._position.advance()
                except BaseException:
                    self._discard()  # batches made ahead follow one that the loop did not receive
                    raise
            yield batch
        self._position.end()

    def __len__(self) -> int:
        """Steps of a finite pass, counted from its start.

        Raises:
            TypeError: the plan is endless.
        """
        if (num_samples := self.plan.at(self.cursor).num_samples) is None:
            raise TypeError(
                "the plan is endless: it has no length. Iterate the loader itself, without a DataLoader around it"
            )
        return math.ceil(num_samples / self._ranks.global_batch_size)

    def __getitem__(self, _: Any) -> Any:
        """Refuse a DataLoader around a loader.

        Raises:
            LoaderError: always.
        """
        raise LoaderError(
            f"a {type(self).__name__} makes batches and is not a data set: iterate it itself, without a DataLoader",
            hint="or give DataLoader(dataset, batch_size=None, sampler=dataset.sampler) a StreamDataset",
        )

    def __getstate__(self) -> Any:
        """Refuse copies and pickles, which would share the position or lose the thread.

        Raises:
            LoaderError: always.
        """
        raise LoaderError(
            f"a {type(self).__name__} cannot be copied or sent to another process",
            hint="make a loader of the plan there, and give it the state: load_state_dict(loader.state_dict())",
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        ranks = self._ranks
        return (
            f"<{type(self).__name__} of {self.plan!r} at sample {self.cursor.sample}: "
            f"global batches of {ranks.global_batch_size}, rank {ranks.rank} of {ranks.world_size}>"
        )

    @property
    def plan(self) -> StreamPlan:
        """The plan that is read."""
        return self._plan

    @property
    def cursor(self) -> Cursor:
        """The position of the loop in the plan."""
        return self._position.cursor

    def state_dict(self) -> dict[str, Any]:
        """The cursor as a line of JSON under one key, the same on every rank."""
        return save_state(self.plan, self.cursor)

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        weights: Literal["same", "cursor", "plan"] = "same",
        corpora: Literal["same", "plan"] = "same",
        seq_len: Literal["same", "plan"] = "same",
    ) -> None:
        """Continue where a state was taken.

        Args:
            weights: ``"same"``: the run continues with the weights of the state, including those of `set_weights`; a
                plan that sets other weights from here on than the plan that saved the state is refused. ``"plan"``: the
                weights of this plan are in force from here on. ``"cursor"``: the weights of the state stay in force
                whatever this plan sets, but its planned changes must equal the plan's.
            corpora: ``"same"``: other corpora than before are refused; ``"plan"``: read the corpora of this plan, with
                its weights. A corpus of both plans continues where it was; the state records added and removed corpora.
                If the corpora are the same, this equals ``"same"``.
            seq_len: ``"same"``: a plan with another `seq_len` than before is refused; ``"plan"``: samples have the
                plan's `seq_len` from here on. Nothing is read twice. If it is a multiple of the earlier length, the
                rows left in windows are joined, and nothing is left out (with several streams, little). Otherwise, a
                warning and `stats` count the tokens left out, and the next epoch reads them.

        A list of masked documents is known by its length and hash. If it was moved, `mask` it at its new place first.
        Other documents masked before are not in the state: mask them again, as a warning says.

        A plan that was not given `block_tokens` or `window_blocks` takes those of the run.

        Raises:
            PlanMismatchError: the state belongs to another plan, or not to a tokshard loader.
        """
        plan = plan_of_run(self.plan, state)
        files = [mask.file for mask in self.cursor.masks]
        cursor = load_state(plan, state, weights=weights, corpora=corpora, seq_len=seq_len, mask_files=files)
        known = {(mask.fingerprint, mask.sha256) for mask in cursor.masks}
        if lost := [mask.file for mask in self.cursor.masks if (mask.fingerprint, mask.sha256) not in known]:
            warnings.warn(
                f"documents of {listed(lost, 'and')} were masked before the state was loaded, which does not have "
                "them: call mask again after load_state_dict",
                stacklevel=2,
            )
        with self._exclusive():
            self._position.jump(cursor, plan)
            if plan is not self._plan:
                self._plan, self._memory = plan, None
            self._discard()

    def set_weights(self, weights: Weights) -> None:
        """Read with other weights from the next batch on, also where the plan has later changes: a warning names them.

        The plan does not change; earlier shares are not compensated.

        Windows have the size for the largest share in the plan and its schedule, for the whole run. A warning says if
        they become short for a corpus that gets a much larger share; `window_blocks` of a plan makes them larger.

        Raises:
            PlanError: the weights do not fit the plan.
        """
        checked = checked_weights(self.plan.names, weights)
        with self._exclusive():
            if replaced := [part.start for part in self.cursor.segments if part.start > self.cursor.sample]:
                warnings.warn(
                    f"set_weights replaces {counted(len(replaced), 'planned change')} of weights, next at sample "
                    f"{replaced[0]:,}; to change weights and keep these, load the state into a plan that has both",
                    stacklevel=2,
                )
            cursor = self.cursor.weighted(checked)
            self._position.move(cursor.compacted(self.plan.mixture(cursor)))
            self._discard()
        if warning := warning_of_windows(self.plan, self._ranks.global_batch_size, cursor):
            warnings.warn(warning, stacklevel=2)

    def skip(self, num_samples: int) -> None:
        """Skip the next samples, on record in the state. A multiple of the batch keeps steps aligned.

        Raises:
            PlanError: the number is not an integer, or is negative, or leads beyond sample 2**62.
        """
        num_samples = integer("num_samples", num_samples, least=0)
        with self._exclusive():
            most = self.plan.at(self.cursor).num_samples
            if most is not None:
                num_samples = min(num_samples, most - self.cursor.sample)
            integer("the sample to skip to", self.cursor.sample + num_samples)
            if num_samples:
                self._position.jump(self.cursor.skipping(num_samples))
                self._discard()

    def resize(
        self,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        *,
        global_batch_size: int | None = None,
    ) -> None:
        """Read as rank `dp_rank` of `dp_world_size`, or in batches of another size, from the next batch on.

        What is None stays. All ranks call it between two steps. No sample is lost or read twice: a sample depends
        neither on the ranks nor on the batch. Tables and tokens of windows are kept, so batches that were made ahead
        are quickly made again. A rank that joins first loads the state of another.

        Raises:
            PlanError: the ranks or the streams do not divide the batch, or the rank is not one of them.
        """
        given: dict[str, Any] = {"rank": dp_rank, "world_size": dp_world_size, "global_batch_size": global_batch_size}
        ranks = replace(self._ranks, **{name: value for name, value in given.items() if value is not None})
        ranks.check_size(self.plan.seq_len)
        with self._exclusive():
            if ranks.global_batch_size != self._ranks.global_batch_size:
                _warn_of_windows(self.plan, ranks)
            if ranks != self._ranks:
                self._ranks = ranks
                self._position.resize(ranks.global_batch_size)
                self._discard()

    def mask(self, corpus: str, file: str | os.PathLike[str]) -> None:
        """Take documents out of the loss from the next batch on, on record in the state. Every rank must call it.

        All labels of their tokens become -100; order, positions and all other labels stay. It cannot be undone. Masking
        the same documents again changes nothing, so a program may mask at every start. It reads the bounds of each
        document, which costs a request if the corpus is read by range.

        Args:
            corpus: its name in the plan. Other corpora of the plan with the same content are masked, too.
            file: their numbers in the corpus, one per line as `tokshard diff --numbers` writes them, or a .npy file of
                integers. The state keeps its path, and the length and hash of the part that counts. Every resume must
                find that part there, or in a file that was masked before the state was loaded. Lines may be appended;
                they count from the next call on.

        Raises:
            PlanError: the corpus or a document does not exist, the documents cannot be read, or the file has other
                changes than appended lines.
        """
        with self._exclusive():
            self._position.move(self.plan.masking(self.cursor, corpus, file))
            self._discard()

    def stats(self) -> dict[str, Any]:
        """Statistics of the loader since it was made, and of its position.

        Returns:
            batches and wait_seconds since it was made; queue, the number of batches that are ready; bytes_read, the
            bytes of token ids copied for these batches, as stored, including labels that are no inputs, without
            padding; samples of the plan so far, and skipped_samples among them. corpora, by name: samples; tokens;
            left_out (tokens that changes of `seq_len` left out); epoch (tokens and left_out over the tokens of an
            epoch); and the weight at the next sample. All but the weight include skipped samples and the padding of
            rows. fetched: reads of this process from corpora that are not mapped, as in `ReadCounts`. masked_documents
            in the plan's corpora, and masked_tokens among the inputs of the batches since it was made.
        """
        plan, masked = self.plan, self.plan.masked(self.cursor)
        counts = plan.mixture(self.cursor).counts_before(self.cursor.sample)
        tokens = self.cursor.tokens_of(counts, plan.seq_len)
        left_out = plan.left_out(self.cursor)
        weights = self.cursor.segments[self.cursor.num_started - 1].weights
        return {
            "batches": self._num_batches,
            "wait_seconds": self._wait_seconds,
            "queue": 0 if self._prefetch is None else self._prefetch.num_ready,
            "bytes_read": self._num_read_tokens * plan.sources[0].dtype.itemsize,
            "samples": self.cursor.sample,
            "skipped_samples": sum(stop - start for start, stop in self.cursor.skipped),
            "fetched": fetched(plan.sources),
            "masked_documents": 0 if masked is None else masked.num_documents,
            "masked_tokens": self._num_masked_tokens,
            "corpora": {
                name: {
                    "samples": count,
                    "tokens": read,
                    "left_out": left,
                    "epoch": corpus.epochs_of(read + left),
                    "weight": weight,
                }
                for name, count, read, left, corpus, weight in zip(
                    plan.names, counts, tokens, left_out, plan.corpora, weights, strict=True
                )
            },
        }

    def close(self) -> None:
        """Stop the thread. The loader can be iterated again."""
        if self._pid != os.getpid():
            self._lock = threading.RLock()  # a thread of the parent may hold the other one
        self._discard()

    def _next(self) -> Batch:
        prefetch = self._prefetch = self._prefetch or self._started()
        started = time.perf_counter()
        batch, num_masked, num_read = prefetch.next()
        self._wait_seconds += time.perf_counter() - started
        self._num_batches += 1
        self._num_masked_tokens += num_masked
        self._num_read_tokens += num_read
        return batch

    def _started(self) -> Prefetch[tuple[Batch, int, int]]:
        if self._pid != os.getpid():
            self._plan, self._pid, self._memory = self._plan.copy(reopened=True), os.getpid(), None
        memory = self._memory or (self._plan.copy(), Recycler(self._depth + HELD_BATCHES))
        (reader, recycler), self._memory = memory, memory
        steps = partial(narrow_batches, reader, self._ranks, self._position.cursor, self._position.stop.sample)
        return Prefetch(
            partial(_batches, steps, self._finish, recycler),  # without this object, which could then not be freed
            depth=self._depth,
            timeout_seconds=self._timeout_seconds,
            reading=partial(_reading, self._plan),
        )

    def _discard(self) -> None:
        """Drop the batches that were made ahead, also if Ctrl-C ends the wait for the thread."""
        (prefetch, self._prefetch), (memory, self._memory) = (self._prefetch, None), (self._memory, None)
        if prefetch is None or prefetch.close():  # else the thread hangs, and may go on to use the memory
            self._memory = memory

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Refuse two threads at once, and a forked child, which would read the same samples as its parent.

        Raises:
            LoaderError: either is the case.
        """
        if self._prefetch is not None and self._prefetch.pid != os.getpid():
            raise LoaderError(
                f"process {self._prefetch.pid} reads from this loader, and this is process {os.getpid()}, forked "
                "from it",
                hint="make a loader in each process, or close this one here first",
            )
        if not self._lock.acquire(blocking=False):
            raise LoaderError(
                "this loader is used by two threads at once",
                hint="use it from one thread, or make one loader per thread",
            )
        try:
            yield
        finally:
            self._lock.release()


class NumpyLoader(BatchLoader[NumpyBatch]):
    """Batches of a plan as numpy arrays, from a cursor on, without torch: for JAX, and for tests.

    Batches, state and arguments are the same as for `StreamingLoader`, whose docstring lists them. Only the rank is not
    detected: dp_rank and dp_world_size are 0 and 1 by default.

    Raises:
        PlanError: the ranks do not divide the batch, a number is out of range, or a launcher started several processes
            and no rank is given, so each would read everything.
    """

    def __init__(
        self,
        plan: StreamPlan,
        *,
        global_batch_size: int | None = None,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        prefetch_factor: int = 4,
        compact: bool = False,
        uneven: Literal["refuse", "pad"] = "refuse",
        deal: Deal = "order",
        timeout_seconds: float = 600.0,
    ) -> None:
        super().__init__(
            plan,
            ranks=rows_of_rank(
                plan, global_batch_size, dp_rank, dp_world_size, uneven, deal=deal, otherwise=_single_process
            ),
            finish=compact_batch if flag("compact", compact) else full_batch,
            prefetch_factor=prefetch_factor,
            timeout_seconds=timeout_seconds,
        )


def rows_of_rank(
    plan: Any,
    global_batch_size: int | None,
    rank: int | None,
    world_size: int | None,
    uneven: Literal["refuse", "pad"],
    *,
    deal: Deal,
    otherwise: Callable[[], tuple[int, int]],
) -> RankRows:
    """The rows that a loader of a plan reads.

    Args:
        global_batch_size: None: as in the plan's file.
        otherwise: returns rank and world size if they are not given.

    Raises:
        PlanError: it is not a plan, no batch size is given, only one of rank and world size is given, or the numbers do
            not fit together.
    """
    if not isinstance(plan, StreamPlan):
        raise PlanError(f"the plan is {plan!r:.100}", hint="give StreamPlan(corpora, seq_len=...)")
    if (size := plan.global_batch_size if global_batch_size is None else global_batch_size) is None:
        raise PlanError(
            "global_batch_size is not given, and the plan is not from a file that has it",
            hint="give global_batch_size=512, samples of a step over all ranks",
        )
    if (rank is None) != (world_size is None):
        raise PlanError(
            f"dp_rank is {rank}, dp_world_size {world_size}: only one is given", hint="give both, or neither"
        )
    if rank is None or world_size is None:
        rank, world_size = otherwise()
    ranks = RankRows(
        global_batch_size=size,
        rank=rank,
        world_size=world_size,
        uneven=uneven,
        num_streams=plan.num_streams,
        deal=deal,
    )
    ranks.check_size(plan.seq_len)
    return ranks


def launched() -> str | None:
    """The variable of a launcher that started several processes, and its value; None: this process is alone."""
    found = ((name, os.environ.get(name, "1")) for name in _LAUNCHERS)
    return next((f"{name} is {value}" for name, value in found if value != "1"), None)


def _single_process() -> tuple[int, int]:
    if (several := launched()) is not None:
        raise PlanError(
            f"{several}: the job has several processes, and the rank of this one is not known",
            hint="give dp_rank and dp_world_size, such as jax.process_index() and jax.process_count()",
        )
    return 0, 1


def narrow_batches(plan: StreamPlan, ranks: RankRows, cursor: Cursor, end: int | None = None) -> Iterator[NarrowBatch]:
    """Every step from a cursor on, as one rank reads it.

    Layouts have one step until every corpus has had a row: most of their time goes into tables of windows. Each later
    one has twice as many, up to some thousand pieces. So the first batches come soon, and later ones share the cost of
    a layout. The tokens of a step may be overwritten by the next one.

    Args:
        end: the sample that ends the pass; None: it is endless.

    Raises:
        CorpusError: a shard is missing, or differs from its manifest.
    """
    cursor = cursor.compacted(plan.mixture(cursor))  # so that no step counts samples from long ago on
    size, rows, sample, steps = ranks.global_batch_size, ranks.rows_per_rank, cursor.sample, 1
    while end is None or sample < end:
        starts = np.arange(sample, sample + steps * size, size)
        starts = starts if end is None else starts[starts < end]
        layout, sums = steps_laid_out(plan, ranks, cursor, starts, end, is_sequential=True)
        for row in range(0, len(layout.samples), rows):
            narrow = plan.read(layout, row, row + rows)
            yield narrow if sums is None else replace(narrow, step=sums[row // rows])
        sample += steps * size
        weights = plan.mixture(cursor).weights_at(sample)
        steps = min(
            2 * steps if sample - cursor.sample >= len(plan.names) else 1,
            ranks.steps_at_once(
                len(layout.lengths) / len(layout.samples), len(plan.names), _ranks_laid_out(plan, ranks)
            ),
            steps_of_shortest_window(plan.corpora, weights, size * plan.seq_len),
        )


def steps_laid_out(
    plan: StreamPlan,
    ranks: RankRows,
    cursor: Cursor,
    starts: NDArray[np.int64],
    end: int | None,
    *,
    is_sequential: bool = False,
) -> tuple[Layout, list[StepTargets] | None]:
    """The rows of a rank in some steps; and the sums of each step, for which the rows of all ranks are laid out.

    Args:
        starts: int64 [steps], their first samples.
        end, is_sequential: as for `RankRows.samples`, `StreamPlan.lay_out`.
    """
    num_ranks = _ranks_laid_out(plan, ranks)
    samples = ranks.samples(starts, end, num_ranks=num_ranks)
    layout = plan.lay_out(cursor, samples, is_sequential=is_sequential)
    sums = layout.sums_of_steps(len(starts)) if plan.knows_steps(ranks) else None
    if num_ranks > 1 or ranks.deal == "cost":
        of_ranks = ranks.dealt(layout.costs())
        layout = layout.of_rows(of_ranks[ranks.parts(starts) % num_ranks + np.arange(len(starts)) * num_ranks].ravel())
    return layout, sums


def dealt_samples(plan: StreamPlan, ranks: RankRows, cursor: Cursor, start: int, end: int | None) -> NDArray[np.int64]:
    """The samples of a step by rank, among the ranks that a rank shares its rows with.

    Args:
        start: the first sample of the step.
        end: as for `RankRows.samples`.

    Returns:
        int64 [num_dealt_together, rows_per_rank].
    """
    samples = ranks.samples(np.array([start]), end, num_ranks=ranks.num_dealt_together)
    return samples[ranks.dealt(plan.lay_out(cursor, samples).costs())]


def _ranks_laid_out(plan: StreamPlan, ranks: RankRows) -> int:
    """The ranks whose rows a rank lays out to make its own batches."""
    return ranks.world_size if plan.knows_steps(ranks) else ranks.num_dealt_together


def _batches(
    steps: Callable[[], Iterator[NarrowBatch]], finish: Callable[[NarrowBatch, Recycler], Batch], recycler: Recycler
) -> Iterator[tuple[Batch, int, int]]:
    for narrow in steps():
        yield finish(narrow, recycler), narrow.num_masked_tokens, narrow.num_read_tokens


def _warn_of_windows(plan: StreamPlan, ranks: RankRows) -> None:
    """Warn, in the caller of a loader's method or class, of windows that do not fit the batches."""
    for message in warnings_of_windows(plan, ranks.global_batch_size, ranks.world_size):
        warnings.warn(message, stacklevel=4)


def _reading(plan: StreamPlan) -> str:
    """The shards that were read last."""
    names = {source.reading for source in plan.sources} - {None}
    return ", ".join(sorted(map(str, names))) or "no shard yet"


def _seconds(timeout_seconds: Any) -> float:
    seconds = real("timeout_seconds", timeout_seconds)
    if not seconds > 0:
        raise PlanError(f"timeout_seconds is {timeout_seconds}", hint="give a number above 0")
    return min(seconds, threading.TIMEOUT_MAX)
