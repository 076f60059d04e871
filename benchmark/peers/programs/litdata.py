"""litdata: `optimize` with TokensLoader, a file for each input of a worker."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmark.peers.programs.common import Settings, batches, encoder, end_id, files, folder_bytes, main, texts


def _documents(path: str, tokenizer: str) -> Iterator[Any]:
    import numpy as np
    import torch

    encode, end = encoder(tokenizer), end_id(tokenizer)
    for batch in batches(texts([path])):
        for ids in encode(batch):
            yield torch.from_numpy(np.append(np.asarray(ids, np.uint16), np.uint16(end)))


def build(settings: Settings) -> dict[str, int]:
    """Chunks of 64 MB, as in its guide for text."""
    from litdata import TokensLoader, optimize

    optimize(
        fn=functools.partial(_documents, tokenizer=settings["tokenizer"]),
        inputs=files(settings["texts"]),
        output_dir=settings["out"],
        chunk_bytes="64MB",
        item_loader=TokensLoader(),
        num_workers=settings["processes"],
    )
    return {}


def count(settings: Settings) -> dict[str, int]:
    """What the index names."""
    index = Path(settings["out"], "index.json")
    chunks = json.loads(index.read_bytes())["chunks"] if index.exists() else []
    return {
        "documents": sum(chunk["chunk_size"] for chunk in chunks),
        "tokens": sum(chunk["dim"] for chunk in chunks),
        "output_bytes": folder_bytes(settings["out"]),
    }


if __name__ == "__main__":
    main({"build": build, "count": count}, ["litdata", "tokenizers"])
