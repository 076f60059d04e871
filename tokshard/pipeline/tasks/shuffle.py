"""The shuffle of a copy: documents are dealt to buckets by a random key, and gathered bucket by bucket.

    deal     read documents like any writing task, and write them into one file per task, bucket by bucket
    redeal   if there are more than `FAN_OUT` buckets: the same with the content of one bucket of the level before
    gather   read some buckets of the last level, sort each by its keys, and write shards

So a task holds `DEAL_BYTES` or one bucket at a time, however large the corpora are. A file of dealt documents has one
record batch for each bucket with documents in each round. A table at its end lists their places, so the parts of a
bucket are ranges that any store can read. Batches, their places and the table each have a CRC-32.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from tokshard.format.arrays import lists_array, number_array
from tokshard.format.schema import ARROW_ERRORS, TOKENS, shard_schema
from tokshard.pipeline.encode.documents import Documents
from tokshard.pipeline.request import Build
from tokshard.pipeline.sources.corpora import SLICE_TOKENS
from tokshard.pipeline.tasks.planning import StepTask, groups
from tokshard.pipeline.tasks.sorted_rows import damaged, read_parts
from tokshard.pipeline.workspace.places import DEAL
from tokshard.pipeline.workspace.receipts import Key, Receipt, file_path
from tokshard.store import Store, side_by_side, written

BUCKET_BYTES = 32 << 20
"""About so much of the corpora is in one bucket of the last level, which a task holds three times over."""

DEAL_BYTES = 32 << 20
"""About so much of the documents is dealt at once."""

FAN_OUT = 1_024
"""Buckets that a task deals to at most: parts of 32 kB and more. One level is enough for 32 GiB, two for 32 TiB."""

_KEY, _SOURCE, _RECORD = "\\key", "\\source", "\\record"
"""Columns next to the columns of a shard, whose names have no backslash."""

_PLACE = np.dtype([("start", "<i8"), ("length", "<i8"), ("tokens", "<i8"), ("crc32", "<u4")])
"""Of a record batch: where it is, in bytes, its tokens, and its checksum. A length of 0: it is not there."""

_CRC_BYTES = 4

SHORT_TOKENS = 100
"""Documents that are shorter on average are taken by Arrow, longer ones a slice at a time. Changes speed only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """How the documents of a shuffle are dealt to ``fan_out ** depth`` buckets, level by level."""

    fan_out: int
    depth: int

    def buckets(self, keys: NDArray[np.uint64], level: int) -> NDArray[np.uint64]:
        """The bucket of each key among the ``fan_out ** (level + 1)`` of a level: they ascend with the keys."""
        return ((keys >> np.uint64(32)) * np.uint64(self.fan_out ** (level + 1))) >> np.uint64(32)


def deal_levels(num_bytes: int) -> Levels:
    """The smallest number of levels.

    Args:
        num_bytes: bytes of all shards.
    """
    wanted = max(1, -(-num_bytes // BUCKET_BYTES))
    depth = 1
    while FAN_OUT**depth < wanted:
        depth += 1
    fan_out = 1
    while fan_out**depth < wanted:
        fan_out += 1
    return Levels(fan_out=fan_out, depth=depth)


def random_keys(seed: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The key of each document, from its number: uint64, like `numbers`. No two are equal.

    References:
        Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (the mixing function).
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    return _mixed(_mixed(np.array([seed % (1 << 64)], np.uint64)) + (numbers.astype(np.uint64) + np.uint64(1)) * golden)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """A file of dealt documents.

    Args:
        rounds: record batches that each bucket may have.
    """

    name: str
    num_bytes: int
    rounds: int


class DealtWriter:
    """Writes a file of dealt documents. Memory is about three times `DEAL_BYTES`, or the largest document.

    Args:
        name: the name of the file, which the checksums cover, too.
        first: number of the first bucket; there are `fan_out`.
    """

    def __init__(self, file: IO[bytes], name: str, levels: Levels, level: int, *, first: int) -> None:
        self._file, self._levels, self._level, self._first = file, levels, level, first
        self._name = name
        self._position = 0
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._rounds: list[NDArray[np.void]] = []

    def add(self, rows: pa.RecordBatch) -> None:
        """Add documents, as `dealt_rows` makes them."""
        self._pending.append(rows)
        self._pending_bytes += rows.nbytes
        if self._pending_bytes >= DEAL_BYTES:
            self._deal()

    def finish(self) -> tuple[int, int]:
        """Write the rest, and the table; returns the size of the file and the number of rounds."""
        if self._pending:
            self._deal()
        fan_out = self._levels.fan_out
        places = np.stack(self._rounds, axis=1) if self._rounds else np.empty((fan_out, 0), _PLACE)
        content = np.ascontiguousarray(places).tobytes()
        self._file.write(content + _crc32(self._name, content).to_bytes(_CRC_BYTES, "little"))
        return self._position + len(content) + _CRC_BYTES, len(self._rounds)

    def _deal(self) -> None:
        rows = pa.Table.from_batches(self._pending).combine_chunks().to_batches()[0]
        self._pending, self._pending_bytes = [], 0
        buckets = self._levels.buckets(rows.column(_KEY).to_numpy(), self._level) - np.uint64(self._first)
        order = np.argsort(buckets, kind="stable")
        bounds = np.searchsorted(buckets[order], np.arange(self._levels.fan_out + 1, dtype=np.uint64))
        places = np.array([_place(self._name, 0, 0, b"")] * self._levels.fan_out, _PLACE)
        for bucket in np.unique(buckets).tolist():
            part = _taken(rows, order[bounds[bucket] : bounds[bucket + 1]])
            content = part.serialize()
            self._file.write(content)
            places[bucket] = _place(self._name, self._position, len(part.column(TOKENS).flatten()), content)
            self._position += content.size
        self._rounds.append(places)


def _place(name: str, start: int, tokens: int, content: bytes | pa.Buffer) -> tuple[int, int, int, int]:
    """A row of the table of places of a file. Its checksum is of all of it."""
    length = len(content)
    return start, length, tokens, _crc32(f"{name} {start} {length} {tokens}", content)


def _crc32(name: str, content: bytes | pa.Buffer) -> int:
    return zlib.crc32(content, zlib.crc32(name.encode()))


def dealt_rows(documents: Documents, seed: int, schema: pa.Schema) -> pa.RecordBatch:
    """Documents with their keys, without a copy.

    Args:
        schema: as `dealt_schema` makes it.
    """
    numbers, sources, records = documents.numbers, documents.sources, documents.records
    assert numbers is not None, "only documents of corpora are shuffled"
    assert sources is not None
    assert records is not None
    offsets = np.concatenate([np.zeros(1, np.int64), documents.ends])
    tokens = lists_array(offsets, documents.tokens, schema.field(TOKENS).type)
    keys = random_keys(seed, numbers)
    arrays = [tokens, *documents.columns.values(), *map(number_array, (keys, sources, records))]
    return pa.record_batch(arrays, schema=schema)


def dealt_schema(shards: pa.Schema) -> pa.Schema:
    """The schema of dealt documents.

    Args:
        shards: the schema of the copy's shards.
    """
    added = {_KEY: pa.uint64(), _SOURCE: pa.int64(), _RECORD: pa.int64()}
    return pa.schema([*shards, *(pa.field(name, kind, nullable=False) for name, kind in added.items())])


def read_bucket(
    store: Store, files: Sequence[Dealt], bucket: int, fan_out: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The documents of one bucket, a record batch after another.

    Args:
        bucket: number, counted from the first bucket of the files.

    Raises:
        BuildError: a file is missing, short or damaged.
    """

    def parts(file: Dealt) -> list[pa.RecordBatch]:
        row_bytes = file.rounds * _PLACE.itemsize
        start = file.num_bytes - _CRC_BYTES - (fan_out - bucket) * row_bytes
        (table,) = read_parts(store, file.name, [(start, row_bytes)])
        places = np.frombuffer(table, _PLACE).tolist()
        try:
            for start, length, *_ in places:
                if not 0 <= start <= start + length <= file.num_bytes:
                    raise ValueError(f"its table names {length} bytes at {start}")
            contents = iter(
                read_parts(store, file.name, there) if (there := [one[:2] for one in places if one[1]]) else ()
            )
            found = [next(contents) if length else b"" for _, length, *_ in places]
            for place, content in zip(places, found, strict=True):
                if _place(file.name, place[0], place[2], content) != place:
                    raise ValueError(f"its checksum does not hold for {len(content)} bytes at {place[0]}")
            batches = [ipc.read_record_batch(pa.py_buffer(content), schema) for content in found if content]
        except ARROW_ERRORS as error:
            raise damaged(store, file.name, str(error)) from error
        return batches

    for batches in side_by_side(store, parts, (file for file in files if file.rounds)):
        yield from batches


def bucket_tokens(store: Store, file: Dealt, fan_out: int) -> NDArray[np.int64]:
    """The tokens of every bucket of a file: int64 [fan_out].

    Raises:
        BuildError: the file is missing, short or damaged.
    """
    table_bytes = fan_out * file.rounds * _PLACE.itemsize + _CRC_BYTES
    (saved,) = read_parts(store, file.name, [(file.num_bytes - table_bytes, table_bytes)])
    content, crc = saved[:-_CRC_BYTES], saved[-_CRC_BYTES:]
    if _crc32(file.name, content) != int.from_bytes(crc, "little"):
        raise damaged(store, file.name, "its table does not have its checksum")
    tokens: NDArray[np.int64] = np.frombuffer(content, _PLACE).reshape(fan_out, file.rounds)["tokens"].sum(axis=1)
    return tokens


def sorted_documents(rows: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[Documents]:
    """The documents of one bucket in the order of their keys, `SLICE_TOKENS` at a time. All are held in memory."""
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
        yield Documents(
            tokens=part.column(TOKENS).flatten().to_numpy(),
            ends=ends[start:stop] - before,
            positions=np.arange(stop - start),
            sources=part.column(_SOURCE).to_numpy(),
            records=part.column(_RECORD).to_numpy(),
            columns={name: part.column(name) for name in kept},
        )
        start = stop


class DealSink:
    """Writes the documents of a dealing task into one file."""

    def __init__(self, build: Build, key: Key, stack: contextlib.ExitStack, *, levels: Levels) -> None:
        self._seed, self._schema = build.options.shuffle or 0, dealt_schema(shard_schema(build.facts))
        name = file_path(DEAL, key)
        file = stack.enter_context(written(build.workspace.store, name))
        self._writer = DealtWriter(file, name, levels, 0, first=0)

    def extend(self, parts: Sequence[Documents], source: int, base: int) -> None:  # noqa: ARG002 - documents know both
        """Deal documents. Both corpora of a split share one file, because the split follows from the tokens."""
        for part in filter(len, parts):
            self._writer.add(dealt_rows(part, self._seed, self._schema))

    def finish(self, receipt: Receipt) -> Receipt:
        """Write the rest, and describe the file in the receipt."""
        file_bytes, rounds = self._writer.finish()
        return msgspec.structs.replace(receipt, file_bytes=file_bytes, parts=[(rounds, 0)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Redeal:
    """Deal the documents of one bucket of the level before to the buckets of a level."""

    bucket: int
    level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Write the documents of the buckets ``[start, stop)`` of the last level."""

    start: int
    stop: int


def dealt_files(stage: str, receipts: Iterable[Receipt]) -> list[Dealt]:
    """The files of tasks that deal documents."""
    return [
        Dealt(name=file_path(stage, receipt.key), num_bytes=receipt.file_bytes, rounds=receipt.parts[0][0])
        for receipt in receipts
        if receipt.parts
    ]


def redeal_tasks(levels: Levels, level: int, made_of: str) -> list[StepTask]:
    """The tasks of a level after the first: one for each bucket of the level before."""
    return [
        StepTask(key=(bucket, 0), step=Redeal(bucket=bucket, level=level), made_of=made_of)
        for bucket in range(levels.fan_out**level)
    ]


def gather_tasks(store: Store, dealt: Sequence[Dealt], levels: Levels, most: int, made_of: str) -> list[StepTask]:
    """The tasks that write shards: each gathers buckets of at most `most` tokens together, or one bucket.

    Args:
        dealt: the files of the last level.
    """
    of_each = list(side_by_side(store, partial(bucket_tokens, store, fan_out=levels.fan_out), dealt))
    tokens = np.concatenate(of_each) if levels.depth > 1 else sum(of_each, np.zeros(levels.fan_out, np.int64))
    return [
        StepTask(key=(number, 0), step=Gather(start=start, stop=stop), made_of=made_of)
        for number, (start, stop) in enumerate(groups(tokens.tolist(), most))
    ]


def redeal(build: Build, name: str, step: Redeal, levels: Levels, dealt: Sequence[Dealt]) -> tuple[int, int]:
    """Deal the documents of one bucket again, into a file with this name; returns its size and its rounds.

    Raises:
        BuildError: a file of the level before is gone.
    """
    with written(build.workspace.store, name) as file:
        writer = DealtWriter(file, name, levels, step.level, first=step.bucket * levels.fan_out)
        for rows in _bucket(build, step.bucket, step.level, levels, dealt):
            writer.add(rows)
        return writer.finish()


def gathered(build: Build, step: Gather, levels: Levels, dealt: Sequence[Dealt]) -> Iterator[Documents]:
    """The documents of some buckets of the last level, in the order of their keys.

    Raises:
        BuildError: a file of that level is gone.
    """
    schema = dealt_schema(shard_schema(build.facts))
    for bucket in range(step.start, step.stop):
        yield from sorted_documents(_bucket(build, bucket, levels.depth, levels, dealt), schema)


def _bucket(build: Build, bucket: int, level: int, levels: Levels, dealt: Sequence[Dealt]) -> Iterator[pa.RecordBatch]:
    """The documents of one bucket of the level before `level`, in any order."""
    schema = dealt_schema(shard_schema(build.facts))
    # a file of the first level holds documents of all buckets; a file of a later level, of one bucket before it
    files = dealt if level == 1 else [dealt[bucket // levels.fan_out]]
    return read_bucket(build.workspace.store, files, bucket % levels.fan_out, levels.fan_out, schema)


def _taken(rows: pa.RecordBatch, order: NDArray[np.intp]) -> pa.RecordBatch:
    """Some rows, in some order. Arrow's `take` makes an index of 8 bytes for each token, and is three times slower."""
    documents = rows.column(TOKENS)
    offsets, tokens = documents.offsets.to_numpy(), documents.values.to_numpy()
    starts, stops = offsets[order], offsets[order + 1]
    ends = np.cumsum(stops - starts)
    if int(ends[-1]) < SHORT_TOKENS * len(order):
        return rows.take(number_array(order))
    taken = np.concatenate([tokens[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)])
    lists = lists_array(np.concatenate([np.zeros(1, np.int64), ends]), taken, documents.type)
    others = rows.select(rows.schema.names[1:]).take(number_array(order))
    return pa.record_batch([lists, *others.columns], schema=rows.schema)
