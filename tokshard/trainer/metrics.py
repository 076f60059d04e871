"""The figures of a step: added up over all ranks in one vector, and read a step later."""

from __future__ import annotations

import hashlib
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed

from tokshard.errors import TrainerError, UsageError
from tokshard.jobs.metrics_file import MetricsFile, progress_line
from tokshard.jobs.model_shape import Shape, training_flops
from tokshard.jobs.recipe import Train
from tokshard.runtime.batches import IGNORED, PADDING_INDEX
from tokshard.runtime.tensors import Batch
from tokshard.trainer.batches import Batches
from tokshard.trainer.parallel import raise_together, together
from tokshard.trainer.upkeep import STOP_SIGNALS, say

PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "B200": 2250, "A100": 312, "MI300X": 1307}
"""Dense bf16, by a part of the device's name; the first that fits counts."""


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
        self._peak_tflops = settings.peak_tflops or peak_tflops(device)
        self._sums: tuple[Tensor, torch.Event | None] | None = None
        self._last: _Step | None = None
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
                board = tensorboard_writer(out, last_step) if self._settings.tensorboard else None
                self._log = MetricsFile(path, last_step=last_step, board=board)
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
        here = torch.from_numpy(self._figures(batch, len(losses), has_failed=has_failed))
        if self.device.type == "cuda":
            here = here.pin_memory()
        sums = torch.cat((losses, squared_norm[None], here.to(self.device, non_blocking=True)))
        distributed.all_reduce(sums)
        arrival = torch.Event(self.device) if self.device.type == "cuda" else None
        self._sums = sums.to("cpu", non_blocking=True), arrival
        if arrival is not None:
            arrival.record()
        num = len(losses)
        targets, has_no_batch = sums[num + 1 : 2 * num + 1].sum().clamp(min=1), sums[2 * num + 1] > 0
        norm = sums[num].sqrt() / targets
        return Sums(targets, norm, has_no_batch | ~(sums[:num].sum() + norm).isfinite())

    def end_step(self, step: int, lr: float) -> None:
        """Report the step before this one, whose sums should have arrived by now.

        Raises:
            TokshardError: its loss was not finite, or the loader of a rank failed; the same error on all ranks.
        """
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        record = {"step": step, "lr": lr, "samples": self._batches.samples}
        if self._sums is None:  # left out
            self.flush()
            self._write({"step": step, "skipped": "train.skip", "samples": self._batches.samples})
            return
        if self._log is not None:
            corpora = self._batches.loader.stats()["corpora"]
            record["corpora"] = {name: {key: of[key] for key in ("tokens", "epoch")} for name, of in corpora.items()}
        last, self._last, self._sums = self._last, _Step(record, seconds, *self._sums), None
        if last is not None:
            self._read(last)

    def flush(self) -> None:
        """Wait for the last step, and report it: before a save, and at the end.

        Raises:
            TokshardError: as for `end_step`.
        """
        last, self._last = self._last, None
        if last is not None:
            self._read(last)

    def write_evaluation(self, step: int, losses: dict[str, dict[str, float | None]] | None) -> None:
        """Report an evaluation after a step; None: a signal ended it, which ends the run. Every rank calls this."""
        if losses is None:
            number = torch.tensor(max(self._received, default=0))
            distributed.all_reduce(number, distributed.ReduceOp.MAX)
            self._signal_number = int(number)
            say(f"step {step}: a signal ended the evaluation, which is not recorded")
            return
        if self._log is not None:
            self._log.write({"step": step, "evaluation": losses})
        shown = {name: "not finite" if of["loss"] is None else f"{of['loss']:.3f}" for name, of in losses.items()}
        say(f"step {step}: evaluation  " + ", ".join(f"{name} {loss}" for name, loss in shown.items()))

    def _figures(self, batch: Batch, num_corpora: int, *, has_failed: bool) -> np.ndarray[Any, Any]:
        """What this rank's host knows of a step, in the order of `_read`."""
        ids, labels, samples, index, bounds = (
            batch[key].numpy() for key in ("input_ids", "labels", "sample_index", "corpus_index", "cu_seqlens")
        )
        rows = np.flatnonzero(samples != PADDING_INDEX)
        lengths = np.diff(bounds[bounds <= len(rows) * labels.shape[1]].astype(np.int64))
        digest = sum(row_digest(int(samples[row]), ids[row], labels[row]) for row in rows)
        has_failed = has_failed or (self._log is not None and self._log.failure is not None)
        of_ranks = np.zeros((2, self._world_size))
        of_ranks[:, self._rank] = self._batches.wait_seconds, memory_bytes(self.device)
        return np.concatenate(
            (
                np.bincount(index.clip(0), weights=(labels != IGNORED).sum(1), minlength=num_corpora),
                [self._batches.failure is not None, has_failed, *(number in self._received for number in STOP_SIGNALS)],
                [len(rows), (lengths * (lengths + 1) // 2).sum()],
                [digest >> shift & 0xFFFF for shift in (0, 16, 32, 48)],  # sums of 16 bits are exact in float64
                of_ranks.ravel(),
            )
        )

    def _read(self, step: _Step) -> None:
        if step.arrival is not None:
            step.arrival.synchronize()
        values, names, ranks = iter(step.sums.tolist()), self._batches.plan.names, self._world_size
        sizes = (len(names), 1, len(names), 1, 1, len(STOP_SIGNALS), 1, 1, 4, ranks, ranks)
        losses, (squared,), targets, (has_no_batch,), (has_failed,), *rest = (
            list(islice(values, size)) for size in sizes
        )
        signals, (num,), (pairs,), digest, waits, memory = rest
        if has_no_batch:
            raise_together(self._batches.failure)
        self._has_failed |= bool(has_failed)
        self._signal_number = next((number for number, of in zip(STOP_SIGNALS, signals, strict=True) if of), 0)
        all_targets, tokens = max(1.0, sum(targets)), int(num) * self._batches.plan.seq_len
        loss, norm = sum(losses) / all_targets, math.sqrt(squared) / all_targets
        is_finite = math.isfinite(loss + norm)
        if not is_finite and self._settings.on_non_finite == "stop":
            raise TrainerError(
                f"step {step.record['step']}: loss is {loss}, gradient norm {norm}",
                hint="resume from the last checkpoint with a lower optimizer.lr, with train.skip for the steps there, "
                "or with train.on_non_finite=skip",
            )
        by_corpus = {name: s / n if n else None for name, s, n in zip(names, losses, targets, strict=True)}
        self._write(
            step.record
            | ({} if is_finite else {"skipped": f"loss is {loss}, gradient norm {norm}"})
            | {
                "loss": loss if is_finite else None,
                "loss_by_corpus": by_corpus if is_finite else {},
                "grad_norm": norm if is_finite else None,
                "targets": int(sum(targets)),
                "num_samples": int(num),
                "tokens": tokens,
                "digest": step_digest(int(part) << shift for part, shift in zip(digest, (0, 16, 32, 48), strict=True)),
                "tokens_per_second": tokens / step.seconds,
                "mfu": self._mfu(tokens, pairs, step.seconds),
                "mfu_full_rows": self._mfu(tokens, tokens * self._batches.plan.seq_len, step.seconds),
                "loader_wait_seconds": max(waits),
                "memory_bytes": int(max(memory)),
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


def tensorboard_writer(out: str, last_step: int) -> Any:
    """A writer for TensorBoard into ``out/tensorboard``, which shows no steps after `last_step` of a job that died.

    Raises:
        UsageError: it is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(
            f"train.tensorboard needs the package tensorboard: {error}", hint="pip install 'tokshard[tensorboard]'"
        ) from error
    return SummaryWriter(os.path.join(out, "tensorboard"), purge_step=last_step + 1)


def row_digest(sample: int, input_ids: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> int:
    """The digest of one sample, from its number and int64 arrays [seq_len]. Takes 25 ns per token."""
    content = sample.to_bytes(8, "little") + input_ids.tobytes() + labels.tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def step_digest(rows: Iterable[int]) -> str:
    """The digest of a step: the sum of those of its samples, so that ranks and their order do not matter."""
    return f"{sum(rows) % 2**64:016x}"


def peak_tflops(device: torch.device) -> float | None:
    """What a device can do at most; None if it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((float(peak) for part, peak in PEAK_TFLOPS.items() if part in name), None)


def memory_bytes(device: torch.device) -> int:
    """The peak memory of this rank: of its GPU, or of the process if it has none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
