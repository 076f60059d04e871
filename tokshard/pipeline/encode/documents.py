"""Which encoded texts become documents, and in which corpus: token limits and the validation split. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.pipeline.sources.records import BadRecord

TOO_FEW_TOKENS = "under min-tokens"
TOO_MANY_TOKENS = "over max-tokens"

_SPLIT_PERSON = b"tokshard split 1"
"""Part of every hash that splits. A change moves documents to the other corpus, and builds would no longer repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRules:
    """The options that decide what becomes of a document once it is encoded.

    Args:
        min_tokens, max_tokens: bounds of its length, delimiters included; None for no bound.
        validation_fraction: share of the documents for the validation corpus; None for a build of one corpus.
    """

    min_tokens: int | None = None
    max_tokens: int | None = None
    validation_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of one chunk of records.

    Args:
        texts: of the documents; None if only their tokens are known.
        positions: int64 [documents], ascending: the index of each document's record in the chunk.
        columns: name of a kept column to its values, one per document.
        tokens: unsigned integers [tokens]: one document after another, delimiters included.
        ends: int64 [documents]: where each document ends in `tokens`.
    """

    texts: Sequence[str] | None
    positions: NDArray[np.int64]
    columns: Mapping[str, Sequence[Any]]
    tokens: NDArray[Any]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens in each document: int64 [documents]."""
        return np.diff(self.ends, prepend=0)

    def select(self, is_wanted: NDArray[np.bool_]) -> Documents:
        """The documents that a mask bool [documents] marks. Copies the tokens, unless all are wanted."""
        if is_wanted.all():
            return self
        lengths = self.lengths
        chosen = np.flatnonzero(is_wanted).tolist()
        return Documents(
            None if self.texts is None else [self.texts[index] for index in chosen],
            self.positions[is_wanted],
            {name: [values[index] for index in chosen] for name, values in self.columns.items()},
            self.tokens[np.repeat(is_wanted, lengths)],
            np.cumsum(lengths[is_wanted]),
        )

    def contents(self) -> Iterator[bytes]:
        """What each document holds, for hashes: its text as UTF-8, or its tokens as little-endian uint32."""
        if self.texts is not None:
            yield from (text.encode() for text in self.texts)
            return
        start = 0
        for end in self.ends.tolist():
            yield self.tokens[start:end].astype("<u4").tobytes()
            start = end

    def head(self, count: int) -> Documents:
        """The first `count` documents."""
        ends = self.ends[:count]
        return Documents(
            None if self.texts is None else self.texts[:count],
            self.positions[:count],
            {name: values[:count] for name, values in self.columns.items()},
            self.tokens[: ends[-1] if count else 0],
            ends,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDocuments:
    """What becomes of the records of one chunk, before the rules.

    Args:
        count: all records.
        documents: those that can be documents.
        bad: those that cannot, by ascending position.
        left_out: reason to the positions of others that are left out: int64, ascending. The rest is empty.
        changes: what was done to documents on their way, to the positions of those documents.
    """

    count: int
    documents: Documents
    bad: list[BadRecord]
    left_out: dict[str, NDArray[np.int64]]
    changes: Mapping[str, NDArray[np.int64]] = field(default_factory=lambda: MappingProxyType({}))


def within_limits(documents: Documents, rules: DocumentRules) -> tuple[Documents, dict[str, NDArray[np.int64]]]:
    """The documents of an allowed length; and for each reason to leave out others, the positions of their records."""
    if rules.min_tokens is None and rules.max_tokens is None:
        return documents, {}
    lengths = documents.lengths
    is_short = lengths < (rules.min_tokens or 0)
    is_long = lengths > (np.iinfo(np.int64).max if rules.max_tokens is None else rules.max_tokens)
    left_out = {
        reason: documents.positions[which]
        for reason, which in ((TOO_FEW_TOKENS, is_short), (TOO_MANY_TOKENS, is_long))
        if which.any()
    }
    return documents.select(~(is_short | is_long)), left_out


def split_documents(documents: Documents, rules: DocumentRules) -> list[Documents]:
    """The documents for each corpus of the build: one list of all, or those for training and those for validation."""
    if rules.validation_fraction is None:
        return [documents]
    is_validation = in_validation(documents.contents(), rules.validation_fraction)
    return [documents.select(~is_validation), documents.select(is_validation)]


def in_validation(contents: Iterable[bytes], fraction: float) -> NDArray[np.bool_]:
    """Which documents belong to the validation corpus: bool [documents].

    Only what they hold decides. So equal ones are in the same corpus, other inputs change nothing, and a larger
    fraction only moves texts from training to validation. Costs 1 CPU-second per GB.
    """
    threshold = int(Fraction(fraction) * (1 << 64))
    digests = b"".join(hashlib.blake2b(held, digest_size=8, person=_SPLIT_PERSON).digest() for held in contents)
    return np.frombuffer(digests, "<u8") < np.uint64(min(threshold, (1 << 64) - 1))
