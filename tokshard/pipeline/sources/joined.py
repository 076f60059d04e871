"""Columns of documents from a file that was made later, such as scores: found by the number or the id of a document."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import BuildError, UsageError
from tokshard.format.arrays import as_written, number_array, numbers_of, value_array
from tokshard.format.corpus import Corpus
from tokshard.format.document_list import ID, MAX_ROWS
from tokshard.format.files import file_sha256
from tokshard.format.schema import ARROW_ERRORS, SUPPORTED_COLUMN_TYPES
from tokshard.store import locate

if TYPE_CHECKING:
    from pyarrow import parquet as pq

DOCUMENT, FINGERPRINT = "document", "fingerprint"
_ID_BYTES = 16
_NO_ID = b"\xff" * _ID_BYTES
_LAST = (1 << 63) - 1
_HINT = "give a parquet file with a column 'id', or 'document' and 'fingerprint', and the columns to join"


class _Rows(NamedTuple):
    """Rows of the file, in memory.

    Args:
        groups: int64 [groups], their row groups.
        keys: int64 or bytes [rows], ascending: the number or the hash of the id of each.
        order: int64 [rows], its place in `values`.
        values: the joined columns.
    """

    groups: NDArray[np.int64]
    keys: NDArray[Any]
    order: NDArray[np.int64]
    values: Mapping[str, pa.Array]


class Joined:
    """The columns of a file, by document.

    The file has a column `id`, as ``--id-field`` kept them, or `document`: a number in the corpus whose content
    fingerprint is in the column `fingerprint` or in the metadata of the file. That of an earlier generation will do,
    because documents keep their numbers. Without a fingerprint, the numbers are of this corpus if the file has a row
    for each of its documents.

    Of a file with numbers, only the row groups that may have the documents asked for are read: two or three at a time,
    if the file is sorted by number. A file with ids is read whole. What is read stays in memory, at 24 bytes a row or
    more.

    Args:
        file: a parquet file, by path or URI.
        corpus: the corpus of the documents.
        sha256: of the file that the view began with, in hexadecimal digits.

    Attributes:
        columns: its other columns, name to type: a type of kept columns, or the name of Arrow for one that cannot be
            compared.
        by_id: whether documents are found by their ids.
        file: as given.

    Raises:
        UsageError: it cannot be read, or belongs to another corpus.
        BuildError: it is not the file that the view began with.
    """

    def __init__(self, file: str, corpus: Corpus, sha256: str) -> None:
        self.file, self._fingerprints = file, list(corpus.content_fingerprints)
        self._version = _version_of(file)  # before the hash: what is read later must be what was hashed
        unchanged(file, sha256)
        with self._opened() as table:
            schema = table.schema_arrow
            self.by_id = DOCUMENT not in schema.names
            self._check(schema, corpus)
            if not self.by_id:
                self._check_is_of(table, corpus)
            self.columns = {
                name: _kind(schema.field(name).type) for name in schema.names if name not in {ID, DOCUMENT, FINGERPRINT}
            }
            groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
        self._keys = [ID] if self.by_id else [name for name in (DOCUMENT, FINGERPRINT) if name in schema.names]
        self._num_rows = np.array([group.num_rows for group in groups], np.int64)
        self._bounds = np.array([_bounds(group) for group in groups], np.int64).reshape(-1, 2)
        self._rows: _Rows | None = None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        from pyarrow import parquet  # takes 50 ms, and most commands need none

        store, name = locate(self.file)
        path = store.local_path(name)
        try:
            # not mapped: cutting a mapped file ends the process
            with pa.PythonFile(store.open(name), mode="r") if path is None else pa.OSFile(path) as source:
                yield parquet.ParquetFile(source)
        except ARROW_ERRORS as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)[:200]
            raise UsageError(f"{self.file} cannot be read: {reason}", hint=_HINT) from error

    def _check(self, schema: pa.Schema, corpus: Corpus) -> None:
        """Refuse a file whose rows name no documents of this corpus."""
        for name in schema.names:
            if schema.names.count(name) > 1:
                raise UsageError(f"{self.file} has several columns {name!r}", hint="rename them")
        if self.by_id and ID not in schema.names:
            raise UsageError(f"{self.file} has the columns {', '.join(schema.names) or 'none'}", hint=_HINT)
        of_ids = schema.field(ID).type if self.by_id else pa.string()
        if not (pa.types.is_decimal(of_ids) or _kind(of_ids) in {"string", "int64"}):  # 1.0 is not the id 1
            raise UsageError(
                f"{self.file}: the column 'id' has type {of_ids}, expected texts or integers",
                hint="convert it to the texts that --id-field kept",
            )
        if self.by_id and ID not in corpus.manifest.columns:
            raise UsageError(
                f"{self.file} lists ids, and the corpus has no column 'id'",
                hint="build it with --id-field, or list documents by their numbers ('document' and 'fingerprint')",
            )
        if not self.by_id and not pa.types.is_integer(schema.field(DOCUMENT).type):
            raise UsageError(f"{self.file}: the column 'document' has to be integers without nulls", hint=_HINT)

    def _check_is_of(self, table: pq.ParquetFile, corpus: Corpus) -> None:
        """Refuse the numbers of another corpus."""
        metadata = table.schema_arrow.metadata or {}
        given = {metadata[key].decode() for key in (b"fingerprint", b"tokshard.fingerprint") if key in metadata}
        if FINGERPRINT in table.schema_arrow.names:
            batches = table.iter_batches(columns=[FINGERPRINT])
            found = (set(batch.column(0).unique().to_pylist()) & set(self._fingerprints) for batch in batches)
            given |= next(filter(None, found), {""})
        num_rows = table.metadata.num_rows
        if given and given.isdisjoint(self._fingerprints):
            raise UsageError(
                f"{self.file} is for {min(given)[:12] or 'another corpus'}, and this corpus is "
                f"{corpus.fingerprint[:12]}",
                hint="give the file of this corpus ('tokshard inspect --json' shows its fingerprint)",
            )
        if not given and num_rows != corpus.num_documents:
            raise UsageError(
                f"{self.file} has {num_rows:,} rows, and the corpus {corpus.num_documents:,} documents",
                hint="give a row for each document; or add the column 'fingerprint', with the content fingerprint of "
                "the corpus, as 'tokshard inspect --json' shows it",
            )

    def values(
        self, numbers: NDArray[np.int64], ids: pa.Array | None, names: Sequence[str]
    ) -> tuple[NDArray[np.bool_], Mapping[str, pa.Array]]:
        """Whether the file names each of some documents, bool [documents], and its columns: null where it does not.

        Args:
            numbers: int64 [documents]: the number of each in the corpus, ascending.
            ids: the column of their ids; None if the corpus has none.
            names: the columns, in each call the same.

        Raises:
            UsageError: the file cannot be read, has too many rows to keep in memory, or names a document twice.
            BuildError: it was changed since it was opened.
        """
        wanted: NDArray[Any] = numbers
        groups = np.arange(len(self._num_rows))
        if self.by_id:
            wanted = _hashes([None] * len(numbers) if ids is None else ids.to_pylist())
        else:
            groups = np.flatnonzero((self._bounds[:, 0] <= numbers[-1]) & (self._bounds[:, 1] >= numbers[0]))
        rows = self._rows
        if rows is None or not np.array_equal(groups, rows.groups):
            self._rows = None  # before others take its room
            rows = self._rows = self._loaded(groups, names)
        places = np.searchsorted(rows.keys, wanted)
        is_there = places < len(rows.keys)
        is_there[is_there] = rows.keys[places[is_there]] == wanted[is_there]
        taken = pa.Array.from_buffers(
            pa.int64(),
            len(numbers),
            [
                pa.py_buffer(np.packbits(is_there, bitorder="little")),
                *number_array(np.append(rows.order, 0)[places]).buffers()[1:],
            ],
        )
        return is_there, {name: values.take(taken) for name, values in rows.values.items()}

    def _loaded(self, groups: NDArray[np.int64], names: Sequence[str]) -> _Rows:
        num_rows = int(self._num_rows[groups].sum())
        if num_rows > MAX_ROWS and self.by_id:
            raise UsageError(
                f"{self.file} has more than {MAX_ROWS:,} rows, which are found by their ids",
                hint="list documents by their numbers ('document'), or divide it, and join several views",
            )
        if num_rows > MAX_ROWS:
            raise UsageError(
                f"{self.file} is not sorted: any of {num_rows:,} rows may name the same documents",
                hint="sort its rows by 'document', and write row groups of about a million",
            )
        self._check_version()
        with self._opened() as file:
            table = _without_views(file.read_row_groups(groups.tolist(), columns=[*self._keys, *names]))
            if FINGERPRINT in table.schema.names:
                import pyarrow.compute as pc

                ours = value_array(self._fingerprints, pa.string())
                table = table.filter(pc.is_in(table.column(FINGERPRINT).cast(pa.string()), ours))
            if self.by_id:
                table = table.filter(table.column(ID).is_valid())  # a row without an id names no document
            values = {name: _cast(table.column(name), self.columns[name]).combine_chunks() for name in names}
            named = table.column(ID) if self.by_id else table.column(DOCUMENT).cast("int64")
        self._check_version()  # nobody knows when a change began
        if not self.by_id and named.null_count:
            raise UsageError(f"{self.file}: the column 'document' has to be integers without nulls", hint=_HINT)
        keys: NDArray[Any] = _hashes(named.to_pylist()) if self.by_id else numbers_of(named)
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        if len(twice := np.flatnonzero(keys[1:] == keys[:-1])):
            again = named[int(order[twice[0] + 1])].as_py()
            raise UsageError(f"two rows of {self.file} name {again!r}", hint="give each document once")
        return _Rows(groups, keys, order, values)

    def _check_version(self) -> None:
        if _version_of(self.file) != self._version:
            raise _changed(self.file)


def unchanged(file: str, expected: str) -> str:
    """A file that a view is made with.

    Raises:
        BuildError: its content has changed since the build began.
    """
    if file_sha256(*locate(file)) != expected:
        raise _changed(file)
    return file


def _changed(file: str) -> BuildError:
    return BuildError(
        f"{file} was changed while documents were selected by it",
        hint="put back the file with which the command began, or start over with --force",
    )


def _version_of(file: str) -> str | None:
    """The version of a file in its store; None if it is gone."""
    store, name = locate(file)
    with contextlib.suppress(OSError):
        return store.stat(name).version
    return None


def _bounds(group: pq.RowGroupMetaData) -> tuple[int, int]:
    """The least and greatest number of a document in a row group, as far as the file says it."""
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == DOCUMENT and column.statistics is not None and column.statistics.has_min_max:
            return min(max(column.statistics.min, 0), _LAST), min(column.statistics.max, _LAST)
    return 0, _LAST


def _hashes(ids: list[str | int | None]) -> NDArray[np.bytes_]:
    """A hash of 128 bits of each id; for a missing id, one that no id has."""
    encoded = (None if value is None else str(value).encode("utf-8", "surrogatepass") for value in ids)
    digests = (_NO_ID if value is None else hashlib.blake2b(value, digest_size=_ID_BYTES).digest() for value in encoded)
    return np.frombuffer(b"".join(digests), f"S{_ID_BYTES}")


def _without_views(table: pa.Table) -> pa.Table:
    """A table with its texts as strings: Arrow does not take some of views."""
    fields = (field.with_type(pa.string()) if field.type == pa.string_view() else field for field in table.schema)
    return table.cast(pa.schema(fields))


def _cast(column: pa.ChunkedArray, kind: str) -> pa.ChunkedArray:
    is_rounded = kind == "float64" and column.type not in (pa.float64(), pa.float16())
    return as_written(column) if is_rounded else column.cast(SUPPORTED_COLUMN_TYPES[kind])


def _kind(kind: pa.DataType) -> str:
    """The type of a joined column, as kept columns have it: dates are texts, which have their order."""
    if pa.types.is_dictionary(kind) and _kind(kind.value_type) == "string":
        return "string"
    return next((name for name, tests in _KINDS.items() if any(is_it(kind) for is_it in tests)), str(kind))


_KINDS = {
    "bool": [pa.types.is_boolean],
    "int64": [pa.types.is_integer],
    "float64": [pa.types.is_floating, pa.types.is_decimal],
    "string": [
        *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null),
        *(pa.types.is_date, pa.types.is_timestamp),
    ],
}
"""Types of kept columns, and the types of Arrow that become them."""
