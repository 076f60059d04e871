"""Megatron-Bridge: its offline preparation of packed conversations, the modules for it alone.

The package imports what needs CUDA, so its ``__init__`` is not run, nor that of the packages on the way to the modules.
"""

import importlib
import logging
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.peers.programs import common
from benchmark.peers.programs.rows import Stage, figures, save


def chat(settings: common.Settings) -> dict[str, Any]:
    """The steps of `prepare_gpt_sft_packed_data`, in stages."""
    for name in ("", ".training", ".models", ".data", ".data.builders"):
        _package_without_init(f"megatron.bridge{name}")
    from megatron.bridge.data.builders.gpt_sft import build_gpt_sft_split
    from megatron.bridge.data.packing import algorithms, offline
    from megatron.core.tokenizers import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(settings["tokenizer"], metadata_path={"library": "huggingface"})
    seq_len = settings["seq_len"]
    prepare, pack = Stage(), Stage()
    with prepare:
        dataset = offline.tokenize_dataset(
            Path(settings["chats"]),
            tokenizer,
            seq_len,
            17,
            {"chat": True, "use_hf_tokenizer_chat_template": True},
            num_tokenizer_workers=settings["workers"],
            dataset_builder=build_gpt_sft_split,
        )
    with pack:
        sequences, histogram = algorithms.create_hist(dataset, seq_len)
        assignments, _ = algorithms.create_packing_strategy(histogram, seq_len, "first_fit_shuffle")
        rows = algorithms.fill_packing_strategy(assignments, sequences, seq_len, tokenizer.eos_id)
        np.save(Path(settings["folder"]) / "packed.npy", rows)
    pieces = []
    for row in rows:
        bounds = [*row["seq_start_id"], len(row["input_ids"])]
        for start, stop in pairwise(bounds):
            # the mask is of the token after each; the last of a piece is a label alone
            marks = [False, *map(bool, row["loss_mask"][start : stop - 1])]
            pieces.append(([int(token) for token in row["input_ids"][start:stop]], marks))
    save(settings["out"], pieces)
    return figures(prepare, pack) | {"rows": len(rows), "used": sum(len(ids) - 1 for ids, _ in pieces)}


def _package_without_init(name: str) -> None:
    """Make the modules of a package importable without its ``__init__``."""
    parent, _, child = name.rpartition(".")
    places = list(importlib.import_module(parent).__path__)
    package = types.ModuleType(name)
    package.__path__ = [str(path) for place in places if (path := Path(place) / child).is_dir()]
    sys.modules[name] = package
    setattr(sys.modules[parent], child, package)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    common.main({"chat": chat}, ("megatron-bridge", "megatron-core", "transformers", "tokenizers"))
