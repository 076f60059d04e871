"""Weights as Hugging Face's Llama keeps them: the names of tensors, config.json, safetensors files, the tokenizer.

Nothing is unpickled or executed. Tensors are those of torch, and only pass through here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokshard.errors import RESTORE, DamagedCorpusError, TrainerError, UsageError
from tokshard.format import names
from tokshard.format.corpus import Corpus

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
OF_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
"""Tensors with a row for each id."""
HINT = "give the sizes of its config.json in [model] of the recipe; models of other families cannot be imported"

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
"""What the model of the trainer cannot vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFiles:
    """A directory of weights.

    Args:
        path: for messages.
        config: of config.json.
        places: name of each tensor to its file, and its name there. A tied head is the embedding.
    """

    path: str
    config: dict[str, Any]
    places: dict[str, tuple[str, str]]

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.places["lm_head.weight"][1] != "lm_head.weight"

    def check(self, sizes: Mapping[str, Any], *, num_ids: int) -> None:
        """Refuse weights that would mean something else in a model of the trainer.

        Args:
            sizes: of the model, by the names of a recipe.
            num_ids: ids that the corpora may hold.

        Raises:
            TrainerError: names what differs.
        """
        config = self.config
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        found = {**_DEFAULTS, **config} | {"rope_type": rope.get("rope_type", rope.get("type", "default"))}
        found |= {"num_key_value_heads": config.get("num_key_value_heads") or config.get("num_attention_heads")}
        found["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
        needed = _FIXED | {theirs: sizes[ours] for ours, theirs in _SIZES.items()}
        needed |= {"rope_theta": sizes["rope_theta"]}
        if config.get("head_dim"):
            needed["head_dim"] = sizes["dim"] // sizes["num_heads"]
        different = [
            f"{key} is {found.get(key)!r} there, {value!r} here"
            for key, value in needed.items()
            if found.get(key) != value
        ]
        if different:
            raise TrainerError(f"{self.path}/{CONFIG} is of another model: {'; '.join(different)}", hint=HINT)
        num_rows = config.get("vocab_size")
        if not isinstance(num_rows, int) or not num_ids <= num_rows <= sizes["vocab_size"]:
            raise TrainerError(
                f"{self.path} has {num_rows} ids, the corpora {num_ids:,} and the model {sizes['vocab_size']:,}",
                hint="build the corpora with the tokenizer of these weights, and give their ids as model.vocab_size",
            )

    def tensor(self, name: str) -> Any:
        """One tensor, in memory."""
        file, key = self.places[name]
        with safetensors().safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(key)


def open_llama(path: str) -> LlamaFiles:
    """The weights in a directory; tensors are read when they are asked for.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: the file is missing or damaged; reading a tensor
            raises the same.
        TrainerError: its index names a file elsewhere.
        UsageError: safetensors is not installed.
    """
    config, files, places = _read(os.path.join(path, CONFIG)), {WEIGHTS}, dict[str, tuple[str, str]]()
    if os.path.exists(os.path.join(path, INDEX)):
        files = set(_read(os.path.join(path, INDEX))["weight_map"].values())
    for name in sorted(files):
        if os.path.basename(name) != name:
            raise TrainerError(f"{path}/{INDEX} names {name!r}, a file elsewhere", hint="download it again")
        file = os.path.join(path, name)
        with safetensors().safe_open(file, framework="pt") as tensors:
            keys = [key for key in tensors.keys() if not key.endswith("rotary_emb.inv_freq")]  # noqa: SIM118
            places |= {key: (file, key) for key in keys}
    if config.get("tie_word_embeddings") and "lm_head.weight" not in places:
        places["lm_head.weight"] = places["model.embed_tokens.weight"]
    return LlamaFiles(path=path, config=config, places=places)


def write_config(path: str, sizes: Mapping[str, Any], *, seq_len: int, dtype: str, special: Mapping[str, int]) -> None:
    """Write the config.json of a model of the trainer.

    Args:
        sizes: of the model, by the names of a recipe.
        dtype: of the tensors, ``"fp32"`` or ``"bf16"``.
        special: ids of delimiters, such as ``eos_token_id``.
    """
    fields = {
        "architectures": ["LlamaForCausalLM"],
        **_FIXED,
        **{theirs: sizes[ours] for ours, theirs in _SIZES.items()},
        "vocab_size": sizes["vocab_size"],
        "max_position_embeddings": seq_len,
        "rope_theta": sizes["rope_theta"],  # of transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes["rope_theta"]},
        "tie_word_embeddings": False,
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
        "bos_token_id": None,
        "eos_token_id": None,
        **special,
    }
    _write(os.path.join(path, CONFIG), fields)


def write_index(path: str, files: Mapping[str, str]) -> None:
    """Write which file has which tensor; one file alone needs no index."""
    if len(set(files.values())) > 1:
        _write(os.path.join(path, INDEX), {"metadata": {}, "weight_map": dict(files)})


def write_tokenizer(path: str, corpus: Corpus) -> dict[str, int]:
    """Copy the tokenizer of a corpus. Returns its delimiters, by their names in config.json.

    Raises:
        DamagedCorpusError: it is missing, or not that of the manifest.
    """
    source = corpus.store.where(names.TOKENIZER)
    try:
        content = corpus.store.get(names.TOKENIZER)
    except OSError as error:
        raise DamagedCorpusError(f"{source} cannot be read: {error.strerror}", hint=RESTORE) from error
    if hashlib.sha256(content).hexdigest() != corpus.manifest.files[names.TOKENIZER].sha256:
        raise DamagedCorpusError(f"{source} is not that of the manifest", hint=RESTORE)
    with open(os.path.join(path, "tokenizer.json"), "wb") as file:
        file.write(content)
    special = {name: index for name, index in (("bos", corpus.bos_id), ("eos", corpus.eos_id)) if index is not None}
    texts = {token["id"]: token["content"] for token in json.loads(content).get("added_tokens", [])}
    settings = {f"{name}_token": texts[index] for name, index in special.items() if index in texts}
    _write(os.path.join(path, "tokenizer_config.json"), {"tokenizer_class": "PreTrainedTokenizerFast"} | settings)
    return {f"{name}_token_id": index for name, index in special.items()}


def name_of(parameter: str) -> str:
    """The name of a parameter of the trainer's model here."""
    layer, name = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", parameter).groups("")  # type: ignore[union-attr]
    return f"{layer and 'model.' + layer}{_NAMES[name]}.weight"


def file_name(number: int, num_files: int) -> str:
    """Of a file of tensors; numbers count from 1."""
    return WEIGHTS if num_files == 1 else f"model-{number:05}-of-{num_files:05}.safetensors"


def safetensors() -> Any:
    """The package.

    Raises:
        UsageError: it is not installed.
    """
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
