"""litdata: documents optimized for its TokensLoader, read by StreamingDataset and StreamingDataLoader."""

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

from benchmark.peers.programs.common import Settings
from benchmark.peers.programs.reading import Opened, documents, run, source


class Documents:
    """The documents of the corpus as tensors."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, _: int) -> Iterator[Any]:
        for ids in documents(self.settings):
            yield torch.from_numpy(ids.copy())


def make(settings: Settings) -> None:
    seq_len, width = settings["seq_len"], source(settings)[0].itemsize
    optimize(
        fn=Documents(settings),
        inputs=[0],
        output_dir=settings["data"],
        chunk_size=max(1, settings["file_bytes"] // width // seq_len) * seq_len,
        num_workers=1,
        item_loader=TokensLoader(block_size=seq_len),
    )


def opened(settings: Settings, states: list[Any] | None) -> Opened:
    place: dict[str, Any] = {"input_dir": settings.get("remote", settings["data"])}
    if "remote" in settings:
        place |= {"cache_dir": tempfile.mkdtemp(dir=settings["cache"]), "storage_options": settings["storage_options"]}
    dataset = StreamingDataset(**place, item_loader=TokensLoader(block_size=settings["seq_len"]), shuffle=True, seed=17)
    loader = StreamingDataLoader(
        dataset, batch_size=settings["rows"] // settings["world"], num_workers=settings["workers"]
    )
    if states is not None:
        loader.load_state_dict(states[0])
    return Opened(batches=iter(loader), ids=lambda batch: batch, state=loader.state_dict)


if __name__ == "__main__":
    run(make, opened, ("litdata", "torch"))
