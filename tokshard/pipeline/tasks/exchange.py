"""The exchange: tasks deal rows to buckets by a key, and a later task reads one bucket of all their files.

    deal     a task writes its rows into one file, bucket by bucket
    join     a task deals the rows of some files into one, if there are more files, or more rows, than were provided for
    redeal   a task deals the rows of one bucket to more buckets, if one level has too few
    read     a task reads a bucket of the last level

The search for duplicates deals hashes, and then the places of the duplicates; a shuffle deals documents. In each round,
a file gets one record batch for each bucket with rows. Other batches hold rows that only its own task wants back. A
table at its end lists the places of all batches, so the parts of a bucket are ranges that any store can read. Batches,
their places and the table each have a CRC-32. Rows of a bucket stay in the order in which they were dealt.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from tokshard.format.arrays import lists_array, number_array, numbers_of
from tokshard.format.schema import TOKENS
from tokshard.numbers import ceil_div
from tokshard.pipeline.tasks.planning import StepTask
from tokshard.pipeline.workspace.receipts import Receipt, file_path, readable
from tokshard.store import Store, side_by_side, written

DEAL_BYTES = 32 << 20
"""Approximate bytes of rows that are dealt at once."""

FAN_OUT = 1_024
"""The most buckets that a task deals to."""

FAN_IN = 256
"""The most files that one task joins."""

KEY = "\\key"
"""The column of keys, uint64. No column of a shard has a backslash in its name."""

_PLACE = np.dtype([("start", "<i8"), ("length", "<i8"), ("size", "<i8"), ("crc32", "<u4")])
"""A record batch: its place in bytes, its tokens or rows, and its checksum. The length is 0 if there is none."""

_CRC_BYTES = 4

SHORT_TOKENS = 100
"""Average length below which Arrow takes the documents; longer ones are taken slice by slice. Changes only speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """How rows of a schema are dealt to ``fan_out ** depth`` buckets, level by level."""

    fan_out: int
    depth: int
    schema: pa.Schema

    @classmethod
    def of(cls, num_buckets: int, schema: pa.Schema) -> Levels:
        """The fewest levels that have so many buckets."""
        depth = next(depth for depth in itertools.count(1) if FAN_OUT**depth >= num_buckets)
        fan_out = next(fan_out for fan_out in itertools.count(1) if fan_out**depth >= num_buckets)
        return cls(fan_out=fan_out, depth=depth, schema=schema)

    @property
    def num_buckets(self) -> int:
        """Buckets of the last level."""
        return int(self.fan_out**self.depth)

    def buckets(self, keys: NDArray[np.uint64], level: int) -> NDArray[np.uint64]:
        """The bucket of each key among the ``fan_out ** level`` of a level, from 1: they ascend with the keys."""
        return ((keys >> np.uint64(32)) * np.uint64(self.fan_out**level)) >> np.uint64(32)

    def first_key(self, bucket: int) -> int:
        """The smallest key of a bucket of the last level; 2^64 for the bucket after the last."""
        return ceil_div(bucket << 32, self.num_buckets) << 32


def spread(numbers: NDArray[np.int64], count: int) -> NDArray[np.uint64]:
    """Different keys for numbers below `count`, which ascend with them and are dealt evenly: uint64."""
    keys: NDArray[np.int64] = ceil_div(numbers << 32, count) << 32
    return keys.view(np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtFile:
    """A file of dealt rows.

    Args:
        rounds: record batches that each bucket may have.
        kept: record batches of rows that are in no bucket.
    """

    name: str
    num_bytes: int
    rounds: int
    kept: int = 0


def dealt_file(stage: str, receipt: Receipt) -> DealtFile:
    """The file of a task that dealt rows."""
    name = file_path(stage, receipt.key)
    return DealtFile(name=name, num_bytes=receipt.file_bytes, rounds=receipt.rounds, kept=receipt.kept)


class DealtWriter:
    """Writes a file of dealt rows. Memory is about three times `DEAL_BYTES`, or the largest document.

    Args:
        name: the name of the file, which the checksums cover, too.
        level: the level that it deals, from 1.
        bucket: the bucket of the level before that all its rows are in.
    """

    def __init__(self, file: IO[bytes], name: str, levels: Levels, level: int = 1, bucket: int = 0) -> None:
        self._file, self._levels, self._level, self._first = file, levels, level, bucket * levels.fan_out
        self._name = name
        self._position = 0
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._rounds: list[NDArray[np.void]] = []
        self._kept: list[tuple[int, int, int, int]] = []

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows of the schema."""
        if rows.num_rows:
            self._pending.append(rows)
            self._pending_bytes += rows.nbytes
        if self._pending_bytes >= DEAL_BYTES:
            self._deal()

    def keep(self, rows: pa.RecordBatch) -> None:
        """Add rows of any schema to no bucket: `read_kept` gives them back."""
        if rows.num_rows:
            self._kept.append(self._written(rows))

    def finish(self, receipt: Receipt) -> Receipt:
        """Write the rest, and the table, and describe the file in the receipt of its task."""
        if self._pending:
            self._deal()
        places = np.array(self._kept, _PLACE)
        if self._rounds:
            places = np.concatenate([places, np.stack(self._rounds, axis=1).ravel()])
        content = places.tobytes()
        self._file.write(content + _crc32(self._name, content).to_bytes(_CRC_BYTES, "little"))
        num_bytes = self._position + len(content) + _CRC_BYTES
        return msgspec.structs.replace(receipt, file_bytes=num_bytes, rounds=len(self._rounds), kept=len(self._kept))

    def _deal(self) -> None:
        rows = pa.Table.from_batches(self._pending).combine_chunks().to_batches()[0]
        self._pending, self._pending_bytes = [], 0
        buckets = self._levels.buckets(numbers_of(rows.column(KEY)), self._level) - np.uint64(self._first)
        order = np.argsort(buckets, kind="stable")
        bounds = np.searchsorted(buckets[order], np.arange(self._levels.fan_out + 1, dtype=np.uint64))
        places = np.full(self._levels.fan_out, np.array(_place(self._name, 0, 0, b""), _PLACE))
        for bucket in np.unique(buckets).tolist():
            places[bucket] = self._written(taken(rows, order[bounds[bucket] : bounds[bucket + 1]]))
        self._rounds.append(places)

    def _written(self, rows: pa.RecordBatch) -> tuple[int, int, int, int]:
        content = rows.serialize()
        self._file.write(content)
        place = _place(self._name, self._position, _size(rows), content)
        self._position += content.size
        return place


def _size(rows: pa.RecordBatch) -> int:
    """The tokens of documents; the number of other rows."""
    return len(rows.column(TOKENS).flatten()) if TOKENS in rows.schema.names else int(rows.num_rows)


def _place(name: str, start: int, size: int, content: bytes | pa.Buffer) -> tuple[int, int, int, int]:
    """A row of a file's table of places. Its checksum covers the place and the content."""
    length = len(content)
    return start, length, size, _crc32(f"{name} {start} {length} {size}", content)


def _crc32(name: str, content: bytes | pa.Buffer) -> int:
    return zlib.crc32(content, zlib.crc32(name.encode()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """Rows that tasks have dealt.

    Args:
        level: levels that were dealt: 1 after the first.
        files: files of the tasks of that level, in order. After the first level, each holds rows of all buckets.
            After a later one, each holds the buckets that one bucket of the level before was dealt to.
    """

    store: Store
    levels: Levels
    level: int
    files: Sequence[DealtFile]

    @classmethod
    def by(cls, store: Store, levels: Levels, stage: str, receipts: Iterable[Receipt], level: int = 1) -> Dealt:
        """The rows that the tasks of a stage have dealt."""
        files = [dealt_file(stage, receipt) for receipt in receipts if receipt.file_bytes]
        return cls(store=store, levels=levels, level=level, files=files)

    def buckets(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """The rows of the buckets ``[start, stop)`` of the level; those of one bucket in the order of the tasks.

        Raises:
            BuildError: a file is missing, short or damaged.
        """
        fan_out = self.levels.fan_out
        if self.level == 1:
            yield from self._rows(self.files, start, stop)
            return
        for number in range(start // fan_out, ceil_div(stop, fan_out)):
            low, high = max(start, number * fan_out), min(stop, (number + 1) * fan_out)
            yield from self._rows([self.files[number]], low - number * fan_out, high - number * fan_out)

    def of_files(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """The rows of all buckets in the files ``[start, stop)``.

        Raises:
            BuildError: a file is missing, short or damaged.
        """
        return self._rows(self.files[start:stop], 0, self.levels.fan_out)

    def sizes(self) -> list[int]:
        """The tokens, or rows, of each bucket of the level.

        Raises:
            BuildError: a file is missing, short or damaged.
        """

        def sizes(file: DealtFile) -> NDArray[np.int64]:
            places = _read_table(self.store, file, self.levels.fan_out)[file.kept :]
            found: NDArray[np.int64] = places.reshape(self.levels.fan_out, file.rounds)["size"].sum(axis=1)
            return found

        of_each = list(side_by_side(self.store, sizes, self.files))
        if self.level > 1:
            return [int(size) for each in of_each for size in each]
        return [int(size) for size in sum(of_each, np.zeros(self.levels.fan_out, np.int64))]

    def _rows(self, files: Sequence[DealtFile], start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """The rows of consecutive buckets of each file."""

        def of_file(file: DealtFile) -> list[pa.RecordBatch]:
            wanted = range(file.kept + start * file.rounds, file.kept + stop * file.rounds)
            return _read_batches(self.store, file, self.levels.fan_out, wanted, self.levels.schema)

        for batches in side_by_side(self.store, of_file, (file for file in files if file.rounds)):
            yield from batches


def read_kept(store: Store, file: DealtFile, levels: Levels, schema: pa.Schema) -> pa.Table:
    """The rows of a file that are in no bucket.

    Raises:
        BuildError: the file is missing, short or damaged.
    """
    batches = _read_batches(store, file, levels.fan_out, range(file.kept), schema) if file.kept else []
    return pa.Table.from_batches(batches, schema)


def _read_table(store: Store, file: DealtFile, fan_out: int) -> NDArray[np.void]:
    """The table of a file, checked."""
    num_bytes = (file.kept + fan_out * file.rounds) * _PLACE.itemsize
    (saved,) = read_parts(store, file.name, [(file.num_bytes - num_bytes - _CRC_BYTES, num_bytes + _CRC_BYTES)])
    content, crc = saved[:-_CRC_BYTES], saved[-_CRC_BYTES:]
    with readable(store, file.name):
        if _crc32(file.name, content) != int.from_bytes(crc, "little"):
            raise ValueError("its table does not have its checksum")
        return np.frombuffer(content, _PLACE)


def _read_batches(
    store: Store, file: DealtFile, fan_out: int, wanted: range, schema: pa.Schema
) -> list[pa.RecordBatch]:
    """The record batches in some rows of the table of a file: of the table, only these rows are read."""
    at = file.num_bytes - _CRC_BYTES - (file.kept + fan_out * file.rounds - wanted.start) * _PLACE.itemsize
    (table,) = read_parts(store, file.name, [(at, len(wanted) * _PLACE.itemsize)])
    places = np.frombuffer(table, _PLACE).tolist()
    with readable(store, file.name):
        for start, length, *_ in places:
            if not 0 <= start <= start + length <= file.num_bytes:
                raise ValueError(f"its table names {length} bytes at {start}")
        there = [(start, length) for start, length, *_ in places if length]
        contents = iter(read_parts(store, file.name, there) if there else ())
        found = [next(contents) if length else b"" for _, length, *_ in places]
        for place, content in zip(places, found, strict=True):
            if _place(file.name, place[0], place[2], content) != place:
                raise ValueError(f"its checksum does not hold for {len(content)} bytes at {place[0]}")
        return [ipc.read_record_batch(pa.py_buffer(content), schema) for content in found if content]


def join_tasks(receipts: Sequence[Receipt], most: int) -> list[StepTask]:
    """The tasks that join the files of receipts, of which at most `most` are wanted, in one round or several."""
    # a task that reads a bucket opens every joined file, a join every file that it joins: about a square root of all
    size = min(FAN_IN, max(math.isqrt(len(receipts) - 1) + 1, ceil_div(len(receipts), most)))
    return [
        StepTask(
            key=(number, 0),
            kind="join",
            start=start,
            stop=min(start + size, len(receipts)),
            inputs_digest=digest_of(receipts[start : start + size]),
        )
        for number, start in enumerate(range(0, len(receipts), size))
    ]


def redeal(name: str, task: StepTask, dealt: Dealt, levels: Levels) -> Receipt:
    """Run a task that joins or deals again: its rows come into a file with this name, which is in the receipt.

    Raises:
        BuildError: a file of the level before is gone.
    """
    with written(dealt.store, name) as file:
        if task.kind == "join":
            writer, found = DealtWriter(file, name, levels), dealt.of_files(task.start, task.stop)
        else:
            writer = DealtWriter(file, name, levels, dealt.level + 1, task.start)
            found = dealt.buckets(task.start, task.stop)
        for rows in found:
            writer.add(rows)
        receipt = writer.finish(Receipt(key=task.key))
    return msgspec.structs.replace(receipt, input_bytes=receipt.file_bytes)


def digest_of(receipts: Iterable[Receipt], *others: object) -> str:
    """A name for the rows that tasks dealt: 32 hexadecimal digits.

    Args:
        others: other values that determine the results.
    """
    facts = [[one.key, one.inputs_digest, sorted(one.left_out), one.documents] for one in receipts]
    return hashlib.blake2b(msgspec.json.encode([*facts, *others]), digest_size=16).hexdigest()


def taken(rows: pa.RecordBatch, order: NDArray[np.intp]) -> pa.RecordBatch:
    """The rows in the given order.

    Arrow's `take` makes an index of 8 bytes for each token of documents, and is three times slower.
    """
    if TOKENS not in rows.schema.names:
        return rows.take(number_array(order))
    documents = rows.column(TOKENS)
    offsets, tokens = numbers_of(documents.offsets), numbers_of(documents.values)
    starts, stops = offsets[order], offsets[order + 1]
    ends = np.cumsum(stops - starts)
    if int(ends[-1]) < SHORT_TOKENS * len(order):
        return rows.take(number_array(order))
    slices = [tokens[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    lists = lists_array(np.concatenate([np.zeros(1, np.int64), ends]), np.concatenate(slices), documents.type)
    others = rows.select(rows.schema.names[1:]).take(number_array(order))
    return pa.record_batch([lists, *others.columns], schema=rows.schema)


def read_parts(store: Store, name: str, places: Sequence[tuple[int, int]]) -> Sequence[bytes]:
    """Parts of a file of an unfinished build.

    Raises:
        BuildError: the file cannot be read, or is too short.
    """
    with readable(store, name):
        return store.read(name, places)
