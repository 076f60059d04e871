"""What a program of the section on conversations hands over: the pieces of conversations that its rows have."""

import os
import time
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np


class Stage:
    """Adds up the seconds and CPU seconds of a stage, those of processes that have ended by then included."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0

    def __enter__(self) -> Self:
        self._started = time.perf_counter(), _cpu()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started[0]
        self.cpu_seconds += _cpu() - self._started[1]


def _cpu() -> float:
    return sum(os.times()[:4])


def figures(prepare: Stage, pack: Stage) -> dict[str, float]:
    """The columns of both stages."""
    return {
        "prepare_seconds": prepare.seconds,
        "prepare_cpu_seconds": prepare.cpu_seconds,
        "pack_seconds": pack.seconds,
        "pack_cpu_seconds": pack.cpu_seconds,
    }


def save(out: str, pieces: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> None:
    """Write pieces of conversations as the judge reads them.

    Args:
        pieces: ids, and whether each of them is predicted by a row: a target.
    """
    listed = list(pieces)
    lengths = np.array([len(ids) for ids, _ in listed], np.int64)
    ids = np.concatenate([np.asarray(ids, np.int32) for ids, _ in listed])
    targets = np.concatenate([np.asarray(targets, bool) for _, targets in listed])
    if len(ids) != len(targets):
        raise ValueError(f"{len(ids)} ids have {len(targets)} marks")
    np.savez(out, lengths=lengths, ids=ids, targets=targets)
