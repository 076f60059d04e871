"""datasets: `load_dataset("json")`, `map` in batches, `save_to_disk`."""

from pathlib import Path
from typing import Any

from benchmark.peers.programs.common import Settings, encoder, end_id, files, folder_bytes, main

_worker: dict[str, Any] = {}


def _encode(batch: dict[str, list[str]], tokenizer: str) -> dict[str, list[Any]]:
    import numpy as np

    if not _worker:  # once in each process
        _worker.update(encode=encoder(tokenizer), end=end_id(tokenizer))
    ids = _worker["encode"](batch["text"])
    return {"input_ids": [np.append(np.asarray(each, np.uint16), np.uint16(_worker["end"])) for each in ids]}


def build(settings: Settings) -> dict[str, int]:
    """Ids are uint16; left to itself it stores 8 bytes a token."""
    from datasets import Features, List, Value, load_dataset

    data = load_dataset(
        "json", data_files=files(settings["texts"]), split="train", cache_dir=settings["out"] + "-cache"
    )
    encoded = data.map(
        _encode,
        batched=True,
        num_proc=settings["processes"],
        remove_columns=data.column_names,
        features=Features({"input_ids": List(Value("uint16"))}),
        fn_kwargs={"tokenizer": settings["tokenizer"]},
    )
    encoded.save_to_disk(settings["out"], num_proc=settings["processes"])
    return {}


def count(settings: Settings) -> dict[str, int]:
    """What `load_from_disk` opens; without the state, which is written last, nothing."""
    from datasets import load_from_disk

    size = folder_bytes(settings["out"])
    if not Path(settings["out"], "state.json").exists():
        return {"documents": 0, "tokens": 0, "output_bytes": size}
    data = load_from_disk(settings["out"])
    tokens = sum(len(chunk.flatten()) for chunk in data.data.column("input_ids").chunks)
    return {"documents": len(data), "tokens": tokens, "output_bytes": size}


if __name__ == "__main__":
    main({"build": build, "count": count}, ["datasets", "tokenizers"])
