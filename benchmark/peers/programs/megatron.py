"""Megatron: the loop of its preprocess_data.py, which is not in megatron-core, around IndexedDatasetBuilder."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

from benchmark.peers.programs.common import CannotError, Settings, encoder, end_id, files, folder_bytes, main

_worker: dict[str, Any] = {}


def _start(tokenizer: str) -> None:
    _worker.update(encode=encoder(tokenizer), end=end_id(tokenizer))


def _encode(line: str) -> list[int]:
    """One line to the ids of a document, as in the script: a record at a time, and the end token."""
    (ids,) = _worker["encode"]([json.loads(line)["text"]])
    return [*ids, _worker["end"]]


def build(settings: Settings) -> dict[str, int]:
    """All files one after another through one pool, 32 lines a message, into one ``.bin`` and ``.idx``."""
    paths = files(settings["texts"])
    if any(path.endswith(".zst") for path in paths):
        raise CannotError("The script reads plain text alone.")
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    Path(settings["out"]).mkdir(exist_ok=True)
    builder = IndexedDatasetBuilder(f"{settings['out']}/text.bin", dtype=np.uint16)
    with multiprocessing.Pool(settings["processes"], _start, (settings["tokenizer"],)) as pool:
        for path in paths:
            with open(path, encoding="utf-8") as lines:
                for ids in pool.imap(_encode, lines, 32):
                    builder.add_document(ids, [len(ids)])
    builder.finalize(f"{settings['out']}/text.idx")
    return {}


def count(settings: Settings) -> dict[str, int]:
    """What IndexedDataset opens; without the ``.idx``, which is written last, nothing."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    size = folder_bytes(settings["out"])
    if not Path(settings["out"], "text.idx").exists():
        return {"documents": 0, "tokens": 0, "output_bytes": size}
    data = IndexedDataset(f"{settings['out']}/text")
    return {"documents": len(data), "tokens": int(data.sequence_lengths.sum()), "output_bytes": size}


if __name__ == "__main__":
    main({"build": build, "count": count}, ["megatron-core", "tokenizers"])
