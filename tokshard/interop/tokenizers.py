"""SentencePiece models and tiktoken rank files as ``tokenizer.json``.

No library converts every model faithfully. So the conversion writes what the file says, and then compares the result
with the original on a few thousand texts. What ``tokenizer.json`` cannot express is refused.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import Tokenizer

from tokshard.errors import TokenizerError, UsageError
from tokshard.store import open_store

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_BPE = 2
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A tokenizer of another library.

    Args:
        content: ``tokenizer.json``, the same bytes for the same file.
        config: what ``tokenizer_config.json`` would say of EOS and BOS.
        original: ids of a text by its own library, special tokens in it as the text they are.
        note: where it came from.
    """

    content: bytes
    config: Mapping[str, Any]
    original: Callable[[str], Sequence[int]]
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedTokenizer:
    """What `convert_tokenizer` wrote.

    Args:
        eos, bos: what ``tokenizer_config.json`` names; None if nothing does.
        note: where the tokenizer came from.
    """

    directory: Path
    eos: str | None
    bos: str | None
    note: str


def convert_tokenizer(path: Path, out: Path, *, eos: str | None = None) -> ConvertedTokenizer:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` for a SentencePiece model or tiktoken rank file.

    Args:
        eos: token that ends a document; default: what the file itself names.

    Raises:
        TokenizerError: the file cannot be converted, or the result encodes some text differently, or has no such EOS.
        UsageError: `out` has other such files.
    """
    conversion = convert(path)
    _compare_with_original(path, conversion)
    config = {**conversion.config, **({"eos_token": eos} if eos else {})}
    _check_eos(path, conversion, eos)
    files = {out / "tokenizer.json": conversion.content, out / "tokenizer_config.json": _json(config)}
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
    for text in probes(conversion):
        expected, found = list(conversion.original(text)), encode(text)
        if found != expected:
            raise TokenizerError(
                f"{path} cannot become a tokenizer.json: {text[:40]!r} has the ids {_some(expected)} by its own "
                f"library and {_some(found)} by tokenizers {importlib.metadata.version('tokenizers')}",
                hint="give the tokenizer.json that the model was published with, or another version of tokenizers",
            )


def _encoder_of(conversion: Conversion) -> Callable[[str], list[int]]:
    """Ids of a text by `tokenizers`, special tokens in it as the text they are."""
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
        raise TokenizerError(f"{path} cannot be read: {error.strerror}", hint="check the path") from error
    if _RANK_LINE.match(content):
        return _convert_ranks(path, content)
    return _convert_pieces(path, content)


def probes(conversion: Conversion) -> Iterator[str]:
    """Texts on which a conversion and its original have to agree."""
    yield from _PROBES
    vocabulary = json.loads(conversion.content)["added_tokens"]
    for token in [*(entry["content"] for entry in vocabulary), "<0x41>", "<unk>"]:
        yield from (token, f"a {token} b", f"a{token}b{token}{token}")
    for start in range(0, 0x3000, 16):  # a few thousand characters, in runs and beside letters
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
    f"{_SPACE} a{_SPACE}b {_SPACE}{_SPACE}",
    "a" * 1_000,
    "ab" * 500 + " " * 500 + "!" * 333 + "\n" * 100,
    'https://example.org/a/b?c=d&e=%20#f 0x1F 1e-9 $3.50 50% <tag attr="x"> [[link]] {{template}} |-\n',
)  # fmt: skip


# SentencePiece


def _convert_pieces(path: Path, content: bytes) -> Conversion:
    try:
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    except ImportError as error:
        _missing(path, "a SentencePiece model", error)
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(content)
        if not model.pieces:
            raise ValueError("it has no pieces")
        processor = SentencePieceProcessor(model_proto=content)
    except Exception as error:  # the library raises errors of protobuf and RuntimeError
        raise TokenizerError(
            f"{path} is neither a SentencePiece model nor a tiktoken rank file: {error}",
            hint="give a SentencePiece .model or tiktoken ranks",
        ) from error
    _check_expressible(path, model)
    pieces = [(piece.piece, piece.score, piece.type) for piece in model.pieces]
    added = [
        _added_token(index, piece, special=kind == _CONTROL)
        for index, (piece, _, kind) in enumerate(pieces)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    # where no piece crosses the start of a word, words can be encoded one by one
    crosses = any(_SPACE in piece[1:] for piece, _, kind in pieces if kind in (_NORMAL, _USER_DEFINED))
    parsed = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": list(_normalizers(model.normalizer_spec))},
        "pre_tokenizer": None
        if crosses
        else {"type": "Split", "pattern": {"String": _SPACE}, "behavior": "MergedWithNext", "invert": False},
        "post_processor": None,
        "decoder": _decoder(is_prefixed=model.normalizer_spec.add_dummy_prefix),
        "model": _bpe_of_pieces(
            pieces, unknown=model.trainer_spec.unk_piece, has_bytes=model.trainer_spec.byte_fallback
        ),
    }
    control = {piece for piece, _, kind in pieces if kind == _CONTROL}
    names = {"eos_token": model.trainer_spec.eos_piece, "bos_token": model.trainer_spec.bos_piece}
    return Conversion(
        content=_json(parsed),
        config={key: piece for key, piece in names.items() if piece in control},
        original=processor.encode,
        note=f"converted from the SentencePiece model {path.name}, SHA-256 {hashlib.sha256(content).hexdigest()}",
    )


def _check_expressible(path: Path, model: Any) -> None:
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    problem = None
    if trainer.model_type != _BPE:
        # SentencePiece adds scores in single precision and tokenizers in double, so near ties fall differently
        problem = "it is not a BPE model, and others are encoded differently for some texts"
    elif normalizer.precompiled_charsmap:
        # tokenizers looks characters up by grapheme, SentencePiece by longest match
        problem = f"it normalizes characters ({normalizer.name}), which tokenizers does differently for some texts"
    elif any(piece.type == _UNUSED for piece in model.pieces):
        problem = "it has unused pieces"
    elif trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        problem = "it treats white space in a way of its own"
    if problem:
        _refuse(path, problem)


def _bpe_of_pieces(pieces: Sequence[tuple[str, float, int]], *, unknown: str, has_bytes: bool) -> dict[str, Any]:
    vocabulary = {piece: index for index, (piece, _, _) in enumerate(pieces)}
    scores = {piece: score for piece, score, kind in pieces if kind in (_NORMAL, _USER_DEFINED)}
    # control pieces and bytes are no results of merges, so text never becomes one
    made = sorted((piece for piece in scores if len(piece) > 1), key=lambda piece: (-scores[piece], vocabulary[piece]))
    merges = [pair for piece in made for pair in _pairs(piece, scores, vocabulary)]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": has_bytes,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def _pairs(token: Any, known: Mapping[Any, Any], order: Mapping[Any, int]) -> list[tuple[Any, Any]]:
    """Every pair of known tokens that `token` can be merged from."""
    pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
    return sorted(
        (pair for pair in pairs if pair[0] in known and pair[1] in known),
        key=lambda pair: (order[pair[0]], order[pair[1]]),
    )


def _normalizers(spec: Any) -> Iterator[dict[str, Any]]:
    if spec.remove_extra_whitespaces:
        # at the end it has spaces for what stands for one, too
        yield {"type": "Replace", "pattern": {"Regex": rf"\A +|[ {_SPACE}]+\z"}, "content": ""}
        yield {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    if spec.add_dummy_prefix:
        yield {"type": "Prepend", "prepend": _SPACE}
    yield {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}


def _decoder(*, is_prefixed: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if is_prefixed:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


# tiktoken


def _convert_ranks(path: Path, content: bytes) -> Conversion:
    try:
        import tiktoken
    except ImportError as error:
        _missing(path, "a tiktoken rank file", error)
    try:
        lines = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise TokenizerError(f"{path} is not a tiktoken rank file: {error}", hint="fetch the file again") from error
    pattern, specials = _pattern_of(path, content, ranks)
    encoding = tiktoken.Encoding(path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=dict(specials))
    spell = dict(_byte_characters())

    def spelled(token: bytes) -> str:
        return "".join(spell[byte] for byte in token)

    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        _refuse(path, f"byte {missing[0]:#04x} has no rank")
    made = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    merges = [(spelled(left), spelled(right)) for token in made for left, right in _pairs(token, ranks, ranks)]
    parsed = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(index, token, special=True)
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
    return Conversion(
        content=_json(parsed),
        config={"eos_token": "<|endoftext|>"} if "<|endoftext|>" in specials else {},
        original=encoding.encode_ordinary,
        note=f"converted from the tiktoken ranks {path.name}, SHA-256 {hashlib.sha256(content).hexdigest()}",
    )


_PATTERN_FILE = "tiktoken.json"


def _pattern_of(path: Path, content: bytes, ranks: Mapping[bytes, int]) -> tuple[str, Mapping[str, int]]:
    """How words are split, and the special tokens, neither of which a rank file says."""
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


def _byte_characters() -> Iterator[tuple[int, str]]:
    """How a byte-level vocabulary spells bytes: printable ones as themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = 0
    for byte in range(256):
        if byte in printable:
            yield byte, chr(byte)
        else:
            yield byte, chr(256 + others)
            others += 1


def _added_token(index: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, **flags, "special": special}


def _json(parsed: Mapping[str, Any]) -> bytes:
    return json.dumps(parsed, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass")


def _missing(path: Path, what: str, error: ImportError) -> NoReturn:
    raise TokenizerError(
        f"{path} is {what}, and a package that reads it is missing: {error}",
        hint="pip install 'tokshard[convert]', or give the model's tokenizer.json",
    ) from error


def _refuse(path: Path, problem: str) -> NoReturn:
    raise TokenizerError(
        f"{path} cannot become a tokenizer.json: {problem}",
        hint="give the tokenizer.json that the model was published with, if there is one",
    )
