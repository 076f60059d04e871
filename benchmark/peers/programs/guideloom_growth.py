"""GuideLoom: its shuffle of windows, over shards that are links to one hole."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from guideloom import StreamDataset, StreamNumpyFormat, StreamStorage

from benchmark.peers.programs import common, starting
from benchmark.peers.programs.guideloom_loading import order

SHARD_TOKENS = 32_000_000


def make(settings: common.Settings) -> dict[str, Any]:
    """Shards as large as tokshard's."""
    place = Path(settings["folder"]) / "shards"
    place.mkdir()
    hole = Path(settings["folder"]) / "hole"
    hole.touch()
    os.truncate(hole, 2 * SHARD_TOKENS)
    for shard in range(-(-settings["documents"] * settings["document_tokens"] // SHARD_TOKENS)):
        os.link(hole, place / f"{shard:07}.in_band.bin")
    return {"place": str(place)}


def start(settings: common.Settings) -> dict[str, Any]:
    def first() -> Any:
        # its default way to read keeps no file open; a map of each shard needs more open files than a process may have
        ids = StreamNumpyFormat(np.dtype([("input_ids", np.uint16)]))
        with StreamDataset(StreamStorage(Path(settings["place"]), ids), 4_096).sync_reader() as reader:
            shuffled = order(len(reader))
            for row in range(8):
                reader[shuffled.shuffle(row)]
        return {"epoch": 0, "observation_offset": 8, "shuffle": True, "shuffle_seed": 17, "drop_last": True}

    return starting.started(first, settings["folder"])


if __name__ == "__main__":
    common.main({"make": make, "start": start}, ("guideloom", "numba"))
