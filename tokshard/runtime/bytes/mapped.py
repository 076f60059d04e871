"""A corpus whose shards are memory maps. Its tokens are copied as slices, or gathered by their addresses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, CorpusError, DamagedCorpusError
from tokshard.forking import ForkLock, cached_property
from tokshard.format.corpus import Corpus
from tokshard.format.loss import Targets
from tokshard.format.shard import Shard
from tokshard.runtime.bytes.copying import copy_pieces, cut_at
from tokshard.runtime.bytes.fetch import read_ranges
from tokshard.runtime.bytes.places import DocumentPlaces, ShardPlaces
from tokshard.runtime.bytes.source import SpansIn
from tokshard.runtime.bytes.targets import TargetReader

MAX_BATCHES = 8_192
"""Record batches whose tokens are kept open: a map costs about a kilobyte and no file descriptor."""


class MappedTokens:
    """The tokens of record batches, by the number of the batch in the corpus.

    They are viewed as one array, from the lowest address to the highest. Most of that array is not mapped, and never
    read: callers check that every piece lies within a record batch. Threads that `add` at the same time need a lock.
    Reading needs none, because record batches are never removed.

    Args:
        first_tokens: int64 [record batches + 1], position of the first token of each, and the end of the corpus.
    """

    def __init__(self, first_tokens: NDArray[np.int64], dtype: np.dtype[Any]) -> None:
        self._first_tokens, self._dtype = first_tokens, dtype
        self._values: dict[int, NDArray[Any]] = {}
        self._addresses = np.zeros(len(first_tokens) - 1, np.int64)
        self._stop = 0
        self._memory = np.empty(0, dtype), 0

    def __len__(self) -> int:
        return len(self._values)

    def missing(self, batches: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of some record batches that were not added."""
        found: NDArray[np.int64] = batches[self._addresses[batches] == 0]
        return found

    def add(self, batch: int, values: NDArray[Any]) -> None:
        """Keep the aligned tokens of a record batch, without a copy."""
        address: int = values.__array_interface__["data"][0]
        (memory, start), size = self._memory, self._dtype.itemsize
        self._stop = max(self._stop, address + values.nbytes)
        lowest = values if not start or address < start else memory
        start = min(address, start or address)
        shape = ((self._stop - start) // size,)
        self._memory = np.lib.stride_tricks.as_strided(lowest, shape=shape, strides=(size,), writeable=False), start
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
        memory, first = self._memory
        elements = (self._addresses[batches] - first) // self._dtype.itemsize + starts - self._first_tokens[batches]
        copy_pieces(memory, elements, lengths, out, at)


class MappedCorpus(DocumentPlaces):
    """The record batches of a corpus, memory-mapped when their tokens are first touched.

    Sizes are checked then. Offsets are not mapped: of a shard with a block in a window, those around the block are read
    in a third of the time that a map and its page faults take. They are checked at every read.

    Attributes:
        corpus: the open corpus.
    """

    corpus: Corpus
    _touched: int | None = None
    """The shard that was opened, or whose offsets were read, last."""

    def _begin(self) -> None:
        """Open nothing, so that a corpus that is not read costs nothing."""
        self._lock = ForkLock()

    @cached_property
    def _batch_tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.corpus.shards.batch_tokens()

    @cached_property
    def _first_batches(self) -> list[int]:
        """The first record batch of each shard."""
        found: list[int] = self._batch_tokens[0].tolist()
        return found

    @cached_property
    def _first_tokens(self) -> NDArray[np.int64]:
        """The position of the first token of each record batch, and the end of the corpus."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self._batch_tokens[1])])

    @cached_property
    def _kept(self) -> MappedTokens:
        """The tokens of the record batches that are open."""
        return MappedTokens(self._first_tokens, self.corpus.dtype)

    def targets(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> SpansIn:
        """The loss spans in stretches of the corpus, as `TokenSource.targets` gives them.

        Raises:
            DamagedCorpusError: a shard is missing, or differs from the manifest.
        """
        return self._targets.find(starts, stops)

    @cached_property
    def _targets(self) -> TargetReader:
        return TargetReader(self._first_tokens, self._load_targets)

    @property
    def reading(self) -> str | None:
        """Path of the shard that was opened, or whose offsets were read, last."""
        return None if self._touched is None else self._shard(self._touched).path

    def _read_unhashed(self, shard: ShardPlaces, places: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """As in `DocumentPlaces`; only the manifest is checked."""
        found = self._read_offsets(shard, places)
        self.corpus.check_in_place([shard.index])
        return found

    def _read_offsets(self, shard: ShardPlaces, places: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        self._touched = shard.index
        try:
            return read_ranges(self.corpus.store, shard, places)[0]
        except CorpusError:
            self.corpus.check_in_place([shard.index])  # that the corpus was replaced says more
            raise

    def _load_targets(self, batch: int) -> Targets:
        found = self._shard_at(batch).targets(self._within(batch))
        self.corpus.check_in_place([self._shard_of(batch)])
        return found

    def read(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]
    ) -> None:
        """Copy the tokens of pieces, as `TokenSource.read` does.

        Raises:
            DamagedCorpusError: a shard is missing, or differs from the manifest.
        """
        if not len(starts):
            return
        # a position beyond the corpus follows from changed offsets: it is beyond the last batch, too
        batches = np.minimum(self._first_tokens.searchsorted(starts, "right") - 1, len(self._first_tokens) - 2)
        is_wrong = (starts + lengths > self._first_tokens[batches + 1]) | (batches < 0)
        if is_wrong.any():
            raise self._damage(int(batches[int(np.argmax(is_wrong))]), "a document extends beyond its record batch")
        self._ready(batches).read(batches, starts, lengths, out, at)

    def ends(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ends of documents in stretches of the corpus, as in `TokenSource.ends`.

        Raises:
            DamagedCorpusError: a shard is missing, or differs from the manifest.
        """
        stretches, batches, begins, ends = cut_at(self._first_tokens, starts, stops)
        bases = self._first_tokens[batches]
        lows, highs = begins - bases, ends - bases
        parts: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        counts = []
        inside = list(zip(batches.tolist(), lows.tolist(), highs.tolist(), strict=True))
        sizes = (self._first_tokens[batches + 1] - bases).tolist()
        for (batch, low, high), size, offsets in zip(inside, sizes, self._offsets_in(inside), strict=True):
            first, last = offsets.searchsorted((low, high), "right").tolist()
            # the offsets that were read must reach past these tokens, or to the end of the batch
            if not 0 < first <= last or (last == len(offsets) and offsets[-1] != size):
                raise self._changed(batch, low, high)
            parts.append(offsets[first - 1 : last])  # with the start of the document that holds the first token
            counts.append(last - first)
        found, num_ends = np.concatenate(parts), np.array(counts, np.int64)  # what is checked is what is used
        after = np.cumsum(num_ends + 1)
        is_start = np.zeros(len(found), np.bool_)
        is_start[after - num_ends - 1] = True
        # of each part: start <= low < ends, which ascend, <= high
        owners = np.repeat(np.arange(len(num_ends)), num_ends + 1)
        least = np.where(is_start, 0, np.maximum(np.roll(found, 1), lows[owners]) + 1)
        is_wrong = (found < least) | (found > np.where(is_start, lows[owners], highs[owners]))
        if is_wrong.any():
            raise self._changed(*inside[owners[is_wrong.argmax()]])
        totals = np.bincount(stretches, num_ends, len(starts)).astype(np.int64)
        return np.concatenate([[0], np.cumsum(totals)]), found[~is_start] + np.repeat(bases, num_ends)

    def _offsets_in(self, inside: Sequence[tuple[int, int, int]]) -> Sequence[NDArray[np.int64]]:
        """The offsets around some tokens of record batches, as far as the shard table tells where they are.

        Args:
            inside: a record batch each, the first of the tokens in it, and the one after the last.
        """
        of_shard: dict[int, list[int]] = {}
        for part, (batch, _, _) in enumerate(inside):
            of_shard.setdefault(self._shard_of(batch), []).append(part)
        found = [np.empty(0, np.int64)] * len(inside)
        for index, parts in of_shard.items():
            shard, base = self._shard(index), self._first_batches[index]
            places = [shard.offsets_around(inside[part][0] - base, *inside[part][1:]) for part in parts]
            for part, content in zip(parts, self._read_offsets(shard, places), strict=True):
                found[part] = np.frombuffer(content, np.int64)
        self.corpus.check_in_place(of_shard)
        return found

    def _ready(self, batches: NDArray[np.int64]) -> MappedTokens:
        """Tokens of record batches, which stay valid if another thread opens more than are kept."""
        return self._open(np.unique(batches)) if len(self._kept.missing(batches)) else self._kept

    def _open(self, batches: NDArray[np.int64]) -> MappedTokens:
        """Open record batches, each once, some of which are not open yet."""
        with self._lock.now:
            tokens = self._kept
            missing = tokens.missing(batches)
            if len(tokens) + len(missing) > MAX_BATCHES:
                tokens, missing = MappedTokens(self._first_tokens, self.corpus.dtype), batches
            found = {batch: self._values(batch) for batch in missing.tolist()}
            for batch, values in found.items():
                if not values.flags.aligned:
                    raise self._damage(batch, "its tokens are not aligned, as a shard's tokens must be")
            self.corpus.check_in_place([self._shard_of(batch) for batch in found])
            for batch, values in found.items():
                tokens.add(batch, values)
            if len(tokens) <= MAX_BATCHES:
                self._kept = tokens
            return tokens

    def _values(self, batch: int) -> NDArray[Any]:
        return self._shard_at(batch).batch(self._within(batch))[1]

    def _shard_at(self, batch: int) -> Shard:
        self._touched = index = self._shard_of(batch)
        return self.corpus.shard(index)

    def _within(self, batch: int) -> int:
        """The number of a record batch in its shard."""
        return batch - self._first_batches[self._shard_of(batch)]

    def _shard_of(self, batch: int) -> int:
        return bisect_right(self._first_batches, batch) - 1

    def _changed(self, batch: int, low: int, high: int) -> DamagedCorpusError:
        num_tokens = int(self._first_tokens[batch + 1] - self._first_tokens[batch])
        return self._damage(
            batch,
            f"offsets of the documents in tokens {low} to {high} must ascend within [0, {num_tokens}]: the file or the "
            "shard table was changed",
        )

    def _damage(self, batch: int, problem: str) -> DamagedCorpusError:
        """The error for a record batch that changed after it was opened."""
        if (cut := changed_shard(self.corpus)) is not None:
            return DamagedCorpusError(
                f"{cut} is not as long as its manifest says: it was cut during the run", hint=RESTORE
            )
        shard = self._shard_of(max(0, batch))
        number = batch - self._first_batches[shard]
        return DamagedCorpusError(f"{self._shard(shard).path}, batch {number}: {problem}", hint=RESTORE)


def changed_shard(corpus: Corpus) -> str | None:
    """The first shard that is missing, or whose size differs from the manifest. Costs a stat per shard."""
    for shard in corpus.shards:
        try:
            size = corpus.store.stat(shard.name).size
        except OSError:
            size = -1
        if size != shard.num_bytes:
            return corpus.store.where(shard.name)
    return None
