"""What a run tells: a line of JSON per step, and a line for people every few steps."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokshard.trainer.parallel import gather_rows


class MetricsFile:
    """``metrics.jsonl``: each step once, also after a resume.

    Args:
        path: the file.
        last_step: lines beyond this step are dropped: a job that died had not saved them.
    """

    def __init__(self, path: str, *, last_step: int) -> None:
        kept: list[str] = []
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                kept = [line for line in file if line.endswith("\n") and json.loads(line)["step"] <= last_step]
        partial = path + ".partial"
        with open(partial, "w", encoding="utf-8") as file:
            file.writelines(kept)
        os.replace(partial, path)
        self._path = path

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def batch_record(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Which samples a step read, over all ranks, and a digest of their tokens and labels.

    Equal for equal global batches, whatever the ranks. Costs about a millisecond per MB of batch and one small gather.
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
    """Of one sample: int64 arrays [seq_len]."""
    digest = hashlib.blake2b(input_ids.tobytes() + labels.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def step_digest(rows: list[tuple[int, int]]) -> str:
    """Of the samples of a step with their digests, ascending."""
    return hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest()


def memory_bytes() -> int:
    """The most memory that this rank has used: of the GPU, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def progress_line(record: Mapping[str, Any], num_steps: int) -> str:
    """A step for people."""
    by_corpus = ", ".join(f"{name} {loss:.3f}" for name, loss in record["loss_by_corpus"].items() if loss is not None)
    read = ", ".join(
        f"{name} {corpus['tokens']:,} (epoch {corpus['epoch']:.3f})" for name, corpus in record["corpora"].items()
    )
    return (
        f"step {record['step']:>{len(str(num_steps))}}/{num_steps}  loss {record['loss']:.3f} ({by_corpus})"
        f"  grad {record['grad_norm']:.2f}  lr {record['lr']:.1e}  {record['tokens_per_second']:,.0f} tokens/s"
        f"  wait {record['loader_wait_seconds']:.2f} s  {record['memory_bytes'] / 1e9:.2f} GB  read {read}"
    )
