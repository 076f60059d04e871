"""A corpus from its first document to its last, checked on the way: for what copies or converts all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format.corpus import Corpus
from tokshard.format.files import map_path
from tokshard.format.schema import HASH_STRIDE
from tokshard.format.shard import Shard
from tokshard.format.stride_hashes import StrideHasher
from tokshard.format.tables import BatchPlace, ShardInfo
from tokshard.store import Store, local_file


def checked_batches(corpus: Corpus, index: int) -> Iterator[tuple[Shard, int]]:
    """Each record batch of one shard, as `batches_of_shard` gives them.

    Raises:
        DamagedCorpusError: the shard is missing, or is not what the manifest and its hashes say.
    """
    info, places = corpus.shards[index], corpus.shards.batch_places(index)
    return batches_of_shard(corpus.store, info, places, corpus.shard_schema, corpus.stride_hashes(index))


def batches_of_shard(
    store: Store, info: ShardInfo, places: list[BatchPlace], schema: pa.Schema, hashes: NDArray[np.uint32]
) -> Iterator[tuple[Shard, int]]:
    """Each record batch of one shard, as the shard and the index of the batch there.

    The tokens are compared with their hashes when the last batch has been taken, so use nothing for good before the
    iterator ends. Costs 0.25 ns per byte. A shard of another store is first copied to a temporary file.

    Args:
        hashes: of its strides, as `Corpus.stride_hashes` gives them.

    Raises:
        DamagedCorpusError: the shard is missing, or is not what is known of it.
    """
    hasher = StrideHasher()
    with _on_this_machine(store, info, places, schema) as shard:
        for batch in range(shard.num_batches):
            yield shard, batch
            hasher.add(shard.batch(batch)[1])
        _check_hashes(shard, hasher.finish(), hashes)


@contextmanager
def _on_this_machine(store: Store, info: ShardInfo, places: list[BatchPlace], schema: pa.Schema) -> Iterator[Shard]:
    if store.local_path(info.name) is not None:
        yield Shard(store, info, places, schema)
        return
    try:
        copied = local_file(store, info.name)
        with copied as path:
            yield Shard(store, info, places, schema, content=map_path(path))
    except FileNotFoundError:
        raise DamagedCorpusError(f"{store.where(info.name)} is missing", hint=RESTORE) from None


def _check_hashes(shard: Shard, found: NDArray[np.uint32], expected: NDArray[np.uint32]) -> None:
    if np.array_equal(found, expected):
        return
    stride = int(np.flatnonzero(found != expected)[0])
    raise DamagedCorpusError(
        f"{shard.path}: its tokens from {HASH_STRIDE * stride} on have CRC-32 {found[stride]:08x}, "
        f"expected {expected[stride]:08x}",
        hint=RESTORE,
    )
