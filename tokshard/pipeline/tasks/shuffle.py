"""The shuffle of a copy: documents are dealt to buckets by a random key, and gathered bucket by bucket.

    deal     read documents like any writing task, and deal them; see `tokshard.pipeline.tasks.exchange`
    gather   read some buckets of the last level, sort each by its keys, and write shards

So a task holds `DEAL_BYTES` or one bucket at a time, however large the corpora are. One level is enough for 32 GiB, two
for 32 TiB.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.format.arrays import lists_array, number_array, numbers_of
from tokshard.format.schema import TOKENS
from tokshard.numbers import ceil_div
from tokshard.pipeline.encode.documents import Documents
from tokshard.pipeline.request import Build
from tokshard.pipeline.sources.corpora import SLICE_TOKENS
from tokshard.pipeline.tasks.exchange import KEY, Dealt, DealtWriter, Levels, taken
from tokshard.pipeline.workspace.places import DEAL
from tokshard.pipeline.workspace.receipts import Key, Receipt, file_path
from tokshard.store import written

BUCKET_BYTES = 32 << 20
"""Approximate size of a bucket of the last level. A task holds it three times over."""

_SOURCE, _RECORD = "\\source", "\\record"
"""Columns next to the columns of a shard, whose names have no backslash."""


def deal_levels(num_bytes: int, shards: pa.Schema) -> Levels:
    """How documents are dealt.

    Args:
        num_bytes: bytes of all shards that are copied.
        shards: the schema of the copy's shards.
    """
    return Levels.of(max(1, ceil_div(num_bytes, BUCKET_BYTES)), dealt_schema(shards))


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
    added = {KEY: pa.uint64(), _SOURCE: pa.int64(), _RECORD: pa.int64()}
    return pa.schema([*shards, *(pa.field(name, kind, nullable=False) for name, kind in added.items())])


def sorted_documents(rows: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[Documents]:
    """The documents of one bucket in the order of their keys, `SLICE_TOKENS` at a time. All are held in memory."""
    table = pa.Table.from_batches(rows, schema).combine_chunks()
    if not table.num_rows:
        return
    batch = table.to_batches()[0]
    order = np.argsort(numbers_of(batch.column(KEY)))
    ends = np.cumsum(np.diff(numbers_of(batch.column(TOKENS).offsets))[order])
    kept = [name for name in schema.names if name not in {TOKENS, KEY, _SOURCE, _RECORD}]
    start = 0
    while start < len(order):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + SLICE_TOKENS, "right")))
        part = taken(batch, order[start:stop])
        yield Documents(
            tokens=numbers_of(part.column(TOKENS).flatten()),
            ends=ends[start:stop] - before,
            positions=np.arange(stop - start),
            sources=numbers_of(part.column(_SOURCE)),
            records=numbers_of(part.column(_RECORD)),
            columns={name: part.column(name) for name in kept},
        )
        start = stop


class DealSink:
    """Writes the documents of a dealing task into one file."""

    def __init__(self, build: Build, key: Key, stack: contextlib.ExitStack, *, levels: Levels) -> None:
        self._seed, self._schema = build.options.shuffle or 0, levels.schema
        name = file_path(DEAL, key)
        self._writer = DealtWriter(stack.enter_context(written(build.workspace.store, name)), name, levels)

    def extend(self, parts: Sequence[Documents], source: int, base: int) -> None:  # noqa: ARG002 - documents know both
        """Deal documents. Both corpora of a split share one file, because the split follows from the tokens."""
        for part in filter(len, parts):
            self._writer.add(dealt_rows(part, self._seed, self._schema))

    def finish(self, receipt: Receipt) -> Receipt:
        """Write the rest, and describe the file in the receipt."""
        return self._writer.finish(receipt)


def gathered(dealt: Dealt, start: int, stop: int) -> Iterator[Documents]:
    """The documents of the buckets ``[start, stop)`` of the last level, in the order of their keys.

    Raises:
        BuildError: a file of that level is gone.
    """
    for bucket in range(start, stop):
        yield from sorted_documents(dealt.buckets(bucket, bucket + 1), dealt.levels.schema)
