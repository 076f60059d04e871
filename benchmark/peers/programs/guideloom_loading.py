"""GuideLoom: a stream of ids in its own shards, read without torch in the order that its loader for torch has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from guideloom import StreamDataset, StreamNumpyFormat, StreamStorage
from guideloom.io import MmapIO
from guideloom.shuffle import FeistelShuffler

from benchmark.peers.programs.common import CannotError, Settings
from benchmark.peers.programs.reading import Opened, files_of_rows, run, source

SEED = 17


def storage(settings: Settings) -> Any:
    """By memory map, the fastest of its ways to read local files."""
    ids = StreamNumpyFormat(np.dtype([("input_ids", source(settings)[0].dtype)]))
    return StreamStorage(Path(settings["data"]), ids, MmapIO())


def make(settings: Settings) -> None:
    with storage(settings).sync_writer() as writer:
        for shard, some in enumerate(files_of_rows(settings)):
            writer.append(shard, {"input_ids": np.ravel(some)})


def opened(settings: Settings, states: list[Any] | None) -> Opened:
    if settings["workers"]:
        raise CannotError("Workers are threads of its loader for torch, and torch is not in its environment.")
    reader = StreamDataset(storage(settings), settings["seq_len"]).sync_reader()
    reader.open()
    begin = {"epoch": 0, "observation_offset": 0, "shuffle": True, "shuffle_seed": SEED, "drop_last": True}
    state = states[0] if states is not None else begin
    return Opened(
        batches=_batches(settings, reader, state), ids=lambda batch: batch, state=state.copy, close=reader.close
    )


def order(rows: int, epoch: int = 0) -> Any:
    """The shuffle of an epoch, seeded as in its StatefulDataLoader."""
    bits = np.random.Philox(np.random.SeedSequence(SEED, spawn_key=(epoch,)))
    return FeistelShuffler(rows, np.random.Generator(bits))


def _batches(settings: Settings, reader: Any, state: dict[str, Any]) -> Iterator[Any]:
    """Batches as its StatefulDataLoader deals them to ranks, and its state, one offset for all ranks."""
    shuffled = order(len(reader), state["epoch"])
    while (start := state["observation_offset"]) + settings["rows"] <= len(reader):
        state["observation_offset"] = stop = start + settings["rows"]
        places = range(start + settings["rank"], stop, settings["world"])
        yield np.stack([reader[shuffled.shuffle(place)]["input_ids"] for place in places])


if __name__ == "__main__":
    run(make, opened, ("guideloom", "numba"))
