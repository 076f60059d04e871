"""Weights in the form of Hugging Face: ``python -m tokshard.trainer.hugging_face CHECKPOINT --out DIR``.

`load_weights` starts a run with such weights, or with the weights of a checkpoint. `export` writes the weights of a
checkpoint; it needs no model, because a checkpoint has the names and sizes of its tensors, and the recipe of the run.
Nothing is unpickled or executed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tokshard.errors import ExportError, TokshardError, TrainerError, UsageError
from tokshard.extras import extra_module
from tokshard.format.corpus import Corpus
from tokshard.format.decode import read_tokenizer
from tokshard.format.opening import open_corpus
from tokshard.interop.export.destination import new_place
from tokshard.run_files.checkpoint_directory import STATE_FILE, check_hashes, is_checkpoint
from tokshard.run_files.model_shape import Shape, model_shape
from tokshard.run_files.recipe import Config, resolve
from tokshard.run_files.torch_checkpoints import load_checkpoint, read_index
from tokshard.trainer import checkpoint
from tokshard.trainer.launcher import exit_code_of, show
from tokshard.trainer.model import Transformer, fill
from tokshard.trainer.parallel import DTYPES, together

FILE_BYTES = 5 * 10**9
"""The size of the tensors of one file, which are in memory together."""
_OF_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
"""The files that an export copies from a tokenizer's folder: one of them has the chat template."""
CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"

_HINT = "models that the trainer can train are Llama and Qwen3 of transformers, dense, without quantization"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
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
    "norm_eps": "rms_norm_eps",
}
_SCALING = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_length": "original_max_position_embeddings",
}
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""The settings that the trainer's model cannot vary."""
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "qwen3"),
    "rope_type": ("default", "llama3"),
    **{key: (value,) for key, value in _FIXED.items()},
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "layer_types": ("full_attention",),
    "no_rope_layers": (1,),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "quantization_config": (None,),
}
"""The settings that a config.json may have: values, or values of each layer. It may leave out all but `model_type`."""

_Places = dict[str, tuple[str, str]]
"""Name of each tensor to its file, and its name there. A tied head is the embedding."""


def load_weights(path: str, model: Transformer, *, num_ids: int) -> list[str]:
    """Fill a model with the weights of a checkpoint, without optimizer and cursor, or of a Hugging Face directory.

    Every rank calls this, and reads all files: one tensor is in memory at a time. Ids that the directory does not have
    (padding of the vocabulary) get zeros.

    Args:
        num_ids: ids that the corpora may hold.

    Returns:
        Notes for the user, one line each.

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
        damage = (_safetensors().SafetensorError, ValueError, KeyError, TypeError, AttributeError)
        try:
            config = _read(os.path.join(path, CONFIG))
            _check(path, config, model.shape, num_ids)
            places = _places(path)
            if config.get("tie_word_embeddings"):
                places.pop(_HEAD, None)
                if not model.shape.tied_embeddings:
                    places[_HEAD] = places[_EMBEDDING]
                    notes.append(
                        "its head is its embedding: here both start with these values, and are trained apart. "
                        "model.tied_embeddings=true keeps them together"
                    )
            _fill(model, path, places, config["vocab_size"])
        except damage as error:
            raise TrainerError(f"{path} is damaged: {error}", hint="download it again") from error
    return notes


def export(path: str, out: str, *, dtype: str = "fp32", corpus: str = "", tokenizer: str = "") -> Iterator[str]:
    """Write the weights of a checkpoint for ``AutoModelForCausalLM.from_pretrained(out)`` of transformers.

    The vocabulary is cut to the size of the corpus's, and its tokenizer is written, too. If no corpus can be read, the
    vocabulary stays padded. Takes one process, and memory for `FILE_BYTES`.

    Args:
        path: a checkpoint of the trainer.
        out: a directory that does not exist, or is empty; it appears when it is complete.
        dtype: ``"fp32"`` or ``"bf16"``.
        corpus: a corpus that the model was trained on; default: the one of the recipe whose path comes first.
        tokenizer: a folder with the same tokenizer, whose chat template and settings are copied; default: the one whose
            weights the run began with.

    Yields:
        Lines for people: the parts that were written, and those that were not, with the reason.

    Raises:
        UsageError: `out` has content, safetensors is not installed, or `tokenizer` is another one.
        ExportError: `out` cannot be written.
        TokshardError: the checkpoint, or the given corpus, is damaged or cannot be read.
    """
    save_file = _safetensors().torch.save_file
    with new_place(out, is_marked=False) as store:
        place, files, special = store.where(""), dict[str, str](), dict[str, int]()
        recipe, sizes = _described(path)
        num_rows = num_ids = sizes["model.embedding.weight"][0]
        try:
            found = open_corpus(corpus or min(recipe.data.corpora.values()))
            num_ids, special = found.vocab_size, _write_tokenizer(place, found)
        except TokshardError as error:  # also one that asks for an extra
            if corpus:
                raise
            yield f"no tokenizer, and {num_ids:,} ids, maybe padded: {error.problem}; see --corpus"
        else:
            yield _copy_settings(place, tokenizer or recipe.checkpoint.load_weights, is_needed=bool(tokenizer))
        groups = _groups(sizes)
        for number, group in enumerate(groups, start=1):
            tensors = {name: torch.empty(size) for name, size in group.items()}
            load_checkpoint(tensors, path, no_dist=True)
            ready = dict(_converted(tensors, DTYPES[dtype], num_ids))
            file = WEIGHTS if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
            try:
                save_file(ready, os.path.join(place, file), metadata={"format": "pt"})
            except _safetensors().SafetensorError as error:  # of the disk
                problem = f"{out} cannot be written: {error}"
                raise ExportError(problem, hint="make room, or give another --out") from error
            files |= dict.fromkeys(ready, file)
            yield f"{file}: {len(ready)} tensors"
        if len(groups) > 1:
            _write(os.path.join(place, INDEX), {"metadata": {}, "weight_map": files})
        shape = dataclasses.replace(model_shape(recipe.model, num_rows), vocab_size=num_ids)
        write_config(place, shape, seq_len=recipe.data.seq_len, dtype=dtype, special=special)
    yield f"wrote {out}: {num_ids:,} of {num_rows:,} ids, {dtype}"


def write_config(path: str, shape: Shape, *, seq_len: int, dtype: str, special: Mapping[str, int]) -> None:
    """Write the config.json of a model of the trainer.

    Args:
        dtype: of the tensors, ``"fp32"`` or ``"bf16"``.
        special: ids of delimiters, such as ``eos_token_id``.
    """
    is_scaled = shape.rope_factor > 1
    rope: dict[str, Any] = {"rope_type": "llama3" if is_scaled else "default"}
    if is_scaled:
        rope |= {theirs: getattr(shape, ours) for ours, theirs in _SCALING.items()}
    fields = {
        "architectures": ["Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        **_FIXED,
        **{theirs: getattr(shape, ours) for ours, theirs in _SIZES.items()},
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": max(seq_len, int(shape.rope_original_length * shape.rope_factor) * is_scaled),
        "rope_theta": shape.rope_theta,  # of transformers 4, as the next
        **({"rope_scaling": rope} if is_scaled else {}),
        "rope_parameters": rope | {"rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
        "bos_token_id": None,
        "eos_token_id": None,
        **special,
    }
    _write(os.path.join(path, CONFIG), fields)


def name_of(parameter: str) -> str:
    """The name of a parameter of the trainer's model in Hugging Face's Llama and Qwen3."""
    layer, name = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", parameter).groups("")  # type: ignore[union-attr]
    return f"{layer and 'model.' + layer}{_NAMES[name]}.weight"


def _check(path: str, config: Mapping[str, Any], shape: Shape, num_ids: int) -> None:
    """Refuse weights that would mean something else in a model of the trainer."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = {"model_type": "", **config, **rope, "rope_type": rope.get("rope_type", rope.get("type"))}
    if config.get("use_sliding_window") is False:
        given.pop("sliding_window", None)  # transformers does not read it then
    foreign = [
        f"{key} is {json.dumps(value)} (supported: {' or '.join(map(json.dumps, supported))})"
        for key, supported in _SUPPORTED.items()
        if (value := given.get(key)) is not None
        and any(each not in supported for each in (value if isinstance(value, list) else [value]))
    ]
    if foreign:
        raise UsageError(f"{path}/{CONFIG} has what the trainer cannot train: {'; '.join(foreign)}", hint=_HINT)
    found = _model_of(config, rope)
    needed = {name: getattr(shape, name) for name in found} | {"head_dim": shape.head_size}
    if shape.rope_factor == 1:
        needed |= {name: found[name] for name in _SCALING if name != "rope_factor"}  # they mean nothing then
    different = [name for name in found if found[name] != needed[name]]
    if different and not (different == ["tied_embeddings"] and found["tied_embeddings"]):  # a head may be trained apart
        differences = (f"model.{name} is {found[name]!r} there, {needed[name]!r} here" for name in different)
        settings = " ".join(f"model.{name}={json.dumps(found[name])}" for name in different)
        raise UsageError(
            f"{path}/{CONFIG} is of another model: {'; '.join(differences)}",
            hint=f"train these weights with {settings}",
        )
    num_rows = config.get("vocab_size")
    if not isinstance(num_rows, int) or not num_ids <= num_rows <= shape.vocab_size:
        raise UsageError(
            f"{path} has {num_rows} ids, the corpora {num_ids:,} and the model {shape.vocab_size:,}",
            hint=f"build the corpora with the tokenizer of these weights, and give model.vocab_size={num_rows}",
        )


def _model_of(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as keys of ``[model]``, with the defaults of transformers."""
    heads, is_qwen = config.get("num_attention_heads"), config.get("model_type") == "qwen3"
    found = {ours: config.get(theirs) for ours, theirs in _SIZES.items()}
    found["num_kv_heads"] = config.get("num_key_value_heads") or heads
    found["norm_eps"] = config.get("rms_norm_eps", 1e-6)
    found["head_dim"] = config.get("head_dim") or (128 if is_qwen else (config.get("hidden_size") or 0) // (heads or 1))
    found["qk_norm"], found["tied_embeddings"] = is_qwen, bool(config.get("tie_word_embeddings"))
    found["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    is_scaled = rope.get("rope_type", rope.get("type")) == "llama3"
    return found | {ours: rope[theirs] if is_scaled else 1 for ours, theirs in _SCALING.items()}


def _places(path: str) -> _Places:
    """The tensors of a directory, by name."""
    files, places = {WEIGHTS}, _Places()
    if os.path.exists(os.path.join(path, INDEX)):
        files = set(_read(os.path.join(path, INDEX))["weight_map"].values())
    for name in sorted(files):
        if os.path.basename(name) != name:
            raise TrainerError(f"{path}/{INDEX} names {name!r}, a file elsewhere", hint="download it again")
        file = os.path.join(path, name)
        with _safetensors().safe_open(file, framework="pt") as tensors:
            keys = [key for key in tensors.keys() if not key.endswith("rotary_emb.inv_freq")]  # noqa: SIM118
            places |= {key: (file, key) for key in keys}
    return places


@torch.no_grad()
def _fill(model: Transformer, path: str, places: _Places, num_rows: int) -> None:
    parameters = {name_of(name): parameter for name, parameter in model.named_parameters()}
    if different := sorted(places.keys() ^ parameters.keys()):
        raise UsageError(f"{path} is of another model: {different[0]} is only in one of them", hint=_HINT)
    for loads in (False, True):  # every size is checked before anything is loaded
        for name, parameter in parameters.items():
            file, key = places[name]
            rows = num_rows if name in (_EMBEDDING, _HEAD) else len(parameter)
            with _safetensors().safe_open(file, framework="pt") as tensors:
                size, expected = tuple(tensors.get_slice(key).get_shape()), (rows, *parameter.shape[1:])
                if size != expected:
                    raise TrainerError(f"{path}: {name} is {size}, expected {expected}", hint=_HINT)
                if loads:
                    full = torch.zeros(parameter.shape)
                    full[:rows] = tensors.get_tensor(key)
                    fill(parameter, full)


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
        theirs = name_of(name.removeprefix("model."))
        yield theirs, tensor[: num_ids if theirs in (_EMBEDDING, _HEAD) else None].to(dtype, copy=True)


def _write_tokenizer(path: str, corpus: Corpus) -> dict[str, int]:
    """Copy the tokenizer of a corpus. Returns its delimiters, by their names in config.json.

    Raises:
        DamagedCorpusError: it is missing, or does not match the manifest.
    """
    content = read_tokenizer(corpus.store, corpus.manifest)
    with open(os.path.join(path, "tokenizer.json"), "wb") as file:
        file.write(content)
    special = {name: index for name, index in (("bos", corpus.bos_id), ("eos", corpus.eos_id)) if index is not None}
    texts = {token["id"]: token["content"] for token in json.loads(content).get("added_tokens", [])}
    settings = {f"{name}_token": texts[index] for name, index in special.items() if index in texts}
    _write(os.path.join(path, "tokenizer_config.json"), {"tokenizer_class": "PreTrainedTokenizerFast"} | settings)
    return {f"{name}_token_id": index for name, index in special.items()}


def _copy_settings(path: str, folder: str, *, is_needed: bool) -> str:
    """Copy the files beside a folder's tokenizer.json, if that equals the one in `path`. Returns a line for people.

    Raises:
        UsageError: the folder has no such tokenizer, and it `is_needed`.
    """
    own, other = (os.path.join(at, "tokenizer.json") for at in (path, folder))
    is_same = False
    with suppress(OSError, ValueError, TypeError):  # a missing or damaged file is not the same
        is_same = bool(folder) and _read(own) == _read(other)
    if not is_same:
        if is_needed:
            raise UsageError(
                f"{folder} does not have the tokenizer of the corpus",
                hint="give the folder that the corpus was built with",
            )
        return "no chat template: --tokenizer DIR copies one from the folder of the tokenizer"
    names = [name for name in _OF_TOKENIZER if os.path.exists(os.path.join(folder, name))]
    for name in names:
        shutil.copyfile(os.path.join(folder, name), os.path.join(path, name))
    return f"{', '.join(names) or 'nothing'} of {folder}"


def _safetensors() -> Any:
    """The package.

    Raises:
        UsageError: it is not installed.
    """
    extra_module("safetensors.torch", "safetensors is not installed", extra="safetensors")
    return sys.modules["safetensors"]


def _read(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        return dict(json.load(file))


def _write(path: str, fields: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(fields, file, indent=2)


def main(arguments: list[str]) -> int:
    """Export a checkpoint. Exit codes: 0, 1 the checkpoint is damaged or a disk failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m tokshard.trainer.hugging_face",
        description="Export the weights of a checkpoint, with the tokenizer of its corpus, as a Hugging Face Llama or "
        "Qwen3: config.json and safetensors files that AutoModelForCausalLM.from_pretrained(DIR) loads.",
        epilog="Example: python -m tokshard.trainer.hugging_face run/checkpoints/step-00040000 --out llama",
    )
    parser.add_argument("path", metavar="CHECKPOINT", help="a checkpoint of the trainer")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="a directory that is new or empty; it appears when it is complete"
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="type of the numbers that are written; default: fp32"
    )
    parser.add_argument(
        "--corpus",
        default="",
        metavar="CORPUS",
        help="the corpus whose tokenizer is written, and whose vocabulary the weights are cut to; default: the one "
        "of the run whose path comes first",
    )
    parser.add_argument(
        "--tokenizer",
        default="",
        metavar="DIR",
        help="a folder with the same tokenizer, whose chat template and settings are copied; default: the folder whose "
        "weights the run began with (checkpoint.load_weights)",
    )
    given = parser.parse_args(arguments)
    return exit_code_of(lambda: show(export(**vars(given))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
