"""The report of a step: a line of JSON, the same as scalars, and a line for people."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UNDECODABLE, TrainerError
from tokshard.forking import decodable

_LONG_WAIT = 0.01
"""The share of a step's time that the loader may take without a note in the step's line."""


_MAX_LOSSES = 8
"""Corpora whose losses are in the line for people: a mix may have a thousand cells."""


@decodable
class Line(msgspec.Struct, frozen=True):
    """The fields of a line that are read back."""

    step: int
    samples: tuple[int, int] | None = None
    skipped: str = ""
    evaluation: dict[str, Any] = {}


class MetricsFile:
    """``metrics.jsonl``: each step once, even after a resume.

    Lines that could not be written are kept and written first the next time; `failure` says why.

    Args:
        path: the file.
        last_step: later steps are cut off: the job that wrote them died before it saved them.

    Attributes:
        is_evaluated: whether it had an evaluation of `last_step`.

    Raises:
        OSError: the file cannot be written.
        TrainerError: its end is not from a run that reached `last_step`.
    """

    def __init__(self, path: str, *, last_step: int) -> None:
        self.failure: TrainerError | None = None
        self.is_evaluated = False
        self._path, self._unwritten = path, b""
        with open(path, "a+b") as file:
            if os.path.getsize(path):
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    end, self.is_evaluated = _end_of(content, path, last_step)
                file.truncate(end)

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


def _end_of(content: mmap.mmap, path: str, last_step: int) -> tuple[int, bool]:
    """The end of the lines of `last_step`, in bytes, and whether the last one is an evaluation.

    Reads only the lines after them.
    """
    end, problem, found, is_evaluated = content.rfind(b"\n") + 1, "", 0, False
    while end:
        start = content.rfind(b"\n", 0, end - 1) + 1
        try:
            line = msgspec.json.decode(content[start:end], type=Line)
        except UNDECODABLE as error:
            found, problem = 0, f"the line at byte {start:,} is not a step of a run: {error}"
        else:
            found, is_evaluated = line.step, bool(line.evaluation) and line.step == last_step
            if found <= last_step:
                break
        end = start
    if problem and found < last_step:  # else it was written by a job that died
        raise TrainerError(
            f"{path}: {problem}",
            hint="remove that line, or move the file away: a new one begins where the run continues",
        )
    return end, is_evaluated


def row_digest(
    sample: int,
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    loss_weights: NDArray[np.float32] | None = None,
) -> int:
    """The digest of one sample, from its number and arrays [seq_len]. Takes 25 ns per token."""
    content = sample.to_bytes(8, "little") + input_ids.tobytes() + labels.tobytes()
    if loss_weights is not None:
        content += loss_weights.tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def step_digest(rows: Iterable[int]) -> str:
    """The digest of a step: the sum of its samples' digests, so ranks and their order do not matter."""
    return f"{sum(rows) % 2**64:016x}"


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a step by name; of a corpus as ``loss_by_corpus/code``."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield prefix + name, value


def progress_line(record: Mapping[str, Any], num_steps: int) -> str:
    """One step as a line for people; its record says more."""
    step = f"step {record['step']:>{len(str(num_steps))}}/{num_steps}"
    if "skipped" in record:
        return f"{step}  skipped: {record['skipped']}"
    losses = [f"{name} {loss:.3f}" for name, loss in record["loss_by_corpus"].items() if loss is not None]
    more = [f"and {len(losses) - _MAX_LOSSES} more"] if len(losses) > _MAX_LOSSES else []
    by_corpus = ", ".join(losses[:_MAX_LOSSES] + more)
    mfu = f"  MFU {record['mfu']:.1%}" if record["mfu"] is not None else ""
    waited = record["loader_wait_seconds"] * record["tokens_per_second"] / max(1, record["tokens"])
    wait = f"  waiting for data {waited:.0%}" if waited >= _LONG_WAIT else ""
    loss = "no targets" if record["loss"] is None else f"loss {record['loss']:.3f} ({by_corpus})"
    return (
        f"{step}  {loss}"
        f"  grad {record['grad_norm']:.2f}  lr {record['lr']:.1e}  {record['tokens_per_second']:,.0f} tokens/s{mfu}"
        f"  memory {record['memory_bytes'] / 1e9:.2f} GB{wait}"
    )
