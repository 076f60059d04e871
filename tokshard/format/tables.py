"""``shards.arrow`` and ``sources.arrow``: the tables next to the manifest, read a column at a time through a map."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format.arrow_file import ArrowFile
from tokshard.format.content import HASH_BYTES, Content, TokenHash
from tokshard.format.files import HashingFile, LoadFile, map_file
from tokshard.format.partial_file import PartialFile
from tokshard.format.schema import ARROW_ERRORS, FORMAT_VERSION, describe_schema, numbers_type
from tokshard.store import Store

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
"""What the writer says of a shard: its row of the shard table, and its part of ``stride-hashes.bin``."""

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
        loss_bytes: how long they are.
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
    content: Content


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
    """What each shard holds, from rows of the shard table."""
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
        """Whether nothing is read any more after the table was opened."""
        self._partial = partial
        try:
            self._file = ArrowFile(load(store, name)) if partial is None else partial.load()
        except ARROW_ERRORS as error:
            raise DamagedCorpusError(f"{path} cannot be read: {error}", hint=RESTORE) from error
        if not self._file.schema.equals(schema, check_metadata=True):
            raise DamagedCorpusError(
                f"{path} has {describe_schema(self._file.schema)}, expected {describe_schema(schema)}", hint=RESTORE
            )
        self._batches: dict[int, pa.RecordBatch] = {}
        self.num_batches = self._file.num_batches

    def batch(self, index: int) -> pa.RecordBatch:
        """One record batch, validated when it is first asked for."""
        if index not in self._batches:
            try:
                batch = self._file.batch(index)
                for field, column in zip(batch.schema, batch.columns, strict=True):
                    # the lists of the shard table can be long: `list_at` checks the offsets that it follows
                    if not pa.types.is_large_list(field.type):
                        column.validate(full=True)
            except ARROW_ERRORS as error:
                raise DamagedCorpusError(f"{self.path}, batch {index}: {error}", hint=RESTORE) from error
            for field, column in zip(batch.schema, batch.columns, strict=True):
                nulls = column.null_count
                if pa.types.is_large_list(field.type):
                    nulls += column.values.null_count
                if nulls:
                    raise DamagedCorpusError(
                        f"{self.path}, batch {index}: column {field.name} has {nulls} nulls, expected none",
                        hint=RESTORE,
                    )
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
        parts = [batch.column(column).to_numpy() for batch in self.batches()]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def lists(self, column: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A column of lists: int64 [rows], how long each is, and the values of all of them one after another.

        Not one that is read by row.

        Raises:
            DamagedCorpusError: the offsets of the lists do not ascend within their values.
        """
        counts, parts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for index, batch in enumerate(self.batches()):
            cells = batch.column(column)
            ends = np.frombuffer(cells.buffers()[1], np.int64, count=len(cells) + 1, offset=8 * cells.offset)
            found = np.diff(ends)
            if int(ends[0]) < 0 or int(ends[-1]) > len(cells.values) or int(found.min(initial=0)) < 0:
                raise DamagedCorpusError(
                    f"{self.path}, batch {index}: offsets of column {column} must ascend within {len(cells.values)}",
                    hint=RESTORE,
                )
            counts.append(found)
            parts.append(self._numbers_at(column, cells.values, int(ends[0]), int(ends[-1])))
        return np.concatenate(counts), np.concatenate(parts)

    def list_at(self, column: str, row: int) -> NDArray[np.int64]:
        """The list in one row, as an int64 array.

        The rows of every batch but the last are `SHARDS_PER_BATCH`, so the batch is found by division.
        """
        batch = self.batch(row // SHARDS_PER_BATCH)
        cells = batch.column(column)
        index = row % SHARDS_PER_BATCH
        ends = np.frombuffer(cells.buffers()[1], np.int64, count=2, offset=8 * (cells.offset + index))
        values = cells.values
        if not 0 <= ends[0] <= ends[1] <= len(values):
            raise DamagedCorpusError(
                f"{self.path}: offsets of column {column}, row {row}, are {ends.tolist()}, "
                f"expected ascending within {len(values)}",
                hint=RESTORE,
            )
        if self._partial is not None and column in self._partial.by_row:
            return self._numbers_of(self._partial, values, *ends.tolist())
        return self._numbers_at(column, values, *ends.tolist())

    def _numbers_at(self, column: str, values: pa.Array, start: int, stop: int) -> NDArray[np.int64]:
        """Some of the values of a column of lists.

        Not by `to_numpy`: where pandas is not installed, old versions of pyarrow look for it at every call, which takes
        20 times as long as everything else.
        """
        dtype = np.dtype(str(values.type))
        content = values.buffers()[1] or b""
        found = np.frombuffer(content, dtype, count=len(content) // dtype.itemsize)[values.offset :][start:stop]
        if len(found) < stop - start:
            raise DamagedCorpusError(
                f"{self.path}: column {column} has less than the {stop} values that its offsets name",
                hint=RESTORE,
            )
        return found.astype(np.int64, copy=False)

    def _numbers_of(self, partial: PartialFile, values: pa.Array, start: int, stop: int) -> NDArray[np.int64]:
        try:
            content = partial.read(values, start, stop)
        except OSError as error:
            raise DamagedCorpusError(f"{self.path} cannot be read: {error.strerror or error}", hint=RESTORE) from error
        # old versions of pyarrow need pandas to name the dtype
        return np.frombuffer(content, str(values.type)).astype(np.int64)
