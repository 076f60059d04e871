"""A run of a plan: which step reads which samples, before and after a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from tokshard.errors import UsageError
from tokshard.jobs.checkpoint_directory import is_checkpoint
from tokshard.jobs.plan_file import load_mix
from tokshard.jobs.saved_state import read_state
from tokshard.runtime.cursor import Cursor
from tokshard.runtime.cursor_json import load_cursor
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.shards import CorpusSource
from tokshard.runtime.steps import Ranks
from tokshard.runtime.stop import UsedUp, stop_of, used_up
from tokshard.wording import counted


class StepPlace(NamedTuple):
    """The position of a sample among the steps.

    Args:
        step: from 1.
        row: row in the global batch, from 0.
        start: the first sample of the step.
    """

    step: int
    row: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A plan, a batch size, and the position of a job in the plan.

    Steps count from 1, as in the trainer's log and in the names of its checkpoints: step n is the n-th batch that the
    training loop received. It has the `global_batch_size` samples after those of the step before; skipped samples
    belong to no step. Steps are computed forwards and backwards from the cursor, so they are right as long as the batch
    size did not change between the cursor and the step.

    Args:
        cursor: from a checkpoint, or the start of the plan.
        step: steps done at the cursor; None if the checkpoint does not say and the batch size does not divide the
            samples that were read.
        checkpoint: path that the cursor was read from; empty for the start of the plan.
        uneven: what to do if the world size does not divide the batch, as for `StreamingLoader`.
    """

    plan: StreamPlan
    global_batch_size: int
    cursor: Cursor
    step: int | None = 0
    checkpoint: str = ""
    uneven: Literal["refuse", "pad"] = "refuse"

    def ranks(self, rank: int = 0, world_size: int = 1) -> Ranks:
        """The rows of each step that a rank reads.

        Raises:
            PlanError: the loader would refuse these sizes.
        """
        return Ranks(
            global_batch_size=self.global_batch_size,
            rank=rank,
            world_size=world_size,
            uneven=self.uneven,
            num_streams=self.plan.num_streams,
        )

    @property
    def directories(self) -> list[str]:
        """Directories of the corpora."""
        return [source.corpus.location for source in self.plan.sources if isinstance(source, CorpusSource)]

    @property
    def num_received(self) -> int:
        """Samples that the training loop has received."""
        return self.cursor.sample - sum(stop - start for start, stop in self.cursor.skipped)

    @property
    def had_other_batch_size(self) -> bool:
        """Whether some steps had another batch size, so that early steps cannot be located exactly."""
        return self.step is None or self.step != -(-self.num_received // self.global_batch_size)

    @property
    def limit(self) -> UsedUp | None:
        """Where the run stops because a corpus is used up; None if it does not."""
        limits = used_up(self.plan, self.cursor) if self.plan.on_max_epochs == "stop" else []
        return limits[0] if limits else None

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
        done, size = self._steps_done(), self.global_batch_size
        if step <= done:
            start = self._received_before((done - step + 1) * size)
            if start < 0:
                raise UsageError(
                    f"step {step} is not known: {self.checkpoint} has read {counted(self.num_received, 'sample')} "
                    f"in {counted(done, 'step')}, fewer than {size} a step",
                    hint="give the --global-batch-size that it had, or ask by --sample",
                )
            return start
        start = self._end + (step - done - 1) * size
        check_sample(start + size)
        if self._is_beyond(start):
            limit = self.limit
            why = f"corpus {limit.corpus!r} is used up at {limit.sample}" if limit else "the pass is over"
            raise UsageError(
                f"there is no step {step}: it would start at sample {start}, and {why}", hint="ask for an earlier step"
            )
        return start

    def place_of(self, sample: int) -> StepPlace | None:
        """The step of a sample; None if it was skipped, is never read, or its step is unknown."""
        size, done = self.global_batch_size, self.step
        if done is None or any(start <= sample < stop for start, stop in self.cursor.skipped):
            return None
        if sample < self.cursor.sample:
            passed = sum(stop - start for start, stop in self.cursor.skipped if start > sample)
            back = self._end - sample - passed
            step, within = done - (back - 1) // size, -back % size
            is_read = step > 0
        else:
            step, within = divmod(sample - self._end, size)
            step += done + 1
            is_read = not self._is_beyond(sample - within)
        start = sample - within
        return StepPlace(step, self.ranks().row_of(sample, start), start) if is_read else None

    @property
    def _end(self) -> int:
        """The sample after the last step's; the last step of a finished pass is padded."""
        is_finished = self.cursor.sample == self.plan.num_samples
        return self.cursor.sample + (-self.num_received % self.global_batch_size if is_finished else 0)

    def _steps_done(self) -> int:
        if self.step is None:
            raise UsageError(
                f"{self.checkpoint} has read {counted(self.num_received, 'sample')}, not a multiple of a batch of "
                f"{self.global_batch_size}: the batch size was different for a while, so steps cannot be counted",
                hint="give the --global-batch-size that it had, or ask by --sample",
            )
        return self.step

    def _received_before(self, count: int) -> int:
        """The sample from which exactly `count` samples were received up to the cursor."""
        position = self._end
        for start, stop in reversed(self.cursor.skipped):
            if position - stop >= count:
                break
            count -= position - stop
            position = start
        return position - count

    def _is_beyond(self, start: int) -> bool:
        """Whether the run ends before a step that would start at a sample."""
        return not stop_of(self.plan, self.cursor).has_step(start, self.global_batch_size)


def check_sample(sample: int) -> None:
    """Refuse a sample number that is too large to compute with.

    Raises:
        UsageError: it is 2**62 or more.
    """
    if sample >> 62:
        raise UsageError(f"sample {sample:,} is beyond 2**62, where samples end", hint="ask for an earlier one")


def open_run(location: str | None, options: Mapping[str, Any], *, checkpoint: str | None = None) -> Run:
    """Open a run from a plan and, optionally, a checkpoint.

    Args:
        location: as for `load_mix`; a checkpoint of the trainer serves as plan and checkpoint.
        options: key to value; they override the file.
        checkpoint: as for `read_state`; `location` may be omitted for a checkpoint of the trainer.

    Raises:
        TokshardError: the plan or the state cannot be read, or they do not fit each other.
    """
    if location is None and checkpoint is None:
        raise UsageError("no plan is given", hint="give a mix.toml, a corpus directory or a checkpoint")
    location = location or str(checkpoint)
    mix = load_mix(location, options)
    plan = mix.plan()
    if checkpoint is None and is_checkpoint(location):
        checkpoint = location
    if checkpoint is None:
        start = mix.masked(plan, plan.cursor())
        return Run(plan=plan, global_batch_size=mix.global_batch_size, cursor=start, uneven=mix.uneven)
    state = read_state(checkpoint)
    run = Run(
        plan=plan,
        global_batch_size=mix.global_batch_size,
        cursor=mix.masked(plan, load_cursor(state.cursor, plan.identity, plan.schedule)),
        step=state.step,
        checkpoint=os.path.normpath(checkpoint),
        uneven=mix.uneven,
    )
    if run.step is not None:
        return run
    steps, rest = divmod(run.num_received, run.global_batch_size)
    if rest and run.cursor.sample != plan.num_samples:
        return run
    return replace(run, step=steps + bool(rest))
