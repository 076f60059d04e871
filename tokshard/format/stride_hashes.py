"""``stride-hashes.bin``: a CRC-32 for every `HASH_STRIDE` tokens, so that a ranged read is checked before it is used.

The shard table has the CRC-32 of every `HASH_GROUP` of them, which detects hashes of another corpus. Hashes detect
accidents; against forgery there is the SHA-256 of every file.
"""

from __future__ import annotations

import zlib
from array import array
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.format import names
from tokshard.format.arrays import numbers_of
from tokshard.format.files import readable
from tokshard.format.schema import HASH_GROUP, HASH_STRIDE
from tokshard.numbers import ceil_div
from tokshard.store import Store

HASH_BYTES = 4
"""A hash is a little-endian uint32."""


class StrideHasher:
    """Hashes the strides of one shard, whose tokens come piece by piece; 4 GB per second."""

    def __init__(self) -> None:
        self._hashes = array("I")
        self._hash = 0
        self._num_bytes = 0  # of the stride that is not full yet

    def add(self, tokens: NDArray[Any]) -> None:
        """Take the next tokens of the shard: uint16 or uint32 [n], contiguous."""
        if not len(tokens):
            return
        content = tokens.data.cast("B")
        stride_bytes = HASH_STRIDE * tokens.itemsize
        start = min(-self._num_bytes % stride_bytes, len(content))
        self._take(content[:start], stride_bytes)
        stop = len(content) - (len(content) - start) % stride_bytes
        self._hashes.extend([zlib.crc32(content[at : at + stride_bytes]) for at in range(start, stop, stride_bytes)])
        self._take(content[stop:], stride_bytes)

    def finish(self) -> NDArray[np.uint32]:
        """The hashes of all strides; the last one may be short. uint32 [strides]."""
        if self._num_bytes:
            self._close_stride()
        return np.array(self._hashes, np.uint32)

    def _take(self, part: memoryview, stride_bytes: int) -> None:
        """Take a part of one stride."""
        self._hash = zlib.crc32(part, self._hash)
        self._num_bytes += len(part)
        if self._num_bytes == stride_bytes:
            self._close_stride()

    def _close_stride(self) -> None:
        self._hashes.append(self._hash)
        self._hash = self._num_bytes = 0


def num_strides(num_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of hashes of shards of these lengths: int64 [n], like `num_tokens`."""
    return ceil_div(num_tokens, HASH_STRIDE)


def group_hashes(hashes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The CRC-32 of every `HASH_GROUP` stride hashes of one shard; the last group may be shorter: uint32 [groups]."""
    groups = range(0, len(hashes), HASH_GROUP)
    return np.array([zlib.crc32(hashes[at : at + HASH_GROUP].data) for at in groups], np.uint32)


def stride_hash_bytes(shards: pa.RecordBatch) -> pa.Buffer:
    """The bytes of the file for some shards.

    Args:
        shards: rows of `WRITTEN_SHARD_SCHEMA`.
    """
    return pa.py_buffer(numbers_of(shards.column("stride_hashes").flatten()))


def read_stride_hashes(store: Store, start: int, stop: int) -> NDArray[np.uint32]:
    """Some of the hashes of a generation, by one ranged read: uint32 [stop - start].

    Raises:
        DamagedCorpusError: the file is missing or ends before.
        StoreError: the store does not answer.
    """
    path = store.where(names.STRIDE_HASHES)
    with readable(path, f": hashes {start} to {stop} cannot be read"):
        (content,) = store.read(names.STRIDE_HASHES, [(HASH_BYTES * start, HASH_BYTES * (stop - start))])
    return np.frombuffer(content, "<u4")
