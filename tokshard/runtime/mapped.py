"""Shards of a corpus as memory maps, and their tokens copied out of them: as slices, or all at once by address.

A slice costs about a quarter of a microsecond, whatever its length; by address a token costs about a nanosecond,
whatever the pieces are. So pieces of a few hundred tokens and less are gathered.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format.corpus import Corpus

GATHER_BELOW = 350
"""Mean tokens of a piece below which gathering is faster than slices. Changes speed only, not results."""


class MappedTokens:
    """The tokens of the record batches that were touched, by their number in the corpus.

    All of them are looked at as one array, from the lowest address to the highest. Most of that is not mapped, and is
    not touched: every piece is checked to lie within a record batch first. Threads that `add` at the same time need a
    lock. Reading needs none: what was added stays.

    Args:
        first_tokens: int64 [record batches + 1], position of the first token of each, and the end of the corpus.
    """

    def __init__(self, first_tokens: NDArray[np.int64], dtype: np.dtype[Any]) -> None:
        self._first_tokens, self._dtype = first_tokens, dtype
        self._values: dict[int, NDArray[Any]] = {}
        self._addresses = np.zeros(len(first_tokens) - 1, np.int64)
        self._stop = 0
        self._memory = np.empty(0, dtype), 0
        self._are_aligned = True
        self._numbers = np.arange(1 << 16)

    def __len__(self) -> int:
        return len(self._values)

    def missing(self, batches: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of some record batches that were not added."""
        found: NDArray[np.int64] = batches[self._addresses[batches] == 0]
        return found

    def add(self, batch: int, values: NDArray[Any]) -> None:
        """Keep the tokens of a record batch, which stay where they are."""
        address: int = values.__array_interface__["data"][0]
        start, size = self._memory[1], self._dtype.itemsize
        # tokens at odd addresses cannot be part of one array
        self._are_aligned &= values.flags.aligned
        self._stop = max(self._stop, address + values.nbytes)
        if self._are_aligned:
            lowest = values if not start or address < start else self._memory[0]
            start = min(address, start or address)
            shape = ((self._stop - start) // size,)
            memory = np.lib.stride_tricks.as_strided(lowest, shape=shape, strides=(size,), writeable=False)
            self._memory = memory, start
        self._values[batch] = values
        self._addresses[batch] = address

    def read(
        self,
        batches: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        out: NDArray[Any],
        at: NDArray[np.int64],
    ) -> None:
        """Copy pieces, each of which lies within a record batch that was added.

        Args:
            batches: int64 [n], of each piece.
            starts, lengths, out, at: as in `TokenSource.read`.
        """
        within = starts - self._first_tokens[batches]
        if self._are_aligned and int(lengths.sum()) < GATHER_BELOW * len(lengths):
            self._gather(batches, within, lengths, out, at)
        else:
            self._copy(batches, within, lengths, out, at)

    def _gather(
        self,
        batches: NDArray[np.int64],
        within: NDArray[np.int64],
        lengths: NDArray[np.int64],
        out: NDArray[Any],
        at: NDArray[np.int64],
    ) -> None:
        """Take the tokens of all pieces with one index."""
        memory, start = self._memory
        elements = (self._addresses[batches] - start) // self._dtype.itemsize + within
        # short pieces wait for memory: the first and the last token of each, asked for in a row, bring many at a time
        memory.take(elements, mode="wrap")
        memory.take(elements + (lengths - 1), mode="wrap")
        index = np.repeat(elements - np.cumsum(lengths) + lengths, lengths)
        index += self._numbers[: len(index)] if len(index) <= len(self._numbers) else np.arange(len(index))
        low = 0
        for _, place, stop in _runs(lengths, at):
            high = low + stop - place
            # 'wrap' checks nothing that was not checked, and needs no second buffer as 'raise' does
            memory.take(index[low:high], out=out[place:stop], mode="wrap")
            low = high

    def _copy(
        self,
        batches: NDArray[np.int64],
        within: NDArray[np.int64],
        lengths: NDArray[np.int64],
        out: NDArray[Any],
        at: NDArray[np.int64],
    ) -> None:
        """Copy every piece as a slice."""
        values, ends = self._values, within + lengths
        views = [
            values[batch][start:stop]
            for batch, start, stop in zip(batches.tolist(), within.tolist(), ends.tolist(), strict=True)
        ]
        low = 0
        for high, place, stop in _runs(lengths, at):
            np.concatenate(views[low:high], out=out[place:stop])
            low = high


def _runs(lengths: NDArray[np.int64], at: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Pieces that follow each other without a gap: the one after the last, and the places from and to which they go."""
    stops = at + lengths
    is_last = np.ones(len(at), np.bool_)
    np.not_equal(at[1:], stops[:-1], out=is_last[:-1])
    last = np.flatnonzero(is_last)
    first = np.concatenate([[0], last[:-1] + 1])
    return list(zip((last + 1).tolist(), at[first].tolist(), stops[last].tolist(), strict=True))


class MappedShard:
    """Keeps offsets and tokens of the record batches that were touched, and nothing else of Arrow."""

    def __init__(self, corpus: Corpus, index: int) -> None:
        self._corpus, self._index = corpus, index
        shard = corpus.shard(index)
        self.path = str(shard.path)
        self._num_bytes = corpus.shards[index].num_bytes
        self._first_documents = _starts([place.num_documents for place in shard.places])
        self._starts = _starts([place.num_tokens for place in shard.places])
        self._batches: dict[int, tuple[NDArray[np.int64], NDArray[Any]]] = {}

    def values(self, batch: int) -> NDArray[Any]:
        return self._batch(batch)[1]

    def _batch(self, batch: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        found = self._batches.get(batch)
        if found is None:
            found = self._batches[batch] = self._corpus.shard(self._index).batch(batch)
        return found

    def ends(self, start: int, stop: int) -> NDArray[np.int64]:
        parts = []
        while start < stop:
            batch = bisect_right(self._starts, start) - 1
            base, end = self._starts[batch], min(stop, self._starts[batch + 1])
            parts.append(self._ends(batch, start - base, end - base) + base)
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _ends(self, batch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Where documents end in ``(start, stop]`` of a record batch.

        The offsets were checked when they were first touched, but a map shows what is written to the file later.
        """
        offsets = self._batch(batch)[0]
        low, high = int(offsets.searchsorted(start, "right")), int(offsets.searchsorted(stop, "right"))
        around = offsets[max(0, low - 1) : high + 1].copy()  # what is checked is what is used
        ends = around[1 : 1 + high - low]
        is_right = (
            0 < low <= high
            and 0 <= around[0] <= start
            and bool(np.all(around[1:] > around[:-1]))
            and (around[-1] == self._num_tokens(batch) if high == len(offsets) else around[-1] > stop)
            and (not len(ends) or (start < ends[0] and ends[-1] <= stop))
        )
        if not is_right:
            raise self._changed(batch)
        return ends

    def document_at(self, position: int) -> tuple[int, int, int]:
        batch = bisect_right(self._starts, position) - 1
        within = position - self._starts[batch]
        row = int(np.searchsorted(self._batch(batch)[0], within, "right")) - 1
        start, stop = self._document(batch, row)
        if not start <= within < stop:
            raise self._changed(batch)
        return self._first_documents[batch] + row, self._starts[batch] + start, self._starts[batch] + stop

    def bounds(self, row: int) -> tuple[int, int]:
        batch = bisect_right(self._first_documents, row) - 1
        start, stop = self._document(batch, row - self._first_documents[batch])
        return self._starts[batch] + start, self._starts[batch] + stop

    def _document(self, batch: int, row: int) -> tuple[int, int]:
        """Where a document starts and ends in its record batch."""
        bounds = self._batch(batch)[0][max(0, row) : row + 2].tolist()
        if len(bounds) != 2 or not 0 <= bounds[0] < bounds[1] <= self._num_tokens(batch):
            raise self._changed(batch)
        return bounds[0], bounds[1]

    def _num_tokens(self, batch: int) -> int:
        return self._starts[batch + 1] - self._starts[batch]

    def _changed(self, batch: int) -> DamagedCorpusError:
        if os.stat(self.path).st_size != self._num_bytes:
            return DamagedCorpusError(
                f"{self.path} is not as long as its manifest says: it was cut under the running job", hint=RESTORE
            )
        return DamagedCorpusError(
            f"{self.path}, batch {batch}: the offsets of its documents no longer ascend from 0 to "
            f"{self._num_tokens(batch)}: the file was changed under the running job",
            hint=RESTORE,
        )


def _starts(counts: list[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)]
