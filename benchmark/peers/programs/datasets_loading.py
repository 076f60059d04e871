"""`datasets`: rows packed ahead into parquet, streamed, through torchdata's StatefulDataLoader."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmark.peers.programs.common import CannotError, Settings
from benchmark.peers.programs.reading import Opened, files_of_rows, run

BUFFER_ROWS = 1_000


def make(settings: Settings) -> None:
    folder = Path(settings["data"])
    folder.mkdir(parents=True)
    for number, some in enumerate(files_of_rows(settings)):
        column = pa.FixedSizeListArray.from_arrays(pa.array(some.reshape(-1)), settings["seq_len"])
        pq.write_table(pa.table({"tokens": column}), folder / f"rows-{number:05}.parquet")


def opened(settings: Settings, states: list[Any] | None) -> Opened:
    if states is not None and len(states) != settings["world"]:
        raise CannotError("A state is of one rank and its workers, and nothing divides it among other ranks.")
    files = sorted(map(str, Path(settings["data"]).glob("*.parquet")))
    data = load_dataset("parquet", data_files=files, split="train", streaming=True)
    data = data.shuffle(seed=17, buffer_size=BUFFER_ROWS).with_format("torch")
    data = split_dataset_by_node(data, rank=settings["rank"], world_size=settings["world"])
    loader = StatefulDataLoader(data, batch_size=settings["rows"] // settings["world"], num_workers=settings["workers"])
    if states is not None:
        loader.load_state_dict(states[settings["rank"]])
    return Opened(batches=iter(loader), ids=lambda batch: batch["tokens"], state=loader.state_dict)


if __name__ == "__main__":
    run(make, opened, ("datasets", "torchdata", "torch"))
