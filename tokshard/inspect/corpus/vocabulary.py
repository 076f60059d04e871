"""The vocabulary of a tokenizer: spellings, and which ids are unknown, special or byte tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokshard.errors import RESTORE, UNDECODABLE, DamagedCorpusError
from tokshard.format import names
from tokshard.format.corpus import Corpus
from tokshard.format.decode import SPACE, byte_alphabet, parse_tokenizer

_BYTE = re.compile("<0x[0-9A-F]{2}>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The ids of a ``tokenizer.json``.

    Args:
        spellings: id to its bytes; to its entry in UTF-8 if the vocabulary is not byte-level.
        unknown_id: the id for text outside the vocabulary; None if the vocabulary lacks one.
        byte_ids: the byte fallbacks ``<0x00>`` to ``<0xFF>``; in a byte-level vocabulary, entries that are parts of
            characters.
        special_ids: added tokens that are flagged as special.
        normalizers: steps that change text before it is encoded, such as ``NFKC``, except those that decoding undoes.
    """

    spellings: Mapping[int, bytes]
    unknown_id: int | None
    byte_ids: frozenset[int]
    special_ids: frozenset[int]
    normalizers: tuple[str, ...] = ()

    def shown(self, token: int) -> str:
        """A readable spelling, in which bytes that are not UTF-8 are escaped."""
        return self.spellings.get(token, b"?").decode("utf-8", "backslashreplace")


def load_vocabulary(corpus: Corpus) -> Vocabulary:
    """The vocabulary of a corpus, from the copy of its tokenizer.

    Raises:
        DamagedCorpusError: the copy is missing or is not a JSON object.
    """
    path = corpus.store.where(names.TOKENIZER)
    try:
        return _vocabulary_in(corpus.store.get(names.TOKENIZER))
    except (OSError, ValueError, TypeError, AttributeError, LookupError, OverflowError, *UNDECODABLE) as error:
        raise DamagedCorpusError(f"{path} cannot be read: {error}", hint=RESTORE) from error


@lru_cache(maxsize=1)  # many corpora have one tokenizer, and a large one takes a second
def _vocabulary_in(content: bytes) -> Vocabulary:
    return parse_vocabulary(parse_tokenizer(content))


def token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token to id, for the model and the added tokens of a parsed ``tokenizer.json``; at least one.

    Raises:
        ValueError, TypeError, AttributeError, LookupError: the vocabulary is missing or malformed.
    """
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    ids = {token: int(index) for token, index in {**_model_ids(tokenizer), **added}.items()}
    if not ids:
        raise ValueError("it is empty")
    return ids


def parse_vocabulary(tokenizer: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary in a parsed ``tokenizer.json``; parts in an unknown form are ignored."""
    model = tokenizer.get("model", {})
    entries = _model_ids(tokenizer)
    is_byte_level = _has_byte_level(tokenizer.get("decoder")) or _has_byte_level(tokenizer.get("pre_tokenizer"))
    spell = _byte_level_bytes if is_byte_level else _plain_bytes
    spellings = {token: spell(piece) for piece, token in entries.items()}
    if is_byte_level:
        byte_ids = {token for token, spelling in spellings.items() if not _is_text(spelling)}
    else:
        byte_ids = {token for piece, token in entries.items() if _BYTE.fullmatch(piece)}
    added = tokenizer.get("added_tokens") or []
    spellings |= {token["id"]: token["content"].encode("utf-8", "surrogatepass") for token in added}
    unknown = model.get("unk_token")
    unknown_id = model.get("unk_id") if unknown is None else entries.get(unknown)
    if unknown_id is None and unknown is not None:
        unknown_id = next((token["id"] for token in added if token["content"] == unknown), None)
    return Vocabulary(
        spellings=spellings,
        unknown_id=unknown_id,
        byte_ids=frozenset(byte_ids),
        special_ids=frozenset(token["id"] for token in added if token.get("special")),
        normalizers=tuple(_normalizers(tokenizer.get("normalizer"))),
    )


def _model_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    entries = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(entries, list):  # Unigram: [piece, score]
        return {entry[0]: index for index, entry in enumerate(entries)}
    return dict(entries)


def _normalizers(part: Any) -> Iterator[str]:
    if not isinstance(part, Mapping):
        return
    if part.get("type") == "Sequence":
        for inner in part.get("normalizers") or ():
            yield from _normalizers(inner)
    elif SPACE not in {part.get("prepend"), part.get("content")}:
        yield str(part.get("type"))


def _has_byte_level(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    parts = [*(part.get("pretokenizers") or ()), *(part.get("decoders") or ())]
    return part.get("type") == "ByteLevel" or any(map(_has_byte_level, parts))


_BYTES = byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    if all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece)
    return _plain_bytes(piece)


def _plain_bytes(piece: str) -> bytes:
    return piece.replace(SPACE, " ").encode("utf-8", "surrogatepass")


def _is_text(spelling: bytes) -> bool:
    try:
        spelling.decode()
    except UnicodeDecodeError:
        return False
    return True
