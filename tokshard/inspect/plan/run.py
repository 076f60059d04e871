"""A run of a plan: which step reads which samples, before and after a checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UNDECODABLE, PlanMismatchError, UsageError
from tokshard.forking import cached_property, decodable
from tokshard.format.corpus import Corpus
from tokshard.format.names import MIX
from tokshard.inspect.corpus.places import trained_on
from tokshard.numbers import ceil_div
from tokshard.run_files.checkpoint_directory import checkpoints_by_step, is_checkpoint, newest, state_of
from tokshard.run_files.plan_file import Mix, TrainerData, load_mix
from tokshard.run_files.recipe import corpora_of, evaluated_on, plan_of
from tokshard.run_files.saved_state import read_state
from tokshard.run_files.strict_toml import change_paths, path_beside, read_toml
from tokshard.runtime.cursor import MAX_SAMPLE, Cursor
from tokshard.runtime.loader import dealt_samples
from tokshard.runtime.order.mixture import Segment
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.steps import Deal, RankRows, rotations
from tokshard.runtime.state import load_state, other_weights, plan_of_run
from tokshard.runtime.stop import Stop, stop_of
from tokshard.store import absolute_location
from tokshard.wording import counted

_NO_RECORD = np.empty((0, 3), np.int64)
_KEPT_DEALS = 256

_NOT_OF_SAMPLES = {"on_resume", "memory_bytes", "cache_dir", "cache_bytes", "allow_small_blocks"}
"""Keys of ``[data]`` that do not change the samples of a run."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A plan, the batch sizes of a job, and the position of the job in the plan.

    Steps count from 1, as in the trainer's log and in the names of its checkpoints: step n is the n-th batch that the
    training loop received. It has the samples after those of the step before; skipped samples belong to no step. Steps
    up to the checkpoint come from `record`, if the job has one. All others are counted from the checkpoint, forwards
    and backwards, which is right if they had the sizes of the plan.

    Args:
        ramp: (step, global_batch_size) from that step on; `global_batch_size` until then.
        cursor: from a checkpoint, or the start of the plan.
        step: steps done at the cursor; None if the checkpoint does not say and no number of steps has read the samples.
        is_step_counted: the checkpoint does not say its step, so it was counted from the samples and the batch size.
        checkpoint: path that the cursor was read from; empty for the start of the plan.
        world_size: data-parallel ranks that share the rows of a step.
        uneven, deal: how the ranks share the rows of a step, as for `StreamingLoader`.
        record: int64 [steps, 3], ascending: steps up to `step`, with the first sample of each and the one after the
            last. A step that was left out has skipped samples.
        held_out: the corpora that a recipe evaluates on, name to directory.
        other_run: how the run beside a recipe differs from the recipe, which is traced without it; empty: not at all.
        unread_mix: the mix.toml that was not read, because the folder that has it was given; empty: there is none.
    """

    plan: StreamPlan
    global_batch_size: int
    cursor: Cursor
    ramp: Sequence[tuple[int, int]] = ()
    step: int | None = 0
    is_step_counted: bool = False
    checkpoint: str = ""
    world_size: int = 1
    uneven: Literal["refuse", "pad"] = "refuse"
    deal: Deal = "order"
    record: NDArray[np.int64] = field(default_factory=_NO_RECORD.copy, compare=False)
    held_out: Mapping[str, str] = field(default_factory=dict)
    other_run: str = ""
    unread_mix: str = ""

    def ranks(self, size: int | None = None, rank: int | None = None) -> RankRows:
        """The rows of each step of a size that a rank reads; None: the only rank.

        Raises:
            PlanError: the loader would refuse these sizes.
        """
        return RankRows(
            global_batch_size=self.global_batch_size if size is None else size,
            rank=rank or 0,
            world_size=1 if rank is None else self.world_size,
            uneven=self.uneven,
            num_streams=self.plan.num_streams,
            deal="order" if rank is None else self.deal,
        )

    @property
    def batch_sizes(self) -> list[int]:
        """The samples of a step, at first and after each change."""
        return [self.global_batch_size, *(size for _, size in self.ramp)]

    @property
    def corpora(self) -> dict[str, Corpus]:
        """The corpora by their names in the plan."""
        return corpora_of(self.plan)

    def shares(self, segment: Segment) -> dict[str, float]:
        """The share of the samples that each corpus has under some weights."""
        weights = zip(self.plan.names, segment.weights, strict=True)
        return {name: weight / sum(segment.weights) for name, weight in weights}

    @property
    def num_received(self) -> int:
        """Samples that the training loop has received."""
        return self.cursor.sample - sum(stop - start for start, stop in self.cursor.skipped)

    @property
    def had_other_batch_size(self) -> bool:
        """Whether steps that are not on record had other sizes, so that early ones cannot be located exactly."""
        return self.step is None or self._surplus != 0

    @cached_property
    def stop(self) -> Stop:
        """Where the pass ends."""
        return stop_of(self.plan, self.cursor)

    def size_of(self, step: int) -> int:
        """Samples of a step."""
        if len(self.record) and self.record[0, 0] <= step <= self.record[-1, 0]:
            _, start, stop = self.record[step - int(self.record[0, 0])].tolist()
            if stop != self.stop.sample:  # the last step of a pass may be short
                return int(stop - start)
        return next((size for first, size in reversed(self.ramp) if step >= first), self.global_batch_size)

    def samples_in(self, num_steps: int) -> int:
        """Samples of the first so many steps of the plan."""
        bounds = [(1, self.global_batch_size), *self.ramp, (num_steps + 1, 0)]
        return sum(size * max(0, min(after, num_steps + 1) - first) for (first, size), (after, _) in pairwise(bounds))

    def step_with(self, number: int) -> tuple[int, int]:
        """The step of the plan that has a sample, counted from 0 without skipped ones, and its place in the step."""
        for (first, size), (after, _) in pairwise([(1, self.global_batch_size), *self.ramp, (math.inf, 0)]):
            if number < (after - first) * size:
                break
            number -= int(after - first) * size
        return int(first) + number // size, number % size

    def start_of(self, step: int) -> int:
        """The first sample of a step.

        Raises:
            UsageError: the step does not exist, or its samples are unknown.
        """
        if step < 1:
            raise UsageError(
                f"there is no step {step}: steps count from 1, as in the trainer's log",
                hint="--step 1 is the first; its rows are samples 0, 1, ...",
            )
        if self.step is None:
            raise UsageError(
                f"{self.checkpoint} has read {counted(self.num_received, 'sample')}, not a multiple of a batch of "
                f"{self.global_batch_size}: the batch size was different for a while, so steps cannot be counted",
                hint="give the --global-batch-size that it had, or use --sample",
            )
        if len(self.record) and self.record[0, 0] <= step <= self.step:
            _, start, stop = self.record[step - int(self.record[0, 0])].tolist()
            if self.is_skipped(start):
                raise UsageError(
                    f"step {step} was left out of the run",
                    hint=f"--sample {start}:{stop} shows its documents",
                )
            return int(start)
        if step > self.step:
            start = self.cursor.sample + self.samples_in(step - 1) - self.samples_in(self.step)
            check_sample(start + self.size_of(step) - 1)
            if not self.stop.has_step(start):
                corpus, sample = self.stop.corpus, self.stop.sample
                why = f"corpus {corpus!r} is used up at {sample}" if corpus else "the pass is over"
                raise UsageError(
                    f"there is no step {step}: it would start at sample {start}, and {why}",
                    hint="ask for an earlier step",
                )
            return start
        number = self.samples_in(step - 1) + self._surplus
        if number < 0:
            raise UsageError(
                f"step {step} is not known: {self.checkpoint} has read {counted(self.num_received, 'sample')} "
                f"in {counted(self.step, 'step')}, fewer than {self.global_batch_size} a step",
                hint="give the --global-batch-size that it had, or use --sample",
            )
        for start, stop in self.cursor.skipped:
            if number >= start:
                number += stop - start
        return number

    def left_out(self, steps: range) -> list[int]:
        """The steps of a range that the run left out, by its record."""
        some = self.record[(self.record[:, 0] >= steps.start) & (self.record[:, 0] < steps.stop)]
        return [step for step, start, _ in some.tolist() if self.is_skipped(start)]

    def step_of(self, sample: int) -> tuple[int, int] | None:
        """The step that has a sample, from 1, and the place of the sample in it, wherever the pass ends.

        None if it was skipped, or its step is unknown.
        """
        if self.step is None or self.is_skipped(sample):
            return None
        if sample >= self.cursor.sample:
            return self.step_with(sample - self.cursor.sample + self.samples_in(self.step))
        if len(self.record) and sample >= self.record[0, 1]:
            index = int(np.searchsorted(self.record[:, 1], sample, "right")) - 1
            return int(self.record[index, 0]), sample - int(self.record[index, 1])
        skipped = sum(stop - start for start, stop in self.cursor.skipped if start < sample)
        step, within = self.step_with(sample - skipped - self._surplus)
        return (step, within) if step >= 1 else None

    def place_of(self, sample: int) -> tuple[int, int, int] | None:
        """Where a sample is read: the step, from 1; the data-parallel rank; the row in the batch of that rank.

        None if it was skipped, is never read, its step is unknown, or is dealt by the cost of samples that were read
        under weights that the checkpoint does not keep.
        """
        is_read = sample < self.cursor.sample or self.stop.has_step(sample)
        if not is_read or (found := self.step_of(sample)) is None:
            return None
        step, within = found
        start, size = sample - within, self.size_of(step)
        part, row = divmod(self.ranks(size).row_of(sample, start), ceil_div(size, self.world_size))
        (rotation,) = rotations(np.array([start]), self.world_size, self.plan.num_streams).tolist()
        if self.deal == "cost":
            if start < self.cursor.segments[0].start:
                return None
            first = part - part % self.ranks(size, 0).num_dealt_together
            dealt = self._dealt(self.ranks(size, (first - rotation) % self.world_size), start)
            ((place, row),) = np.argwhere(dealt == sample).tolist()
            part = first + place
        return step, (part - rotation) % self.world_size, row

    @cached_property
    def _dealt(self) -> Callable[[RankRows, int], NDArray[np.int64]]:
        """`dealt_samples` of ranks in the step that begins with a sample; the last ones are kept."""

        @lru_cache(_KEPT_DEALS)
        def dealt(ranks: RankRows, start: int) -> NDArray[np.int64]:
            return dealt_samples(self.plan, ranks, self.cursor, start, self.stop.sample)

        return dealt

    @cached_property
    def _surplus(self) -> int:
        """Received samples in no step of the plan's sizes, up to the first step on record, or the checkpoint."""
        step, sample = self.step or 0, self.cursor.sample
        if len(self.record):
            step, sample = int(self.record[0, 0]) - 1, int(self.record[0, 1])
        received = sample - sum(stop - start for start, stop in self.cursor.skipped if start < sample)
        is_short = sample == self.stop.sample and self.samples_in(step - 1) < received <= self.samples_in(step)
        return 0 if is_short else received - self.samples_in(step)

    def is_skipped(self, sample: int) -> bool:
        """Whether a skip passed over a sample."""
        return any(start <= sample < stop for start, stop in self.cursor.skipped)


def check_sample(sample: int) -> None:
    """Refuse a number that no sample has.

    Raises:
        UsageError: it is more than 2**62.
    """
    if sample > MAX_SAMPLE:
        raise UsageError(f"sample {sample:,} is beyond 2**62, where samples end", hint="ask for an earlier one")


def open_run(
    location: str | None,
    options: Mapping[str, Any],
    *,
    checkpoint: str | None = None,
    world_size: int = 1,
    mask_files: Sequence[str] = (),
) -> Run:
    """Open a run from a plan and, optionally, a checkpoint.

    Args:
        location: as for `load_mix`, or a folder of corpora, see `trained_on`; a checkpoint of the trainer serves as
            plan and checkpoint, and so does the directory of a run, by its newest one.
        options: key to value; they override the file. One batch size replaces all those of a recipe.
        checkpoint: as for `read_state`; `location` may be omitted for a checkpoint of the trainer.
        world_size: as in `Run`.
        mask_files: where else lists of masked documents may be.

    Raises:
        TokshardError: the plan or the state cannot be read, or they do not fit each other.
    """
    if (location := location or checkpoint) is None:
        raise UsageError("no plan is given", hint="give a mix.toml, a corpus directory or a checkpoint")
    location, checkpoint = _newest_of_run(location), checkpoint and _newest_of_run(checkpoint)
    corpora = trained_on(location)
    mix, record = load_mix(location, {"corpora": corpora or None, **options}), _NO_RECORD
    plan = plan_of(mix)
    cursor, done = plan.cursor(), cast("int | None", 0)
    if checkpoint is None and is_checkpoint(location):
        checkpoint = location
    # a checkpoint has those of its recipe in its state
    is_known = checkpoint == location and not options.get("mask")
    lists = [] if is_known else list(mix.masks())
    if checkpoint is not None:
        state = read_state(checkpoint)
        plan = plan_of_run(plan, {"cursor": state.cursor})
        changes: dict[str, Any] = dict.fromkeys(mix.on_resume if isinstance(mix, TrainerData) else (), "plan")
        if isinstance(mix, TrainerData) or mix.weights or mix.repeats or mix.schedule:
            # of a recipe that was edited since; it holds from the checkpoint on
            changes["weights"] = "same" if other_weights(plan, {"cursor": state.cursor}) is None else "plan"
        else:
            changes["weights"] = "cursor"
        listing = plan.cursor()
        for name, file in lists:
            listing = plan.masking(listing, name, file)
        files = [*mask_files, *(mask.file for mask in listing.masks)]
        try:
            cursor, done = load_state(plan, {"cursor": state.cursor}, mask_files=files, **changes), state.step
        except PlanMismatchError as error:  # its hint is for a program that resumes
            hint = "give the mix.toml or recipe, and the values, that the checkpoint was made with"
            raise PlanMismatchError(error.problem, hint=hint) from error
        record = _NO_RECORD if done is None else _read_record(checkpoint, done, cursor.sample)
    for name, file in lists:
        cursor = plan.masking(cursor, name, file)  # from here on, unless they were masked before
    run = Run(
        plan=plan,
        global_batch_size=mix.global_batch_size,
        ramp=mix.batch_ramp if isinstance(mix, TrainerData) and options.get("global_batch_size") is None else [],
        cursor=cursor,
        step=done,
        checkpoint=os.path.normpath(checkpoint) if checkpoint else "",
        world_size=world_size,
        uneven=mix.uneven,
        deal=mix.deal,
        record=record,
        held_out=evaluated_on(location) if isinstance(mix, TrainerData) else {},
        unread_mix=mix_beside if corpora and os.path.exists(mix_beside := os.path.join(location, MIX)) else "",
        other_run=_other_run(location, mix, plan) if checkpoint is None else "",
    )
    step, rest = run.step_with(run.num_received)
    if done is not None or (rest and cursor.sample != run.stop.sample):
        return run
    return replace(run, step=step - 1 + bool(rest), is_step_counted=bool(run.num_received))


def _newest_of_run(location: str) -> str:
    """The newest checkpoint of the directory of a run; of anything else, itself.

    Raises:
        TokshardError: the run has no checkpoint, or its newest one is damaged.
    """
    directory = os.path.join(location, "checkpoints")
    if os.path.isfile(location) or not os.path.isdir(directory):
        return location
    if (found := newest(directory)) is None:
        raise UsageError(f"{location}: the run has no checkpoint yet", hint="give its recipe")
    return found


def _other_run(location: str, mix: Mix, plan: StreamPlan) -> str:
    """How the run of a recipe differs from the recipe as it is now; empty if it does not, or there is none."""
    out = read_toml(location, hint="").get("train", {}).get("out") if isinstance(mix, TrainerData) else None
    if not isinstance(out, str):
        return ""
    run = path_beside(location, out)
    saved = list(checkpoints_by_step(os.path.join(run, "checkpoints")).values())
    if not saved:
        return ""
    state = state_of(saved[-1])
    now, before = change_paths(asdict(mix), TrainerData, absolute_location), state.config.get("data", {})
    now = msgspec.json.decode(msgspec.json.encode(now))  # as it was saved
    names = [f"data.{name}" for name in now if name not in _NOT_OF_SAMPLES and now[name] != before.get(name, now[name])]
    cursor = msgspec.json.decode(state.loader["cursor"])
    of_plan = [[one.start, list(one.weights)] for one in plan.schedule.segments if one.start <= cursor["sample"]]
    if not names and cursor["weights"] != of_plan:
        names = ["its weights"]
    if not names and cursor["skipped"]:
        names = ["skipped samples"]
    return f"{run}, by {', '.join(names)}" if names else ""


@decodable
class _Line(msgspec.Struct, frozen=True):
    """The fields read from a line of ``metrics.jsonl``; an evaluation has no samples."""

    step: int
    samples: tuple[int, int] | None = None


def _read_record(checkpoint: str, step: int, sample: int) -> NDArray[np.int64]:
    """The steps up to a checkpoint, from the ``metrics.jsonl`` of its run; empty if no such file leads to it."""
    found: list[tuple[int, int, int]] = []
    try:
        with open(os.path.join(checkpoint, "..", "..", "metrics.jsonl"), "rb") as file:
            for line in file:
                one = msgspec.json.decode(line, type=_Line)
                if one.step > step:
                    break
                if one.samples is not None:
                    found.append((one.step, *one.samples))
    except (OSError, *UNDECODABLE):
        return _NO_RECORD
    rows = np.array(found or _NO_RECORD, np.int64)
    is_whole = found[-1:] and (found[-1][0], found[-1][2]) == (step, sample) and (np.diff(rows[:, 0]) == 1).all()
    return rows if is_whole else _NO_RECORD
