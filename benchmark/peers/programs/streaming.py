"""MosaicML streaming: MDSWriter in each process, and `merge_index`, as in its guide to parallel conversion."""

import json
import multiprocessing
from pathlib import Path

from benchmark.peers.programs.common import (
    Settings,
    batches,
    encoder,
    end_id,
    files,
    folder_bytes,
    main,
    texts,
)
from benchmark.peers.programs.streaming_stubs import imported


def _write(share: tuple[str, list[str], str]) -> None:
    import numpy as np
    from streaming import MDSWriter

    out, paths, tokenizer = share
    encode, end = encoder(tokenizer), end_id(tokenizer)
    with MDSWriter(out=out, columns={"tokens": "ndarray:uint16"}) as writer:
        for batch in batches(texts(paths)):
            for ids in encode(batch):
                writer.write({"tokens": np.append(np.asarray(ids, np.uint16), np.uint16(end))})


def build(settings: Settings) -> dict[str, int]:
    """Each process has a folder and a share of the files."""
    merge_index = imported().base.util.merge_index

    paths, processes, out = files(settings["texts"]), settings["processes"], settings["out"]
    shares = [(f"{out}/{index}", paths[index::processes], settings["tokenizer"]) for index in range(processes)]
    with multiprocessing.Pool(processes) as pool:
        pool.map(_write, shares)
    merge_index(out, keep_local=True)
    return {}


def count(settings: Settings) -> dict[str, int]:
    """What the merged index names, read sample by sample."""
    local_dataset = imported().LocalDataset

    size = folder_bytes(settings["out"])
    index = Path(settings["out"], "index.json")
    if not index.exists() or not json.loads(index.read_bytes())["shards"]:
        return {"documents": 0, "tokens": 0, "output_bytes": size}
    data = local_dataset(settings["out"])
    return {
        "documents": len(data),
        "tokens": sum(len(data[i]["tokens"]) for i in range(len(data))),
        "output_bytes": size,
    }


if __name__ == "__main__":
    main({"build": build, "count": count}, ["mosaicml-streaming", "tokenizers"])
