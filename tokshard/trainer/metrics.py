"""What a run reports: a line of JSON per step, and a line for people every few steps."""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec
import numpy as np
import torch
from torch import Tensor

from tokshard.errors import TrainerError
from tokshard.trainer.parallel import gather_rows


class _Line(msgspec.Struct):
    """The only field that is read back."""

    step: int


class MetricsFile:
    """``metrics.jsonl``: each step once, even after a resume.

    Lines that could not be written are kept and written first the next time; `failure` says why.

    Args:
        path: the file.
        last_step: later steps are cut off: the job that wrote them died before it saved them.

    Raises:
        OSError: the file cannot be written.
        TrainerError: a line up to `last_step` cannot be read.
    """

    def __init__(self, path: str, *, last_step: int) -> None:
        self.failure: TrainerError | None = None
        self._path, self._unwritten = path, b""
        with open(path, "a+b") as file:
            file.truncate(_end_of(file, path, last_step))

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step."""
        self._unwritten += json.dumps(record).encode() + b"\n"
        try:
            with open(self._path, "ab", buffering=0) as file:
                while self._unwritten:
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
        except OSError as error:
            self.failure = TrainerError(
                f"{self._path} cannot be written: {error.strerror}",
                hint="make room or repair the directory, then run the same command to continue",
            )


def _end_of(file: BinaryIO, path: str, last_step: int) -> int:
    """Where the line of `last_step` ends, in bytes."""
    end = step = 0
    file.seek(0)
    for number, line in enumerate(file, start=1):
        try:
            if not line.endswith(b"\n") or (step := msgspec.json.decode(line, type=_Line).step) > last_step:
                break
        except (msgspec.MsgspecError, RecursionError) as error:
            if step >= last_step:
                break  # of a job that died
            raise TrainerError(
                f"{path}: line {number} is not a step of a run: {error}",
                hint="remove that line, or move the file away: a new one begins where the run continues",
            ) from error
        end += len(line)
    return end


def batch_record(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Which samples a step read, over all ranks, and a digest of their tokens and labels.

    The same for a global batch on any number of ranks. Costs about a millisecond per MB of batch and a small gather.
    """
    columns = [batch[key].numpy().astype(np.int64) for key in ("input_ids", "labels")]
    digests = [row_digest(*(column[row] for column in columns)) for row in range(len(columns[0]))]
    rows = gather_rows(torch.stack((batch["sample_index"], torch.tensor(digests)), dim=1))
    ordered = sorted((sample, digest) for sample, digest in rows.tolist() if sample >= 0)
    return {
        "samples": [ordered[0][0], ordered[-1][0] + 1],
        "num_samples": len(ordered),
        "digest": step_digest(ordered),
    }


def row_digest(input_ids: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> int:
    """The digest of one sample, from int64 arrays [seq_len]."""
    digest = hashlib.blake2b(input_ids.tobytes() + labels.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def step_digest(rows: list[tuple[int, int]]) -> str:
    """The digest of a step, from its samples and their digests in ascending order."""
    return hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest()


def memory_bytes(device: torch.device) -> int:
    """The peak memory of this rank: of its GPU, or of the process if it trains on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def progress_line(record: Mapping[str, Any], num_steps: int) -> str:
    """One step as a line for people."""
    by_corpus = ", ".join(f"{name} {loss:.3f}" for name, loss in record["loss_by_corpus"].items() if loss is not None)
    read = ", ".join(
        f"{name} {corpus['tokens']:,} (epoch {corpus['epoch']:.3f})" for name, corpus in record["corpora"].items()
    )
    return (
        f"step {record['step']:>{len(str(num_steps))}}/{num_steps}  loss {record['loss']:.3f} ({by_corpus})"
        f"  grad {record['grad_norm']:.2f}  lr {record['lr']:.1e}  {record['tokens_per_second']:,.0f} tokens/s"
        f"  wait {record['loader_wait_seconds']:.2f} s  {record['memory_bytes'] / 1e9:.2f} GB  read {read}"
    )
