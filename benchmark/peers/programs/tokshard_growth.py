"""tokshard: from a corpus of many shards, which are links to one, to its first shuffled rows."""

import os
from pathlib import Path
from typing import Any

from benchmark.peers.programs import common, starting
from benchmark.shards import corpus, repeated
from tokshard.format import names
from tokshard.runtime import NumpyLoader, StreamPlan

SHARD_TOKENS = 32_000_000


def make(settings: common.Settings) -> dict[str, Any]:
    length = settings["document_tokens"]
    one = corpus(
        Path(settings["folder"]), num_tokens=SHARD_TOKENS, document_tokens=length, shard_tokens=SHARD_TOKENS * 2
    )
    num_shards = -(-settings["documents"] * length // SHARD_TOKENS)
    directory = repeated(Path(settings["folder"]), one, num_shards=num_shards)
    (shard,) = one.glob("shard-*.arrow")
    for number in range(num_shards):
        os.link(shard, directory / names.shard_name(generation=0, first_input=number, segment=0, part=0))
    return {"place": str(directory)}


def start(settings: common.Settings) -> dict[str, Any]:
    def first() -> Any:
        with NumpyLoader(StreamPlan(settings["place"], seq_len=4_096, seed=17), global_batch_size=8) as loader:
            next(iter(loader))
            return loader.state_dict()

    return starting.started(first, settings["folder"])


if __name__ == "__main__":
    common.main({"make": make, "start": start}, ("tokshard",))
