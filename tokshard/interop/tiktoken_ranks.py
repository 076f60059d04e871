"""tiktoken rank files as ``tokenizer.json``."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokshard.errors import TokenizerError
from tokshard.interop.conversion import (
    Conversion,
    added_token,
    byte_characters,
    merge_pairs,
    missing_package,
    refuse,
    tokenizer_json,
)


def convert_ranks(path: Path, content: bytes) -> Conversion:
    """Convert tiktoken ranks; arguments and errors as for `convert`.

    Args:
        content: the bytes of the file.
    """
    try:
        import tiktoken
    except ImportError as error:
        missing_package(path, "a tiktoken rank file", error)
    try:
        lines = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise TokenizerError(f"{path} is not a tiktoken rank file: {error}", hint="fetch the file again") from error
    pattern, specials = _pattern_of(path, content, ranks)
    encoding = tiktoken.Encoding(path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=dict(specials))
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        refuse(path, f"byte {missing[0]:#04x} has no rank")
    return Conversion(
        content=tokenizer_json(_byte_level_bpe(ranks, pattern, specials)),
        config={"eos_token": "<|endoftext|>"} if "<|endoftext|>" in specials else {},
        original=encoding.encode_ordinary,
        note=f"converted from the tiktoken ranks {path.name}, SHA-256 {hashlib.sha256(content).hexdigest()}",
    )


def _byte_level_bpe(ranks: Mapping[bytes, int], pattern: str, specials: Mapping[str, int]) -> dict[str, Any]:
    """The ``tokenizer.json`` that splits and merges as tiktoken does."""
    spell = byte_characters()

    def spelled(token: bytes) -> str:
        return "".join(spell[byte] for byte in token)

    made = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    merges = [(spelled(left), spelled(right)) for token in made for left, right in merge_pairs(token, ranks, ranks)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(index, token, special=True)
            for token, index in sorted(specials.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {spelled(token): rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])},
            "merges": merges,
        },
    }


_PATTERN_FILE = "tiktoken.json"


def _pattern_of(path: Path, content: bytes, ranks: Mapping[bytes, int]) -> tuple[str, Mapping[str, int]]:
    """The pattern that splits words, and the special tokens; a rank file has neither."""
    pattern_file = path.parent / _PATTERN_FILE
    if pattern_file.exists():
        try:
            parsed = json.loads(pattern_file.read_bytes())
            specials = {str(token): int(index) for token, index in parsed["special_tokens"].items()}
            return str(parsed["pat_str"]), specials
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TokenizerError(
                f"{pattern_file} does not say pat_str and special_tokens: {error!r}", hint="repair the file"
            ) from error
    from tiktoken_ext import openai_public

    make = openai_public.ENCODING_CONSTRUCTORS.get(path.stem)
    if make is None:
        raise TokenizerError(
            f"{path} does not say how words are split, and {path.stem} is not an encoding that tiktoken knows",
            hint=f"put {_PATTERN_FILE} next to it, with pat_str (a regular expression) and special_tokens (their ids)",
        )

    def load(*_: Any, expected_hash: str | None = None, **__: Any) -> Mapping[bytes, int]:
        if expected_hash not in (None, hashlib.sha256(content).hexdigest()):
            raise TokenizerError(f"{path} is not the {path.stem} that tiktoken knows", hint="fetch the file again")
        return ranks

    # its constructors fetch the ranks from the network; everything else that they say is wanted
    original, openai_public.load_tiktoken_bpe = openai_public.load_tiktoken_bpe, load
    try:
        arguments = make()
    finally:
        openai_public.load_tiktoken_bpe = original
    return arguments["pat_str"], arguments["special_tokens"]
