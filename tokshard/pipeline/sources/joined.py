"""Columns of documents from a file that was made later, such as scores: found by the number or the id of a document."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.arrays import number_array, numbers_of
from tokshard.format.corpus import Corpus
from tokshard.format.document_list import ID, MAX_ROWS
from tokshard.format.schema import ARROW_ERRORS, SUPPORTED_COLUMN_TYPES
from tokshard.store import local_file, locate

DOCUMENT, FINGERPRINT = "document", "fingerprint"
_ID_BYTES = 16
_NO_ID = b"\xff" * _ID_BYTES
_HINT = "give a parquet file with a column 'id', or 'document' and 'fingerprint', and the columns to join"


class Joined:
    """The columns of a file, by document.

    The file has a column `id`, as ``--id-field`` kept them, or `document`: a number in the corpus whose content
    fingerprint is in the column `fingerprint` or in the metadata of the file. Without a fingerprint, the numbers are of
    this corpus if the file has a row for each of its documents. The file stays in memory, at 24 bytes a row or more.

    Args:
        file: a parquet file, by path or URI.
        corpus: the corpus of the documents.

    Attributes:
        columns: its other columns: name to type.
        by_id: whether documents are found by their ids.

    Raises:
        UsageError: it cannot be read, belongs to another corpus, or names a document twice.
    """

    def __init__(self, file: str, corpus: Corpus) -> None:
        from pyarrow import parquet  # takes 50 ms, and most commands need none

        self._file = file
        try:
            with local_file(*locate(file)) as path:
                table = parquet.read_table(path, memory_map=False)
        except ARROW_ERRORS as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)[:200]
            raise UsageError(f"{file} cannot be read: {reason}", hint=_HINT) from error
        names = table.schema.names
        self.by_id = DOCUMENT not in names
        if ID not in names and self.by_id:
            raise UsageError(f"{file} has the columns {', '.join(names) or 'none'}", hint=_HINT)
        if table.num_rows > MAX_ROWS:
            raise UsageError(f"{file} has more than {MAX_ROWS:,} rows", hint="divide it, and join several views")
        if self.by_id and ID not in corpus.manifest.columns:
            raise UsageError(
                f"{file} lists ids, and the corpus has no column 'id'",
                hint="build it with --id-field, or list documents by their numbers ('document' and 'fingerprint')",
            )
        if not self.by_id:
            table = self._of_this(table, corpus)
        self.columns = {
            name: _kind(file, name, table.schema.field(name).type)
            for name in names
            if name not in {ID, DOCUMENT, FINGERPRINT}
        }
        self._values = {
            name: table.column(name).combine_chunks().cast(SUPPORTED_COLUMN_TYPES[kind])
            for name, kind in self.columns.items()
        }
        keys = _hashes(table.column(ID).to_pylist()) if self.by_id else numbers_of(table.column(DOCUMENT).cast("int64"))
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        if len(twice := np.flatnonzero(self._keys[1:] == self._keys[:-1])):
            row = int(self._order[twice[0] + 1])
            named = table.column(ID if self.by_id else DOCUMENT)[row].as_py()
            raise UsageError(f"row {row + 1} of {file} names {named!r}, as an earlier row does", hint="give each once")

    def _of_this(self, table: pa.Table, corpus: Corpus) -> pa.Table:
        """The rows for the documents of this corpus."""
        column = table.column(DOCUMENT)
        if column.null_count or not pa.types.is_integer(column.type):
            raise UsageError(f"{self._file}: the column 'document' has to be integers without nulls", hint=_HINT)
        metadata = table.schema.metadata or {}
        given = {metadata[key].decode() for key in (b"fingerprint", b"tokshard.fingerprint") if key in metadata}
        if FINGERPRINT in table.schema.names:
            import pyarrow.compute as pc

            mine = pc.equal(table.column(FINGERPRINT), corpus.fingerprint)
            given |= {corpus.fingerprint} if pc.any(mine).as_py() else {"another"}
            table = table.filter(mine)
        if (given and corpus.fingerprint not in given) or (not given and table.num_rows != corpus.num_documents):
            found = f"is for the corpus {min(given)[:12]}" if given else f"has {table.num_rows:,} rows"
            raise UsageError(
                f"{self._file} {found}, and this is {corpus.fingerprint[:12]} with {corpus.num_documents:,} documents",
                hint="give the file of this corpus, with its fingerprint ('tokshard inspect --json' shows it)",
            )
        return table

    def values(self, numbers: NDArray[np.int64], ids: pa.Array | None) -> Mapping[str, pa.Array]:
        """The columns of some documents: null for one that the file does not name.

        Args:
            numbers: int64 [documents]: the number of each in the corpus.
            ids: the column of their ids; None if the corpus has none.
        """
        wanted: NDArray[Any] = numbers
        if self.by_id:
            wanted = _hashes([None] * len(numbers) if ids is None else ids.to_pylist())
        places = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        is_there = self._keys[places] == wanted
        rows = pa.Array.from_buffers(
            pa.int64(),
            len(numbers),
            [pa.py_buffer(np.packbits(is_there, bitorder="little")), *number_array(self._order[places]).buffers()[1:]],
        )
        return {name: values.take(rows) for name, values in self._values.items()}


def _hashes(ids: list[str | int | None]) -> NDArray[np.bytes_]:
    """A hash of 128 bits of each id; for a missing id, one that no id has."""
    encoded = (None if value is None else str(value).encode("utf-8", "surrogatepass") for value in ids)
    digests = (_NO_ID if value is None else hashlib.blake2b(value, digest_size=_ID_BYTES).digest() for value in encoded)
    return np.frombuffer(b"".join(digests), f"S{_ID_BYTES}")


def _kind(file: str, name: str, kind: pa.DataType) -> str:
    """The type of a joined column, as kept columns have it."""
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind):
        return "int64"
    if pa.types.is_floating(kind):
        return "float64"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind):
        return "string"
    raise UsageError(f"{file}: the column {name!r} is {kind}", hint="join numbers, texts, or true and false")
