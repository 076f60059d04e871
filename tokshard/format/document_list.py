"""Lists of documents, such as opt-outs and leaked benchmarks, and the documents of corpora that they name.

A row of a list has the `id` of a document, as ``--id-field`` kept it, or its number: `document`, counted from 0. A
number comes with the `fingerprint` of its corpus, which may be left out for a single corpus. If no corpus has it, the
id of the row counts. ``tokshard scan`` writes rows that have all three.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.corpus import Corpus
from tokshard.format.row_files import read_rows

ID = "id"
"""The kept column of ids, and their column in a list."""

MAX_ROWS = 1 << 26
"""Rows that a list may have: 24 bytes of memory for each, in every process."""

_HASH_BYTES = 16
_HINT = (
    "give a text with one id in each line, or JSON lines, csv or parquet with a column 'id', or with 'document' and "
    "'fingerprint'"
)


class ListedRow(NamedTuple):
    """A row of a list, as written there."""

    id: str | None = None
    document: int | None = None
    fingerprint: str | None = None

    def __str__(self) -> str:
        return f"document {self.document}" if self.id is None else self.id


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentList:
    """The rows of a list that concern some corpora. Compares ids by 128 bits of BLAKE2b, and drops repeated rows.

    Args:
        ids: bytes [n], ascending: hashes of ids.
        id_rows: int64 [n], the row of each in the file, from 0.
        numbers: by the index of a corpus: int64 [2, n]: document numbers, ascending, and their rows.
        foreign: int64 [n]: rows that name a document of other corpora.
    """

    ids: NDArray[np.bytes_]
    id_rows: NDArray[np.int64]
    numbers: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    foreign: NDArray[np.int64]

    @property
    def rows(self) -> NDArray[np.int64]:
        """All rows, ascending."""
        return np.sort(np.concatenate([self.id_rows, self.foreign, *(rows for _, rows in self.numbers.values())]))

    def find(
        self, corpus: int, numbers: NDArray[np.int64], ids: Any = None
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Whether documents are listed, bool [documents], and the rows that name them. Costs 4 us for each id.

        Args:
            corpus: the index of their corpus.
            numbers: int64 [documents]: the number of each in the corpus.
            ids: the column of their ids; None if the corpus has none.
        """
        is_listed, rows = np.zeros(len(numbers), np.bool_), [np.empty(0, np.int64)]
        if corpus in self.numbers:
            wanted, of_number = self.numbers[corpus]
            places = np.minimum(np.searchsorted(wanted, numbers), len(wanted) - 1)
            is_listed = wanted[places] == numbers
            rows.append(of_number[places[is_listed]])
        if ids is not None and len(self.ids) and len(ids):
            values = ids.to_pylist() if isinstance(ids, pa.Array) else ids
            hashes = np.frombuffer(
                b"".join(_hash("" if value is None else str(value)) for value in values), f"S{_HASH_BYTES}"
            )
            places = np.minimum(np.searchsorted(self.ids, hashes), len(self.ids) - 1)
            has_id = (self.ids[places] == hashes) & np.array([value is not None for value in values], np.bool_)
            is_listed |= has_id
            rows.append(self.id_rows[places[has_id]])
        return is_listed, np.unique(np.concatenate(rows))


def read_document_list(location: str, corpora: Sequence[Corpus]) -> DocumentList:
    """Read a list, once from start to end.

    Args:
        location: a path or URI of a text, or of ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet``; texts may be compressed
            (``.gz``, ``.zst``, ``.bz2``).
        corpora: the corpora of the documents.

    Raises:
        UsageError: it cannot be read, has no rows or more than `MAX_ROWS`, or lists documents that these corpora cannot
            have.
    """
    of_fingerprint = {
        fingerprint: index for index, corpus in enumerate(corpora) for fingerprint in corpus.content_fingerprints
    }
    has_ids = any(ID in corpus.manifest.columns for corpus in corpora)
    hashes, id_rows, foreign = bytearray(), array.array("q"), array.array("q")
    numbers: dict[int, tuple[array.array[int], array.array[int]]] = {}
    row = -1
    for row, listed in enumerate(listed_rows(location)):
        if row == MAX_ROWS:
            raise UsageError(f"{location} has more than {MAX_ROWS:,} rows", hint="divide it, and copy twice")
        corpus = of_fingerprint.get(listed.fingerprint) if listed.fingerprint is not None else None
        if listed.document is not None and listed.fingerprint is None:
            if len(corpora) > 1:
                raise UsageError(
                    f"row {row + 1} of {location} has the number of a document, and there are {len(corpora)} corpora",
                    hint="add the 'fingerprint' of its corpus to each row ('tokshard inspect --json' shows it)",
                )
            corpus = 0
        if listed.document is not None and corpus is not None:
            mine = numbers.setdefault(corpus, (array.array("q"), array.array("q")))
            mine[0].append(listed.document)
            mine[1].append(row)
        elif listed.id is not None:
            if not has_ids:
                raise UsageError(
                    f"{location} lists ids, such as {listed.id:.60}, and no corpus has a column 'id'",
                    hint="list documents by their numbers ('document' and 'fingerprint' in JSON lines); only a build "
                    "with --id-field keeps ids",
                )
            hashes += _hash(listed.id)
            id_rows.append(row)
        else:
            foreign.append(row)
    if row < 0:
        raise UsageError(f"{location} lists no document", hint=_HINT)
    kind = f"S{_HASH_BYTES}"
    all_ids = np.frombuffer(hashes, kind) if hashes else np.empty(0, kind)
    ids, first = np.unique(all_ids, return_index=True)
    return DocumentList(
        ids=ids,
        id_rows=np.frombuffer(id_rows, np.int64)[first] if len(ids) else np.empty(0, np.int64),
        numbers={corpus: _distinct(*map(np.array, of_corpus)) for corpus, of_corpus in numbers.items()},
        foreign=np.array(foreign, np.int64),
    )


def rows_not_found(
    location: str, listed: DocumentList, found: NDArray[np.int64], *, most: int
) -> tuple[int, list[str]]:
    """The number of rows that name no document, and the first of them, as written.

    Args:
        found: int64 [n]: rows that name a document, in any order, repeated or not.
        most: rows to name.
    """
    missing = np.setdiff1d(listed.rows, found)
    wanted = set(missing[:most].tolist())
    rows = islice(listed_rows(location), max(wanted) + 1 if wanted else 0)
    return len(missing), [str(one) for row, one in enumerate(rows) if row in wanted]


def listed_rows(location: str) -> Iterator[ListedRow]:
    """The rows of a list in order. Empty lines do not count.

    Raises:
        UsageError: the file cannot be read, or a row is not valid.
    """
    for number, row in enumerate(read_rows(location, columns=ListedRow._fields, of_line=ID, hint=_HINT), 1):
        try:
            yield _listed(row)
        except (TypeError, ValueError) as error:
            raise UsageError(f"row {number} of {location}: {error}", hint=_HINT) from error


def _listed(row: Mapping[str, Any]) -> ListedRow:
    own, number, fingerprint = row.get(ID), row.get("document"), row.get("fingerprint")
    if isinstance(own, bool) or not isinstance(own, str | int | None):
        raise TypeError(f"the id {own!r:.60} is neither a text nor an integer")
    if isinstance(number, str):
        with contextlib.suppress(ValueError):  # it is refused below
            number = int(number) if number else None
    if isinstance(number, bool) or not isinstance(number, int | None) or not 0 <= (number or 0) < 1 << 63:
        raise ValueError(f"the document {number!r:.60} is not a number from 0 on")
    if not isinstance(fingerprint, str | None):
        raise TypeError(f"the fingerprint {fingerprint!r:.60} is not a text")
    listed = ListedRow(None if own in (None, "") else str(own), number, fingerprint or None)
    if listed.id is None and listed.document is None:
        raise ValueError("it has neither 'id' nor 'document'")
    return listed


def _hash(value: str) -> bytes:
    return hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()


def _distinct(numbers: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    distinct, first = np.unique(numbers, return_index=True)
    return np.stack([distinct, rows[first]])
