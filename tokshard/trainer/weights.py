"""Weights that a run starts with: of a checkpoint or of Hugging Face. `tokshard.interop.weights` is the way out."""

from __future__ import annotations

import dataclasses

import torch

from tokshard.errors import TrainerError
from tokshard.interop import llama
from tokshard.jobs.checkpoint_directory import is_checkpoint
from tokshard.trainer import checkpoint
from tokshard.trainer.model import Transformer, fill
from tokshard.trainer.parallel import together


def load_weights(path: str, model: Transformer, *, num_ids: int) -> list[str]:
    """Fill a model with the weights of a checkpoint, without optimizer and cursor, or of a Hugging Face directory.

    Every rank calls this, and reads all files: one tensor is in memory at a time. Ids that the directory does not have
    (padding of the vocabulary) get zeros.

    Args:
        num_ids: ids that the corpora may hold.

    Returns:
        What the reader should know: lines for people.

    Raises:
        TokshardError: the weights are damaged, or of another model; the same error on all ranks.
    """
    notes = [f"{path}: weights alone"]
    if is_checkpoint(path):
        checkpoint.load(path, model, None)
        return notes
    with together(
        f"{path} cannot be read", hint="give a checkpoint, or a directory with config.json and *.safetensors"
    ):
        damage = (llama.safetensors().SafetensorError, ValueError, KeyError, TypeError, AttributeError)
        try:
            files = llama.open_llama(path)
            files.check(dataclasses.asdict(model.shape), num_ids=num_ids)
            _fill(model, files)
        except damage as error:
            raise TrainerError(f"{path} is damaged: {error}", hint="download it again") from error
        if files.is_tied:
            notes.append("its head is its embedding: here both start with these values, and are trained apart")
    return notes


@torch.no_grad()
def _fill(model: Transformer, files: llama.LlamaFiles) -> None:
    parameters = {llama.name_of(name): parameter for name, parameter in model.named_parameters()}
    if different := sorted(files.places.keys() ^ parameters.keys()):
        raise TrainerError(f"{files.path} is of another model: {different[0]} is only in one of them", hint=llama.HINT)
    for name, parameter in parameters.items():
        tensor = files.tensor(name)
        rows = files.config["vocab_size"] if name in llama.OF_VOCABULARY else len(parameter)
        if tensor.shape != (expected := (rows, *parameter.shape[1:])):
            raise TrainerError(f"{files.path}: {name} is {tuple(tensor.shape)}, expected {expected}", hint=llama.HINT)
        full = torch.zeros(parameter.shape)
        full[:rows] = tensor
        fill(parameter, full)
