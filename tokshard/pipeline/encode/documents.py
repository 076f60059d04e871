"""Documents on their way into a corpus, and the rules that decide which of them are written, and where. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.format.arrays import number_array
from tokshard.format.manifest import BuildConfig
from tokshard.pipeline.sources.records import BadRecord

TOO_FEW_TOKENS = "under min-tokens"
TOO_MANY_TOKENS = "over max-tokens"
DUPLICATE = "duplicate"
"""Reason for a text that is equal to an earlier one."""

Column = Any
"""Values of a kept column, one per document: a list, or an Arrow array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The documents of one chunk.

    Args:
        tokens: unsigned integers [tokens]: one document after another, delimiters included. Empty where only hashes
            are wanted, or a view is made.
        ends: int64 [documents]: where each document ends in `tokens`.
        positions: int64 [documents], ascending: the index of each document's record in the chunk.
        columns: name of a kept column to its values.
        text_bytes: int64 [documents]: UTF-8 bytes of each text; None where no text is read.
        has_special: bool [documents]: the text spells a special token; None where no text is read.
        is_validation: bool [documents]: it belongs to the validation corpus; None for a build of one corpus.
        sources, records: int64 [documents]: origin of each; None: the input that is read.
        numbers: int64 [documents]: number of each among all documents of all corpora; None where no corpus is read.
        hashes: uint64 [documents, 2]: hash of each text; None where duplicates are not looked for.
        starts: int64 [documents]: the position of the first token of each in its corpus; None where no view is made.
        num_targets: int64 [documents]: targets of each, for a view of a corpus that has loss spans.
        omitted: what the template left out of each conversation: see `chat.omissions`; None where texts are read.
    """

    tokens: NDArray[Any]
    ends: NDArray[np.int64]
    positions: NDArray[np.int64]
    columns: Mapping[str, Column]
    text_bytes: NDArray[np.int64] | None = None
    has_special: NDArray[np.bool_] | None = None
    is_validation: NDArray[np.bool_] | None = None
    sources: NDArray[np.int64] | None = None
    records: NDArray[np.int64] | None = None
    numbers: NDArray[np.int64] | None = None
    hashes: NDArray[np.uint64] | None = None
    starts: NDArray[np.int64] | None = None
    num_targets: NDArray[np.int64] | None = None
    omitted: Sequence[Sequence[tuple[str, int]]] | None = None

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, here or in the corpus of a view."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens in each document: int64 [documents]."""
        return np.diff(self.ends, prepend=0)

    def select(self, is_wanted: NDArray[np.bool_]) -> Documents:
        """The documents that a mask bool [documents] marks. Copies the tokens, unless all are wanted."""
        if is_wanted.all():
            return self
        lengths = self.lengths
        chosen = np.flatnonzero(is_wanted)
        return replace(
            self,
            tokens=self.tokens[np.repeat(is_wanted, lengths)] if len(self.tokens) else self.tokens,
            ends=np.cumsum(lengths[is_wanted]),
            columns={name: _taken(values, chosen) for name, values in self.columns.items()},
            **{name: _taken(values, chosen) for name, values in self._by_document()},
        )

    def head(self, count: int) -> Documents:
        """The first `count` documents."""
        return replace(
            self,
            tokens=self.tokens[: self.ends[count - 1] if count else 0],
            ends=self.ends[:count],
            columns={name: values[:count] for name, values in self.columns.items()},
            **{name: values[:count] for name, values in self._by_document()},
        )

    def contents(self) -> Iterator[bytes]:
        """The tokens of each document as little-endian uint32, for hashes."""
        content = np.ascontiguousarray(self.tokens, "<u4").data.cast("B") if len(self.tokens) else b""
        start = 0
        for stop in (4 * self.ends).tolist():
            yield bytes(content[start:stop])
            start = stop

    def _by_document(self) -> Iterator[tuple[str, Any]]:
        for one in fields(self):
            if one.name not in {"tokens", "ends", "columns"} and (values := getattr(self, one.name)) is not None:
                yield one.name, values


def _taken(values: Any, chosen: NDArray[np.int64]) -> Any:
    """Some of the values of an array or a list."""
    if isinstance(values, np.ndarray):
        return values[chosen]
    if isinstance(values, pa.Array):
        return values.take(number_array(chosen))
    return [values[index] for index in chosen.tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkResult:
    """The results of the records of one chunk.

    Args:
        count: all records of the chunk.
        input_bytes: bytes of the input that the chunk stands for.
        documents: the documents that can be written.
        bad: the records that cannot become documents, by ascending position.
        left_out: reason to the positions of others that are left out: int64, ascending. The rest is empty.
        changes: kind of change on the way to a document, to the positions of the changed records.
        candidates: int64: positions of the records among which duplicates are still to be found. None: that is done.
        fields: kept columns for which at least one record has a field.
        num_marks: byte order marks that were dropped.
        sources: int64 [records]: where each record comes from; None: from the input that is read.
        listed: int64 [rows]: the rows of the list of ``--drop-ids`` that name one of the records.
        padding: int64 [records]: ids of padding that were left out at each; None: none.
    """

    count: int
    input_bytes: int
    documents: Documents
    bad: list[BadRecord] = field(default_factory=list)
    left_out: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    changes: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    candidates: NDArray[np.int64] | None = None
    fields: frozenset[str] = frozenset()
    num_marks: int = 0
    sources: NDArray[np.int64] | None = None
    listed: NDArray[np.int64] | None = None
    padding: NDArray[np.int64] | None = None

    def of(self, is_wanted: NDArray[np.bool_]) -> ChunkResult:
        """The results of the records that a mask bool [records] marks. Only for documents of corpora."""
        return replace(
            self,
            documents=self.documents.select(is_wanted[self.documents.positions]),
            left_out={reason: found[is_wanted[found]] for reason, found in self.left_out.items()},
        )

    def without_duplicates(self, is_kept: NDArray[np.bool_]) -> ChunkResult:
        """Leave out duplicates; no other reason counts for them.

        Args:
            is_kept: bool [candidates].
        """
        assert self.candidates is not None, "duplicates are left out once"
        if is_kept.all():
            return replace(self, candidates=None)
        dropped = self.candidates[~is_kept]
        others = {reason: found[~np.isin(found, dropped)] for reason, found in self.left_out.items()}
        gone = set(dropped.tolist())
        return replace(
            self,
            documents=self.documents.select(~np.isin(self.documents.positions, dropped)),
            bad=[record for record in self.bad if record.position not in gone],
            left_out={**others, DUPLICATE: dropped},
            changes={what: found[~np.isin(found, dropped)] for what, found in self.changes.items()},
            candidates=None,
        )

    def head(self, count: int) -> ChunkResult:
        """The chunk up to its document number `count`: nothing after this document."""
        if len(self.documents) < count:
            return self
        documents = self.documents.head(count)
        last = int(documents.positions[-1])
        return replace(
            self,
            count=last + 1,
            documents=documents,
            bad=[record for record in self.bad if record.position < last],
            left_out={reason: found[found < last] for reason, found in self.left_out.items()},
            changes={what: found[found <= last] for what, found in self.changes.items()},
        )


def apply_rules(made: ChunkResult, config: BuildConfig) -> ChunkResult:
    """Leave out documents of a length that is not wanted, and say which belong to the validation corpus.

    Documents are split by their text where it was read, see `validation_mask`; here by their tokens.
    """
    documents, left_out = made.documents, dict(made.left_out)
    if config.min_tokens is not None or config.max_tokens is not None:
        lengths = documents.lengths
        is_short = lengths < (config.min_tokens or 0)
        is_long = lengths > (np.iinfo(np.int64).max if config.max_tokens is None else config.max_tokens)
        for reason, which in ((TOO_FEW_TOKENS, is_short), (TOO_MANY_TOKENS, is_long)):
            if which.any():
                left_out[reason] = documents.positions[which]
        documents = documents.select(~(is_short | is_long))
    if config.validation_fraction is not None and documents.is_validation is None:
        documents = replace(documents, is_validation=validation_mask(documents.contents(), config.validation_fraction))
    return replace(made, documents=documents, left_out=left_out)


def validation_mask(contents: Iterable[bytes], fraction: float) -> NDArray[np.bool_]:
    """Which documents belong to the validation corpus: bool [documents].

    Only the contents decide. So equal ones are in the same corpus, other inputs change nothing, and a larger
    fraction only moves texts from training to validation. Costs as much as `content_hashes`.
    """
    threshold = int(Fraction(fraction) * (1 << 64))
    return _digests(contents)[:, 2] < np.uint64(min(threshold, (1 << 64) - 1))


def content_hashes(contents: Iterable[bytes]) -> NDArray[np.uint64]:
    """The first half of the SHA-256 of each content: uint64 [contents, 2].

    Costs 0.5 CPU-seconds per GB where the processor has instructions for it (else 2), and 0.2 us per content.
    """
    return np.ascontiguousarray(_digests(contents)[:, :2])


def _digests(contents: Iterable[bytes]) -> NDArray[np.uint64]:
    """The SHA-256 of each content, as four words: uint64 [contents, 4]."""
    digests = b"".join(hashlib.sha256(content).digest() for content in contents)
    return np.frombuffer(digests, "<u8").reshape(-1, 4)


def split_documents(documents: Documents) -> list[Documents]:
    """The documents for each corpus of the build: one list of all, or those for training and those for validation."""
    if documents.is_validation is None:
        return [documents]
    return [documents.select(~documents.is_validation), documents.select(documents.is_validation)]
