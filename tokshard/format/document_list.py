"""Lists of documents, such as opt-outs and leaked benchmarks, and the documents of a corpus that they name.

A row of a list has the `id` of a document, as ``--id-field`` kept it, or its number: `document`, counted from 0. A
number may come with the `fingerprint` of its corpus. If that is another corpus, the id of the row counts. ``tokshard
scan`` writes rows that have all three.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
        of_corpus = f" of the corpus with the content {self.fingerprint[:12]}" if self.fingerprint else ""
        return f"document {self.document}{of_corpus}" if self.id is None else self.id


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentList:
    """The rows of a list that concern a corpus. Compares ids by 128 bits of BLAKE2b, and drops repeated rows.

    Args:
        ids: bytes [n], ascending: hashes of ids.
        id_rows: int64 [n], the row of each in the file, from 0.
        numbers: int64 [n], ascending: numbers of documents.
        number_rows: int64 [n], the row of each.
        foreign: int64 [n]: rows that name a document of other corpora.
    """

    ids: NDArray[np.bytes_]
    id_rows: NDArray[np.int64]
    numbers: NDArray[np.int64]
    number_rows: NDArray[np.int64]
    foreign: NDArray[np.int64]

    @property
    def rows(self) -> NDArray[np.int64]:
        """All rows, ascending."""
        return np.sort(np.concatenate([self.id_rows, self.number_rows, self.foreign]))

    def find(self, numbers: NDArray[np.int64], ids: pa.Array | None) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Whether documents are listed, bool [documents], and the rows that name them. Costs 4 us for each id.

        Args:
            numbers: int64 [documents]: the number of each in the corpus.
            ids: the column of their ids; None if the corpus has none.
        """
        is_listed, rows = _named(self.numbers, self.number_rows, numbers)
        if ids is not None and len(ids) and len(self.ids):
            texts = ("" if value is None else str(value) for value in ids.to_pylist())  # no list has an empty id
            hashes = np.frombuffer(b"".join(map(_hash, texts)), self.ids.dtype)
            has_listed_id, rows_of_ids = _named(self.ids, self.id_rows, hashes)
            is_listed, rows = is_listed | has_listed_id, np.concatenate([rows, rows_of_ids])
        return is_listed, np.unique(rows)


def _named(
    listed: NDArray[Any], rows: NDArray[np.int64], wanted: NDArray[Any]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which values are in a list, bool [values], and the rows that have them there."""
    if not len(listed):
        return np.zeros(len(wanted), np.bool_), rows
    places = np.minimum(np.searchsorted(listed, wanted), len(listed) - 1)
    is_listed = listed[places] == wanted
    return is_listed, rows[places[is_listed]]


def read_document_list(location: str, corpus: Corpus) -> DocumentList:
    """Read a list, once from start to end.

    Args:
        location: a path or URI of a text, or of ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet``; texts may be compressed
            (``.gz``, ``.zst``, ``.bz2``).
        corpus: the corpus of the documents.

    Raises:
        UsageError: it cannot be read, has no rows or more than `MAX_ROWS`, or lists documents that this corpus cannot
            have.
    """
    hashes, id_rows, foreign = bytearray(), array.array("q"), array.array("q")
    numbers, number_rows = array.array("q"), array.array("q")
    row = -1
    for row, listed in enumerate(listed_rows(location)):
        if row == MAX_ROWS:
            raise UsageError(
                f"{location} has more than {MAX_ROWS:,} rows", hint="divide it; with --drop-ids, make a view of a view"
            )
        is_ours = listed.fingerprint is None or listed.fingerprint in corpus.content_fingerprints
        if listed.document is not None and is_ours:
            numbers.append(listed.document)
            number_rows.append(row)
        elif listed.id is not None:
            if ID not in corpus.manifest.columns:
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
        raise UsageError(f"{location} lists no document", hint=f"leave it out if that is right, or {_HINT}")
    kind = f"S{_HASH_BYTES}"
    ids, first_ids = np.unique(np.frombuffer(hashes, kind) if hashes else np.empty(0, kind), return_index=True)
    distinct, first_numbers = np.unique(np.array(numbers), return_index=True)
    return DocumentList(
        ids=ids,
        id_rows=np.array(id_rows)[first_ids],
        numbers=distinct,
        number_rows=np.array(number_rows)[first_numbers],
        foreign=np.array(foreign),
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
