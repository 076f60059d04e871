"""MosaicML streaming: rows packed ahead into MDS, read by StreamingDataset and StreamingDataLoader."""

import tempfile
from typing import Any

import numpy as np

from benchmark.peers.programs.common import Settings
from benchmark.peers.programs.reading import Opened, rows, run
from benchmark.peers.programs.streaming_stubs import imported

streaming = imported()


def make(settings: Settings) -> None:
    every = rows(settings)
    columns = {"tokens": f"ndarray:{every.dtype.name}:{settings['seq_len']}"}
    with streaming.MDSWriter(columns=columns, out=settings["data"], size_limit=settings["file_bytes"]) as writer:
        for row in every:
            writer.write({"tokens": np.asarray(row)})


def opened(settings: Settings, states: list[Any] | None) -> Opened:
    import torch.distributed as dist

    if settings["world"] > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    each = settings["rows"] // settings["world"]
    place: dict[str, Any] = {"local": settings["data"]}
    if "remote" in settings:
        place = {"local": tempfile.mkdtemp(dir=settings["cache"]), "remote": settings["remote"]}
    if "download_timeout" in settings:
        place["download_timeout"] = settings["download_timeout"]
    dataset = streaming.StreamingDataset(**place, shuffle=True, shuffle_seed=17, batch_size=each)
    loader = streaming.StreamingDataLoader(dataset, batch_size=each, num_workers=settings["workers"])
    if states is not None:
        loader.load_state_dict(states[0])
    return Opened(batches=iter(loader), ids=lambda batch: batch["tokens"], state=loader.state_dict)


if __name__ == "__main__":
    run(make, opened, ("mosaicml-streaming", "torch"))
