"""``shards.arrow`` and ``sources.arrow``: the tables next to the manifest, opened and read by columns of a map."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from tokshard.errors import DamagedCorpusError
from tokshard.format import names
from tokshard.format.arrays import numbers_of
from tokshard.format.arrow_file import ArrowFile, PartialFile
from tokshard.format.content import HASH_BYTES, Content, TokenHash
from tokshard.format.files import HashingFile, LoadFile, map_file, readable
from tokshard.format.manifest import Manifest
from tokshard.format.schema import FORMAT_VERSION, describe_schema, numbers_type
from tokshard.store import Store, side_by_side

SHARDS_PER_BATCH = 1_024
"""Rows in each record batch of the shard table but the last; part of FORMAT_VERSION."""


def _schema(fields: Mapping[str, pa.DataType]) -> pa.Schema:
    return pa.schema(
        [pa.field(name, kind, nullable=False) for name, kind in fields.items()],
        metadata={"tokshard.format_version": str(FORMAT_VERSION)},
    )


SHARD_TABLE_SCHEMA = _schema(
    {
        "name": pa.string(),
        "num_documents": pa.int64(),
        "num_tokens": pa.int64(),
        "num_bytes": pa.int64(),
        "sha256": pa.binary(32),
        "tokens_hash": pa.binary(HASH_BYTES),
        "num_targets": pa.int64(),
        "loss_hash": pa.binary(HASH_BYTES),
        # one entry per record batch of the shard; positions are bytes from the start of the file
        "batch_documents": numbers_type(pa.int64()),
        "batch_tokens": numbers_type(pa.int64()),
        "batch_offsets_position": numbers_type(pa.int64()),
        "batch_values_position": numbers_type(pa.int64()),
        # the same of loss spans; empty lists in a corpus without them
        "batch_loss_position": numbers_type(pa.int64()),
        "batch_loss_bytes": numbers_type(pa.int64()),
        "batch_loss_hash": numbers_type(pa.uint32()),
        # entry k: ordinal in the shard of the document that holds token k * ORDINAL_STRIDE
        "stride_documents": numbers_type(pa.uint32()),
        # entry k: CRC-32 of the stride hashes k * HASH_GROUP to (k + 1) * HASH_GROUP of the shard
        "group_hashes": numbers_type(pa.uint32()),
        # runs of documents that are consecutive records of one source
        "run_document": numbers_type(pa.int64()),
        "run_source": numbers_type(pa.int64()),
        "run_record": numbers_type(pa.int64()),
    }
)

WRITTEN_SHARD_SCHEMA = SHARD_TABLE_SCHEMA.append(pa.field("stride_hashes", numbers_type(pa.uint32()), nullable=False))
"""The facts of the writer about a shard: its row of the shard table, and its part of ``stride-hashes.bin``."""

LISTS_OF_DOCUMENTS = ("stride_documents", "run_document", "run_source", "run_record")
"""The columns of the shard table that are long, and needed of single shards only."""

SOURCE_TABLE_SCHEMA = _schema(
    {
        "argument": pa.int64(),
        "path": pa.string(),
        "num_bytes": pa.int64(),
        "records_read": pa.int64(),
        "documents": pa.int64(),
        "tokens": pa.int64(),
        "text_bytes": pa.int64(),
        "left_out": pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False)),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlace:
    """The place of one record batch in a shard.

    Args:
        offsets_position: byte in the file where its ``num_documents + 1`` int64 offsets start.
        values_position: byte in the file where its token ids start.
        loss_position: byte in the file where its loss spans start; 0 if the corpus has none.
        loss_bytes: their length.
        loss_hash: their CRC-32, see `stored_hash`.
    """

    num_documents: int
    num_tokens: int
    offsets_position: int
    values_position: int
    loss_position: int = 0
    loss_bytes: int = 0
    loss_hash: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """One row of the shard table."""

    name: str
    num_documents: int
    num_tokens: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceInfo:
    """One input file, with counts: read, written and left out. ``records_read = documents + sum of left_out``.

    Args:
        argument: index into the manifest's arguments.
        path: relative to the argument; empty where the argument is the file.
        num_bytes: size of the input.
        text_bytes: UTF-8 bytes of the texts that became documents.
    """

    argument: int
    path: str
    num_bytes: int
    records_read: int
    documents: int
    tokens: int
    text_bytes: int
    left_out: Mapping[str, int]


def contents(rows: pa.RecordBatch) -> list[Content]:
    """The content of each shard, from rows of the shard table."""
    columns = ("num_documents", "num_tokens", "tokens_hash", "num_targets", "loss_hash")
    return [
        Content(
            num_documents=documents,
            tokens=TokenHash.from_bytes(tokens, num_tokens),
            num_targets=targets,
            loss=TokenHash.from_bytes(loss, num_tokens),
        )
        for documents, num_tokens, tokens, targets, loss in zip(
            *(rows.column(name).to_pylist() for name in columns), strict=True
        )
    ]


def shard_rows(shards: pa.RecordBatch) -> pa.RecordBatch:
    """The rows of the shard table, from rows of `WRITTEN_SHARD_SCHEMA`.

    They are copied, because views would keep the hashes in memory, which are several times larger.
    """
    rows = shards.select(SHARD_TABLE_SCHEMA.names)
    return ipc.read_record_batch(rows.serialize(), rows.schema)


def write_table(
    file: IO[bytes] | HashingFile, schema: pa.Schema, batches: Iterable[pa.RecordBatch], *, rows_per_batch: int
) -> None:
    """Write an Arrow IPC file whose record batches all have `rows_per_batch` rows, but for the last."""
    pending: list[pa.RecordBatch] = []
    num_rows = 0
    hashed = file if isinstance(file, HashingFile) else HashingFile(file)
    buffered = hashed.buffered()
    try:
        with ipc.new_file(buffered, schema) as writer:
            for batch in batches:
                pending.append(batch)
                num_rows += batch.num_rows
                while num_rows >= rows_per_batch:
                    whole = pa.Table.from_batches(pending, schema).combine_chunks()
                    writer.write_batch(whole.slice(0, rows_per_batch).combine_chunks().to_batches()[0])
                    pending = whole.slice(rows_per_batch).to_batches()
                    num_rows -= rows_per_batch
            rest = pa.Table.from_batches(pending, schema).combine_chunks()
            if rest.num_rows:
                writer.write_batch(rest.to_batches()[0])
        buffered.flush()
        buffered.detach()
    except BaseException:
        hashed.abandon()
        raise


class Table:
    """A table next to the manifest, mapped; a column costs the pages it touches.

    Args:
        load: `map_file` or `read_file`.
        partial: the file, if it is read in parts instead.

    Raises:
        DamagedCorpusError: the file is not an Arrow IPC file of the expected schema.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        schema: pa.Schema,
        *,
        load: LoadFile = map_file,
        partial: PartialFile | None = None,
    ) -> None:
        self.path = path = store.where(name)
        self.is_whole = partial is None
        """Whether nothing more is read after the table was opened."""
        self._partial = partial
        with readable(path):
            self._file = ArrowFile(load(store, name)) if partial is None else partial.load()
            found = self._file.schema
        if not found.equals(schema, check_metadata=True):
            raise DamagedCorpusError(f"{path} has {describe_schema(found)}, expected {describe_schema(schema)}")
        self._batches: dict[int, pa.RecordBatch] = {}
        self._lists: dict[tuple[str, int], tuple[NDArray[np.int64], pa.Array, NDArray[Any]]] = {}
        self.num_batches = self._file.num_batches

    def batch(self, index: int) -> pa.RecordBatch:
        """One record batch, validated when it is first asked for."""
        if index not in self._batches:
            with readable(f"{self.path}, batch {index}", ""):
                batch = self._file.batch(index)
                for field, column in zip(batch.schema, batch.columns, strict=True):
                    nulls = column.null_count
                    if pa.types.is_large_list(field.type):
                        nulls += column.values.null_count
                    else:  # the lists of the shard table can be long: `lists_at` checks the offsets that it follows
                        column.validate(full=True)
                    if nulls:
                        raise ValueError(f"column {field.name} has {nulls} nulls, expected none")
            self._batches[index] = batch
        return self._batches[index]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All record batches in order."""
        for index in range(self.num_batches):
            yield self.batch(index)

    @property
    def num_rows(self) -> int:
        """Rows of all record batches."""
        return sum(batch.num_rows for batch in self.batches())

    def numbers(self, column: str) -> NDArray[np.int64]:
        """An int64 column as one array [rows]."""
        parts = [numbers_of(batch.column(column)) for batch in self.batches()]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def lists(self, column: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A column of lists: int64 [rows], how long each is, and the values of all of them one after another.

        Not one that is read by row.

        Raises:
            DamagedCorpusError: the offsets of the lists do not ascend within their values.
        """
        counts, parts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for index in range(self.num_batches):
            ends, cells, values = self._lists_of(column, index)
            found = np.diff(ends)
            if int(ends[0]) < 0 or int(ends[-1]) > len(cells) or int(found.min(initial=0)) < 0:
                raise DamagedCorpusError(
                    f"{self.path}, batch {index}: offsets of column {column} must ascend within {len(cells)}"
                )
            counts.append(found)
            parts.append(values[int(ends[0]) : int(ends[-1])].astype(np.int64, copy=False))
        return np.concatenate(counts), np.concatenate(parts)

    def lists_at(self, columns: Iterable[str], row: int) -> list[NDArray[np.int64]]:
        """The lists of some columns in one row, as int64 arrays.

        The rows of every batch but the last are `SHARDS_PER_BATCH`, so the batch is found by division.
        """
        batch, index = divmod(row, SHARDS_PER_BATCH)
        found = []
        for column in columns:
            ends, cells, values = self._lists_of(column, batch)
            start, stop = ends[index : index + 2].tolist()
            if not 0 <= start <= stop <= len(cells):
                raise DamagedCorpusError(
                    f"{self.path}: offsets of column {column}, row {row}, are [{start}, {stop}], "
                    f"expected ascending within {len(cells)}"
                )
            if self._partial is not None and column in self._partial.by_row:
                with readable(self.path):
                    part = np.frombuffer(self._partial.read(cells, start, stop), values.dtype)
            else:
                part = values[start:stop]
            found.append(part.astype(np.int64, copy=False))
        return found

    def _lists_of(self, column: str, batch: int) -> tuple[NDArray[np.int64], pa.Array, NDArray[Any]]:
        """A column of lists of one record batch: the ends of the lists, and their values, twice."""
        key = column, batch
        if key not in self._lists:
            lists = self.batch(batch).column(column)
            ends = np.frombuffer(lists.buffers()[1], np.int64, count=len(lists) + 1, offset=8 * lists.offset)
            self._lists[key] = ends, lists.values, numbers_of(lists.values)
        return self._lists[key]


_WHOLE_BYTES = 128 << 20
"""A table in another store is read whole up to this size: the shard table of two trillion tokens."""


def read_sources(store: Store, manifest: Manifest, *, load: LoadFile = map_file) -> list[SourceInfo]:
    """The inputs of a corpus in order, with counts of records read, written and left out.

    Raises:
        DamagedCorpusError: the source table is missing or does not match the manifest.
    """
    table = open_table(store, names.SOURCE_TABLE, SOURCE_TABLE_SCHEMA, manifest, load)
    sources = [
        SourceInfo(**{**row, "left_out": dict(row["left_out"])})
        for batch in table.batches()
        for row in batch.to_pylist()
    ]
    for index, source in enumerate(sources):
        if not 0 <= source.argument < len(manifest.arguments):
            raise DamagedCorpusError(
                f"{table.path}: source {index} comes from argument {source.argument}, "
                f"the manifest has {len(manifest.arguments)}"
            )
    return sources


def all_sources(generations: Sequence[tuple[Store, Manifest]], *, load: LoadFile = map_file) -> list[SourceInfo]:
    """The inputs of all generations in order; their arguments are counted through, too.

    Raises:
        DamagedCorpusError: a source table is missing or does not match its manifest.
    """
    found: list[SourceInfo] = []
    num_arguments = 0
    of_each = side_by_side(generations[0][0], lambda each: read_sources(*each, load=load), generations)
    for (_, manifest), sources in zip(generations, of_each, strict=True):
        found += (replace(source, argument=num_arguments + source.argument) for source in sources)
        num_arguments += len(manifest.arguments)
    return found


def first_sources(generations: Sequence[tuple[Store, Manifest]], *, load: LoadFile = map_file) -> list[int]:
    """The index among `all_sources` of the first input of each generation.

    Raises:
        DamagedCorpusError: a source table is missing or does not match its manifest.
    """
    tables = open_tables(generations, names.SOURCE_TABLE, SOURCE_TABLE_SCHEMA, load)
    return list(accumulate((table.num_rows for table in tables[:-1]), initial=0))


def open_tables(
    generations: Sequence[tuple[Store, Manifest]], name: str, schema: pa.Schema, load: LoadFile
) -> list[Table]:
    """`open_table` of each generation."""

    def open_one(generation: tuple[Store, Manifest]) -> Table:
        store, manifest = generation
        return open_table(store, name, schema, manifest, load)

    return list(side_by_side(generations[0][0], open_one, generations))


def open_table(store: Store, name: str, schema: pa.Schema, manifest: Manifest, load: LoadFile) -> Table:
    """A table of a corpus, checked against its size in the manifest.

    If a large shard table is in another store, only the columns about whole shards are read.

    Raises:
        DamagedCorpusError: it has another size, is missing, or is not such a table.
    """
    path, facts = store.where(name), manifest.files[name]

    def check(num_bytes: int) -> None:
        if num_bytes != facts.num_bytes:
            raise DamagedCorpusError(f"{path} has {num_bytes} bytes, expected {facts.num_bytes}")

    def load_checked(store: Store, name: str) -> pa.Buffer:
        content = load(store, name)
        check(content.size)  # after reading it: to ask before would cost each cell in a bucket a request
        return content

    partial = None
    if facts.num_bytes > _WHOLE_BYTES and load is map_file and store.local_path(name) is None:
        with readable(path):
            entry = store.stat(name)
        check(entry.size)
        partial = PartialFile(store, name, entry, by_row=LISTS_OF_DOCUMENTS)
    return Table(store, name, schema, load=load_checked, partial=partial)
