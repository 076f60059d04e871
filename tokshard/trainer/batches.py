"""The batches of this rank, with the batch sizes and skipped steps of the recipe."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from tokshard.errors import TokshardError
from tokshard.numbers import ceil_div
from tokshard.run_files.checkpoint_directory import State
from tokshard.run_files.recipe import Config, check_ranks
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.narrow import IGNORED, PADDING_INDEX
from tokshard.runtime.state import OtherWeights, other_weights
from tokshard.runtime.stop import stop_of
from tokshard.runtime.tensors import Batch, StreamingLoader
from tokshard.trainer.parallel import check_same, limit_waits, say, together


class Batches:
    """This rank's compact batches, and the loader that yields them.

    Attributes:
        plan: the plan that the loader reads.
        loader: at the last step that was yielded.
        samples: the global samples of that step, half-open.
        wait_seconds: how long this rank waited for its batch.
        failure: the error that ended this rank's loader. Its further batches are padding, so it takes part in steps
            until all ranks know of the failure.
    """

    def __init__(self, settings: Config, plan: StreamPlan, mesh: DeviceMesh) -> None:
        check_ranks(settings, mesh.size())
        self._settings, self.plan, self._mesh = settings, plan, mesh
        self.failure: TokshardError | None = None
        self.samples, self.wait_seconds = (0, 0), 0.0
        self._size = settings.data.global_batch_size
        data = settings.data
        self.loader = compact_loader(plan, self._size, mesh, uneven=data.uneven, deal=data.deal)

    def after(self, step: int) -> Iterator[Batch | None]:
        """The batch of each step after `step`, to the end of the pass; None for a skipped step.

        The documents of `data.mask` are out of the loss, from the first of these steps on if they were not before.

        Raises:
            TokshardError: these documents cannot be read, or are not the same on all ranks; the same error on all.
        """
        self._mask()
        if self._settings.data.mask:
            say(f"{self.loader.stats()['masked_documents']:,} documents are out of the loss")
        check_same(
            json.dumps(self.loader.state_dict()),
            "the masked documents differ from rank 0",
            hint="give each rank the same files in data.mask, at the same paths",
        )
        batches, is_first = iter(self.loader), True
        while True:
            step += 1
            self._size = self._settings.data.batch_size(step)
            self.loader.resize(global_batch_size=self._size)
            start, batch, began = self.loader.cursor.sample, None, time.perf_counter()
            if any(first <= step < stop for first, stop in self._settings.train.skip):
                is_over = not self._leave_out()
            else:
                batch = self._next(batches)
                is_over = batch is None
            if is_over:
                say(f"step {step - 1}: the pass is over, before step {self._settings.train.steps}")
                return
            self.samples, self.wait_seconds = (start, self.loader.cursor.sample), time.perf_counter() - began
            yield batch
            if is_first and batch is not None:  # the first step that is trained has started all that starts slowly
                limit_waits(self._mesh, self._settings.parallel)
                is_first = False

    def load_state(self, state: State) -> list[str]:
        """Continue from a checkpoint. Where its recipe differs from the current one, the latter holds from here on.

        Returns:
            The changes of weights, batch sizes, corpora, seq_len, skipped steps and epochs, one line each.

        Raises:
            TokshardError: it is of another plan, or a list of masked documents is gone; the same error on all ranks.
        """
        self._mask()  # lists of the recipe, in case the lists of the state were moved
        with together(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* were masked before the state was loaded")  # `after` masks them
            weights = other_weights(self.plan, state.loader)
            choices: dict[str, Any] = dict.fromkeys(self._settings.data.on_resume, "plan")
            self.loader.load_state_dict(state.loader, weights="same" if weights is None else "plan", **choices)
        self.plan = self.loader.plan  # with the sizes of the run
        return list(self._changes(state, weights))

    def _changes(self, state: State, weights: OtherWeights | None) -> Iterator[str]:
        here, data, before = self.loader.cursor, self._settings.data, state.config.get("data", {})
        since = f"from sample {here.sample:,} on"
        if weights is not None:
            changed = [
                f"{name} {old:g} -> {new:g}"
                for name, old, new in zip(self.plan.names, weights.before, weights.now, strict=True)
                if old != new
            ]
            yield f"weights {', '.join(changed)} {since}" if changed else f"later changes of weights, {since}"
        old, new = ([one["global_batch_size"], list(map(list, one["batch_ramp"]))] for one in (before, asdict(data)))
        if old != new:
            yield f"global_batch_size and batch_ramp {old} -> {new} from step {state.step + 1:,} on"
        if before["seq_len"] != data.seq_len:
            yield f"seq_len {before['seq_len']:,} -> {data.seq_len:,} {since}"
        known = state.config.get("train", {}).get("skip", [])
        skip = [[first, stop] for first, stop in self._settings.train.skip if first <= state.step]
        if late := [steps for steps in skip if steps not in known]:
            yield f"train.skip {late} is too late for steps up to {state.step:,}: go back to an earlier checkpoint"
        if (epochs := before.get("epochs", 0)) != data.epochs:
            is_padded = epochs and here.sample >= self.plan.at(here).corpora[0].num_samples(epochs)[0]
            left_out = ", without the tokens that would fill the padded end of the last row" if is_padded else ""
            yield f"epochs {epochs} -> {data.epochs} {since}{left_out}"
        yield from (f"corpus {one.name} {one.action} {since}" for one in here.changes if one.sample == here.sample)

    @property
    def why_over(self) -> str:
        """Why no step is left; empty: one is."""
        cursor = self.loader.cursor
        stop = stop_of(self.plan, cursor)
        used_up = "" if stop.corpus is None else f": corpus {stop.corpus!r} was read data.max_epochs times"
        return "" if stop.has_step(cursor.sample) else f"the pass is over{used_up}"

    def close(self) -> None:
        """Stop the threads and workers of the loader."""
        self.loader.close()

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        if self.failure is None:
            try:
                return next(batches, None)
            except TokshardError as error:
                self.failure = error
        if not self._leave_out():
            return None
        return padding(ceil_div(self._size, self._mesh.size()), self.plan.seq_len, has_spans=has_spans(self.plan))

    def _leave_out(self) -> bool:
        """Skip a step, on record in the state; False: the pass is over."""
        cursor = self.loader.cursor
        end = stop_of(self.plan, cursor).end_of_step(cursor.sample, self._size)
        self.loader.skip(end - cursor.sample)
        return end > cursor.sample

    def _mask(self) -> None:
        with together():
            for name, file in self._settings.data.masks():
                self.loader.mask(name, file)


def compact_loader(plan: StreamPlan, size: int, mesh: DeviceMesh, **options: Any) -> StreamingLoader:
    """The loader of this rank's compact batches, in pinned memory if the mesh is of GPUs.

    Args:
        size: samples of a step, over all ranks.
        options: others of `StreamingLoader`.
    """
    is_pinned = mesh.device_type == "cuda"
    return StreamingLoader(plan, global_batch_size=size, dp_mesh=mesh, pin_memory=is_pinned, compact=True, **options)


def has_spans(plan: StreamPlan) -> bool:
    """Whether the batches of a plan have weights of targets, because one of its corpora has loss spans."""
    return any(source.has_spans for source in plan.sources)


def padding(rows: int, seq_len: int, *, has_spans: bool = False) -> Batch:
    """A compact batch that trains nothing."""
    absent = torch.full((rows,), PADDING_INDEX)
    spans = {"loss_bounds": torch.tensor([0, rows * seq_len], dtype=torch.int32), "loss_weights": torch.zeros(1)}
    return {
        **(spans if has_spans else {}),
        "input_ids": torch.zeros(rows, seq_len, dtype=torch.uint16),
        "next_tokens": torch.full((rows,), IGNORED),
        "num_tokens": torch.zeros(rows, dtype=torch.int32),
        "corpus_index": absent,
        "sample_index": absent,
        "cu_seqlens": torch.arange(0, rows * seq_len + 1, seq_len, dtype=torch.int32),
        "max_seqlen": torch.tensor(seq_len),
    }
