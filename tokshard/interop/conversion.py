"""A tokenizer of another library as ``tokenizer.json``: what all conversions share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tokshard.errors import TokenizerError

SPACE = "\u2581"
"""SentencePiece's character for a space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A tokenizer of another library.

    Args:
        content: ``tokenizer.json``, the same bytes for the same file.
        config: EOS and BOS, as in ``tokenizer_config.json``.
        original: encodes a text with its own library; special tokens in the text are encoded as ordinary text.
        note: where the tokenizer came from.
    """

    content: bytes
    config: Mapping[str, Any]
    original: Callable[[str], Sequence[int]]
    note: str


def byte_characters() -> dict[int, str]:
    """How a byte-level vocabulary spells each byte: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def merge_pairs(token: Any, known: Mapping[Any, Any], order: Mapping[Any, int]) -> list[tuple[Any, Any]]:
    """Every pair of known tokens that `token` can be merged from."""
    pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
    return sorted(
        (pair for pair in pairs if pair[0] in known and pair[1] in known),
        key=lambda pair: (order[pair[0]], order[pair[1]]),
    )


def added_token(index: int, content: str, *, special: bool) -> dict[str, Any]:
    """An entry of ``added_tokens``."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, **flags, "special": special}


def tokenizer_json(parsed: Mapping[str, Any]) -> bytes:
    """JSON in the form in which tokenizer files are written."""
    return json.dumps(parsed, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass")


def missing_package(path: Path, what: str, error: ImportError) -> NoReturn:
    """Refuse a file whose own library is not installed.

    Raises:
        TokenizerError: always.
    """
    raise TokenizerError(
        f"{path} cannot be read as {what}: a package is missing: {error}",
        hint="pip install 'tokshard[convert]', or give the model's tokenizer.json",
    ) from error


def refuse(path: Path, problem: str) -> NoReturn:
    """Refuse a file that ``tokenizer.json`` cannot express.

    Raises:
        TokenizerError: always.
    """
    raise TokenizerError(
        f"{path} cannot become a tokenizer.json: {problem}",
        hint="give the tokenizer.json that the model was published with, if there is one",
    )
