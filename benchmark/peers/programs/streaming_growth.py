"""MosaicML streaming: its shuffle of the ids of all samples, over shards that are links to one."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.peers.programs import common, starting
from benchmark.peers.programs.streaming_stubs import imported

SHARD_SAMPLES = 100_000


def make(settings: common.Settings) -> dict[str, Any]:
    """Samples of one token: their ids are what grows."""
    writer_kind = imported().MDSWriter
    place = Path(settings["folder"]) / "shards"
    with writer_kind(out=str(place), columns={"tokens": "ndarray:uint16:1"}, size_limit=1 << 30) as writer:
        for _ in range(SHARD_SAMPLES):
            writer.write({"tokens": np.zeros(1, np.uint16)})
    index = json.loads((place / "index.json").read_text(encoding="utf-8"))
    (only,) = index["shards"]
    index["shards"] = []
    for number in range(-(-settings["documents"] // SHARD_SAMPLES)):
        name = f"link.{number}.mds"
        os.link(place / only["raw_data"]["basename"], place / name)
        index["shards"].append({**only, "raw_data": {**only["raw_data"], "basename": name}})
    (place / "index.json").write_text(json.dumps(index), encoding="utf-8")
    return {"place": str(place)}


def start(settings: common.Settings) -> dict[str, Any]:
    kind = imported().StreamingDataset

    def first() -> Any:
        dataset = kind(local=settings["place"], shuffle=True, shuffle_seed=17, batch_size=8)
        rows = iter(dataset)
        for _ in range(8):
            next(rows)
        return dataset.state_dict(8, from_beginning=True)

    return starting.started(first, settings["folder"])


if __name__ == "__main__":
    common.main({"make": make, "start": start}, ("mosaicml-streaming",))
