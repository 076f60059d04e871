"""Fetches bytes of a corpus by range, from the cache on this machine or from the store, and checks them."""

from __future__ import annotations

import errno
import itertools
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, CorpusError, DamagedCorpusError
from tokshard.format import names
from tokshard.format.corpus import Corpus
from tokshard.format.schema import HASH_GROUP
from tokshard.runtime.bytes.cache import Cache
from tokshard.runtime.bytes.places import ShardPlaces
from tokshard.store import Store, joined_ranges

_GAP_BYTES = 32 << 10
"""Ranges of a shard with a smaller gap are requested as one: a gap costs a millisecond, a request tens of ms."""

_MAX_HASHES = 16 << 20
"""Hashes that are kept, of 4 bytes each: enough for a corpus of 137 billion tokens."""


class Fetch:
    """Fetches strides and checks their hashes; also fetches bytes that no hash covers.

    The hashes of the strides come from the corpus and are kept; its shard table vouches for them. So a corpus that
    replaced this one is refused, and so are foreign bytes in the cache. Threads may share it.

    Args:
        stride_tokens: tokens of a stride.
    """

    def __init__(self, corpus: Corpus, cache: Cache, stride_tokens: int) -> None:
        self._corpus, self._cache, self._stride_tokens = corpus, cache, stride_tokens
        self._is_local = corpus.store.local_path(names.MANIFEST) is not None
        self._versions: dict[str, str] = {}
        self._groups: OrderedDict[tuple[int, int], Future[NDArray[np.uint32]]] = OrderedDict()

    def strides(self, shard: ShardPlaces, first: int, stop: int) -> Callable[[], NDArray[Any]]:
        """A function that fetches the tokens of some strides of a shard. Missing hashes are requested now.

        One thread at a time calls this method. A thread of the cache calls the function, which raises
        `DamagedCorpusError` if the shard is missing, or if its bytes are wrong twice; `StoreError` if the store does
        not answer.
        """
        groups = range(first // HASH_GROUP, (stop - 1) // HASH_GROUP + 1)
        hashes = [self._group(shard.index, group) for group in groups]
        return partial(self._strides, shard, first, stop, hashes)

    def _group(self, shard: int, group: int) -> Future[NDArray[np.uint32]]:
        key = shard, group
        found = self._groups.pop(key, None)
        if found is None or (found.done() and found.exception() is not None):
            found = self._cache.hash_fetchers.start(partial(self._read_group, shard, group), is_urgent=True)
        self._groups[key] = found
        if len(self._groups) > _MAX_HASHES // HASH_GROUP:
            self._groups.popitem(last=False)
        return found

    def _read_group(self, shard: int, group: int) -> NDArray[np.uint32]:
        found = self._corpus.stride_hashes(shard, group)
        self._cache.count(requests=1, fetched_bytes=found.nbytes)
        return found

    def _strides(
        self, shard: ShardPlaces, first: int, stop: int, groups: Sequence[Future[NDArray[np.uint32]]]
    ) -> NDArray[Any]:
        base = first // HASH_GROUP * HASH_GROUP

        def hashes(low: int, high: int) -> NDArray[np.uint32]:
            found: NDArray[np.uint32] = np.concatenate([group.result() for group in groups])
            return found[low - base : high - base]

        kept = self._cache.disk
        if kept is None:
            return np.frombuffer(self._request(shard, first, stop, hashes), self._corpus.dtype)
        records: list[bytes | memoryview | None] = [
            record if record is not None and zlib.crc32(record) == crc else None
            for record, crc in zip(kept.read(shard.strides, first, stop), hashes(first, stop).tolist(), strict=True)
        ]
        self._cache.count(disk_bytes=sum(len(record) for record in records if record is not None))
        for is_missing, missing in itertools.groupby(range(len(records)), lambda index: records[index] is None):
            if is_missing:
                indices = list(missing)
                low, high = indices[0], indices[-1] + 1
                records[low:high] = found = _cut(shard, self._request(shard, first + low, first + high, hashes))
                kept.write(shard.strides, first + low, found)
        return np.frombuffer(b"".join(record for record in records if record is not None), self._corpus.dtype)

    def _request(
        self, shard: ShardPlaces, first: int, stop: int, hashes: Callable[[int, int], NDArray[np.uint32]]
    ) -> bytes:
        """Strides from the store, checked. Their hashes may arrive at the same time."""
        for is_again in (False, True):  # the network may have changed them
            parts = self._read(shard, shard.token_ranges(first * self._stride_tokens, stop * self._stride_tokens))
            content = parts[0] if len(parts) == 1 else b"".join(parts)
            strides = _cut(shard, content)
            found, expected = np.array(list(map(zlib.crc32, strides)), np.uint32), hashes(first, stop)
            wrong = np.flatnonzero(found != expected).tolist()
            if not wrong:
                return content
            if not is_again:
                self._cache.count(wrong_strides=len(wrong))
        start = (first + wrong[0]) * self._stride_tokens
        position, _ = shard.token_ranges(start, start + 1)[0]
        num_tokens = len(strides[wrong[0]]) // self._corpus.dtype.itemsize
        raise DamagedCorpusError(
            f"{shard.path}: tokens {start} to {start + num_tokens}, from byte {position} on, have the hash "
            f"{found[wrong[0]]:08x}, expected {expected[wrong[0]]:08x}",
            hint=RESTORE,
        )

    def read_unhashed(self, shard: ShardPlaces, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read parts of one shard that no hash covers, each given as its first byte and its length.

        In an object store, the shard's version is pinned at the first such read, and another version is refused. In a
        directory only the size must stay; a file may be touched or moved back.

        Raises:
            DamagedCorpusError: the shard is missing, was replaced, or does not match the manifest.
            StoreError: the store does not answer.
        """
        version = self._version(shard)
        found = self._read(shard, places, None if self._is_local else version)
        if self._is_local:
            self._corpus.check_in_place([shard.index])
        return found

    def _version(self, shard: ShardPlaces) -> str:
        """The version of a shard at its first read, when its size must match the shard table."""
        version = self._versions.get(shard.name)
        if version is None:
            try:
                found = self._corpus.store.stat(shard.name)
            except OSError as error:
                raise _problem(shard, error) from error
            self._cache.count(requests=1)
            if found.size != shard.num_bytes:
                raise DamagedCorpusError(
                    f"{shard.path} has {found.size} bytes, expected {shard.num_bytes}", hint=RESTORE
                )
            if not self._is_local:
                self._corpus.check_in_place([shard.index])
            version = self._versions.setdefault(shard.name, found.version)
        return version

    def _read(self, shard: ShardPlaces, places: Sequence[tuple[int, int]], version: str | None = None) -> list[bytes]:
        if self._is_local:
            self._version(shard)
        found, counts = read_ranges(self._corpus.store, shard, places, version)
        self._cache.count(**counts)
        return found


def read_ranges(
    store: Store, shard: ShardPlaces, places: Sequence[tuple[int, int]], version: str | None = None
) -> tuple[list[bytes], dict[str, int]]:
    """Parts of a shard, each given as its first byte and its length. Parts that lie near to each other are read as one.

    Returns:
        The parts, and the counts of requests and bytes, as `Cache.count` takes them.

    Raises:
        CorpusError: they cannot be read.
    """
    for position, length in places:  # before memory is allocated for them
        if not 0 <= position <= position + length <= shard.num_bytes:
            raise DamagedCorpusError(
                f"{shard.path} has {shard.num_bytes} bytes; the shard table names {length} from byte {position} on",
                hint=RESTORE,
            )
    joined = joined_ranges(places, _GAP_BYTES)
    try:
        parts = store.read(shard.name, joined, version=version)
    except OSError as error:
        raise _problem(shard, error) from error
    counts = {"requests": len(joined), "fetched_bytes": sum(map(len, parts))}
    return list(_cut_out(places, joined, parts)), counts


def _cut(shard: ShardPlaces, content: bytes) -> list[memoryview]:
    size = shard.strides.record_bytes
    return [memoryview(content)[start : start + size] for start in range(0, len(content), size)]


def _problem(shard: ShardPlaces, error: OSError) -> CorpusError:
    """The problem of a shard, from the failure of a read."""
    if isinstance(error, FileNotFoundError):
        return DamagedCorpusError(f"{shard.path} is missing", hint=RESTORE)
    if error.errno == errno.ESTALE:
        return DamagedCorpusError(
            f"{shard.path} was replaced during the run",
            hint="restart the job from its last checkpoint; 'tokshard verify' tells whether the shard is the same as "
            "before",
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return CorpusError(
            f"{shard.path} cannot be opened: {error.strerror or error}",
            hint="raise the limit of open files: 'ulimit -n'",
        )
    if error.errno == errno.ENODATA:
        return DamagedCorpusError(f"{shard.path}: {error.strerror or error}: it was cut during the run", hint=RESTORE)
    return DamagedCorpusError(f"{shard.path} cannot be read: {error.strerror or error}", hint=RESTORE)


def _cut_out(
    places: Sequence[tuple[int, int]], joined: Sequence[tuple[int, int]], parts: Sequence[bytes]
) -> Iterator[bytes]:
    starts = [start for start, _ in joined]
    for position, length in places:
        part = bisect_right(starts, position) - 1
        within = position - starts[part]
        yield parts[part][within : within + length]
