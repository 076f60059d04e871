"""Where tokens lie in a text: the bytes of each id, and the text that they must spell. Exact or refused."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import TokenizerError
from tokshard.format.decode import byte_alphabet
from tokshard.pipeline.encode.encoder import Encoder

_HINT = "give another tokenizer: a byte-level BPE, or a BPE with byte fallback, that changes text by NFC at most"
_PROBE = "e\u0301 \u00e9 \ufb01 \u212b \u5b57\U0001f469\u200d\U0001f52c \0 \u00a0  a   b\n\n\n\tc\r\n<0x41> \u2581 "
"""Accents, a ligature, a sign of another letter, CJK, emoji, NUL, white space, and how vocabularies spell bytes."""
_SPACE = "\u2581"
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}

Step = Callable[[str, bool], str]
"""Changes a text. The second argument is whether it does not continue an earlier text."""


def alternatives(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern for any of these tokens, the longest first as tokenizers do; None if there are none."""
    ordered = sorted(set(tokens) - {""}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


class Speller:
    """A tokenizer with the bytes that each id spells.

    Args:
        content: bytes of its ``tokenizer.json``.

    Attributes:
        special: special added tokens to their ids.
        added: all added tokens to their ids.
        unreachable: special tokens that no text is encoded to; the unknown token is one only with byte fallback.
        strips: special token to whether it drops white space before it, and after it; only those that do.
        plain: encodes text in which all special tokens are spelled, not meant.

    Raises:
        TokenizerError: it is of a class for which tokens cannot be placed exactly, or the library does not load it.
    """

    def __init__(self, content: bytes) -> None:
        self._parsed: dict[str, Any] = json.loads(content)
        try:
            self._read()
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise _refused("content", f"not that of a tokenizer.json ({error!r})") from error
        self.plain = self.engine(frozenset())
        self.plain.probe()

    def _read(self) -> None:
        model, entries = self._parsed["model"], self._parsed.get("added_tokens") or []
        has_fallback = bool(model.get("byte_fallback"))
        self.added = {entry["content"]: int(entry["id"]) for entry in entries}
        self.special = {entry["content"]: int(entry["id"]) for entry in entries if entry.get("special")}
        self.unreachable = {token for token in self.special if has_fallback or token != model.get("unk_token")}
        self._steps = _steps(self._parsed.get("normalizer"))
        self._metaspace = _metaspace(self._parsed.get("pre_tokenizer"))
        _check_model(model)
        _check_pre_tokenizer(_parts(self._parsed.get("pre_tokenizer"), "pretokenizers"), has_fallback=has_fallback)
        self.strips = dict[str, tuple[bool, bool]]()
        for entry in entries:
            self._check_added(entry)
        for token in self.added:
            if self.strips and token.strip() != token and token not in self.special:
                raise _refused(f"added token {token!r}", f"white space that {min(self.strips)!r} drops")
        self._bytes = _spelled(self._parsed, self.added, is_byte_level=not has_fallback)
        self._lengths = np.fromiter(map(len, self._bytes), np.int64, len(self._bytes))

    def _check_added(self, entry: Mapping[str, Any]) -> None:
        sides = bool(entry.get("lstrip")), bool(entry.get("rstrip"))
        if any(sides) and entry.get("special"):
            self.strips[entry["content"]] = sides
        flags = [name for name in ("lstrip", "rstrip") if entry.get(name) and not entry.get("special")]
        flags += ["single_word"] * bool(entry.get("single_word"))
        if entry.get("normalized") and self.normalized(entry["content"]) != entry["content"]:
            flags.append("normalized")
        if flags:
            raise _refused(f"added token {entry['content']!r}", " and ".join(flags))

    def engine(self, spelled: frozenset[str]) -> Engine:
        """The tokenizer with some added tokens as text. Loads it.

        Args:
            spelled: added tokens that are not special, and are text like special ones here.
        """
        parsed = dict(self._parsed)
        if spelled:
            parsed["added_tokens"] = [
                {**entry, "special": entry.get("special") or entry["content"] in spelled}
                for entry in parsed["added_tokens"]
            ]
        first = rest = Encoder(json.dumps(parsed).encode(), self.added)
        if self._metaspace is not None and self._metaspace[1] == "first":
            parsed["pre_tokenizer"] = {**parsed["pre_tokenizer"], "prepend_scheme": "never"}
            rest = Encoder(json.dumps(parsed).encode())
        inner = set(self.added) - set(self.special) - spelled
        # a step that changes single characters does not see where a text is cut, and Gemma has 6,000 such tokens
        is_local = self._parsed.get("normalizer") == _SPACES and not any(" " in token for token in inner)
        return Engine(self, first, rest, alternatives(set() if is_local else inner))

    @property
    def is_plain(self) -> bool:
        """Whether tokens spell the text itself, because nothing changes it."""
        return not self._steps and self._metaspace is None

    def normalized(self, part: str, *, is_first: bool = True, is_start: bool = False) -> str:
        """A text without added tokens, as its tokens spell it.

        Args:
            is_first: the text does not continue one that was normalized before.
            is_start: nothing comes before it.
        """
        for step in self._steps:
            part = step(part, is_first)
        if self._metaspace is not None and part:
            mark, scheme = self._metaspace
            part = part.replace(" ", mark)
            is_marked = is_first and (scheme == "always" or (scheme == "first" and is_start))
            if is_marked and not part.startswith(mark):
                part = mark + part
        return part

    def spell(self, ids: NDArray[np.uint32]) -> bytes:
        """The bytes that ids stand for, joined. Costs 50 ns per token."""
        return b"".join(map(self._bytes.__getitem__, ids.tolist()))

    def lengths(self, ids: NDArray[np.uint32]) -> NDArray[np.int64]:
        """The bytes that each id stands for: int64 [ids]."""
        return self._lengths[ids]


class Engine:
    """Encodes the stretches of a text between its control tokens.

    Args:
        first: encodes the start of the text.
        rest: encodes all else.
        inner: finds the added tokens that stay tokens in a stretch.
    """

    def __init__(self, speller: Speller, first: Encoder, rest: Encoder, inner: re.Pattern[str] | None) -> None:
        self._speller, self._first, self._rest, self._inner = speller, first, rest, inner

    def encode(self, stretches: Sequence[str], *, has_start: bool) -> list[NDArray[np.uint32]]:
        """The ids of each stretch.

        Args:
            has_start: the first one starts the text.

        Raises:
            EncodingError: the library fails on one of them.
        """
        num_first = int(has_start) if self._first is not self._rest else len(stretches)
        return [*self._first(stretches[:num_first]), *self._rest(stretches[num_first:])]

    def parts(self, stretch: str, start: int) -> list[Part]:
        """A stretch as texts and added tokens that stay tokens in it.

        Args:
            start: where it begins in the text.
        """
        if self._speller.is_plain:
            return [Part(start, stretch, self._speller, stretch.encode())]
        parts, position = list[Part](), 0
        found = [one.span() for one in self._inner.finditer(stretch)] if self._inner is not None else []
        for token_start, token_stop in [*found, (len(stretch), len(stretch))]:
            text = stretch[position:token_start]
            if text:
                spelled = self._speller.normalized(text, is_start=not start + position)
                parts.append(Part(start + position, text, self._speller, spelled.encode()))
            if token_start < token_stop:
                token = stretch[token_start:token_stop]
                parts.append(Part(start + token_start, token, None, token.encode()))
            position = token_stop
        return parts

    def probe(self) -> None:
        """Refuse a tokenizer whose tokens do not spell a text that has everything in it."""
        for is_start in (True, False):
            (ids,) = self.encode([_PROBE], has_start=is_start)
            expected = b"".join(part.spelled for part in self.parts(_PROBE, int(not is_start)))
            if self._speller.spell(ids) != expected:
                raise TokenizerError(
                    "the tokens of this tokenizer do not spell the text that they are made of", hint=_HINT
                )


@dataclass(frozen=True, slots=True)
class Part:
    """A text, or an added token, between others.

    Args:
        start: where it begins in the whole text.
        speller: changes it; None if nothing does.
        spelled: its text as the tokens spell it, in UTF-8; empty where the tokenizer drops white space.
    """

    start: int
    text: str
    speller: Speller | None
    spelled: bytes

    def spell(self, start: int, stop: int) -> bytes:
        """The bytes of a stretch of its characters as tokens spell it, if the stretch is changed by itself."""
        stretch = self.text[start:stop] if self.spelled else ""
        if self.speller is not None:
            stretch = self.speller.normalized(stretch, is_first=not start, is_start=not self.start + start)
        return stretch.encode()


def _refused(part: str, found: Any) -> TokenizerError:
    return TokenizerError(
        f"the {part} of the tokenizer is {found}, for which the place of a token in a text is not known exactly",
        hint=_HINT,
    )


def _check_model(model: Mapping[str, Any]) -> None:
    """Refuse by name a model that is not known to keep every byte of a text."""
    if model.get("type", "BPE") != "BPE":
        raise _refused("model", model["type"])
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise _refused("model", f"a BPE with {name}")


def _check_pre_tokenizer(parts: Sequence[Mapping[str, Any]], *, has_fallback: bool) -> None:
    """Refuse by name a pre-tokenizer that is not known to keep every byte of a text."""
    types = [part["type"] for part in parts]
    if has_fallback:
        is_known = types in ([], ["Split"], ["Metaspace"])
    else:
        is_known = types[-1:] == ["ByteLevel"] and set(types[:-1]) <= {"Split", "Digits"}
    if not is_known:
        raise _refused("pre-tokenizer", ", ".join(types) or "missing, without byte fallback")
    if not has_fallback and parts[-1].get("add_prefix_space"):
        raise _refused("pre-tokenizer", "ByteLevel with add_prefix_space")


def _parts(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """The parts of a sequence, of sequences too."""
    if part is None:
        return []
    return [inner for one in part[key] for inner in _parts(one, key)] if part["type"] == "Sequence" else [part]


def _metaspace(pre_tokenizer: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """The sign for a space, and when one is put in front: ``always``, ``first`` or ``never``."""
    if pre_tokenizer is None or pre_tokenizer["type"] != "Metaspace":
        return None
    older = "always" if pre_tokenizer.get("add_prefix_space", True) else "never"
    return pre_tokenizer.get("replacement", _SPACE), pre_tokenizer.get("prepend_scheme", older)


def _steps(normalizer: Mapping[str, Any] | None) -> list[Step]:
    """A normalizer as functions of text."""
    if normalizer is None:
        return []
    kind = normalizer["type"]
    if kind == "Sequence":
        return [step for part in normalizer["normalizers"] for step in _steps(part)]
    if kind == "NFC":
        return [lambda text, _: unicodedata.normalize("NFC", text)]
    if kind == "Replace" and "String" in normalizer["pattern"]:
        old, new = normalizer["pattern"]["String"], normalizer["content"]
        return [lambda text, _: text.replace(old, new)]
    if kind == "Prepend":
        return [lambda text, is_first: normalizer["prepend"] + text if text and is_first else text]
    raise _refused("normalizer", f"{kind} of a pattern" if kind == "Replace" else kind)


def _spelled(parsed: Mapping[str, Any], added: Mapping[str, int], *, is_byte_level: bool) -> list[bytes]:
    """The bytes of each id; empty for ids that no token has."""
    vocabulary: dict[str, int] = parsed["model"]["vocab"]
    spelled = [b""] * (1 + max([*vocabulary.values(), *added.values()]))
    if is_byte_level:
        alphabet = byte_alphabet()
        for token, index in vocabulary.items():
            try:
                spelled[index] = bytes([alphabet[character] for character in token])
            except KeyError:
                spelled[index] = token.encode()  # such a token is added, or never made
    else:
        for token, index in vocabulary.items():
            spelled[index] = token.encode("utf-8", "surrogatepass")
        for byte in range(256):
            spelled[vocabulary[f"<0x{byte:02X}>"]] = bytes([byte])
    for token, index in added.items():
        spelled[index] = token.encode()
    return spelled


def document_end(
    speller: Speller,
    wanted: str | None,
    *,
    config: Mapping[str, str],
    literals: Collection[str],
    written: Collection[str],
) -> tuple[str, int]:
    """The token that ends the document of a conversation, and its id: one that neither text nor template can make.

    It is never a target, and no token after it sees it, so the choice does not matter for training. A token whose name
    says that it begins a turn does not fit.

    Args:
        wanted: the user's choice; None for the first that fits.
        config: the tokenizer's own tokens, such as ``eos_token``.
        literals: texts that the template may write of its own.
        written: tokens that it may write through variables.

    Raises:
        TokenizerError: there is none, or `wanted` is not one.
    """
    reasons = {token: _unfit(token, speller, literals=literals, written=written) for token in speller.special}
    fitting = [token for token, reason in reasons.items() if reason is None]
    preferred = [config.get("eos_token"), "<|endoftext|>", "<|end_of_text|>", "<eos>", config.get("pad_token")]
    ranked = sorted(
        fitting,
        key=lambda token: (
            preferred.index(token) if token in preferred else len(preferred),
            "pad" not in token.lower(),
            not any(word in token.lower() for word in ("reserved", "unused")),
            "unk" in token.lower(),
        ),
    )
    if wanted is None and ranked:
        return ranked[0], speller.special[ranked[0]]
    if wanted in fitting:
        assert wanted is not None
        return wanted, speller.special[wanted]
    shown = ", ".join(map(repr, ranked[:5]))
    raise TokenizerError(
        "the tokenizer has no special token for the end of a document: the chat template writes all of them, or they "
        "begin a turn or text"
        if wanted is None
        else f"document_end is {wanted!r}, which {reasons.get(wanted, 'is not a special token of the tokenizer')}",
        hint=f"give one of {shown} with --document-end"
        if shown
        else "add a special token to the tokenizer, as the guide to conversations shows",
    )


_OPENING = re.compile(r"(?i)start|begin|bos\b|^<s>$|^\[INST\]$|user|human|assistant|system|header|\brole")
"""Special tokens that begin a turn, or a text, by their names."""


def _unfit(token: str, speller: Speller, *, literals: Collection[str], written: Collection[str]) -> str | None:
    """Why a special token cannot end documents; None if it can."""
    if token in written or any(token in text for text in literals):
        return "the chat template writes"
    if token not in speller.unreachable:
        return "a text can become"
    return "begins a turn or a text" if _OPENING.search(token) else None


_CONTROL = re.compile(
    r"<\|[^\s<>|]{1,60}\|>|<\uff5c[^\s<>\uff5c]{1,60}\uff5c>|</?s>|<[be]os>|<(?:start|end)_of_[a-z_]{1,40}>"
    r"|\[/?[A-Z][A-Z_]{2,40}\]"
)
"""How the tokens that control a model are spelled in the templates of known models."""


def missing_tokens(text: str, speller: Speller) -> dict[str, int]:
    """Control tokens that a template writes and the tokenizer lacks, each with the number of tokens that it becomes."""
    found = dict.fromkeys(_CONTROL.findall(text))
    counts = {
        token: len(speller.plain.encode([token], has_start=False)[0]) for token in found if token not in speller.added
    }
    return {token: count for token, count in counts.items() if count > 1}
