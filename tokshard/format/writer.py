"""Writing shards: documents in, whole Arrow IPC files out, with one record batch in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from tokshard.format.arrays import lists_array, numbers_of, table_batch, value_array
from tokshard.format.content import Content, TokenHash, hash_tokens
from tokshard.format.files import HashingFile, map_path
from tokshard.format.loss import LOSS, LOSS_COLUMNS, batch_targets, stored_hash
from tokshard.format.schema import (
    MAX_BATCH_CHARACTERS,
    MAX_BATCH_TOKENS,
    ORDINAL_STRIDE,
    TOKENS,
    column_kinds,
    token_type,
)
from tokshard.format.stride_hashes import StrideHasher, group_hashes
from tokshard.format.tables import WRITTEN_SHARD_SCHEMA
from tokshard.numbers import ceil_div
from tokshard.store import Store


class ShardWriter:
    """Writes the documents of one task as consecutive shards.

    A shard is spooled, and put into the store when it is closed. Memory is one record batch of `MAX_BATCH_TOKENS`
    tokens (32 MiB as uint16) and `MAX_BATCH_CHARACTERS` of kept text, or the largest document. The bytes do not depend
    on how documents are split into calls of `extend`. Leaving the context by an exception removes the unfinished shard.

    Args:
        store: the store of the corpus.
        name: gives the name of the next shard, from the number of shards closed before.
        schema: of every shard, from `manifest.shard_schema`.
        shard_tokens: a shard closes before the document that would exceed this; a longer document gets its own shard.
    """

    def __init__(
        self,
        *,
        store: Store,
        name: Callable[[int], str],
        schema: pa.Schema,
        shard_tokens: int,
    ) -> None:
        self._store = store
        self._name = name
        self._schema = schema
        self._kinds = column_kinds(schema)
        self._loss_columns = [name for name, kind in self._kinds.items() if kind in LOSS_COLUMNS.values()]
        self._shard_tokens = shard_tokens
        self._buffer = np.empty(0, token_type(schema))
        self._rows: list[Mapping[str, Any]] = []
        self._file: _OpenShard | None = None
        self._start_batch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.discard()
            self._file = None

    def extend(
        self,
        tokens: NDArray[Any],
        ends: NDArray[np.int64],
        *,
        source: int | NDArray[np.int64],
        records: NDArray[np.int64],
        columns: Mapping[str, Sequence[Any]],
    ) -> None:
        """Append documents.

        Args:
            tokens: the documents one after another, delimiters included; ids that fit the dtype of the corpus.
            ends: int64 [documents], where each document ends in `tokens`.
            source: index of the input that the documents come from, or of each: int64 [documents].
            records: int64 [documents]; record number of each in its input, counted from 0.
            columns: column to one value per document, None for null; a list for a column of loss spans.
        """
        start, stop, base = 0, len(ends), 0
        sources = np.broadcast_to(np.asarray(source, np.int64), stop)
        text_ends = self._text_ends(columns, stop)
        text_base = 0
        while start < stop:
            shard_room = self._shard_tokens - self._tokens_in_shard - self._fill
            room = min(MAX_BATCH_TOKENS - self._fill, shard_room)
            text_room = MAX_BATCH_CHARACTERS - self._characters
            fit = min(
                int(np.searchsorted(ends, base + room, "right")),
                int(np.searchsorted(text_ends, text_base + text_room, "right")),
            )
            if fit <= start:  # the next document does not fit
                length = int(ends[start]) - base
                if length > shard_room and (self._tokens_in_shard or self._fill):
                    self._close_shard()
                    continue
                if self._fill:
                    self._flush_batch()
                    continue
                fit = start + 1  # longer than a batch or a shard, so it gets its own
            self._append(tokens, ends, start, fit, base, sources, records, columns)
            self._characters += int(text_ends[fit - 1]) - text_base
            start, base, text_base = fit, int(ends[fit - 1]), int(text_ends[fit - 1])

    def finish(self) -> pa.RecordBatch:
        """Close the last shard.

        Returns:
            One row of `WRITTEN_SHARD_SCHEMA` per shard, run_record as given to `extend`.
        """
        if self._fill or self._file is not None:
            self._close_shard()
        columns = {field.name: [row[field.name] for row in self._rows] for field in WRITTEN_SHARD_SCHEMA}
        return table_batch(columns, WRITTEN_SHARD_SCHEMA)

    def _start_batch(self) -> None:
        self._fill = 0
        self._characters = 0
        self._ends: list[NDArray[np.int64]] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in self._kinds}

    def _text_ends(self, columns: Mapping[str, Sequence[Any]], count: int) -> NDArray[np.int64]:
        """For each document, the characters of kept text up to its end."""
        lengths = np.zeros(count, np.int64)
        for name, kind in self._kinds.items():
            if kind == "string":
                lengths += np.fromiter((len(text or "") for text in columns[name]), np.int64, count)
        return np.cumsum(lengths)

    @property
    def _tokens_in_shard(self) -> int:
        return 0 if self._file is None else self._file.num_tokens

    def _append(  # noqa: PLR0917 - one caller, which has them all
        self,
        tokens: NDArray[Any],
        ends: NDArray[np.int64],
        start: int,
        stop: int,
        base: int,
        sources: NDArray[np.int64],
        records: NDArray[np.int64],
        columns: Mapping[str, Sequence[Any]],
    ) -> None:
        if self._file is None:
            self._file = _OpenShard(self._store, self._name(len(self._rows)), self._schema, self._loss_columns)
        length = int(ends[stop - 1]) - base
        self._reserve(self._fill + length)
        self._buffer[self._fill : self._fill + length] = tokens[base : base + length]
        self._ends.append(ends[start:stop] - (base - self._fill))
        self._file.runs.add(sources[start:stop], records[start:stop])
        for name, values in self._columns.items():
            values.extend(columns[name][start:stop])
        self._fill += length

    def _reserve(self, size: int) -> None:
        if size <= len(self._buffer):
            return
        # untouched pages of the full batch cost no memory, so there is nothing to gain from growing in steps
        grown = np.empty(max(size, MAX_BATCH_TOKENS), self._buffer.dtype)
        grown[: self._fill] = self._buffer[: self._fill]
        self._buffer = grown

    def _flush_batch(self) -> None:
        if not self._fill or self._file is None:
            return
        offsets = np.concatenate([np.zeros(1, np.int64), *self._ends])
        documents = lists_array(offsets, self._buffer[: self._fill], self._schema.field(TOKENS).type)
        columns = [value_array(self._columns[name], self._schema.field(name).type) for name in self._columns]
        batch = pa.record_batch([documents, *columns], schema=self._schema)
        self._file.write(batch, offsets, self._buffer[: self._fill])
        if self._fill > MAX_BATCH_TOKENS:
            self._buffer = np.empty(0, self._buffer.dtype)  # give back what one huge document needed
        self._start_batch()

    def _close_shard(self) -> None:
        self._flush_batch()
        if self._file is not None:
            self._rows.append(self._file.publish())
            self._file = None


class _OpenShard:
    """One shard being written."""

    def __init__(self, store: Store, name: str, schema: pa.Schema, loss_columns: Sequence[str]) -> None:
        self._name, self._loss_columns = name, loss_columns
        self.runs = _Runs()
        self._spool = store.spool(name)
        self._hashed = HashingFile(self._spool.file)
        self._stream = self._hashed.buffered()
        self._writer = ipc.new_file(self._stream, schema)
        self.num_tokens = 0
        self._content = Content()
        self._hasher = StrideHasher()
        self._strides: list[NDArray[np.int64]] = []
        self._batch_documents: list[int] = []
        self._batch_tokens: list[int] = []

    def write(self, batch: pa.RecordBatch, offsets: NDArray[np.int64], tokens: NDArray[Any]) -> None:
        length = int(offsets[-1])
        first = ceil_div(self.num_tokens, ORDINAL_STRIDE) * ORDINAL_STRIDE
        positions = np.arange(first, self.num_tokens + length, ORDINAL_STRIDE)
        within = np.searchsorted(offsets, positions - self.num_tokens, "right") - 1
        self._strides.append(within + self._content.num_documents)
        self._writer.write_batch(batch)
        num_targets, loss = length - batch.num_rows, TokenHash(length)
        if self._loss_columns:
            columns = [batch.column(name) for name in self._loss_columns]
            lists = ((numbers_of(column.offsets), numbers_of(column.values)) for column in columns)
            targets = batch_targets(*lists, offsets=offsets)
            num_targets, loss = targets.count, targets.hashed(length)
        self._content = self._content.then(
            Content(num_documents=batch.num_rows, tokens=hash_tokens(tokens), num_targets=num_targets, loss=loss)
        )
        self._hasher.add(tokens)
        self._batch_documents.append(batch.num_rows)
        self._batch_tokens.append(length)
        self.num_tokens += length

    def publish(self) -> Mapping[str, Any]:
        """Put the shard, and return its row of the shard table."""
        self._writer.close()
        self._stream.flush()
        self._stream.detach()
        self._spool.file.flush()
        places = list(_buffer_places(self._spool.path, self._loss_columns))
        self._spool.put()
        hashes, facts = self._hasher.finish(), self._hashed.facts
        return {
            "name": self._name,
            "num_documents": self._content.num_documents,
            "num_tokens": self.num_tokens,
            "num_bytes": facts.num_bytes,
            "sha256": bytes.fromhex(facts.sha256),
            "tokens_hash": self._content.tokens.to_bytes(),
            "num_targets": self._content.num_targets,
            "loss_hash": self._content.loss.to_bytes(),
            "batch_documents": self._batch_documents,
            "batch_tokens": self._batch_tokens,
            **{f"batch_{what}": [place[what] for place in places if what in place] for what in _PLACES},
            "stride_documents": np.concatenate(self._strides),
            "group_hashes": group_hashes(hashes),
            "run_document": np.concatenate(self.runs.documents),
            "run_source": np.concatenate(self.runs.sources),
            "run_record": np.concatenate(self.runs.records),
            "stride_hashes": hashes,
        }

    def discard(self) -> None:
        """Drop the shard and remove its file. Its writer stays open: closing it twice would crash the process."""
        self._hashed.abandon()
        self._spool.discard()


class _Runs:
    """Compresses (source, record) of consecutive documents to runs in which the record counts up by one."""

    def __init__(self) -> None:
        self.documents: list[NDArray[np.int64]] = []
        self.sources: list[NDArray[np.int64]] = []
        self.records: list[NDArray[np.int64]] = []
        self._count = 0
        self._next: tuple[int, int] | None = None

    def add(self, sources: NDArray[np.int64], records: NDArray[np.int64]) -> None:
        is_start = np.ones(len(records), np.bool_)
        is_start[1:] = (np.diff(records) != 1) | (np.diff(sources) != 0)
        is_start[0] = self._next != (int(sources[0]), int(records[0]))
        starts = np.flatnonzero(is_start)
        if len(starts):
            self.documents.append(starts + self._count)
            self.sources.append(sources[starts])
            self.records.append(records[starts])
        self._count += len(records)
        self._next = (int(sources[-1]), int(records[-1]) + 1)


_PLACES = ("offsets_position", "values_position", "loss_position", "loss_bytes", "loss_hash")


def _buffer_places(path: str, loss_columns: Sequence[str]) -> Iterator[dict[str, int]]:
    """The places of the tokens and loss spans of each record batch, in bytes of the file, as in `BatchPlace`."""
    mapped = map_path(path)
    reader = ipc.open_file(mapped)
    for index in range(reader.num_record_batches):
        batch = reader.get_batch(index)
        _, offsets, _, values = batch.column(TOKENS).buffers()
        place = {
            "offsets_position": offsets.address - mapped.address,
            "values_position": values.address - mapped.address,
        }
        if loss_columns:
            place["loss_position"] = start = batch.column(LOSS).buffers()[1].address - mapped.address
            # the buffers of these columns follow each other: 8 bytes for each offset, 4 for each value
            place["loss_bytes"] = sum(
                8 * (batch.num_rows + 1) + 4 * len(batch.column(name).values) for name in loss_columns
            )
            section = memoryview(mapped)[start : start + place["loss_bytes"]]
            place["loss_hash"] = stored_hash(np.frombuffer(offsets, np.int64, count=batch.num_rows + 1), section)
        yield place
