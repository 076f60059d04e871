"""Which encoded texts become documents, and of which corpus: token limits and the validation split. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOO_FEW_TOKENS = "under min-tokens"
TOO_MANY_TOKENS = "over max-tokens"

_SPLIT_PERSON = b"tokshard split 1"
"""Part of every hash that splits; another one puts documents elsewhere, and breaks promises about saved corpora."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRules:
    """What decides about a document once it is encoded.

    Args:
        min_tokens, max_tokens: bounds of its length, delimiters included; None: none.
        validation_fraction: share of the documents for the validation corpus; None: there is one corpus.
    """

    min_tokens: int | None = None
    max_tokens: int | None = None
    validation_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class Documents:
    """Encoded texts of one chunk of records.

    Args:
        texts: of the documents.
        positions: int64 [documents], ascending: index in the chunk of the record of each.
        columns: kept column to one value per document.
        tokens: one document after another, delimiters included.
        ends: int64 [documents], where each ends in `tokens`.
    """

    texts: Sequence[str]
    positions: NDArray[np.int64]
    columns: Mapping[str, Sequence[Any]]
    tokens: NDArray[Any]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.ends, prepend=0)

    def select(self, is_wanted: NDArray[np.bool_]) -> Documents:
        """Some of the documents; costs a copy of the tokens unless it is all."""
        if is_wanted.all():
            return self
        lengths = self.lengths
        chosen = np.flatnonzero(is_wanted).tolist()
        return Documents(
            [self.texts[index] for index in chosen],
            self.positions[is_wanted],
            {name: [values[index] for index in chosen] for name, values in self.columns.items()},
            self.tokens[np.repeat(is_wanted, lengths)],
            np.cumsum(lengths[is_wanted]),
        )

    def head(self, count: int) -> Documents:
        """The first documents."""
        ends = self.ends[:count]
        return Documents(
            self.texts[:count],
            self.positions[:count],
            {name: values[:count] for name, values in self.columns.items()},
            self.tokens[: ends[-1] if count else 0],
            ends,
        )


def within_limits(documents: Documents, rules: DocumentRules) -> tuple[Documents, dict[str, NDArray[np.int64]]]:
    """The documents whose length is allowed, and by reason the positions of the records of the others."""
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
    """The documents of each corpus of the build: all, or those for training and those for validation."""
    if rules.validation_fraction is None:
        return [documents]
    is_validation = in_validation(documents.texts, rules.validation_fraction)
    return [documents.select(~is_validation), documents.select(is_validation)]


def in_validation(texts: Sequence[str], fraction: float) -> NDArray[np.bool_]:
    """Which texts belong to the validation corpus: bool [texts].

    Nothing but the text decides, so equal texts lie together, other inputs move nothing, and a larger fraction only
    moves texts from training to validation. Costs 1 CPU-second per GB.
    """
    threshold = int(Fraction(fraction) * (1 << 64))
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8, person=_SPLIT_PERSON).digest() for text in texts)
    return np.frombuffer(digests, "<u8") < np.uint64(min(threshold, (1 << 64) - 1))
