"""From the chunks that readers yield to documents: parse, then encode texts or check the tokens of other tools.

Chunks are independent, so several processes can handle chunks of one input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.forking import cached_property
from tokshard.format.manifest import TokenizerInfo
from tokshard.interop.tokens.batches import TokenBatch
from tokshard.pipeline.encode.chat.spans import NOTHING_TO_LEARN
from tokshard.pipeline.encode.chat.texts import ChatTexts
from tokshard.pipeline.encode.documents import ChunkResult, Documents, apply_rules, content_hashes, validation_mask
from tokshard.pipeline.encode.encoder import DocumentEncoder, EncodedTexts, Encoder
from tokshard.pipeline.encode.passing import TokenPasser
from tokshard.pipeline.encode.tokenizer_file import added_tokens, parsed_tokens, parsing
from tokshard.pipeline.request import Build
from tokshard.pipeline.sources import token_lines
from tokshard.pipeline.sources.json_lines import JsonLinesParser
from tokshard.pipeline.sources.records import (
    SPECIAL_TOKEN,
    UNREAD,
    BadRecord,
    Chunk,
    LineChunk,
    Records,
    positions_array,
)

_IS_SPECIAL = "the tokenizer gives this text the id of a special token, which would be read as control"

SPELLED = "spelled: "
"""Prefix of an added token that is not special, in the changes of documents whose text spells it."""


Parsed = Records | ChunkResult
"""The records of one chunk: texts, and the problems of other records; or, where no text is read, the documents."""


Keeps = Callable[[int], NDArray[np.bool_]]
"""Whether each of the next candidates, so many, is kept, because it is no duplicate: bool [candidates]."""


class Maker:
    """Makes documents of chunks. The tokenizer is loaded when the first text is encoded.

    Args:
        load: reads the ``tokenizer.json``.
    """

    def __init__(self, build: Build, load: Callable[[], bytes]) -> None:
        self._chat, self._config, self._tokenizer, self._load = build.chat, build.config, build.tokenizer, load
        self._spec, self._parse = build.spec, JsonLinesParser(build.spec)
        self._special = SpecialText(build.tokenizer.special_ids)
        self._added: AddedText | None = None
        self._pass_on = TokenPasser(build.tokenizer, build.spec) if build.spec.tokens is not None else None

    @cached_property
    def encode(self) -> Callable[[Sequence[str]], EncodedTexts]:
        """The tokenizer."""
        loaded = self._load()
        if self._chat is not None:
            texts = ChatTexts(parsing(loaded, self._tokenizer), self._chat, self._config, self._tokenizer)
            self._added = AddedText(loaded, self._tokenizer, texts.control)
            return texts
        special_tokens = parsed_tokens(self._config.special_tokens)
        self._added = AddedText(loaded, self._tokenizer, special_tokens)
        content = parsing(loaded, self._tokenizer, special_tokens)
        encode = Encoder(content, self._tokenizer.special_ids, self._tokenizer.library)
        return DocumentEncoder(encode, self._tokenizer)

    def parse(self, chunk: Chunk | ChunkResult) -> Parsed:
        """The records of a chunk."""
        found = self._parse(chunk) if isinstance(chunk, LineChunk) else chunk
        if self._pass_on is None or isinstance(found, ChunkResult):
            assert not isinstance(found, TokenBatch), "only an import reads tokens"
            return found
        return self._pass_on(found if isinstance(found, TokenBatch) else token_lines.batch(found, self._spec))

    def make(self, parsed: Parsed, keeps: Keeps | None = None) -> ChunkResult:
        """The documents of a chunk.

        Args:
            keeps: says which texts are no duplicates, so that no others are encoded. None: that is not known yet.
        """
        if isinstance(parsed, ChunkResult):
            made = replace(parsed, candidates=parsed.documents.positions)
        else:
            made = self._encoded(parsed, keeps)
        return apply_rules(made, self._config)

    def hashed(self, parsed: Parsed) -> ChunkResult:
        """The texts of a chunk as documents without tokens, only with hashes."""
        if isinstance(parsed, ChunkResult):
            documents = _hashed(parsed.documents.contents(), parsed.documents.positions)
            return replace(parsed, documents=documents)
        return _made(parsed, _hashed(map(str.encode, parsed.texts), positions_array(parsed)), parsed.bad)

    def _encoded(self, records: Records, keeps: Keeps | None) -> ChunkResult:
        candidates = positions_array(records)
        is_kept = None if keeps is None else keeps(len(candidates))
        texts, positions, columns = records.texts, candidates, records.columns
        if is_kept is not None and not is_kept.all():
            texts, positions, columns = _chosen(np.flatnonzero(is_kept).tolist(), texts, positions, columns)
        encoded = self.encode(texts)
        bad = records.bad
        changes = {what: positions[list(found)] for what, found in encoded.changes.items()}
        for name, found in records.unread.items():
            changes[UNREAD + name] = np.array(found, np.int64)[np.isin(found, positions)]
        if self._added is not None:
            changes |= {SPELLED + token: positions[spelled] for token, spelled in self._added(texts).items()}
        idle = {NOTHING_TO_LEARN: np.sort(positions[list(encoded.idle)])} if encoded.idle else {}
        if encoded.with_special or encoded.failed or encoded.idle:
            rejected = [BadRecord(int(positions[index]), SPECIAL_TOKEN, _IS_SPECIAL) for index in encoded.with_special]
            rejected += [BadRecord(int(positions[index]), *problem) for index, problem in encoded.failed.items()]
            bad = sorted([*bad, *rejected], key=lambda record: record.position)
            kept = sorted(set(range(len(texts))) - {*encoded.with_special, *encoded.failed, *encoded.idle})
            texts, positions, columns = _chosen(kept, texts, positions, columns)
        columns = {**{name: list(values) for name, values in encoded.loss.items()}, **columns}
        fraction = self._config.validation_fraction
        documents = Documents(
            tokens=encoded.tokens,
            ends=encoded.ends,
            positions=positions,
            columns=columns,
            text_bytes=_utf8_sizes(texts),
            has_special=self._special.mask(texts),
            omitted=encoded.omitted,
            is_validation=None if fraction is None else validation_mask((text.encode() for text in texts), fraction),
        )
        made = replace(_made(records, documents, bad, candidates), changes=changes, left_out=idle)
        return made if is_kept is None else made.without_duplicates(is_kept)


def _hashed(contents: Iterable[bytes], positions: NDArray[np.int64]) -> Documents:
    return Documents(
        tokens=np.empty(0, np.uint32),
        ends=np.zeros(len(positions), np.int64),
        positions=positions,
        columns={},
        hashes=content_hashes(contents),
    )


def _made(
    records: Records, documents: Documents, bad: list[BadRecord], candidates: NDArray[np.int64] | None = None
) -> ChunkResult:
    """The results of the records of a chunk."""
    return ChunkResult(
        count=records.count,
        input_bytes=records.input_bytes,
        documents=documents,
        bad=bad,
        candidates=candidates,
        fields=frozenset(records.fields),
        num_marks=records.num_marks,
    )


def _chosen(
    chosen: Sequence[int], texts: Sequence[str], positions: NDArray[np.int64], columns: dict[str, list[Any]]
) -> tuple[list[str], NDArray[np.int64], dict[str, list[Any]]]:
    return (
        [texts[index] for index in chosen],
        positions[chosen],
        {name: [values[index] for index in chosen] for name, values in columns.items()},
    )


def _utf8_sizes(texts: Sequence[str]) -> NDArray[np.int64]:
    """Bytes of each text in UTF-8: int64 [texts]; immediate for ASCII."""
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    for index, text in enumerate(texts):
        if not text.isascii():
            sizes[index] = len(text.encode())
    return sizes


class AddedText:
    """Finds texts that spell an added token which is not special: it is a token there, not text.

    Args:
        content: bytes of a ``tokenizer.json``.
        known: tokens that are text there, or that texts mean.
    """

    def __init__(self, content: bytes, info: TokenizerInfo, known: Iterable[str]) -> None:
        tokens = {one["content"] for one in added_tokens(content) if not one.get("special")}
        # stretches of white space and single signs are words of a vocabulary, which nobody takes for control
        tokens = {token for token in tokens if _CONTROL.fullmatch(token)} - {info.eos, info.bos, *known}
        self._texts = SpecialText(tokens)
        self._tokens = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None

    def __call__(self, texts: Sequence[str]) -> dict[str, list[int]]:
        """Each such token, and the indices of the texts that spell it."""
        found: dict[str, list[int]] = {}
        if self._tokens is not None:
            for index in np.flatnonzero(self._texts.mask(texts)).tolist():
                for token in dict.fromkeys(self._tokens.findall(texts[index])):
                    found.setdefault(token, []).append(index)
        return found


_CONTROL = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_MAX_HOPS = 16
_FEW_TOKENS = 4
"""Up to this many tokens, looking at each place of their first character is cheaper than one search for all."""


class SpecialText:
    """Finds texts that contain the spelling of a special token.

    Costs 0.14 CPU-seconds per GB of source code for one token, and 0.4 for the 250 tokens of Llama 3: a search for one
    character runs at 20 GB/s, one with `re` at 3 GB/s.

    Args:
        tokens: their spellings.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        by_first: dict[str, list[str]] = {}
        for token in sorted(set(tokens) - {""}):
            by_first.setdefault(token[0], []).append(token)
        self._groups = [
            (first, tuple(group), re.compile("|".join(map(re.escape, group)))) for first, group in by_first.items()
        ]

    def mask(self, texts: Sequence[str]) -> NDArray[np.bool_]:
        """Which of the texts contain such a spelling: bool [texts]."""
        found = np.zeros(len(texts), np.bool_)
        for first, tokens, pattern in self._groups:
            is_in = (first in text and _contains(text, first, tokens, pattern) for text in texts)
            found |= np.fromiter(is_in, np.bool_, len(texts))
        return found


def _contains(text: str, first: str, tokens: tuple[str, ...], pattern: re.Pattern[str]) -> bool:
    position = -1
    for _ in range(_MAX_HOPS if len(tokens) <= _FEW_TOKENS else 0):
        position = text.find(first, position + 1)
        if position < 0:
            return False
        if text.startswith(tokens, position):
            return True
    return pattern.search(text, position + 1) is not None  # the character is common here, as `<` in HTML
