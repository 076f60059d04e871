"""A corpus of which only the strides that hold what is asked for are read, ahead of need where that is known."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format.corpus import Corpus
from tokshard.format.schema import HASH_STRIDE
from tokshard.runtime.bytes.cache import Cache, CachedStrides
from tokshard.runtime.bytes.checked_shards import CheckedShards, StrideHashes
from tokshard.runtime.bytes.shard_bytes import ShardBytes
from tokshard.runtime.bytes.shard_places import ShardPlaces
from tokshard.runtime.bytes.strides import Strides

_MAX_SHARDS = 8_192
"""Shards whose places of record batches are kept."""

_ENDS_TOKENS = 4 << 20
"""Tokens in which ends of documents are looked for at a time."""


class RangedCorpus:
    """A corpus of which only the strides that hold what is asked for are read, checked, and kept in a cache.

    A block is read as the strides that cover it and the token after it, the label of a document that goes on. Where
    documents end follows from their delimiters. Only the places of single documents are read from the offsets, and all
    ends if the delimiter begins documents too.

    Args:
        touch: called with the path of a shard before it is waited for.
        cache: where strides are kept.
    """

    def __init__(self, corpus: Corpus, touch: Callable[[str], None], cache: Cache) -> None:
        self._corpus, self._touch, self._cache = corpus, touch, cache
        self._begins_with_delimiter = corpus.bos_id == corpus.eos_id
        self._first_tokens = corpus.shards.first_tokens
        self._starts: list[int] = self._first_tokens.tolist()
        self._shards: OrderedDict[int, ShardPlaces] = OrderedDict()

        def count(requests: int, num_bytes: int) -> None:
            cache.count(requests=requests, fetched_bytes=num_bytes)

        self._bytes = ShardBytes(corpus.store, count)
        checked = CheckedShards(
            corpus,
            self._shard,
            self._bytes,
            StrideHashes(corpus, lambda: cache.hash_fetchers, count),
            kept=cache.disk,
            stride_tokens=HASH_STRIDE,
            count=cache.count,
        )
        self._strides = Strides(self._first_tokens, HASH_STRIDE)
        self._cached = CachedStrides(
            cache, self._strides, corpus.dtype, checked.fetch, lambda shard: touch(self._shard(shard).file.path)
        )

    def read(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]
    ) -> None:
        """Copy the tokens of pieces, as `TokenSource.read` does.

        Raises:
            DamagedCorpusError: a shard is missing or not what the manifest says.
            StoreError: the store does not answer.
        """
        if len(starts):
            self._cached.read(self._strides.cut(starts, lengths, at), out)

    def will_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Fetch blocks ahead of need, as `TokenSource.will_read` says."""
        if len(starts):
            self._cached.announce(self._strides_of_blocks(starts, stops))

    def has_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Forget blocks, as `TokenSource.has_read` says."""
        if len(starts):
            self._cached.release(self._strides_of_blocks(starts, stops))

    def ends(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where documents end in stretches of the corpus, as `TokenSource.ends` does.

        Raises:
            DamagedCorpusError: a shard is missing or not what the manifest says.
            StoreError: the store does not answer.
        """
        stretches, begins, stops = self._cut_at_shards(starts, stops)
        counts, found = np.zeros(len(starts), np.int64), [np.empty(0, np.int64)]
        totals = np.cumsum(stops - begins)
        low = 0
        while low < len(stretches):
            done = int(totals[low - 1]) if low else 0
            high = max(low + 1, int(totals.searchsorted(done + _ENDS_TOKENS, "right")))
            parts, ends = self._delimiters(begins[low:high], stops[low:high])
            if self._begins_with_delimiter:
                parts, ends = self._ends_by_offsets(begins[low:high], stops[low:high], parts, ends)
            counts += np.bincount(stretches[low:high][parts], minlength=len(counts))
            found.append(ends)
            low = high
        return np.concatenate([[0], np.cumsum(counts)]), np.concatenate(found)

    def document_at(self, position: int) -> tuple[int, int, int]:
        """The document that holds a token: its number, and its start and stop in the corpus."""
        index = bisect_right(self._starts, position) - 1
        base = self._starts[index]
        within = position - base
        self._touch(self._shard(index).file.path)
        first, offsets = self._offsets(index, within, within + 1)
        row = int(np.searchsorted(offsets, within, "right")) - 1
        document = int(self._corpus.shards.first_documents[index]) + first + row
        return document, base + int(offsets[row]), base + int(offsets[row + 1])

    def bounds(self, shard: int, row: int) -> tuple[int, int]:
        """Start and stop in the corpus of a document of a shard."""
        found = self._shard(shard)
        self._touch(found.file.path)
        (answer,) = self._bytes.read(found.file, [found.bounds_range(row)])
        self._corpus.check_in_place(shard)
        start, stop = found.bounds(row, answer)
        return self._starts[shard] + start, self._starts[shard] + stop

    def bounds_of(self, shard: int, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts and stops in the corpus of some documents of a shard: int64 [n] each."""
        found = self._shard(shard)
        self._touch(found.file.path)
        answers = self._bytes.read(found.file, [found.bounds_range(row) for row in rows.tolist()])
        self._corpus.check_in_place(shard)
        bounds = [found.bounds(row, answer) for row, answer in zip(rows.tolist(), answers, strict=True)]
        starts, stops = np.array(bounds, np.int64).T + self._starts[shard]
        return starts, stops

    def _delimiters(
        self, begins: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where delimiters lie in stretches that each lie in one shard.

        Returns:
            int64 [n] each: number of the stretch, and the position after the delimiter.
        """
        lengths = stops - begins
        after = np.cumsum(lengths)
        tokens = np.empty(int(after[-1]), self._corpus.dtype)
        self.read(begins, lengths, tokens, after - lengths)
        places = np.flatnonzero(tokens == self._corpus.eos_id)
        parts = after.searchsorted(places, "right")
        if not self._begins_with_delimiter and self._corpus.shards.is_whole:
            self._check_numbers(begins, stops, np.bincount(parts, minlength=len(begins)))
        return parts, places + (begins - after + lengths)[parts] + 1

    def _check_numbers(self, begins: NDArray[np.int64], stops: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Refuse delimiters inside documents, as far as the shard table tells."""
        for begin, stop, count in zip(begins.tolist(), stops.tolist(), counts.tolist(), strict=True):
            index = bisect_right(self._starts, begin) - 1
            shard, base = self._shard(index), self._starts[index]
            least, most = shard.num_ends(begin - base, stop - base)
            if not least <= count <= most:
                raise DamagedCorpusError(
                    f"{shard.file.path}: {count} documents end in the tokens {begin - base} to {stop - base}, by their "
                    f"delimiters; the shard table says {least} to {most}",
                    hint=RESTORE,
                )

    def _ends_by_offsets(
        self,
        begins: NDArray[np.int64],
        stops: NDArray[np.int64],
        parts: NDArray[np.int64],
        after: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ends of documents that begin with a delimiter, too: the offsets say which of the delimiters are the last.

        Args:
            parts, after: all delimiters, as `_delimiters` gives them.
        """
        indices = (np.searchsorted(self._first_tokens, begins, "right") - 1).tolist()
        bases = self._first_tokens[indices]
        inside = list(zip(indices, (begins - bases).tolist(), (stops - bases).tolist(), strict=True))
        tasks = [self._cache.fetchers.start(partial(self._offsets, *each), is_urgent=True) for each in inside]
        found = []
        for part, ((index, begin, stop), task) in enumerate(zip(inside, tasks, strict=True)):
            self._touch(self._shard(index).file.path)
            _, offsets = task.result()
            delimiters = np.union1d(offsets[:-1] + 1, offsets[1:])
            delimiters = delimiters[(delimiters > begin) & (delimiters <= stop)]
            if not np.array_equal(after[parts == part] - self._starts[index], delimiters):
                raise DamagedCorpusError(
                    f"{self._shard(index).file.path}: the documents in the tokens {begin} to {stop} do not begin and "
                    "end at delimiters",
                    hint=RESTORE,
                )
            found.append(offsets[1:][(offsets[1:] > begin) & (offsets[1:] <= stop)] + self._starts[index])
        return np.repeat(np.arange(len(found)), [len(ends) for ends in found]), np.concatenate(found)

    def _offsets(self, index: int, start: int, stop: int) -> tuple[int, NDArray[np.int64]]:
        """Of the documents that hold some tokens of a shard: the first, and where they start and the last one stops."""
        shard = self._shard(index)
        first, last = shard.rows(start, stop)
        answers = self._bytes.read(shard.file, shard.offset_ranges(first, last))
        self._corpus.check_in_place(index)
        return first, shard.offsets(first, last, start, stop, answers)

    def _cut_at_shards(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Stretches of the corpus cut where shards begin: int64 [n] each, number of the stretch, start and stop."""
        first = self._first_tokens.searchsorted(starts, "right") - 1
        counts = self._first_tokens.searchsorted(stops, "left") - first
        stretches = np.repeat(np.arange(len(starts)), counts)
        shards = np.arange(len(stretches)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        begins = np.maximum(starts[stretches], self._first_tokens[shards])
        return stretches, begins, np.minimum(stops[stretches], self._first_tokens[shards + 1])

    def _strides_of_blocks(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
        """The strides that hold blocks, and the token after each, which may be the label of its last one."""
        shards = self._first_tokens.searchsorted(stops - 1, "right") - 1
        return self._strides.covering(starts, np.minimum(stops + 1, self._first_tokens[shards + 1]))

    def _shard(self, index: int) -> ShardPlaces:
        # every step is atomic: threads that race for a shard may make it twice, which is harmless
        shard = self._shards.get(index)
        if shard is None:
            shard = self._shards[index] = ShardPlaces(self._corpus, index)
            if len(self._shards) > _MAX_SHARDS:
                with contextlib.suppress(KeyError):
                    self._shards.popitem(last=False)
        return shard


def stride_tokens_of(block_tokens: int) -> int:
    """Tokens of the strides that hold a block and the token after it, wherever it begins."""
    return (-(-block_tokens // HASH_STRIDE) + 1) * HASH_STRIDE
