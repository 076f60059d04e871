"""Documents in random order, in bounded memory: dealt to files at random, then each file shuffled and read.

Each document gets a random key, from the seed and its number. The order is that of the keys, so that it does not depend
on how many files there are.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from tokshard.format.arrays import number_array
from tokshard.interop.copy.selection import SLICE_TOKENS, CopiedDocuments

BUCKET_BYTES = 64 << 20
"""About so much of the corpus is in one file: two or three times as much is in memory."""

MAX_BUCKETS = 768
"""Files that are open at a time at most, of which a process may usually have 1,024; above 48 GiB each is larger."""

_FIRST = ("tokens", "key", "source", "record")


def shuffled(documents: Iterable[CopiedDocuments], *, seed: int, num_bytes: int) -> Iterator[CopiedDocuments]:
    """The same documents in an order that depends on `seed` alone, and on which documents they are.

    Args:
        num_bytes: about the size of all; decides how many files there are.

    Raises:
        OSError: the temporary directory takes no more.
    """
    num_buckets = min(MAX_BUCKETS, max(1, -(-num_bytes // BUCKET_BYTES)))
    with contextlib.ExitStack() as stack:
        buckets = [_Bucket(stack.enter_context(tempfile.TemporaryFile())) for _ in range(num_buckets)]
        number = 0
        for batch in documents:
            keys = random_keys(seed, number, len(batch))
            number += len(batch)
            places = ((keys >> np.uint64(32)) * np.uint64(num_buckets)) >> np.uint64(32)
            rows = _rows(batch, keys)
            order = np.argsort(places, kind="stable")
            bounds = np.searchsorted(places[order], np.arange(num_buckets + 1))
            for place in np.unique(places).tolist():
                buckets[place].add(rows.take(number_array(order[bounds[place] : bounds[place + 1]])))
        for bucket in buckets:
            yield from bucket.read()


def random_keys(seed: int, start: int, count: int) -> NDArray[np.uint64]:
    """Keys of the documents from `start` on: uint64 [count].

    References:
        Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (the mixing function).
    """
    golden = 0x9E3779B97F4A7C15
    base = np.uint64((_mixed(np.array([seed], np.uint64)).item() + start * golden) % (1 << 64))
    return _mixed(base + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(golden))


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _rows(documents: CopiedDocuments, keys: NDArray[np.uint64]) -> pa.RecordBatch:
    offsets = number_array(np.concatenate([np.zeros(1, np.int64), documents.ends]))
    tokens = pa.LargeListArray.from_arrays(offsets, number_array(documents.tokens))
    arrays = [tokens, *map(number_array, (keys, documents.sources, documents.records)), *documents.columns.values()]
    return pa.record_batch(arrays, names=[*_FIRST, *documents.columns])


class _Bucket:
    """A temporary file of documents."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._writer: Any = None

    def add(self, rows: pa.RecordBatch) -> None:
        if self._writer is None:
            self._writer = ipc.new_stream(self._file, rows.schema)
        self._writer.write_batch(rows)

    def read(self) -> Iterator[CopiedDocuments]:
        """All documents of the file, in the order of their keys."""
        if self._writer is None:
            return
        self._writer.close()
        self._file.seek(0)
        table = ipc.open_stream(self._file).read_all()
        order = np.argsort(table.column("key").to_numpy(), kind="stable")
        lengths = _lengths(table)[order]
        ends = np.cumsum(lengths)
        start = 0
        while start < len(order):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + SLICE_TOKENS, "right")))
            part = table.take(number_array(order[start:stop])).combine_chunks()
            columns = {name: part.column(name).combine_chunks() for name in part.column_names}
            tokens = columns["tokens"].chunk(0) if isinstance(columns["tokens"], pa.ChunkedArray) else columns["tokens"]
            yield CopiedDocuments(
                tokens=tokens.flatten().to_numpy(),
                ends=ends[start:stop] - before,
                sources=columns["source"].to_numpy(),
                records=columns["record"].to_numpy(),
                columns={name: column for name, column in columns.items() if name not in _FIRST},
            )
            start = stop
        self._file.truncate(0)


def _lengths(table: pa.Table) -> NDArray[np.int64]:
    """Tokens of each document, from the offsets of the lists."""
    return np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in table.column("tokens").chunks])
