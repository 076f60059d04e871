"""Megatron-Bridge: its preparation of packed conversations, the modules for it alone.

The package imports transformer-engine, which needs CUDA, so its ``__init__`` is not run.
"""

import importlib
import logging
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmark.peers.programs import common
from tests.benchmark.peers.programs.rows import Stage, figures, save


def chat(settings: common.Settings) -> dict[str, Any]:
    """`tokenize_dataset`, and what `prepare_packed_sequence_data` does after it."""
    _package_without_init("megatron.bridge")
    _package_without_init("megatron.bridge.training")
    _package_without_init("megatron.bridge.models")
    from megatron.bridge.data.datasets import packed_sequence
    from megatron.core.tokenizers import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(settings["tokenizer"], metadata_path={"library": "huggingface"})
    folder, seq_len = Path(settings["folder"]), settings["seq_len"]
    options = {"chat": True, "use_hf_tokenizer_chat_template": True}

    def prepared(path: str) -> Any:
        return packed_sequence.tokenize_dataset(Path(path), tokenizer, seq_len, 17, dict(options))

    prepare, pack = Stage(), Stage()
    with prepare:
        dataset = prepared(settings["chats"])
    note = {}
    try:
        packed_sequence.create_hist(dataset, seq_len)
    except IndexError as error:  # it has no place for one that is longer than a row
        note = {"error_on_long": f"{type(error).__name__}: {error}"}
    is_short = [len(one["input_ids"]) - 1 <= seq_len for one in dataset]
    if not all(is_short):
        lines = Path(settings["chats"]).read_text(encoding="utf-8").splitlines(keepends=True)
        short = folder / "short.jsonl"
        short.write_text("".join(line for line, kept in zip(lines, is_short, strict=True) if kept), encoding="utf-8")
        prepare = Stage()
        with prepare:
            dataset = prepared(str(short))
    with pack:
        sequences, histogram = packed_sequence.create_hist(dataset, seq_len)
        assignments, _ = packed_sequence.create_packing_strategy(histogram, seq_len, "first_fit_shuffle")
        rows = packed_sequence.fill_packing_strategy(assignments, sequences, seq_len, tokenizer.eos_id)
        np.save(folder / "packed.npy", rows)
    pieces = []
    for row in rows:
        bounds = [*row["seq_start_id"], len(row["input_ids"])]
        for start, stop in pairwise(bounds):
            # the mask is of the token after each; the last of a piece is a label alone
            marks = [False, *map(bool, row["loss_mask"][start : stop - 1])]
            pieces.append(([int(token) for token in row["input_ids"][start:stop]], marks))
    save(settings["out"], pieces)
    return figures(prepare, pack) | note | {"rows": len(rows), "used": sum(len(ids) - 1 for ids, _ in pieces)}


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
