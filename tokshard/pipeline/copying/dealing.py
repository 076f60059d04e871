"""Files of documents that are dealt to buckets: written round by round, read bucket by bucket.

A file is record batches, one for each bucket of each round that has documents, and at its end a table of where they
lie, so that the parts of a bucket are ranges that any store can read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from tokshard.errors import BuildError
from tokshard.format.arrays import number_array
from tokshard.format.schema import TOKENS
from tokshard.pipeline.copying import planning
from tokshard.pipeline.copying.selection import SLICE_TOKENS, CopiedDocuments
from tokshard.store import Store, side_by_side

_KEY, _SOURCE, _RECORD = "\\key", "\\source", "\\record"
"""Columns next to those of a shard, whose names have no backslash."""

_PLACE = np.dtype([("start", "<i8"), ("length", "<i8"), ("tokens", "<i8")])
"""Of a record batch: where it is, in bytes, and its tokens. A length of 0: it is not there."""

SHORT_TOKENS = 100
"""Documents that are shorter on average are taken by Arrow, longer ones a slice at a time. Changes speed only."""

_READ_BYTES = 1 << 20
"""Asked for at once, unless one record batch has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtFile:
    """A file of dealt documents.

    Args:
        rounds: record batches that each bucket may have.
    """

    name: str
    num_bytes: int
    rounds: int


class DealtWriter:
    """Writes a file of dealt documents. Memory is some three times `planning.DEAL_BYTES`, or the largest document.

    Args:
        first: number of the first bucket; there are `fan_out`.
    """

    def __init__(self, file: IO[bytes], levels: planning.Levels, level: int, *, first: int) -> None:
        self._file, self._levels, self._level, self._first = file, levels, level, first
        self._position = 0
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._rounds: list[NDArray[np.void]] = []

    def add(self, rows: pa.RecordBatch) -> None:
        """Add documents, as `dealt_rows` makes them."""
        self._pending.append(rows)
        self._pending_bytes += rows.nbytes
        if self._pending_bytes >= planning.DEAL_BYTES:
            self._deal()

    def finish(self) -> tuple[int, int]:
        """Write the rest, and the table; the size of the file and the rounds."""
        if self._pending:
            self._deal()
        fan_out = self._levels.fan_out
        places = np.stack(self._rounds, axis=1) if self._rounds else np.empty((fan_out, 0), _PLACE)
        content = np.ascontiguousarray(places).tobytes()
        self._file.write(content)
        return self._position + len(content), len(self._rounds)

    def _deal(self) -> None:
        rows = pa.Table.from_batches(self._pending).combine_chunks().to_batches()[0]
        self._pending, self._pending_bytes = [], 0
        buckets = self._levels.buckets(rows.column(_KEY).to_numpy(), self._level) - np.uint64(self._first)
        order = np.argsort(buckets, kind="stable")
        bounds = np.searchsorted(buckets[order], np.arange(self._levels.fan_out + 1, dtype=np.uint64))
        places = np.zeros(self._levels.fan_out, _PLACE)
        for bucket in np.unique(buckets).tolist():
            part = _taken(rows, order[bounds[bucket] : bounds[bucket + 1]])
            content = part.serialize()
            self._file.write(content)
            places[bucket] = (self._position, content.size, len(part.column(TOKENS).flatten()))
            self._position += content.size
        self._rounds.append(places)


def dealt_rows(documents: CopiedDocuments, seed: int, schema: pa.Schema) -> pa.RecordBatch:
    """Documents with their keys, not copied.

    Args:
        schema: as `dealt_schema` makes it.
    """
    offsets = number_array(np.concatenate([np.zeros(1, np.int64), documents.ends]))
    tokens = pa.LargeListArray.from_arrays(offsets, number_array(documents.tokens), type=schema.field(TOKENS).type)
    keys = planning.random_keys(seed, documents.numbers)
    arrays = [tokens, *documents.columns.values(), *map(number_array, (keys, documents.sources, documents.records))]
    return pa.record_batch(arrays, schema=schema)


def dealt_schema(shards: pa.Schema) -> pa.Schema:
    """The schema of dealt documents.

    Args:
        shards: that of the shards of the copy.
    """
    added = {_KEY: pa.uint64(), _SOURCE: pa.int64(), _RECORD: pa.int64()}
    return pa.schema([*shards, *(pa.field(name, kind, nullable=False) for name, kind in added.items())])


def read_bucket(
    store: Store, files: Sequence[DealtFile], bucket: int, fan_out: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The documents of one bucket, a record batch after another.

    Args:
        bucket: counted from the first of the files.

    Raises:
        BuildError: a file is gone or short.
    """
    filled = [file for file in files if file.rounds]
    places = side_by_side(store, partial(_places, store, bucket=bucket, fan_out=fan_out), filled)
    chunks = (chunk for file, of_file in zip(filled, places, strict=True) for chunk in _chunks(file.name, of_file))
    for contents in side_by_side(store, partial(_read, store), chunks):
        for content in contents:
            yield ipc.read_record_batch(pa.py_buffer(content), schema)


def bucket_tokens(store: Store, file: DealtFile, fan_out: int) -> NDArray[np.int64]:
    """The tokens of every bucket of a file: int64 [fan_out].

    Raises:
        BuildError: the file is gone or short.
    """
    table_bytes = fan_out * file.rounds * _PLACE.itemsize
    (content,) = _read(store, (file.name, [(file.num_bytes - table_bytes, table_bytes)]))
    tokens: NDArray[np.int64] = np.frombuffer(content, _PLACE).reshape(fan_out, file.rounds)["tokens"].sum(axis=1)
    return tokens


def sorted_documents(rows: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[CopiedDocuments]:
    """The documents of one bucket in the order of their keys, `SLICE_TOKENS` at a time. They are all held."""
    table = pa.Table.from_batches(rows, schema).combine_chunks()
    if not table.num_rows:
        return
    batch = table.to_batches()[0]
    order = np.argsort(batch.column(_KEY).to_numpy())
    ends = np.cumsum(np.diff(batch.column(TOKENS).offsets.to_numpy())[order])
    kept = [name for name in schema.names if name not in {TOKENS, _KEY, _SOURCE, _RECORD}]
    start = 0
    while start < len(order):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + SLICE_TOKENS, "right")))
        part = _taken(batch, order[start:stop])
        yield CopiedDocuments(
            tokens=part.column(TOKENS).flatten().to_numpy(),
            ends=ends[start:stop] - before,
            numbers=order[start:stop],
            sources=part.column(_SOURCE).to_numpy(),
            records=part.column(_RECORD).to_numpy(),
            columns={name: part.column(name) for name in kept},
        )
        start = stop


def _taken(rows: pa.RecordBatch, order: NDArray[np.intp]) -> pa.RecordBatch:
    """Some rows, in some order. Arrow alone makes an index of 8 bytes for each token, in three times the time."""
    documents = rows.column(TOKENS)
    offsets, tokens = documents.offsets.to_numpy(), documents.values.to_numpy()
    starts, stops = offsets[order], offsets[order + 1]
    ends = np.cumsum(stops - starts)
    if int(ends[-1]) < SHORT_TOKENS * len(order):
        return rows.take(number_array(order))
    taken = np.concatenate([tokens[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)])
    lists = pa.LargeListArray.from_arrays(
        number_array(np.concatenate([np.zeros(1, np.int64), ends])), number_array(taken), type=documents.type
    )
    others = rows.select(rows.schema.names[1:]).take(number_array(order))
    return pa.record_batch([lists, *others.columns], schema=rows.schema)


_Chunk = tuple[str, Sequence[tuple[int, int]]]
"""A file and ranges of it: the first byte and the length of each."""


def _places(store: Store, file: DealtFile, *, bucket: int, fan_out: int) -> NDArray[np.void]:
    """Where the record batches of a bucket are in a file: `_PLACE` [rounds]."""
    row_bytes = file.rounds * _PLACE.itemsize
    (content,) = _read(store, (file.name, [(file.num_bytes - (fan_out - bucket) * row_bytes, row_bytes)]))
    return np.frombuffer(content, _PLACE)


def _chunks(name: str, places: NDArray[np.void]) -> Iterator[_Chunk]:
    """The ranges of a file at those places, `_READ_BYTES` at a time at most."""
    ranges: list[tuple[int, int]] = []
    num_bytes = 0
    for start, length, _ in places.tolist():
        if ranges and num_bytes + length > _READ_BYTES:
            yield name, ranges
            ranges, num_bytes = [], 0
        if length:
            ranges.append((start, length))
            num_bytes += length
    if ranges:
        yield name, ranges


def _read(store: Store, chunk: _Chunk) -> Sequence[bytes]:
    name, ranges = chunk
    try:
        return store.read(name, ranges)
    except OSError as error:
        raise BuildError(
            f"{store.where(name)} cannot be read: {error.strerror or error}",
            hint="run the same command again: the task that wrote it runs again",
        ) from error
