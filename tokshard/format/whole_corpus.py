"""A corpus from its first document to its last, checked while it is read. For copies and exports."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import CorpusError, DamagedCorpusError, StoreError
from tokshard.format import names
from tokshard.format.corpus import Corpus
from tokshard.format.files import file_sha256, readable
from tokshard.format.schema import HASH_STRIDE
from tokshard.format.shard import Shard
from tokshard.format.stride_hashes import StrideHasher
from tokshard.store import local_file


def check_not_empty(corpus: Corpus) -> None:
    """Refuse a corpus without documents: a generation of a split may be one.

    Raises:
        CorpusError: it has none.
    """
    if not corpus.num_documents:
        raise CorpusError(
            f"{corpus.location} holds no document: all that was appended went into the other split",
            hint="give the directory of the corpus that it was appended to",
        )


def checked_batches(corpus: Corpus, index: int) -> Iterator[tuple[Shard, int]]:
    """Each record batch of one shard, as the shard and the index of the batch there.

    The tokens, and with kept columns the whole file, are checked against their hashes after the last batch. Treat the
    data as unverified until the iterator ends. Costs 0.25 ns per byte, with kept columns about 2 ns. A shard of another
    store is first copied to a temporary file.

    Raises:
        DamagedCorpusError: the shard is missing, or does not match the manifest and its hashes.
        StoreError: it cannot be read.
    """
    stored, number = corpus.stored(index)
    hashes, hasher = stored.stride_hashes(number), StrideHasher()
    digest = hashlib.sha256() if len(stored.shard_schema) > 1 else None  # the hashes of strides are of tokens alone
    with _mapped(stored, number) as (shard, mapped):
        part = corpus.part_of(index, shard)
        released = 0
        for batch, place in enumerate(shard.places):
            yield part, batch
            tokens = shard.batch(batch)[1]
            hasher.add(tokens)
            # pages that were read would count as memory of the process until the shard ends; needed ones come back
            stop = (place.values_position + tokens.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if digest is not None:
                digest.update(memoryview(mapped)[released:stop])
            mapped.madvise(mmap.MADV_DONTNEED, released, stop - released)
            released = stop
        _check_hashes(shard, hasher.finish(), hashes)
        if digest is not None:
            digest.update(memoryview(mapped)[released:])
            if digest.hexdigest() != shard.info.sha256:
                raise _other_hash(shard.path, digest.hexdigest(), shard.info.sha256)


@contextmanager
def open_shard(corpus: Corpus, index: int) -> Iterator[Shard]:
    """One shard, not kept in memory; a shard of a bucket is copied to a temporary file. Its hashes are not checked.

    Raises:
        DamagedCorpusError: the shard is missing, or does not match the manifest.
        StoreError: it cannot be read.
    """
    with _mapped(*corpus.stored(index)) as (shard, _):
        yield corpus.part_of(index, shard)


def check_side_files(corpus: Corpus) -> None:
    """Check the tables and the tokenizer of a corpus against their hashes. Opening it only checks sizes and schemas.

    Raises:
        DamagedCorpusError: one is missing, or does not match the manifest.
    """
    for store, manifest in corpus.generations:
        for name in sorted((names.REQUIRED_FILES | names.FILES_OF_VIEW) - {names.STRIDE_HASHES}):
            if name not in manifest.files:
                continue
            with readable(store.where(name)):
                found = file_sha256(store, name)
            if found != manifest.files[name].sha256:
                raise _other_hash(store.where(name), found, manifest.files[name].sha256)


def _other_hash(path: str, found: str, expected: str) -> DamagedCorpusError:
    return DamagedCorpusError(f"{path} has SHA-256 {found}, expected {expected}")


@contextmanager
def _mapped(corpus: Corpus, number: int) -> Iterator[tuple[Shard, mmap.mmap]]:
    """A stored shard and the map of it, or of a copy of it in a temporary file. It lives as long as a view of it."""
    store, info, places = corpus.store, corpus.shards[number], corpus.shards.batch_places(number)
    try:
        with local_file(store, info.name) as path, open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != info.num_bytes:
                raise DamagedCorpusError(f"{store.where(info.name)} has {num_bytes} bytes, expected {info.num_bytes}")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            yield Shard(store, info, places, corpus.shard_schema, content=pa.py_buffer(mapped)), mapped
    except FileNotFoundError:
        raise DamagedCorpusError(f"{store.where(info.name)} is missing") from None
    except OSError as error:  # the temporary directory may be full, so this need not be damage
        raise StoreError(
            f"{store.where(info.name)} cannot be read: {error.strerror or error}",
            hint="check its permissions, and the room in TMPDIR, where a shard of a bucket is copied to",
        ) from error


def _check_hashes(shard: Shard, found: NDArray[np.uint32], expected: NDArray[np.uint32]) -> None:
    if np.array_equal(found, expected):
        return
    stride = int(np.flatnonzero(found != expected)[0])
    raise DamagedCorpusError(
        f"{shard.path}: its tokens from {HASH_STRIDE * stride} on have CRC-32 {found[stride]:08x}, "
        f"expected {expected[stride]:08x}"
    )
