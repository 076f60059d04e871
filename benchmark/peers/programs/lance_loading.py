"""LanceDB: a table of rows packed ahead, or of documents that it packs, read by StreamingDataset and its DataLoader."""

from collections.abc import Iterator
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import torch
from lancedb.streaming import StreamingDataLoader, StreamingDataset

from benchmark.peers.programs.common import Settings
from benchmark.peers.programs.reading import Opened, files_of_rows, run, source

NUM_SPLITS = 8
"""Fixed for a run; every number of ranks times workers has to divide it."""


def make(settings: Settings) -> None:
    database = lancedb.connect(settings["data"])
    ids, offsets = source(settings)
    width = pa.from_numpy_dtype(ids.dtype)
    schema = pa.schema({"tokens": pa.list_(width, settings["seq_len"])})

    def batches() -> Iterator[pa.RecordBatch]:
        for some in files_of_rows(settings):
            column = pa.FixedSizeListArray.from_arrays(pa.array(np.ravel(some)), settings["seq_len"])
            yield pa.record_batch([column], schema)

    database.create_table("rows", pa.RecordBatchReader.from_batches(schema, batches()))
    # it puts the delimiter between documents by itself
    whole = np.delete(np.asarray(ids), offsets[1:] - 1)
    ends = offsets - np.arange(len(offsets))
    column = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(whole))
    database.create_table("documents", pa.table({"tokens": column}))


def as_tensors(batch: pa.RecordBatch) -> Any:
    """Rows as one tensor, whose rows the loader takes."""
    column = batch.column(0)
    return torch.from_numpy(column.flatten().to_numpy().reshape(len(column), -1))


def opened(settings: Settings, states: list[Any] | None) -> Opened:
    database = lancedb.connect(settings["data"])
    options: dict[str, Any] = {"transform": as_tensors}
    is_packed = settings.get("mode") == "packs"
    if is_packed:
        blocks = len(source(settings)[0]) // settings["seq_len"] // NUM_SPLITS * NUM_SPLITS
        options = {"columns": ["tokens"], "pack_sequences": settings["seq_len"], "eos_id": 0}
        options |= {"pad_id": settings["vocab_size"] - 1, "blocks_per_epoch": blocks}
    dataset = StreamingDataset(
        database.open_table("documents" if is_packed else "rows"),
        num_splits=NUM_SPLITS,
        shuffle_seed=17,
        rank=settings["rank"],
        world_size=settings["world"],
        **options,
    )
    if states is not None:
        dataset.load_state_dict(StreamingDataset.merge_state_dicts(states))
    workers = settings["workers"]
    loader = StreamingDataLoader(
        dataset,
        batch_size=settings["rows"] // settings["world"],
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
    )
    ids = (lambda batch: batch["input_ids"]) if is_packed else (lambda batch: batch)
    return Opened(batches=iter(loader), ids=ids, state=dataset.state_dict)


if __name__ == "__main__":
    run(make, opened, ("lancedb", "pylance", "torch"))
