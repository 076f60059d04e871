"""Weights of a checkpoint for Hugging Face's transformers: ``python -m tokshard.interop.weights CHECKPOINT --out DIR``.

Needs no model: a checkpoint has the names and sizes of its tensors, and the recipe of the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tokshard.errors import CorpusError, StoreError, TokshardError, TrainerError
from tokshard.format.opening import open_corpus
from tokshard.interop import llama
from tokshard.interop.export.destination import new_place
from tokshard.jobs.checkpoint_directory import STATE_FILE, check_hashes
from tokshard.jobs.model_shape import model_shape
from tokshard.jobs.recipe import Config, resolve
from tokshard.jobs.torch_checkpoints import load_checkpoint, read_index

FILE_BYTES = 5 * 10**9
"""Of the tensors of one file, which are in memory together."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export(path: str, out: str, *, dtype: str = "fp32", corpus: str = "") -> Iterator[str]:
    """Write the weights of a checkpoint for ``AutoModelForCausalLM.from_pretrained(out)`` of transformers.

    The vocabulary is cut to that of the corpus, whose tokenizer is written as well. If no corpus can be read, it stays
    as the model has it, padded. Takes one process, and memory for `FILE_BYTES`.

    Args:
        path: a checkpoint of the trainer.
        out: a directory that does not exist, or is empty; it appears when it is complete.
        dtype: ``"fp32"`` or ``"bf16"``.
        corpus: that the model was trained on; default: the first one of the checkpoint's recipe.

    Yields:
        What was written, and what was not and why: lines for people.

    Raises:
        UsageError: `out` has content, or safetensors is not installed.
        ExportError: `out` cannot be written.
        TokshardError: the checkpoint, or the corpus that was asked for, is damaged or cannot be read.
    """
    save_file = llama.safetensors().torch.save_file
    with new_place(out, is_marked=False) as store:
        place, files, special = store.where(""), dict[str, str](), dict[str, int]()
        recipe, sizes = _described(path)
        num_rows = num_ids = sizes["model.embedding.weight"][0]
        try:
            found = open_corpus(corpus or min(recipe.data.corpora.values()))
            num_ids, special = found.vocab_size, llama.write_tokenizer(place, found)
        except (CorpusError, StoreError) as error:
            if corpus:
                raise
            yield f"no tokenizer, and {num_ids:,} ids, maybe padded: {error.problem}; see --corpus"
        groups = _groups(sizes)
        for number, group in enumerate(groups, start=1):
            tensors = {name: torch.empty(size) for name, size in group.items()}
            load_checkpoint(tensors, path, no_dist=True)
            ready = dict(_converted(tensors, _DTYPES[dtype], num_ids))
            file = llama.file_name(number, len(groups))
            save_file(ready, os.path.join(place, file), metadata={"format": "pt"})
            files |= dict.fromkeys(ready, file)
            yield f"{file}: {len(ready)} tensors"
        llama.write_index(place, files)
        named = dataclasses.asdict(model_shape(recipe.model, num_rows)) | {"vocab_size": num_ids}
        llama.write_config(place, named, seq_len=recipe.data.seq_len, dtype=dtype, special=special)
    yield f"wrote {out}: {num_ids:,} of {num_rows:,} ids, {dtype}"


def _described(path: str) -> tuple[Config, dict[str, torch.Size]]:
    """The recipe of an undamaged checkpoint, and the sizes of its weights by name."""
    try:
        check_hashes(path)
        index, state = read_index(path)
    except OSError as error:
        raise TrainerError(
            f"{path} cannot be read: {error}", hint="repair the disk, or use another checkpoint"
        ) from error
    entries = {name: of for name, of in index.state_dict_metadata.items() if name.startswith("model.")}
    sizes = {name: of.size for name, of in entries.items() if isinstance(of, TensorStorageMetadata)}
    return resolve(state.config, where=os.path.join(path, STATE_FILE)), sizes


def _groups(sizes: Mapping[str, torch.Size]) -> list[dict[str, torch.Size]]:
    """The tensors of each file: fp32, by name."""
    groups: list[dict[str, torch.Size]] = [{}]
    for name, size in sizes.items():
        if groups[-1] and 4 * sum(map(math.prod, (*groups[-1].values(), size))) > FILE_BYTES:
            groups.append({})
        groups[-1][name] = size
    return groups


def _converted(tensors: Mapping[str, Tensor], dtype: torch.dtype, num_ids: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a checkpoint by their names in the export, without the rows that pad the vocabulary."""
    for name, tensor in tensors.items():
        theirs = llama.name_of(name.removeprefix("model."))
        yield theirs, tensor[: num_ids if theirs in llama.OF_VOCABULARY else None].to(dtype, copy=True)


def main(arguments: list[str]) -> int:
    """Export a checkpoint. Exit codes: 0, 1 the checkpoint is damaged or a disk failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m tokshard.interop.weights", description=export.__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--out", required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--corpus", default="", help="that the model was trained on; default: of the recipe")
    given = parser.parse_args(arguments)
    try:
        for line in export(given.checkpoint, given.out, dtype=given.dtype, corpus=given.corpus):
            sys.stdout.write(line + "\n")
    except TokshardError as error:
        sys.stderr.write(f"error: {error.problem}\nhint: {error.hint}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
