"""Strides of a corpus as they are fetched: from the cache on this machine or from the store, and checked."""

from __future__ import annotations

import itertools
import zlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format.corpus import Corpus
from tokshard.format.schema import HASH_GROUP
from tokshard.runtime.bytes.fetchers import Fetchers
from tokshard.runtime.bytes.shard_bytes import ShardBytes
from tokshard.runtime.bytes.shard_places import ShardPlaces
from tokshard.runtime.bytes.strides import Run
from tokshard.runtime.order.forking import ForkLock
from tokshard.store.record_cache import RecordCache

_MAX_HASHES = 16 << 20
"""Hashes that are kept, of 4 bytes each: all those of a corpus of 137 billion tokens."""


class StrideHashes:
    """The hashes of the strides of a corpus. Those that were used last are kept. Threads may share it.

    Args:
        fetchers: for requests besides those for tokens.
        on_read: called with the number of requests and of bytes of each.
    """

    def __init__(self, corpus: Corpus, fetchers: Callable[[], Fetchers], on_read: Callable[[int, int], None]) -> None:
        self._corpus, self._fetchers, self._on_read = corpus, fetchers, on_read
        self._kept: OrderedDict[tuple[int, int], NDArray[np.uint32]] = OrderedDict()
        self._lock = ForkLock()

    def ask(self, run: Run) -> Callable[[], NDArray[np.uint32]]:
        """What waits for the hashes of some strides, which are fetched meanwhile, and gives them: uint32 [strides]."""
        first = run.first // HASH_GROUP
        keys = [(run.shard, part) for part in range(first, (run.stop - 1) // HASH_GROUP + 1)]
        base = first * HASH_GROUP
        parts = [self._ask(key) for key in keys]

        def answer() -> NDArray[np.uint32]:
            found: NDArray[np.uint32] = np.concatenate([part() for part in parts])
            return found[run.first - base : run.stop - base]

        return answer

    def _ask(self, key: tuple[int, int]) -> Callable[[], NDArray[np.uint32]]:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return lambda: found
        return self._fetchers().start(partial(self._fetch, key), is_urgent=True).result

    def _fetch(self, key: tuple[int, int]) -> NDArray[np.uint32]:
        found = self._corpus.stride_hashes(*key)
        self._on_read(1, found.nbytes)
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > _MAX_HASHES // HASH_GROUP:
                self._kept.popitem(last=False)
        return found


class CheckedShards:
    """Fetches strides, and gives no others than those that the corpus was built with. Threads may share it.

    Args:
        kept: where strides are kept on this machine, if anywhere.
        stride_tokens: tokens of a stride.
        count: called with what was found: ``wrong_strides`` before they are asked for again, ``disk_bytes``.
    """

    def __init__(
        self,
        corpus: Corpus,
        shards: Callable[[int], ShardPlaces],
        content: ShardBytes,
        hashes: StrideHashes,
        *,
        kept: RecordCache | None,
        stride_tokens: int,
        count: Callable[..., None],
    ) -> None:
        self._dtype, self._shards, self._bytes, self._hashes = corpus.dtype, shards, content, hashes
        self._kept, self._stride_tokens, self._count = kept, stride_tokens, count

    def fetch(self, run: Run) -> NDArray[Any]:
        """The tokens of some strides, read-only.

        Raises:
            DamagedCorpusError: a shard is missing, or its bytes are wrong, also when they are asked for again.
            StoreError: the store does not answer.
        """
        if self._kept is None:
            return self._request(run)
        hashes = self._hashes.ask(run)
        file = self._shards(run.shard).records(self._stride_tokens)
        records: list[bytes | memoryview | None] = [*self._kept.read(file, run.first, run.stop)]
        for index, expected in enumerate(hashes()):  # what another corpus or program wrote there is not this shard's
            if (record := records[index]) is not None and zlib.crc32(record) != expected:
                records[index] = None
        self._count(disk_bytes=sum(len(record) for record in records if record is not None))
        for is_missing, group in itertools.groupby(range(len(records)), lambda index: records[index] is None):
            indices = list(group)
            if is_missing:
                first, stop = indices[0], indices[-1] + 1
                part = Run(run.shard, run.first + first, run.first + stop, run.number + first)
                records[first:stop] = found = self._cut(self._request(part))
                self._kept.write(file, part.first, found)
        return np.frombuffer(b"".join(record for record in records if record is not None), self._dtype)

    def _request(self, run: Run) -> NDArray[Any]:
        """Strides from the store, checked."""
        hashes = self._hashes.ask(run)
        tokens = self._read(run)
        expected = hashes()
        wrong = self._wrong(tokens, expected)
        if len(wrong):
            self._count(wrong_strides=len(wrong))
            tokens = self._read(run)  # they may have changed on the way
            wrong = self._wrong(tokens, expected)
            if len(wrong):
                raise self._damage(run, int(wrong[0]), tokens, expected)
        return tokens

    def _read(self, run: Run) -> NDArray[Any]:
        shard = self._shards(run.shard)
        size = self._stride_tokens
        places = shard.token_ranges(run.first * size, run.stop * size)
        parts = self._bytes.read(shard.file, places, has_hashes=True)
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self._dtype)

    def _wrong(self, tokens: NDArray[Any], expected: NDArray[np.uint32]) -> NDArray[np.int64]:
        return np.flatnonzero(self._found(tokens) != expected)

    def _found(self, tokens: NDArray[Any]) -> NDArray[np.uint32]:
        return np.array([zlib.crc32(stride) for stride in self._cut(tokens)], np.uint32)

    def _cut(self, tokens: NDArray[Any]) -> list[memoryview]:
        content, size = tokens.data.cast("B"), self._stride_tokens * tokens.itemsize
        return [content[start : start + size] for start in range(0, len(content), size)]

    def _damage(self, run: Run, index: int, tokens: NDArray[Any], expected: NDArray[np.uint32]) -> DamagedCorpusError:
        shard, size = self._shards(run.shard), self._stride_tokens
        start = (run.first + index) * size
        stop = min(start + size, shard.num_tokens)
        position, _ = shard.token_ranges(start, start + 1)[0]
        return DamagedCorpusError(
            f"{shard.file.path}: tokens {start} to {stop}, from byte {position} on, have the hash "
            f"{self._found(tokens)[index]:08x}, expected {expected[index]:08x}",
            hint=RESTORE,
        )
