"""Weights as Hugging Face's Llama has them: ``python -m tokshard.trainer.huggingface CHECKPOINT --out DIR``, and back.

Nothing is unpickled or executed: tensors are written to and read from safetensors files.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tokshard.errors import CorpusError, StoreError, TokshardError, TrainerError, UsageError
from tokshard.jobs.checkpoint_directory import check_hashes, is_checkpoint
from tokshard.jobs.torch_checkpoints import load_checkpoint
from tokshard.runtime.shards import CorpusSource
from tokshard.trainer import checkpoint
from tokshard.trainer.model import PRESETS, Shape, Transformer, fill
from tokshard.trainer.parallel import DTYPES, together

CONFIG, INDEX, WEIGHTS, TOKENIZER = "config.json", "model.safetensors.index.json", "model.safetensors", "tokenizer.json"
FILE_BYTES = 5 * 10**9
"""Of the tensors of one file, which are in memory together."""

_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_SIZES = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
}
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False}
_FIXED = _DEFAULTS | {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_type": "default"}
"""What model.py cannot vary."""
_OF_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_HINT = "give the sizes of its config.json in [model] of the recipe; models of other families cannot be imported"


def export(path: str, out: str, *, dtype: str = "fp32", corpus: str = "") -> Iterator[str]:
    """Write the weights of a checkpoint for ``AutoModelForCausalLM.from_pretrained(out)`` of transformers.

    The vocabulary is cut to that of the corpus, whose tokenizer is written as well. If no corpus can be read, it stays
    as the model has it, padded. Takes one process, and memory for `FILE_BYTES`.

    Args:
        path: a checkpoint of the trainer.
        out: a directory that does not exist; it appears when it is complete.
        dtype: ``"fp32"`` or ``"bf16"``.
        corpus: that the model was trained on; default: the first one of the checkpoint's recipe.

    Yields:
        What was written, and what was not and why: lines for people.

    Raises:
        UsageError: `out` exists, or safetensors is not installed.
        TokshardError: the checkpoint, or the corpus that was asked for, is damaged or cannot be read.
        OSError: `out` cannot be written.
    """
    save_file, partial, places = _safetensors().torch.save_file, f"{out}.partial", dict[str, str]()
    for place in (out, partial):
        if os.path.lexists(place):
            raise UsageError(f"{place} exists", hint="give another --out, or remove it")
    check_hashes(path)
    index, state = checkpoint.read_index(path)
    shape = _saved_shape(state.config["model"], index.state_dict_metadata["model.embedding.weight"].size[0])  # type: ignore[union-attr]
    os.makedirs(partial)
    try:
        num_ids, special = shape.vocab_size, dict[str, int]()
        try:
            num_ids, special = _write_tokenizer(corpus or min(state.config["data"]["corpora"].values()), partial)
        except (CorpusError, StoreError) as error:
            if corpus:
                raise
            yield f"no tokenizer, and {num_ids:,} ids, maybe padded: {error.problem}; see --corpus"
        for file, tensors in _files(path, shape):
            ready = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
            ready |= {name: ready[name][:num_ids].clone() for name in _OF_VOCABULARY if name in ready}
            save_file(ready, os.path.join(partial, file), metadata={"format": "pt"})
            places |= dict.fromkeys(ready, file)
            yield f"{file}: {len(ready)} tensors"
        if len(set(places.values())) > 1:
            _write(os.path.join(partial, INDEX), {"metadata": {}, "weight_map": places})
        fields = _config(dataclasses.replace(shape, vocab_size=num_ids), state.config["data"]["seq_len"], dtype)
        _write(os.path.join(partial, CONFIG), fields | {"bos_token_id": None, "eos_token_id": None} | special)
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    yield f"wrote {out}: {num_ids:,} of {shape.vocab_size:,} ids, {dtype}"


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
    if is_checkpoint(path):
        checkpoint.load(path, model, None)
        return [f"{path}: weights alone"]
    with together(
        f"{path} cannot be read", hint="give a checkpoint, or a directory with config.json and *.safetensors"
    ):
        safetensors = _safetensors()
        try:
            notes = _load(path, model, num_ids, safetensors.safe_open)
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrainerError(f"{path} is damaged: {error}", hint="download it again") from error
    return notes


@torch.no_grad()
def _load(path: str, model: Transformer, num_ids: int, safe_open: Any) -> list[str]:
    fields = _read(os.path.join(path, CONFIG))
    _check(fields, model.shape, path, num_ids)
    places, notes = _places(path, safe_open), [f"{path}: weights alone"]
    if fields.get("tie_word_embeddings") and "lm_head.weight" not in places:
        places["lm_head.weight"] = places["model.embed_tokens.weight"]
        notes.append("its head is its embedding: here both start with these values, and are trained apart")
    parameters = {name_of(name): parameter for name, parameter in model.named_parameters()}
    if different := sorted(places.keys() ^ parameters.keys()):
        raise TrainerError(f"{path} is of another model: {different[0]} is only in one of them", hint=_HINT)
    for name, parameter in parameters.items():
        file, key = places[name]
        with safe_open(file, framework="pt") as tensors:
            tensor = tensors.get_tensor(key)
        rows = fields["vocab_size"] if name in _OF_VOCABULARY else len(parameter)
        if tensor.shape != (rows, *parameter.shape[1:]):
            raise TrainerError(
                f"{path}: {name} is {tuple(tensor.shape)}, expected {(rows, *parameter.shape[1:])}", hint=_HINT
            )
        full = torch.zeros(parameter.shape)
        full[:rows] = tensor
        fill(parameter, full)
    return notes


def name_of(parameter: str) -> str:
    """The name that Hugging Face's Llama gives to a parameter of `Transformer`."""
    layer, name = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", parameter).groups("")  # type: ignore[union-attr]
    return f"{layer and 'model.' + layer}{_NAMES[name]}.weight"


def _saved_shape(settings: Mapping[str, Any], vocab_size: int) -> Shape:
    changes = {name: value for name, value in settings.items() if value is not None and name != "preset"}
    return dataclasses.replace(PRESETS[settings["preset"]], **{**changes, "vocab_size": vocab_size})


def _files(path: str, shape: Shape) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Name of each file, and its tensors by their names there."""
    with torch.device("meta"):
        parameters = dict(Transformer(shape).named_parameters())
    groups: list[dict[str, Tensor]] = [{}]
    for name, parameter in parameters.items():
        if groups[-1] and sum(tensor.nbytes for tensor in groups[-1].values()) + parameter.nbytes > FILE_BYTES:
            groups.append({})
        groups[-1][name] = parameter
    for number, group in enumerate(groups, start=1):
        tensors = {f"model.{name}": torch.empty(tensor.shape) for name, tensor in group.items()}
        load_checkpoint(tensors, path, no_dist=True)
        file = WEIGHTS if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        yield file, {name_of(name): tensors[f"model.{name}"] for name in group}


def _write_tokenizer(location: str, out: str) -> tuple[int, dict[str, int]]:
    """Copy the tokenizer of a corpus. Returns its number of ids, and its delimiters by their names in `CONFIG`."""
    corpus = CorpusSource(location).corpus
    try:
        content = corpus.store.get(TOKENIZER)
    except OSError as error:
        raise CorpusError(f"{location}/{TOKENIZER}: {error.strerror}", hint="restore it from a copy") from error
    if hashlib.sha256(content).hexdigest() != corpus.manifest.files[TOKENIZER].sha256:
        raise CorpusError(f"{location}/{TOKENIZER} is not that of the manifest", hint="restore it from a copy")
    with open(os.path.join(out, TOKENIZER), "wb") as file:
        file.write(content)
    special = {"bos": corpus.bos_id, "eos": corpus.eos_id}
    texts = {token["id"]: token["content"] for token in json.loads(content).get("added_tokens", [])}
    settings = {f"{name}_token": texts[index] for name, index in special.items() if index in texts}
    _write(os.path.join(out, "tokenizer_config.json"), {"tokenizer_class": "PreTrainedTokenizerFast"} | settings)
    return corpus.vocab_size, {f"{name}_token_id": index for name, index in special.items() if index is not None}


def _config(shape: Shape, seq_len: int, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        **_FIXED,
        **{theirs: getattr(shape, ours) for ours, theirs in _SIZES.items()},
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": seq_len,
        "rope_theta": shape.rope_theta,  # of transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": False,
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
    }


def _check(fields: Mapping[str, Any], shape: Shape, path: str, num_ids: int) -> None:
    """Refuse weights that would mean something else in this model."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    found: dict[str, Any] = {**_DEFAULTS, **fields} | {"rope_type": rope.get("rope_type", rope.get("type", "default"))}
    found |= {"num_key_value_heads": fields.get("num_key_value_heads") or fields.get("num_attention_heads")}
    found["rope_theta"] = rope.get("rope_theta", fields.get("rope_theta", 10_000.0))
    needed = _FIXED | {theirs: getattr(shape, ours) for ours, theirs in _SIZES.items()}
    needed |= {"rope_theta": shape.rope_theta}
    if fields.get("head_dim"):
        needed["head_dim"] = shape.dim // shape.num_heads
    different = [
        f"{key} is {found.get(key)!r} there, {value!r} here" for key, value in needed.items() if found.get(key) != value
    ]
    if different:
        raise TrainerError(f"{path}/{CONFIG} is of another model: {'; '.join(different)}", hint=_HINT)
    num_rows = fields.get("vocab_size")
    if not isinstance(num_rows, int) or not num_ids <= num_rows <= shape.vocab_size:
        raise TrainerError(
            f"{path} has {num_rows} ids, the corpora {num_ids:,} and the model {shape.vocab_size:,}",
            hint="build the corpora with the tokenizer of these weights, and give their ids as model.vocab_size",
        )


def _places(path: str, safe_open: Any) -> dict[str, tuple[str, str]]:
    """Name of each tensor to its file, and its name there."""
    if os.path.exists(os.path.join(path, INDEX)):
        files = set(_read(os.path.join(path, INDEX))["weight_map"].values())
    else:
        files = {WEIGHTS}
    places = dict[str, tuple[str, str]]()
    for name in sorted(files):
        if os.path.basename(name) != name:
            raise TrainerError(f"{path}/{INDEX} names {name!r}, a file elsewhere", hint="download it again")
        file = os.path.join(path, name)
        with safe_open(file, framework="pt") as tensors:
            keys = [key for key in tensors.keys() if not key.endswith("rotary_emb.inv_freq")]  # noqa: SIM118
            places |= {key: (file, key) for key in keys}
    return places


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError("safetensors is not installed", hint="pip install 'tokshard[safetensors]'") from error
    return safetensors


def _read(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        return dict(json.load(file))


def _write(path: str, fields: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(fields, file, indent=2)


def main(arguments: list[str]) -> int:
    """Export a checkpoint. Exit codes: 0, 1 the checkpoint is damaged or a disk failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m tokshard.trainer.huggingface", description=export.__doc__)
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
    except OSError as error:
        sys.stderr.write(
            f"error: {given.out} could not be written: {error}\nhint: make room, and remove {given.out}.partial\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
