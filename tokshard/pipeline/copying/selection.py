"""Which documents of other corpora a copy takes, and those documents as a stream of batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.corpus import Corpus
from tokshard.format.shard import Shard
from tokshard.format.shard_table import Runs
from tokshard.format.tables import SourceInfo
from tokshard.format.whole_corpus import checked_batches

SLICE_TOKENS = 1 << 20
"""Tokens that are taken at once, unless one document is longer."""

_HASH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Conditions that a document has to meet, all of them.

    Args:
        hashes: half-open range in [0, 1) of the hash of its tokens: equal documents are taken together, and ranges that
            do not overlap divide a corpus.
        where: kept column to the value it has, as text.
        source: shell pattern of where its source is called.
        min_tokens, max_tokens: bounds of its length, delimiters included.
    """

    hashes: tuple[float, float] | None = None
    where: Mapping[str, str] = field(default_factory=dict)
    source: str | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedDocuments:
    """Documents on their way from one corpus to another.

    Args:
        tokens: [tokens], one document after another.
        ends: int64 [documents], where each ends.
        numbers: int64 [documents], of each among the documents of all corpora together, counted from 0.
        sources, records: int64 [documents], where each comes from; sources are those of all corpora together.
        columns: kept column to its values.
    """

    tokens: NDArray[Any]
    ends: NDArray[np.int64]
    numbers: NDArray[np.int64]
    sources: NDArray[np.int64]
    records: NDArray[np.int64]
    columns: Mapping[str, pa.Array]

    def __len__(self) -> int:
        return len(self.ends)

    def only(self, is_taken: NDArray[np.bool_]) -> CopiedDocuments:
        """Those documents for which `is_taken`, bool [documents], is true."""
        if is_taken.all():
            return self
        lengths = np.diff(self.ends, prepend=0)
        mask = pa.array(is_taken)
        return CopiedDocuments(
            tokens=self.tokens[np.repeat(is_taken, lengths)],
            ends=np.cumsum(lengths[is_taken]),
            numbers=self.numbers[is_taken],
            sources=self.sources[is_taken],
            records=self.records[is_taken],
            columns={name: column.filter(mask) for name, column in self.columns.items()},
        )


def source_labels(corpus: Corpus, sources: list[SourceInfo]) -> list[str]:
    """How the sources of a corpus are called: the argument of the build, and the path below it."""
    names = corpus.manifest.arguments
    return [f"{names[one.argument]}/{one.path}" if one.path else names[one.argument] for one in sources]


def read_shard(
    corpus: Corpus, index: int, *, first_number: int, first_source: int, with_columns: bool
) -> Iterator[CopiedDocuments]:
    """All documents of one shard of a corpus, as `read_documents` gives them.

    Args:
        first_number, first_source: numbers of the first document and source of the corpus.

    Raises:
        DamagedCorpusError: the shard is missing, or is not what the manifest and its hashes say.
    """
    runs = corpus.shards.runs(index)
    first = int(corpus.shards.first_documents[index])
    # the sources of a generation are counted from 0
    base = first_source + corpus.provenance(first).source - int(runs.source[0])
    moved = replace(runs, source=runs.source + base)
    batches = checked_batches(corpus, index)
    return read_documents(batches, moved, first_number=first_number + first, with_columns=with_columns)


def read_documents(
    batches: Iterable[tuple[Shard, int]], runs: Runs, *, first_number: int, with_columns: bool
) -> Iterator[CopiedDocuments]:
    """All documents of one shard in order, `SLICE_TOKENS` at a time.

    They are checked when the last slice has been taken, so use nothing for good before the iterator ends.

    Args:
        batches: of `checked_batches` or `batches_of_shard`.
        runs: where its documents come from.
        first_number: number of its first document.
    """
    row = 0
    for shard, batch in batches:
        offsets, tokens = shard.batch(batch)
        columns = shard.columns(batch) if with_columns else {}
        start = 0
        while start < len(offsets) - 1:
            stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + SLICE_TOKENS, "right")) - 1)
            rows = np.arange(row + start, row + stop)
            run = np.searchsorted(runs.document, rows, "right") - 1
            low, high = int(offsets[start]), int(offsets[stop])
            yield CopiedDocuments(
                tokens=tokens[low:high],
                ends=offsets[start + 1 : stop + 1] - low,
                numbers=rows + first_number,
                sources=runs.source[run],
                records=runs.record[run] + rows - runs.document[run],
                columns={name: column.slice(start, stop - start) for name, column in columns.items()},
            )
            start = stop
        row += len(offsets) - 1


class Chooser:
    """Decides which documents meet the conditions.

    Args:
        labels: of all sources.
        columns: kept columns and their types.

    Raises:
        UsageError: a condition is about a column that is not there, or no value of its type.
    """

    def __init__(self, selection: Selection, labels: list[str], columns: Mapping[str, str]) -> None:
        self._selection = selection
        pattern = selection.source
        self._is_wanted = None if pattern is None else np.array([fnmatchcase(label, pattern) for label in labels])
        if self._is_wanted is not None and not self._is_wanted.any():
            raise UsageError(f"no source is called {pattern}", hint=f"a source is called {labels[0]}; use * and ?")
        self._where = {name: _value(name, text, columns) for name, text in selection.where.items()}

    def __call__(self, documents: CopiedDocuments) -> NDArray[np.bool_]:
        """Whether each document is taken: bool [documents]."""
        chosen = np.ones(len(documents), np.bool_)
        lengths = np.diff(documents.ends, prepend=0)
        if self._selection.min_tokens is not None:
            chosen &= lengths >= self._selection.min_tokens
        if self._selection.max_tokens is not None:
            chosen &= lengths <= self._selection.max_tokens
        if self._is_wanted is not None:
            chosen &= self._is_wanted[documents.sources]
        for name, value in self._where.items():
            chosen &= np.array([found == value for found in documents.columns[name].to_pylist()], np.bool_)
        if self._selection.hashes is not None:
            low, high = self._selection.hashes
            hashes = document_hashes(documents.tokens, documents.ends)
            chosen &= (hashes >= low) & (hashes < high)
        return chosen


def document_hashes(tokens: NDArray[Any], ends: NDArray[np.int64]) -> NDArray[np.float64]:
    """The hash of each document, from the little-endian uint32 of its tokens: float64 [documents] in [0, 1)."""
    content = tokens.astype("<u4").data.cast("B")
    stops = (4 * ends).tolist()
    digests = b"".join(
        hashlib.blake2b(content[start:stop], digest_size=_HASH_BYTES).digest()
        for start, stop in zip([0, *stops], stops, strict=False)
    )
    return (np.frombuffer(digests, "<u8") >> 11) / float(1 << 53)


def _value(name: str, text: str, columns: Mapping[str, str]) -> Any:
    kind = columns.get(name)
    if kind is None:
        known = ", ".join(columns) or "none"
        raise UsageError(f"the corpora have no kept column {name!r}", hint=f"kept columns: {known}")
    try:
        match kind:
            case "int64":
                return int(text)
            case "float64":
                return float(text)
            case "bool":
                return {"true": True, "false": False}[text.lower()]
    except (ValueError, KeyError):
        raise UsageError(f"{text!r} is not a value of column {name}, which is {kind}", hint="give another") from None
    return text
