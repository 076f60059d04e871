"""megatron-core: GPTDataset's three indices, over an .idx of many documents and a .bin that is a hole."""

import os
import struct
import types
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.peers.programs import common, starting


def make(settings: common.Settings) -> dict[str, Any]:
    prefix = str(Path(settings["folder"]) / "corpus")
    count, length = settings["documents"], settings["document_tokens"]
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1))  # 8: uint16
        np.full(count, length, np.int32).tofile(file)
        (np.arange(count, dtype=np.int64) * (2 * length)).tofile(file)
        np.arange(count + 1, dtype=np.int64).tofile(file)
    with open(f"{prefix}.bin", "wb") as file:
        os.truncate(file.fileno(), 2 * count * length)
    return {"place": prefix}


def start(settings: common.Settings) -> dict[str, Any]:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=17,
        sequence_length=4_096,
        split="1",
        path_to_cache=settings["folder"],
        tokenizer=types.SimpleNamespace(unique_identifiers={}, eod=0, pad=1, vocab_size=2),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )

    def first() -> Any:
        indexed = GPTDataset.build_low_level_dataset(settings["place"], config)
        numbers = np.arange(len(indexed.document_indices) - 1, dtype=np.int32)
        dataset = GPTDataset(indexed, settings["place"], numbers, None, Split.train, config)
        for row in range(8):
            dataset[row]
        return {"consumed_train_samples": 8}

    return starting.started(first, settings["folder"])


if __name__ == "__main__":
    common.main({"make": make, "start": start}, ("megatron-core",))
