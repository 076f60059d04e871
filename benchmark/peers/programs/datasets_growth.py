"""datasets: a table of many rows, read in shuffled order, which writes an index of the rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmark.peers.programs import common, starting


def make(settings: common.Settings) -> dict[str, Any]:
    """Rows of one byte: their index is what grows."""
    place, rest = Path(settings["folder"]) / "rows.arrow", settings["documents"]
    schema = pa.schema({"token": pa.uint8()})
    with pa.OSFile(str(place), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        while rest > 0:
            rows = min(rest, 1_000_000)
            writer.write_batch(pa.record_batch([pa.array(np.zeros(rows, np.uint8))], schema))
            rest -= rows
    return {"place": str(place)}


def start(settings: common.Settings) -> dict[str, Any]:
    import datasets

    def first() -> Any:
        rows = datasets.Dataset.from_file(settings["place"])
        order = str(Path(settings["folder"]) / "order.arrow")
        shuffled = rows.shuffle(seed=17, indices_cache_file_name=order)
        shuffled[:8]
        return {"seed": 17, "row": 8}

    return starting.started(first, settings["folder"])


if __name__ == "__main__":
    common.main({"make": make, "start": start}, ("datasets", "pyarrow"))
