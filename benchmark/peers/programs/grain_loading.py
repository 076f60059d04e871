"""Grain: rows packed ahead into ArrayRecord, shuffled by index, read by its ElasticIterator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import grain.experimental
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from benchmark.peers.programs.common import Settings
from benchmark.peers.programs.reading import Opened, files_of_rows, run, source


def make(settings: Settings) -> None:
    folder = Path(settings["data"])
    folder.mkdir(parents=True)
    for number, some in enumerate(files_of_rows(settings)):
        writer = ArrayRecordWriter(str(folder / f"rows-{number:05}.array_record"), "group_size:1")
        for row in some:
            writer.write(row.tobytes())
        writer.close()


class Decode(grain.transforms.Map):
    """The ids of a record."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def map(self, element: bytes) -> Any:
        return np.frombuffer(element, self.dtype)


def opened(settings: Settings, states: list[Any] | None) -> Opened:
    files = sorted(map(str, Path(settings["data"]).glob("*.array_record")))
    data = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(files)).seed(17).shuffle()
    data = data.map(Decode(source(settings)[0].dtype.name))
    workers = settings["workers"]
    loader = grain.experimental.ElasticIterator(
        data,
        settings["rows"],
        grain.sharding.ShardOptions(shard_index=settings["rank"], shard_count=settings["world"]),
        multiprocessing_options=grain.multiprocessing.MultiprocessingOptions(num_workers=workers) if workers else None,
    )
    iterator = iter(loader)
    if states is not None:
        iterator.set_state(states[0])
    return Opened(batches=_until_stop(iterator), ids=lambda batch: batch, state=iterator.get_state, close=loader.close)


def _until_stop(iterator: Any) -> Iterator[Any]:
    yield from iterator


if __name__ == "__main__":
    run(make, opened, ("grain", "array-record"))
