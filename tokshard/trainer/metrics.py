"""The figures of a step: added up over all ranks in one vector, and reported a step later."""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from tokshard.errors import TrainerError
from tokshard.run_files.model_shape import Shape, peak_tflops, training_flops
from tokshard.run_files.recipe import Train
from tokshard.runtime import expand
from tokshard.runtime.rows.narrow import IGNORED, PADDING_INDEX
from tokshard.runtime.tensors import Batch
from tokshard.trainer.batches import Batches, has_spans
from tokshard.trainer.launcher import STOP_SIGNALS
from tokshard.trainer.metrics_file import MetricsFile, progress_line, row_digest, step_digest
from tokshard.trainer.parallel import raise_together, say, together

OnRecord = Callable[[Mapping[str, Any]], Mapping[str, float] | None]
"""Takes a line of metrics.jsonl. May return other weights of the corpora."""

DIGEST_SHIFTS = (0, 16, 32, 48)
"""Parts of 16 bits, whose sums over ranks are exact in float64."""


class StepSums:
    """A step over all ranks: one vector of float64, which one all-reduce adds up.

    It is the only collective of a step besides FSDP's. The sums are copied to the host meanwhile, and `read` there
    during the next step, so the host never waits for a step that it has just begun.

    Args:
        losses: float64 [corpora], on the device: the losses of this rank's targets, weighted, summed by corpus.
        squared_norm: float64 [], on the device: of this rank's part of the gradient of the sum of all losses.
        figures: figures of this rank's host; the sum over ranks of each has a meaning.
        weight: float32 [], on the host: of all targets, from the batch; None: it is added up, too.

    Attributes:
        weight: float64 [], on the device: of all targets; without loss spans it is their number. 1 if there are none.
        norm: float64 [], on the device, of the gradient of the mean loss.
        is_lost: bool [], on the device: the step must not change any parameter.
    """

    def __init__(
        self,
        losses: Tensor,
        squared_norm: Tensor,
        figures: Mapping[str, NDArray[np.float64]],
        weight: Tensor | None = None,
    ) -> None:
        sizes = {"losses": len(losses), "squared_norm": 1} | {name: len(of) for name, of in figures.items()}
        here, self._sizes = torch.from_numpy(np.concatenate(list(figures.values()))), sizes
        if losses.is_cuda:
            here = here.pin_memory()
        sums = torch.cat((losses, squared_norm[None], here.to(losses.device, non_blocking=True)))
        distributed.all_reduce(sums)
        self._on_host = sums.to("cpu", non_blocking=True)
        self._arrival = torch.Event(losses.device) if losses.is_cuda else None
        if self._arrival is not None:
            self._arrival.record()
        of = dict(zip(sizes, torch.split(sums, list(sizes.values())), strict=True))
        # None: ranks read streams of their own
        weight = of["loss_weights"].sum() if weight is None else weight.to(losses.device, non_blocking=True).double()
        self.weight = torch.where(weight > 0, weight, 1.0)
        self.norm = of["squared_norm"][0].sqrt() / self.weight
        self.is_lost = (of["has_no_batch"][0] > 0) | ~(of["losses"].sum() + self.norm).isfinite()

    def read(self) -> dict[str, list[float]]:
        """The sums, by name."""
        if self._arrival is not None:
            self._arrival.synchronize()
        values = iter(self._on_host.tolist())
        return {name: list(islice(values, size)) for name, size in self._sizes.items()}


class Report:
    """The figures of the steps, for ``metrics.jsonl`` and people, and whether the run has to end.

    Memory and waiting time have a place per rank in the vector of a step, because the largest counts.

    Args:
        received: signals, as `stop_signals` collects them.
        on_record: as for `train`; the one of rank 0 is called.
    """

    def __init__(
        self,
        settings: Train,
        batches: Batches,
        shape: Shape,
        *,
        device: torch.device,
        received: list[int],
        on_record: OnRecord | None,
    ) -> None:
        self._settings, self._batches, self._shape, self.device = settings, batches, shape, device
        self._received, self._on_record = received, on_record
        self._rank, self._world_size = distributed.get_rank(), distributed.get_world_size()
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak_tflops = settings.peak_tflops or peak_tflops(name)
        self._sums: StepSums | None = None
        # a record, its seconds, and what is on its way
        self._last: tuple[dict[str, Any], float, StepSums] | None = None
        self._log: MetricsFile | None = None
        self._signal_number, self._has_failed, self._has_hook = 0, False, False
        self._answer: Mapping[str, float] | None = None
        self.restart_clock()

    @property
    def is_stopped(self) -> bool:
        """Whether any rank received a signal or cannot write; all ranks see it after the same step."""
        return self._has_failed or self._signal_number > 0

    def open(self, *, last_step: int) -> bool:
        """Continue ``metrics.jsonl`` after a step. Returns whether it has an evaluation of that step.

        Raises:
            TokshardError: it cannot be written, or its end is not of this run; the same error on all ranks.
        """
        path = os.path.join(self._settings.out, "metrics.jsonl")
        with together(f"{path} cannot be written", hint="make room or repair the directory"):
            if self._rank == 0:
                self._log = MetricsFile(path, last_step=last_step)
        of_rank_0 = [self._log is not None and self._log.is_evaluated, self._on_record is not None]
        distributed.broadcast_object_list(of_rank_0)
        is_evaluated, self._has_hook = of_rank_0
        self.restart_clock()
        return is_evaluated

    def close(self, step: int) -> int:
        """The signal that ended the run, 0 if none did.

        Raises:
            TrainerError: metrics could not be written; the same error on all ranks.
        """
        raise_together(self._log.failure if self._log is not None else None)
        if self._signal_number:
            name = signal.Signals(self._signal_number).name
            say(f"stopped by {name} after step {step}; the same command continues")
        return self._signal_number

    def restart_clock(self) -> None:
        """Do not count the time since the last step for the next one."""
        self._started = time.perf_counter()

    def add_up(self, batch: Batch, losses: Tensor, squared_norm: Tensor, *, has_failed: bool) -> StepSums:
        """The sums of a step.

        Args:
            batch: of this rank, on the host.
            losses, squared_norm: as for `StepSums`.
            has_failed: this rank cannot save.
        """
        has_failed = has_failed or (self._log is not None and self._log.failure is not None)
        here = np.arange(self._world_size) == self._rank
        figures = {
            **figures_of(batch, len(losses)),
            "has_no_batch": [self._batches.failure is not None],
            "has_failed": [has_failed],
            "signals": [number in self._received for number in STOP_SIGNALS],
            "wait_seconds": here * self._batches.wait_seconds,
            "memory_bytes": here * memory_bytes(self.device),
        }
        arrays = {name: np.asarray(of, dtype=np.float64) for name, of in figures.items()}
        self._sums = StepSums(losses, squared_norm, arrays, batch.get("step_weight"))
        return self._sums

    def end_step(self, step: int, lr: float) -> None:
        """Report the step before this one, whose sums should have arrived by now.

        With `on_record`, every `train.log_every`-th step is reported at once, and the next one reads with the weights
        that it returns.

        Raises:
            TokshardError: its loss was not finite, the loader of a rank failed, or the weights do not fit the corpora;
                the same error on all ranks.
        """
        now, loader = time.perf_counter(), self._batches.loader
        seconds, self._started = now - self._started, now
        self.flush()
        if self._sums is None:
            self._write({"step": step, "skipped": "train.skip", "samples": self._batches.samples})
        else:
            record: dict[str, Any] = {"step": step, "lr": lr, "samples": self._batches.samples}
            if self._log is not None:
                shown, corpora = ("tokens", "epoch", "weight"), loader.stats()["corpora"]
                record["corpora"] = {name: {key: of[key] for key in shown} for name, of in corpora.items()}
            self._last, self._sums = (record, seconds, self._sums), None
        if self._has_hook and step % self._settings.log_every == 0:
            self.flush()
            answer = [self._answer]
            distributed.broadcast_object_list(answer)
            if answer[0] is not None:
                loader.set_weights(answer[0])

    def flush(self) -> None:
        """Wait for the last step, and report it: before a save, and at the end.

        Raises:
            TokshardError: as for `end_step`.
        """
        last, self._last = self._last, None
        if last is None:
            return
        record, seconds, sums = *last[:2], last[2].read()
        if any(sums["has_no_batch"]):
            raise_together(self._batches.failure)
        self._has_failed |= any(sums["has_failed"])
        signals = [number for number, ranks in zip(STOP_SIGNALS, sums["signals"], strict=True) if ranks]
        self._signal_number = signals[0] if signals else 0
        self._write(record | self._record(record["step"], seconds, sums))

    def stop(self, step: int, number: int) -> None:
        """A signal ended the evaluation after a step, and ends the run. Every rank calls this."""
        self._signal_number = number
        say(f"step {step}: a signal ended the evaluation, which is not recorded")

    def write_evaluation(self, step: int, losses: dict[str, dict[str, float | None]]) -> None:
        """Report an evaluation after a step."""
        self._write({"step": step, "evaluation": losses})
        missing = {name: "not finite" if of["targets"] else "no targets" for name, of in losses.items()}
        shown = {name: missing[name] if of["loss"] is None else f"{of['loss']:.3f}" for name, of in losses.items()}
        say(f"step {step}: evaluation  " + ", ".join(f"{name} {loss}" for name, loss in shown.items()))

    def _record(self, step: int, seconds: float, sums: dict[str, list[float]]) -> dict[str, Any]:
        names, seq_len = self._batches.plan.names, self._batches.plan.seq_len
        (num_samples,), (pairs,), (squared_norm,) = sums["num_samples"], sums["pairs"], sums["squared_norm"]
        tokens, weight = num_samples * seq_len, sum(sums["loss_weights"])
        loss, norm = (figure / (weight or 1.0) for figure in (sum(sums["losses"]), math.sqrt(squared_norm)))
        is_finite = math.isfinite(loss + norm)
        if not is_finite and self._settings.on_non_finite == "stop":
            raise TrainerError(
                f"step {step}: loss is {loss}, gradient norm {norm}",
                hint="resume from the last checkpoint with a lower optimizer.lr, with train.skip for the steps there, "
                "or with train.on_non_finite=skip",
            )
        parts = zip(names, sums["losses"], sums["loss_weights"], strict=True)
        digest = (int(part) << shift for part, shift in zip(sums["digest"], DIGEST_SHIFTS, strict=True))
        return {
            **({} if is_finite else {"skipped": f"loss is {loss}, gradient norm {norm}"}),
            "loss": loss if is_finite and weight else None,
            "loss_by_corpus": {name: of / n if n else None for name, of, n in parts} if is_finite else {},
            "grad_norm": norm if is_finite else None,
            "targets": int(sum(sums["targets"])),
            **({"loss_weights": weight} if has_spans(self._batches.plan) else {}),
            "num_samples": int(num_samples),
            "tokens": int(tokens),
            "digest": step_digest(digest),
            "tokens_per_second": tokens / seconds,
            "mfu": self._mfu(tokens, pairs, seconds),
            "mfu_full_rows": self._mfu(tokens, tokens * seq_len, seconds),
            "loader_wait_seconds": max(sums["wait_seconds"]),
            "memory_bytes": int(max(sums["memory_bytes"])),
        }

    def _mfu(self, tokens: float, pairs: float, seconds: float) -> float | None:
        if self._peak_tflops is None:
            return None
        return training_flops(self._shape, tokens, pairs) / (self._peak_tflops * 1e12 * self._world_size * seconds)

    def _write(self, record: dict[str, Any]) -> None:
        if self._log is None:
            return
        self._log.write(record)
        if self._on_record is not None:
            self._answer = self._on_record(record)
        step, num_steps = record["step"], self._settings.steps
        if "evaluation" not in record and (step % self._settings.log_every == 0 or step == num_steps):
            say(progress_line(record, num_steps))


def figures_of(batch: Batch, num_corpora: int) -> dict[str, Any]:
    """The figures of a rank's host about its compact batch."""
    full = expand({key: value.numpy() for key, value in batch.items()})
    ids, labels, samples, index, bounds = (
        full[key] for key in ("input_ids", "labels", "sample_index", "corpus_index", "cu_seqlens")
    )
    rows = np.flatnonzero(samples != PADDING_INDEX)
    lengths = np.diff(bounds).astype(np.int64) * (samples[(bounds[1:] - 1) // labels.shape[1]] != PADDING_INDEX)
    is_target = labels != IGNORED
    weights = full.get("loss_weights")
    digest = sum(
        row_digest(int(samples[row]), ids[row], labels[row], None if weights is None else weights[row]) for row in rows
    )
    targets, sums = (
        np.bincount(index.clip(0), weights=of.sum(1, dtype=np.float64), minlength=num_corpora)
        for of in (is_target, is_target if weights is None else weights)
    )
    return {
        "targets": targets,
        "loss_weights": sums,
        "num_samples": [len(rows)],
        "pairs": [(lengths * (lengths + 1) // 2).sum()],
        "digest": [digest >> shift & 0xFFFF for shift in DIGEST_SHIFTS],
    }


def memory_bytes(device: torch.device) -> int:
    """The peak memory of this rank: of its GPU, or of the process if it has none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
