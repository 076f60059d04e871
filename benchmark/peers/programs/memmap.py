"""What numpy alone does with one flat file: nanoGPT's random crops, and the copy of rows that bounds every loader."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmark.peers.programs.common import CannotError, Settings
from benchmark.peers.programs.reading import Opened, rows, run, source


def make(settings: Settings) -> None:
    """A flat file of ids."""
    ids, _ = source(settings)
    folder = Path(settings["data"])
    folder.mkdir(parents=True)
    ids.tofile(folder / f"train.{ids.dtype.name}.bin")


def opened(settings: Settings, states: list[Any] | None) -> Opened:
    if settings["workers"]:
        raise CannotError("It has no workers.")
    if settings.get("mode") == "gather":
        return Opened(batches=_gathered(settings), ids=lambda batch: batch, state=_no_state)
    # what a job has done is known from its optimizer's checkpoint; the crops begin again with their seed
    done = settings.get("done", 0)
    return Opened(batches=_crops(settings, done), ids=lambda batch: batch[0], state=_no_state if not states else dict)


def _no_state() -> Any:
    if "RANK" in os.environ:
        return {}
    raise CannotError("none")


def _crops(settings: Settings, done: int) -> Iterator[Any]:
    """Rows from anywhere, with the row one further as targets, int64, as nanoGPT's `get_batch` makes them."""
    (path,) = Path(settings["data"]).iterdir()
    dtype = np.dtype(path.name.split(".")[1])
    seq_len, each = settings["seq_len"], settings["rows"] // settings["world"]
    torch.manual_seed(1337 + settings["rank"])
    num_tokens = path.stat().st_size // dtype.itemsize
    for _ in range(num_tokens // seq_len // settings["rows"] - done):
        data = np.memmap(path, dtype, mode="r")
        starts = torch.randint(len(data) - seq_len, (each,)).tolist()
        inputs = torch.stack([torch.from_numpy(data[i : i + seq_len].astype(np.int64)) for i in starts])
        targets = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + seq_len].astype(np.int64)) for i in starts])
        yield inputs, targets


def _gathered(settings: Settings) -> Iterator[Any]:
    """The bytes of all rows in a random order, copied into one array that stays."""
    every = rows(settings)
    order = np.random.default_rng(17).permutation(len(every))
    batch = np.empty((settings["rows"], settings["seq_len"]), every.dtype)
    for first in range(0, len(order) - len(batch) + 1, len(batch)):
        np.take(every, order[first : first + len(batch)], axis=0, out=batch, mode="clip")
        yield batch


if __name__ == "__main__":
    run(make, opened, ("numpy", "torch"))
