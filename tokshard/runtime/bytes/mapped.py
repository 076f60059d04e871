"""A corpus whose shards are memory maps. Its tokens are copied as slices, or gathered by their addresses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format.corpus import Corpus
from tokshard.runtime.bytes import copying
from tokshard.runtime.order.forking import ForkLock

MAX_BATCHES = 8_192
"""Record batches kept open: a map costs about a kilobyte and no file descriptor."""


class MappedTokens:
    """The tokens of record batches, by the number of the batch in the corpus.

    They are viewed as one array, from the lowest address to the highest. Most of that array is not mapped, and never
    read: callers check that every piece lies within a record batch. Threads that `add` at the same time need a lock.
    Reading needs none, because what was added stays.

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

    def __len__(self) -> int:
        return len(self._values)

    def missing(self, batches: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which of some record batches were not added."""
        found: NDArray[np.int64] = batches[self._addresses[batches] == 0]
        return found

    def add(self, batch: int, values: NDArray[Any]) -> None:
        """Keep the tokens of a record batch, without a copy."""
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
            batches: int64 [n], the record batch of each piece.
            starts, lengths, out, at: as in `TokenSource.read`.
        """
        within = starts - self._first_tokens[batches]
        if self._are_aligned and copying.are_short(lengths):
            memory, start = self._memory
            elements = (self._addresses[batches] - start) // self._dtype.itemsize + within
            copying.copy_short(memory, elements, lengths, out, at)
            return
        values, ends = self._values, within + lengths
        views = [
            values[batch][start:stop]
            for batch, start, stop in zip(batches.tolist(), within.tolist(), ends.tolist(), strict=True)
        ]
        copying.copy_slices(views, lengths, out, at)


class MappedCorpus:
    """The record batches of a corpus, memory-mapped when they are first touched.

    Sizes are checked when a shard is first touched; offsets whenever they are read, because a map shows what is
    written to the file later.

    Args:
        touch: called with the path of a shard before it is read.
    """

    def __init__(self, corpus: Corpus, touch: Callable[[str], None]) -> None:
        self._corpus, self._touch = corpus, touch
        first_batches, tokens = corpus.shards.batch_tokens()
        self._first_batches: list[int] = first_batches.tolist()
        self._first_tokens: NDArray[np.int64] = np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens)])
        self._tokens = MappedTokens(self._first_tokens, corpus.dtype)
        self._offsets: dict[int, tuple[NDArray[np.int64], str]] = {}  # with the path of the shard
        self._lock = ForkLock()

    def read(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]
    ) -> None:
        """Copy the tokens of pieces, as `TokenSource.read` does.

        Raises:
            DamagedCorpusError: a shard is missing or not what the manifest says.
        """
        if not len(starts):
            return
        # a position beyond the corpus follows from changed offsets: it is beyond the last batch, too
        batches = np.minimum(self._first_tokens.searchsorted(starts, "right") - 1, len(self._first_tokens) - 2)
        is_wrong = (starts + lengths > self._first_tokens[batches + 1]) | (batches < 0)
        if is_wrong.any():
            raise self._damage(int(batches[int(np.argmax(is_wrong))]), "a document reaches beyond its record batch")
        tokens = self._tokens
        if len(tokens.missing(batches)):
            tokens, _ = self._open(np.unique(batches))
        tokens.read(batches, starts, lengths, out, at)

    def ends(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where documents end in stretches of the corpus, as `TokenSource.ends` does.

        Raises:
            DamagedCorpusError: a shard is missing or not what the manifest says.
        """
        stretches, batches, lows, highs = self._cut_at_batches(starts, stops)
        parts: list[NDArray[np.int64]] = []
        counts, are_last, following = [], [], []
        for batch, low, high in zip(batches.tolist(), lows.tolist(), highs.tolist(), strict=True):
            offsets = self._offsets_of(batch)
            first, last = int(offsets.searchsorted(low, "right")), int(offsets.searchsorted(high, "right"))
            if not 0 < first <= last:
                raise self._changed(batch)
            parts.append(offsets[first - 1 : last])  # with the start of the document that holds the first token
            counts.append(last - first)
            are_last.append(last == len(offsets))
            following.append(int(offsets[min(last, len(offsets) - 1)]))
        found = np.concatenate(parts) if parts else np.empty(0, np.int64)  # a copy: what is checked is what is used
        num_ends = np.array(counts, np.int64)
        after = np.cumsum(num_ends + 1)
        begins = after - num_ends - 1
        is_ascending = np.ones(len(found), np.bool_)
        np.greater(found[1:], found[:-1], out=is_ascending[1:])
        is_ascending[begins] = (found[begins] >= 0) & (found[begins] <= lows)
        past_low = (num_ends == 0) | (found[np.minimum(begins + 1, len(found) - 1)] > lows)
        batch_tokens = self._first_tokens[batches + 1] - self._first_tokens[batches]
        last_ends = found[after - 1]
        past_high = np.where(are_last, last_ends == batch_tokens, np.array(following, np.int64) > highs)
        is_right = past_low & past_high & (last_ends <= highs)
        if not is_right.all() or not is_ascending.all():
            wrong = (
                int(np.argmin(is_right))
                if not is_right.all()
                else int(after.searchsorted(is_ascending.argmin(), "right"))
            )
            raise self._changed(int(batches[wrong]))
        is_end = np.ones(len(found), np.bool_)
        is_end[begins] = False
        totals = np.bincount(stretches, num_ends, len(starts)).astype(np.int64)
        values = found[is_end] + np.repeat(self._first_tokens[batches], num_ends)
        return np.concatenate([[0], np.cumsum(totals)]), values

    def document_at(self, position: int) -> tuple[int, int, int]:
        """The document that holds a token: its number, and its start and stop in the corpus."""
        batch = int(self._first_tokens.searchsorted(position, "right")) - 1
        base = int(self._first_tokens[batch])
        row = int(self._offsets_of(batch).searchsorted(position - base, "right")) - 1
        start, stop = self._document(batch, row)
        if not start <= position - base < stop:
            raise self._changed(batch)
        shard = self._shard_of(batch)
        places = self._corpus.shards.batch_places(shard)[: batch - self._first_batches[shard]]
        document = int(self._corpus.shards.first_documents[shard]) + sum(place.num_documents for place in places) + row
        return document, base + start, base + stop

    def bounds(self, shard: int, row: int) -> tuple[int, int]:
        """Start and stop in the corpus of a document of a shard."""
        batch = self._first_batches[shard]
        for place in self._corpus.shards.batch_places(shard):
            if row < place.num_documents:
                break
            batch, row = batch + 1, row - place.num_documents
        start, stop = self._document(batch, row)
        base = int(self._first_tokens[batch])
        return base + start, base + stop

    def bounds_of(self, shard: int, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts and stops in the corpus of some documents of a shard: int64 [n] each."""
        places = self._corpus.shards.batch_places(shard)
        first_rows = np.cumsum([0, *(place.num_documents for place in places)])
        of_shard = np.searchsorted(first_rows, rows, "right") - 1
        starts, stops = np.empty_like(rows), np.empty_like(rows)
        for number in np.unique(of_shard).tolist():
            mine, batch = of_shard == number, self._first_batches[shard] + number
            offsets, within = self._offsets_of(batch), rows[mine] - first_rows[number]
            lows, highs = offsets[within], offsets[within + 1]
            base = int(self._first_tokens[batch])
            if bool(((lows < 0) | (lows >= highs) | (base + highs > self._first_tokens[batch + 1])).any()):
                raise self._changed(batch)
            starts[mine], stops[mine] = base + lows, base + highs
        return starts, stops

    def _cut_at_batches(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Stretches of the corpus cut where record batches begin.

        Returns:
            int64 [n] each: number of the stretch, record batch, start and stop in that batch.
        """
        first = self._first_tokens.searchsorted(starts, "right") - 1
        counts = self._first_tokens.searchsorted(stops, "left") - first
        stretches = np.repeat(np.arange(len(starts)), counts)
        batches = np.arange(len(stretches)) + np.repeat(first - np.cumsum(counts) + counts, counts)
        bases = self._first_tokens[batches]
        lows = np.maximum(starts[stretches], bases) - bases
        return stretches, batches, lows, np.minimum(stops[stretches], self._first_tokens[batches + 1]) - bases

    def _offsets_of(self, batch: int) -> NDArray[np.int64]:
        """The offsets of a record batch, a view of the map."""
        found = self._offsets.get(batch)
        if found is None:
            found = self._open(np.array([batch]))[1][batch]
        offsets, path = found
        self._touch(path)
        return offsets

    def _document(self, batch: int, row: int) -> tuple[int, int]:
        """Where a document starts and ends in its record batch."""
        bounds = self._offsets_of(batch)[max(0, row) : row + 2].tolist()
        if (
            len(bounds) != 2
            or not 0 <= bounds[0] < bounds[1] <= self._first_tokens[batch + 1] - self._first_tokens[batch]
        ):
            raise self._changed(batch)
        return bounds[0], bounds[1]

    def _open(self, batches: NDArray[np.int64]) -> tuple[MappedTokens, dict[int, tuple[NDArray[np.int64], str]]]:
        """Open those of some record batches that are not open.

        Returns:
            Tokens and offsets of all of them, which stay when another thread opens more than are kept.
        """
        with self._lock:
            tokens, offsets_of = self._tokens, self._offsets
            missing = tokens.missing(batches)
            if len(tokens) + len(missing) > MAX_BATCHES:
                tokens, offsets_of, missing = MappedTokens(self._first_tokens, self._corpus.dtype), {}, batches
            for batch in missing.tolist():
                index = self._shard_of(batch)
                path = self._corpus.store.where(self._corpus.shards[index].name)
                self._touch(path)
                offsets, values = self._values(index, batch - self._first_batches[index])
                tokens.add(batch, values)
                offsets_of[batch] = offsets, path
            self._tokens, self._offsets = tokens, offsets_of
            return tokens, offsets_of

    def _values(self, shard: int, batch: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        found = self._corpus.shard(shard).batch(batch)
        self._corpus.check_in_place(shard)
        return found

    def _shard_of(self, batch: int) -> int:
        return bisect_right(self._first_batches, batch) - 1

    def _changed(self, batch: int) -> DamagedCorpusError:
        num_tokens = int(self._first_tokens[batch + 1] - self._first_tokens[batch])
        return self._damage(
            batch,
            f"the offsets of its documents no longer ascend from 0 to {num_tokens}: the file was changed under the "
            "running job",
        )

    def _damage(self, batch: int, problem: str) -> DamagedCorpusError:
        """A record batch is not what it was when it was opened."""
        if (cut := changed_shard(self._corpus)) is not None:
            return DamagedCorpusError(
                f"{cut} is not as long as its manifest says: it was cut under the running job", hint=RESTORE
            )
        shard = self._shard_of(max(0, batch))
        path = self._corpus.store.where(self._corpus.shards[shard].name)
        return DamagedCorpusError(f"{path}, batch {batch - self._first_batches[shard]}: {problem}", hint=RESTORE)


def changed_shard(corpus: Corpus) -> str | None:
    """The first shard that is gone, or whose size is not that of the manifest. Costs a stat per shard."""
    for shard in corpus.shards:
        try:
            size = corpus.store.stat(shard.name).size
        except OSError:
            size = -1
        if size != shard.num_bytes:
            return corpus.store.where(shard.name)
    return None
