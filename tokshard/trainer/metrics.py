"""The figures of a step: added up over all ranks in one vector, and read a step later."""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import time
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from tokshard.errors import TrainerError
from tokshard.run_files.model_shape import Shape, peak_tflops, training_flops
from tokshard.run_files.recipe import Train
from tokshard.runtime.batches import IGNORED, PADDING_INDEX
from tokshard.runtime.tensors import Batch
from tokshard.trainer.batches import Batches
from tokshard.trainer.launcher import STOP_SIGNALS
from tokshard.trainer.metrics_file import MetricsFile, progress_line, row_digest, step_digest
from tokshard.trainer.parallel import raise_together, together
from tokshard.trainer.upkeep import say

DIGEST_SHIFTS = (0, 16, 32, 48)
"""Parts of 16 bits, whose sums over ranks are exact in float64."""


class Sums(NamedTuple):
    """A step over all ranks, on the device.

    Args:
        targets: float64 [], at least 1.
        norm: float64 [], of the gradient of the mean loss.
        is_lost: bool [], the step must not change any parameter.
    """

    targets: Tensor
    norm: Tensor
    is_lost: Tensor


class _Step(NamedTuple):
    """A step whose sums are on their way to the host."""

    record: dict[str, Any]
    seconds: float
    sums: Tensor
    arrival: torch.Event | None


class Meter:
    """All figures of the steps, over all ranks.

    A rank's figures of a step are one vector on its device, float64, which one all-reduce adds up. The host reads it
    when the next step is under way, so it waits for no step that it has just begun. Memory and waiting time, of which
    the largest counts, have a place per rank in the vector.

    Args:
        received: signals, as `stop_signals` collects them.
    """

    def __init__(
        self, settings: Train, batches: Batches, shape: Shape, *, device: torch.device, received: list[int]
    ) -> None:
        self._settings, self._batches, self._shape, self.device = settings, batches, shape, device
        self._received = received
        self._rank, self._world_size = distributed.get_rank(), distributed.get_world_size()
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak_tflops = settings.peak_tflops or peak_tflops(name)
        self._sums: tuple[Tensor, torch.Event | None] | None = None
        self._last: _Step | None = None
        self._layout = dict[str, int]()
        self._log: MetricsFile | None = None
        self._signal_number, self._has_failed = 0, False
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
        out = self._settings.out
        path = os.path.join(out, "metrics.jsonl")
        with together(f"{path} cannot be written", hint="make room or repair the directory"):
            if self._rank == 0:
                board = os.path.join(out, "tensorboard") if self._settings.tensorboard else None
                self._log = MetricsFile(path, last_step=last_step, tensorboard=board)
        is_evaluated = [self._log is not None and self._log.is_evaluated]
        distributed.broadcast_object_list(is_evaluated)
        self.restart_clock()
        return is_evaluated[0]

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
        """Leave the time since the last step out of the next one."""
        self._started = time.perf_counter()

    def add_up(self, batch: Batch, losses: Tensor, squared_norm: Tensor, *, has_failed: bool) -> Sums:
        """The sums of a step over all ranks. The only collective of a step besides those of FSDP.

        Args:
            batch: of this rank, on the host.
            losses: float64 [corpora], the losses of this rank's targets summed by corpus.
            squared_norm: float64 [], of this rank's part of the gradient of the sum of all losses.
            has_failed: this rank cannot save.
        """
        figures = self._figures(batch, len(losses), has_failed=has_failed)
        self._layout = {"losses": len(losses), "squared_norm": 1} | {name: len(of) for name, of in figures.items()}
        here = torch.from_numpy(np.concatenate(list(figures.values())))
        if self.device.type == "cuda":
            here = here.pin_memory()
        sums = torch.cat((losses, squared_norm[None], here.to(self.device, non_blocking=True)))
        distributed.all_reduce(sums)
        arrival = torch.Event(self.device) if self.device.type == "cuda" else None
        self._sums = sums.to("cpu", non_blocking=True), arrival
        if arrival is not None:
            arrival.record()
        of = dict(zip(self._layout, torch.split(sums, list(self._layout.values())), strict=True))
        targets, is_without_batch = of["targets"].sum().clamp(min=1), of["has_no_batch"][0] > 0
        norm = of["squared_norm"][0].sqrt() / targets
        return Sums(targets, norm, is_without_batch | ~(of["losses"].sum() + norm).isfinite())

    def end_step(self, step: int, lr: float) -> None:
        """Report the step before this one, whose sums should have arrived by now.

        Raises:
            TokshardError: its loss was not finite, or the loader of a rank failed; the same error on all ranks.
        """
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        self.flush()
        record: dict[str, Any] = {"step": step, "lr": lr, "samples": self._batches.samples}
        if self._sums is None:
            self._write({"step": step, "skipped": "train.skip", "samples": self._batches.samples})
            return
        if self._log is not None:
            corpora = self._batches.loader.stats()["corpora"]
            record["corpora"] = {name: {key: of[key] for key in ("tokens", "epoch")} for name, of in corpora.items()}
        self._last, self._sums = _Step(record, seconds, *self._sums), None

    def flush(self) -> None:
        """Wait for the last step, and report it: before a save, and at the end.

        Raises:
            TokshardError: as for `end_step`.
        """
        last, self._last = self._last, None
        if last is not None:
            self._read(last)

    def stop(self, step: int, number: int) -> None:
        """A signal ended the evaluation after a step, and ends the run. Every rank calls this."""
        self._signal_number = number
        say(f"step {step}: a signal ended the evaluation, which is not recorded")

    def write_evaluation(self, step: int, losses: dict[str, dict[str, float | None]]) -> None:
        """Report an evaluation after a step."""
        if self._log is not None:
            self._log.write({"step": step, "evaluation": losses})
        shown = {name: "not finite" if of["loss"] is None else f"{of['loss']:.3f}" for name, of in losses.items()}
        say(f"step {step}: evaluation  " + ", ".join(f"{name} {loss}" for name, loss in shown.items()))

    def _figures(self, batch: Batch, num_corpora: int, *, has_failed: bool) -> dict[str, NDArray[np.float64]]:
        """What this rank's host knows of a step; the sum over ranks of each figure has a meaning."""
        ids, labels, samples, index, bounds = (
            batch[key].numpy() for key in ("input_ids", "labels", "sample_index", "corpus_index", "cu_seqlens")
        )
        rows = np.flatnonzero(samples != PADDING_INDEX)
        lengths = np.diff(bounds[bounds <= len(rows) * labels.shape[1]].astype(np.int64))
        digest = sum(row_digest(int(samples[row]), ids[row], labels[row]) for row in rows)
        here = np.arange(self._world_size) == self._rank
        figures = {
            "targets": np.bincount(index.clip(0), weights=(labels != IGNORED).sum(1), minlength=num_corpora),
            "has_no_batch": [self._batches.failure is not None],
            "has_failed": [has_failed or (self._log is not None and self._log.failure is not None)],
            "signals": [number in self._received for number in STOP_SIGNALS],
            "num_samples": [len(rows)],
            "pairs": [(lengths * (lengths + 1) // 2).sum()],
            "digest": [digest >> shift & 0xFFFF for shift in DIGEST_SHIFTS],
            "wait_seconds": here * self._batches.wait_seconds,
            "memory_bytes": here * memory_bytes(self.device),
        }
        return {name: np.asarray(of, dtype=np.float64) for name, of in figures.items()}

    def _read(self, step: _Step) -> None:
        if step.arrival is not None:
            step.arrival.synchronize()
        values, names, seq_len = iter(step.sums.tolist()), self._batches.plan.names, self._batches.plan.seq_len
        of = {name: list(islice(values, size)) for name, size in self._layout.items()}
        if any(of["has_no_batch"]):
            raise_together(self._batches.failure)
        self._has_failed |= any(of["has_failed"])
        signals = [number for number, ranks in zip(STOP_SIGNALS, of["signals"], strict=True) if ranks]
        self._signal_number = signals[0] if signals else 0
        (num_samples,), (pairs,), (squared_norm,) = of["num_samples"], of["pairs"], of["squared_norm"]
        tokens, num_targets = num_samples * seq_len, sum(of["targets"])
        loss, norm = (figure / max(1.0, num_targets) for figure in (sum(of["losses"]), math.sqrt(squared_norm)))
        is_finite = math.isfinite(loss + norm)
        if not is_finite and self._settings.on_non_finite == "stop":
            raise TrainerError(
                f"step {step.record['step']}: loss is {loss}, gradient norm {norm}",
                hint="resume from the last checkpoint with a lower optimizer.lr, with train.skip for the steps there, "
                "or with train.on_non_finite=skip",
            )
        digest = (int(part) << shift for part, shift in zip(of["digest"], DIGEST_SHIFTS, strict=True))
        by_corpus = {name: s / n if n else None for name, s, n in zip(names, of["losses"], of["targets"], strict=True)}
        self._write(
            step.record
            | ({} if is_finite else {"skipped": f"loss is {loss}, gradient norm {norm}"})
            | {
                "loss": loss if is_finite else None,
                "loss_by_corpus": by_corpus if is_finite else {},
                "grad_norm": norm if is_finite else None,
                "targets": int(num_targets),
                "num_samples": int(num_samples),
                "tokens": int(tokens),
                "digest": step_digest(digest),
                "tokens_per_second": tokens / step.seconds,
                "mfu": self._mfu(tokens, pairs, step.seconds),
                "mfu_full_rows": self._mfu(tokens, tokens * seq_len, step.seconds),
                "loader_wait_seconds": max(of["wait_seconds"]),
                "memory_bytes": int(max(of["memory_bytes"])),
            }
        )

    def _mfu(self, tokens: float, pairs: float, seconds: float) -> float | None:
        if self._peak_tflops is None:
            return None
        return training_flops(self._shape, tokens, pairs) / (self._peak_tflops * 1e12 * self._world_size * seconds)

    def _write(self, record: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.write(record)
            if record["step"] % self._settings.log_every == 0 or record["step"] == self._settings.steps:
                say(progress_line(record, self._settings.steps))


def memory_bytes(device: torch.device) -> int:
    """The peak memory of this rank: of its GPU, or of the process if it has none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
