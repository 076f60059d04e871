"""Tokenizers that are small enough to be read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.pipeline.inputs import special_token

Json = dict[str, Any]


def tokenizer_json(model: Json, pre_tokenizer: Json | None = None, added: Sequence[Json] = (), **parts: Any) -> Json:
    """A whole ``tokenizer.json``."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": None,
        "model": model,
        **parts,
    }


def numbered(*tokens: str) -> dict[str, int]:
    """A vocabulary in which tokens have these places."""
    return {token: number for number, token in enumerate(tokens)}


def words(*tokens: str, **parts: Any) -> Json:
    """A WordLevel tokenizer of these words, split at white space; the first stands for unknown ones."""
    model = {"type": "WordLevel", "vocab": numbered(*tokens), "unk_token": tokens[0]}
    return tokenizer_json(model, {"type": "WhitespaceSplit"}, **parts)


def write_word_tokenizer(directory: Path) -> Path:
    """A tokenizer of a few words that spells its special tokens as ordinary entries, and has no id for other words."""
    content = words("[UNK]", "<s>", "</s>", "good", "text", "a", "b")
    content["model"]["unk_token"] = "a token that it lacks"
    content["added_tokens"] = [special_token(1, "<s>"), special_token(2, "</s>")]
    return write_vocabulary(directory, content)


def write_vocabulary(directory: Path, content: Json, config: Json | None = None) -> Path:
    """The directory of a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
