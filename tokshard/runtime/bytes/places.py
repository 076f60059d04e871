"""Where the tokens and documents of shards lie: byte ranges from the shard table, and offsets read by range."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.forking import cached_property
from tokshard.format.corpus import Corpus
from tokshard.format.schema import HASH_STRIDE, ORDINAL_STRIDE
from tokshard.numbers import ceil_div
from tokshard.store.record_cache import RecordFile

_MAX_SHARDS = 8_192
"""The number of shards for which the places of record batches are kept."""

_NEAR_DOCUMENTS = 512
"""Documents nearer to each other are read as one range: four kilobytes of offsets."""


class ShardPlaces:
    """The places of the tokens and offsets of one shard.

    Reads nothing, except `rows` and `num_ends` in a corpus whose shard table is read in parts. Tokens and documents
    count from the first of the shard.

    Attributes:
        index: number in the corpus.
        name, num_bytes: of the file.
        path: for messages.
        batches: its record batches.
        first_tokens, first_documents: of each record batch, and the end of the last.
    """

    def __init__(self, corpus: Corpus, index: int) -> None:
        info = corpus.shards[index]
        self.index, self.name, self.num_bytes, self._sha256 = index, info.name, info.num_bytes, info.sha256
        self.path = corpus.store.where(info.name)
        self._item, self._shards = corpus.dtype.itemsize, corpus.shards
        self.batches = corpus.shards.batch_places(index)
        self.first_tokens = [0, *accumulate(place.num_tokens for place in self.batches)]
        self.first_documents = [0, *accumulate(place.num_documents for place in self.batches)]

    @cached_property
    def strides(self) -> RecordFile:
        """Its strides, as records of the cache on disk."""
        num_tokens = self.first_tokens[-1]
        count = ceil_div(num_tokens, HASH_STRIDE)
        return RecordFile(
            content=self._sha256,
            num_records=count,
            record_bytes=HASH_STRIDE * self._item,
            last_bytes=(num_tokens - (count - 1) * HASH_STRIDE) * self._item,
        )

    def token_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The places of the tokens ``[start, stop)``, cut to the shard: one for each record batch."""
        return [
            (self.batches[batch].values_position + low * self._item, (high - low) * self._item)
            for batch, low, high in _parts(self.first_tokens, start, stop)
        ]

    def offset_ranges(self, first: int, stop: int) -> list[tuple[int, int]]:
        """The places of the offsets of the documents ``[first, stop)``: one for each record batch."""
        return [
            (self.batches[batch].offsets_position + 8 * low, 8 * (high - low + 1))
            for batch, low, high in _parts(self.first_documents, first, stop)
        ]

    def offsets_around(self, batch: int, low: int, high: int) -> tuple[int, int]:
        """The place of the offsets around the tokens ``[low, high)`` of a record batch."""
        place, base, documents = self.batches[batch], self.first_tokens[batch], self.first_documents[batch]
        first, stop = self.rows(base + low, base + high)
        first, stop = max(0, first - documents), min(place.num_documents, stop - documents)
        return place.offsets_position + 8 * first, 8 * (stop - first + 1)

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """The first document that may end in a stretch of tokens, and the one after the last, from the shard table."""
        # the documents of the strides that hold the first and the last token bound those in between
        beyond, documents = ceil_div(stop, ORDINAL_STRIDE), self._stride_documents()
        last = int(documents[beyond]) + 1 if beyond < len(documents) else self.first_documents[-1]
        return int(documents[start // ORDINAL_STRIDE]), last

    def num_ends(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The least and greatest number of documents that end in each stretch, from the shard table: int64 [n]."""
        # of the tokens at multiples of the stride the table names the document, and so how many end before them
        inside, beyond = ceil_div(starts, ORDINAL_STRIDE), ceil_div(stops, ORDINAL_STRIDE)
        last = np.where(stops == self.first_tokens[-1], beyond, stops // ORDINAL_STRIDE)
        ended = np.append(self._stride_documents(), self.first_documents[-1])
        return np.maximum(ended[last] - ended[inside], 0), ended[beyond] - ended[starts // ORDINAL_STRIDE]

    def _stride_documents(self) -> NDArray[np.int64]:
        # not kept: for thousands of shards, they would take hundreds of megabytes
        return self._shards.stride_documents(self.index)

    def offsets(self, first: int, stop: int, answers: Sequence[bytes]) -> NDArray[np.int64]:
        """Starts of the documents ``[first, stop)``, and the end of the last one.

        Args:
            answers: the bytes of `offset_ranges`.

        Raises:
            DamagedCorpusError: they do not ascend within their record batches.
        """
        parts = [np.empty(0, np.int64)]
        for (batch, low, high), answer in zip(_parts(self.first_documents, first, stop), answers, strict=True):
            place, found = self.batches[batch], np.frombuffer(answer, np.int64)
            is_whole = (low > 0 or found[0] == 0) and (high < place.num_documents or found[-1] == place.num_tokens)
            if not is_whole or not bool(np.all(found[1:] > found[:-1])) or found[0] < 0 or found[-1] > place.num_tokens:
                raise DamagedCorpusError(
                    f"{self.path}, batch {batch}: offsets of documents {low} to {high} must ascend within "
                    f"[0, {place.num_tokens}], found {found[0]} to {found[-1]}",
                    hint=RESTORE,
                )
            parts.append(found + self.first_tokens[batch])
        # the end of a record batch is the start of the next one
        return np.concatenate([*(part[:-1] for part in parts), parts[-1][-1:]])


class DocumentPlaces:
    """Places of documents in a corpus, from their offsets. A subclass says how bytes of a shard are read."""

    corpus: Corpus

    def _read_unhashed(self, shard: ShardPlaces, places: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """Parts of a shard that no hash covers, each given as its first byte and its length.

        Raises:
            DamagedCorpusError: the shard is missing, was replaced, or does not match the manifest.
            StoreError: the store does not answer.
        """
        raise NotImplementedError

    @cached_property
    def _shards(self) -> OrderedDict[int, ShardPlaces]:
        return OrderedDict()

    def _shard(self, index: int) -> ShardPlaces:
        # every step is atomic: threads that race for a shard may make it twice, which is harmless
        shard = self._shards.get(index)
        if shard is None:
            shard = self._shards[index] = ShardPlaces(self.corpus, index)
            if len(self._shards) > _MAX_SHARDS:
                with contextlib.suppress(KeyError):
                    self._shards.popitem(last=False)
        return shard

    def _document_at(self, position: int) -> tuple[int, int, int]:
        """The document that holds a token: its number, and its start and stop in the corpus."""
        first_tokens = self.corpus.shards.first_tokens
        index = int(first_tokens.searchsorted(position, "right")) - 1
        base = int(first_tokens[index])
        first, offsets = self._offsets_around(index, position - base, position - base + 1)
        row = int(np.searchsorted(offsets, position - base, "right")) - 1
        document = int(self.corpus.shards.first_documents[index]) + first + row
        return document, base + int(offsets[row]), base + int(offsets[row + 1])

    def _bounds_of(self, shard: int, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts and stops in the corpus of some documents of a shard, ascending: int64 [n] each."""
        found = self._shard(shard)
        first_rows, first_tokens = np.array(found.first_documents), np.array(found.first_tokens)
        batches = first_rows.searchsorted(rows, "right") - 1
        within = rows - first_rows[batches]
        is_first = (np.diff(batches, prepend=-1) != 0) | (np.diff(within, prepend=0) > _NEAR_DOCUMENTS)
        firsts = np.flatnonzero(is_first)
        lows, counts = within[firsts], within[np.append(firsts[1:], len(rows)) - 1] - within[firsts] + 2
        places = [
            (found.batches[batch].offsets_position + 8 * low, 8 * count)
            for batch, low, count in zip(batches[firsts].tolist(), lows.tolist(), counts.tolist(), strict=True)
        ]
        offsets = np.frombuffer(b"".join(self._read_unhashed(found, places)), np.int64)
        at = within + np.repeat(np.cumsum(counts) - counts - lows, np.diff(firsts, append=len(rows)))
        starts, stops, size = offsets[at], offsets[at + 1], np.diff(first_tokens)[batches]
        is_wrong = (starts < 0) | (starts >= stops) | (stops > size)
        is_wrong |= (starts == 0) != (within == 0)
        is_wrong |= (stops == size) != (rows + 1 == first_rows[batches + 1])
        if is_wrong.any():
            wrong = int(is_wrong.argmax())
            raise DamagedCorpusError(
                f"{found.path}, batch {batches[wrong]}: offsets must ascend within [0, {size[wrong]}], found "
                f"{starts[wrong]} and {stops[wrong]} of document {within[wrong]}",
                hint=RESTORE,
            )
        bases = first_tokens[batches] + int(self.corpus.shards.first_tokens[shard])
        return starts + bases, stops + bases

    def _offsets_around(self, index: int, start: int, stop: int) -> tuple[int, NDArray[np.int64]]:
        """The documents that hold some tokens of a shard: the first, all starts, and the stop of the last."""
        shard = self._shard(index)
        first, last = shard.rows(start, stop)
        offsets = shard.offsets(first, last, self._read_unhashed(shard, shard.offset_ranges(first, last)))
        if not len(offsets) or offsets[0] > start or offsets[-1] < stop:  # else pieces would run over ends of documents
            raise DamagedCorpusError(
                f"{shard.path}: the shard table says that documents {first} to {last} hold tokens {start} to "
                f"{stop}, they hold {offsets[:1]} to {offsets[-1:]}",
                hint=RESTORE,
            )
        return first, offsets


def _parts(bounds: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """A stretch of a shard cut where record batches begin: batch, start and stop in it; nothing beyond the last one."""
    stop = min(stop, bounds[-1])
    while start < stop:
        batch = bisect_right(bounds, start) - 1
        base, end = bounds[batch], min(stop, bounds[batch + 1])
        yield batch, start - base, end - base
        start = end
