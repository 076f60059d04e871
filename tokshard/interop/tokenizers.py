"""SentencePiece models and tiktoken rank files as ``tokenizer.json``.

No library converts every model faithfully. So the conversion writes what the file says, and then compares the result
with the original on a few thousand texts. What ``tokenizer.json`` cannot express is refused.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tokshard.errors import TokenizerError, UsageError
from tokshard.extras import version_of
from tokshard.interop.conversion import SPACE, Conversion, tokenizer_json
from tokshard.interop.sentencepiece_models import convert_pieces
from tokshard.interop.tiktoken_ranks import convert_ranks
from tokshard.store import open_store

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedTokenizer:
    """What `convert_tokenizer` wrote.

    Args:
        eos, bos: the tokens that ``tokenizer_config.json`` names, or None.
        note: where the tokenizer came from.
    """

    directory: Path
    eos: str | None
    bos: str | None
    note: str


def convert_tokenizer(path: Path, out: Path, *, eos: str | None = None) -> ConvertedTokenizer:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` for a SentencePiece model or tiktoken rank file.

    Args:
        eos: token that ends a document; default: the one that the file names.

    Raises:
        TokenizerError: the file cannot be converted, the result encodes some text differently, or it lacks the EOS.
        UsageError: `out` already has these files, with other content.
    """
    conversion = convert(path)
    _compare_with_original(path, conversion)
    config = {**conversion.config, **({"eos_token": eos} if eos else {})}
    _check_eos(path, conversion, eos)
    files = {out / "tokenizer.json": conversion.content, out / "tokenizer_config.json": tokenizer_json(config)}
    for file, content in files.items():
        if file.exists() and file.read_bytes() != content:
            raise UsageError(f"{file} exists and would be replaced", hint="give another --out")
    out.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        open_store(out).put(file.name, content)
    return ConvertedTokenizer(
        directory=out, eos=config.get("eos_token"), bos=config.get("bos_token"), note=conversion.note
    )


def _check_eos(path: Path, conversion: Conversion, eos: str | None) -> None:
    parsed = json.loads(conversion.content)
    added = [entry["content"] for entry in parsed["added_tokens"]]
    if eos is not None and eos not in added and eos not in parsed["model"]["vocab"]:
        raise TokenizerError(
            f"token {eos!r} (--eos) is not in the vocabulary of {path}",
            hint="give one of its tokens" + (f", such as {', '.join(map(repr, added[:5]))}" if added else ""),
        )


def _compare_with_original(path: Path, conversion: Conversion) -> None:
    """Refuse a conversion that does not encode as the original does.

    Raises:
        TokenizerError: with a text on which they differ.
    """
    encode = _encoder_of(conversion)
    added = json.loads(conversion.content)["added_tokens"]
    user_defined = {entry["content"] for entry in added if not entry["special"]}
    for text in probes(conversion):
        expected, found = list(conversion.original(text)), encode(text)
        if found != expected:
            raise TokenizerError(
                f"{path} cannot become a tokenizer.json: {text[:40]!r} has the ids {_some(expected)} by its own "
                f"library and {_some(found)} by tokenizers {version_of('tokenizers')}"
                + ": before a user-defined symbol it leaves out the space that SentencePiece puts before a text"
                * (text in user_defined),
                hint="give the tokenizer.json that the model was published with, or another version of tokenizers",
            )


def _encoder_of(conversion: Conversion) -> Callable[[str], list[int]]:
    """Encodes a text by `tokenizers`; special tokens in the text are encoded as ordinary text."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(conversion.content)
        file.flush()
        tokenizer: Any = Tokenizer.from_file(file.name)
    if hasattr(tokenizer, "encode_batch_fast"):  # 0.2x
        tokenizer.encode_special_tokens = True
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False, encode_special_tokens=True).ids_array.tolist()
        return ids

    return encode


def _some(ids: Sequence[int]) -> str:
    return f"[{', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}]"


def convert(path: Path) -> Conversion:
    """Convert a SentencePiece model or a tiktoken rank file, whichever it is.

    Raises:
        TokenizerError: it is neither, or ``tokenizer.json`` cannot express it, or a package is missing.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror or error}", hint="check the path") from error
    if _RANK_LINE.match(content):
        return convert_ranks(path, content)
    return convert_pieces(path, content)


def probes(conversion: Conversion) -> Iterator[str]:
    """Texts on which a conversion and its original have to agree."""
    yield from _PROBES
    vocabulary = json.loads(conversion.content)["added_tokens"]
    for token in [*(entry["content"] for entry in vocabulary), "<0x41>", "<unk>"]:
        yield from (token, f"a {token} b", f"a{token}b{token}{token}")
    for start in range(0, 0x3000, 16):  # a few thousand characters, in runs and next to letters
        yield "".join(chr(start + offset) for offset in range(16))
        yield " ".join(f"a{chr(start + offset)}b" for offset in range(16))


_PROBES = (
    "",
    " ",
    "  two spaces  between and around  ",
    "\ttabs\tand\nlines\n\n\nand\r\ncarriage returns\r",
    "The quick brown fox jumps over the lazy dog. It's 12,345.67 o'clock; isn't it? WE'LL SEE",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # nothing\n\n\nclass A:\n\tpass\n",
    "Größe, résumé, naïve; Ελληνικά, русский язык, עברית, العربية, हिन्दी, ไทย, 中文字符, 日本語テキスト, 한국어",
    "e\u0301 \u00e9 \ufb01 \u2460 \u212b \u00a0 \u200b \u3000 \ufeff \x00 \x01 \u0085 \u2028",
    "\U0001f642\U0001f469\u200d\U0001f469\u200d\U0001f467 \U00020000 \U0010ffff",
    f"{SPACE} a{SPACE}b {SPACE}{SPACE}",
    "a" * 1_000,
    "ab" * 500 + " " * 500 + "!" * 333 + "\n" * 100,
    'https://example.org/a/b?c=d&e=%20#f 0x1F 1e-9 $3.50 50% <tag attr="x"> [[link]] {{template}} |-\n',
)  # fmt: skip
