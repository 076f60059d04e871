"""A corpus read by range: only the strides that are needed, ahead of need where that is known.

A stride is `HASH_STRIDE` tokens of one shard; the last of a shard may be shorter. The *place* of a token is its
position in the corpus if every shard were padded to whole strides. A chunk of the cache is a stride of 16-bit tokens,
or half of one of 32-bit tokens: so a place is a chunk and a token in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.forking import cached_property, renew_in_children
from tokshard.format.corpus import Corpus
from tokshard.format.loss import Targets, has_weights
from tokshard.format.schema import HASH_STRIDE
from tokshard.format.shard import checked_targets
from tokshard.numbers import ceil_div
from tokshard.runtime.bytes.cache import Cache, Parts, Request
from tokshard.runtime.bytes.copying import cut_at, spread
from tokshard.runtime.bytes.fetch import Fetch
from tokshard.runtime.bytes.places import DocumentPlaces, ShardPlaces
from tokshard.runtime.bytes.source import SpansIn
from tokshard.runtime.bytes.targets import TargetReader

_RUN_STRIDES = 128
"""Strides of one request: a million tokens."""


class Strides:
    """The places of the strides of a corpus, and their chunks. Chunks are numbered through the corpus.

    Args:
        first_tokens: int64 [shards + 1], position of the first token of each shard, and the end of the corpus.
        tokens: tokens of a stride.
        chunks: chunks of a stride.
    """

    def __init__(self, first_tokens: NDArray[np.int64], tokens: int, chunks: int) -> None:
        self._first_tokens, self._tokens, self._chunks = first_tokens, tokens, chunks
        self._chunk_tokens = tokens // chunks
        counts = ceil_div(np.diff(first_tokens), tokens)
        firsts: NDArray[np.int64] = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self._shift = firsts * tokens - first_tokens
        self._bounds: list[int] = firsts.tolist()

    def cut(self, starts: NDArray[np.int64], lengths: NDArray[np.int64], at: NDArray[np.int64]) -> Parts:
        """Cut pieces at the start of chunks. Each piece lies in one shard.

        Args:
            starts, lengths: int64 [n], positions and tokens of the pieces; at least 1 token.
            at: int64 [n], the place of each in the output.
        """
        size = self._chunk_tokens
        places = self._places(starts)
        stops = places + lengths
        first = places // size
        counts = (stops - 1) // size - first + 1
        if len(counts) == int(counts.sum()):
            return Parts(first, places - first * size, lengths, at)
        pieces, chunks = spread(first, counts)
        begins = np.maximum(places[pieces], chunks * size)
        ends = np.minimum(stops[pieces], (chunks + 1) * size)
        return Parts(chunks, begins - chunks * size, ends - begins, at[pieces] + begins - places[pieces])

    def covering(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
        """The chunks of the strides that hold stretches of the corpus, one stretch after another.

        A chunk that several stretches need is given as often, so stretches announced together may be released apart.

        Args:
            starts, stops: int64 [n], each start below its stop. A stretch may span several shards.
        """
        first = self._places(starts) // self._tokens
        counts = self._places(stops - 1) // self._tokens - first + 1
        return spread(first * self._chunks, counts * self._chunks)[1]

    def runs(self, chunks: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """Join strides that follow each other in a shard, in the order of their chunks.

        Args:
            chunks: int64 [n].

        Yields:
            The shard, the first stride, and the one after the last, counted through the corpus.
        """
        strides = list(dict.fromkeys((chunks // self._chunks).tolist()))
        low = 0
        while low < len(strides):
            first, high = strides[low], low + 1
            shard = bisect_right(self._bounds, first) - 1
            most = min(first + _RUN_STRIDES, self._bounds[shard + 1])
            while high < len(strides) and strides[high] == first + high - low < most:
                high += 1
            yield shard, first, first + high - low
            low = high

    def first(self, shard: int) -> int:
        """The first stride of a shard."""
        return self._bounds[shard]

    def _places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        found: NDArray[np.int64] = positions + self._shift[np.searchsorted(self._first_tokens, positions, "right") - 1]
        return found


class RangedCorpus(DocumentPlaces):
    """A corpus read by range: strides are read when they are needed, checked, and kept in a cache.

    A block is read as the strides that cover it and the token after it, which may be a label. Document ends are found
    by their delimiters. Offsets are read only for the places of single documents, and for all ends if documents also
    begin with the delimiter.

    Args:
        cache: where strides are kept.

    Attributes:
        reading: path of the shard that a reader waited for last.
    """

    corpus: Corpus
    cache: Cache
    reading: str | None = None

    def _begin(self) -> None:
        """Read nothing, so that a corpus that is not read costs nothing."""
        self._chunks_of_stride = self.corpus.dtype.itemsize // 2
        renew_in_children(self)

    def renew(self) -> None:
        """Join the cache anew at the next read: a forked child has a memory and threads of its own."""
        for name in ("_base", "_fetch", "_targets"):
            self.__dict__.pop(name, None)

    @cached_property
    def _base(self) -> int:
        """The number of its first chunk in the cache of this process."""
        return self.cache.join(HASH_STRIDE * 2)

    @cached_property
    def _fetch(self) -> Fetch:
        assert self._base >= 0, "it has joined: the threads of the cache are those of this process"
        return Fetch(self.corpus, self.cache, HASH_STRIDE)

    @property
    def _first_tokens(self) -> NDArray[np.int64]:
        return self.corpus.shards.first_tokens

    @cached_property
    def _strides(self) -> Strides:
        return Strides(self._first_tokens, HASH_STRIDE, self._chunks_of_stride)

    def requests(self, chunks: NDArray[np.int64]) -> Iterator[Request]:
        """The requests for some chunks, as `Chunks.requests` says."""
        size = self._chunks_of_stride
        for index, first, stop in self._strides.runs(np.sort(chunks - self._base)):
            shard, base = self._shard(index), self._strides.first(index)
            work = self._fetch.strides(shard, first - base, stop - base)
            yield Request(range(self._base + size * first, self._base + size * stop), shard.path, work)

    def waits_for(self, path: str) -> None:
        """Note that a reader waits for a shard."""
        self.reading = path

    def read(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]
    ) -> None:
        """Copy the tokens of pieces, as `TokenSource.read` does.

        Raises:
            DamagedCorpusError: a shard is missing, or differs from the manifest.
            StoreError: the store does not answer.
        """
        if len(starts):
            parts = self._strides.cut(starts, lengths, at)
            self.cache.read(Parts(parts.chunks + self._base, parts.starts, parts.lengths, parts.at), out, self)

    def will_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Fetch blocks ahead of need, as `TokenSource.will_read` says."""
        if len(starts):
            self.cache.announce(self._chunks_of_blocks(starts, stops), self)
            if self.corpus.has_spans:
                self._targets.ask(starts, stops, self.cache.fetchers)

    def targets(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> SpansIn:
        """The loss spans in stretches of the corpus, as `TokenSource.targets` gives them.

        Raises:
            DamagedCorpusError: a shard is missing, or differs from the manifest.
            StoreError: the store does not answer.
        """
        return self._targets.find(starts, stops)

    @cached_property
    def _targets(self) -> TargetReader:
        # the table of 200,000 shards takes a while, and only corpora with loss spans need all of its record batches
        first_batches, tokens = self.corpus.shards.batch_tokens()
        firsts = np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens)])
        return TargetReader(firsts, partial(self._load_targets, first_batches))

    def _load_targets(self, first_batches: NDArray[np.int64], batch: int) -> Targets:
        index = int(first_batches.searchsorted(batch, "right")) - 1
        number = batch - int(first_batches[index])
        shard = self._shard(index)
        place = shard.batches[number]
        ranges = [(place.offsets_position, 8 * (place.num_documents + 1)), (place.loss_position, place.loss_bytes)]
        offsets, section = self._read_unhashed(shard, ranges)
        return checked_targets(
            section,
            np.frombuffer(offsets, np.int64),
            place,
            is_weighted=has_weights(self.corpus.manifest.columns),
            where=f"{shard.path}, batch {number}",
        )

    def has_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Forget blocks, as `TokenSource.has_read` says."""
        if len(starts) and "_base" in self.__dict__:  # else nothing was announced in this process
            self.cache.release(self._chunks_of_blocks(starts, stops))

    def ends(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ends of documents in stretches of the corpus, as in `TokenSource.ends`.

        Raises:
            DamagedCorpusError: a shard is missing, or differs from the manifest.
            StoreError: the store does not answer.
        """
        stretches, shards, begins, stops = cut_at(self._first_tokens, starts, stops)
        parts, ends = self._ends(shards, begins, stops)
        counts = np.bincount(stretches[parts], minlength=len(starts))
        return np.concatenate([[0], np.cumsum(counts)]), ends

    def _read_unhashed(self, shard: ShardPlaces, places: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        """As in `DocumentPlaces`; only the size and the manifest of a shard are checked."""
        self.reading = shard.path
        return self._fetch.read_unhashed(shard, places)

    def _ends(
        self, shards: NDArray[np.int64], begins: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ends of documents in stretches that each lie in one shard.

        Returns:
            int64 [n] each: number of the stretch, and the position after the delimiter.
        """
        lengths = stops - begins
        after = np.cumsum(lengths)
        tokens = np.empty(int(after[-1]), self.corpus.dtype)
        self.read(begins, lengths, tokens, after - lengths)
        places = np.flatnonzero(tokens == self.corpus.eos_id)
        parts = after.searchsorted(places, "right")
        ends = places + (begins - after + lengths)[parts] + 1
        bases = self._first_tokens[shards]
        self._check_last(shards, stops, tokens[after - 1])
        if self.corpus.bos_id == self.corpus.eos_id:
            inside = list(zip(shards.tolist(), (begins - bases).tolist(), (stops - bases).tolist(), strict=True))
            delimiters = np.split(ends, parts.searchsorted(np.arange(1, len(inside))))
            return self._ends_by_offsets(inside, [found - base for found, base in zip(delimiters, bases, strict=True)])
        if self.corpus.shards.is_whole:
            self._check_counts(shards, begins - bases, stops - bases, np.bincount(parts, minlength=len(shards)))
        return parts, ends

    def _check_last(self, shards: NDArray[np.int64], stops: NDArray[np.int64], tokens: NDArray[Any]) -> None:
        """Refuse a shard whose last document has no end: pieces would run into the next shard, or out of the corpus.

        Args:
            shards, stops, tokens: [n], the shard of each stretch, where the stretch stops, and its last token.
        """
        is_wrong = (stops == self._first_tokens[shards + 1]) & (tokens != self.corpus.eos_id)
        for wrong in np.flatnonzero(is_wrong)[:1].tolist():
            raise DamagedCorpusError(
                f"{self._shard(int(shards[wrong])).path}: the last token is {tokens[wrong]}, expected the "
                f"delimiter {self.corpus.eos_id}",
                hint=RESTORE,
            )

    def _check_counts(
        self, shards: NDArray[np.int64], begins: NDArray[np.int64], stops: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> None:
        """Refuse delimiters inside documents, as far as the shard table shows them.

        Args:
            shards, begins, stops: int64 [n], the shard of each stretch, and its tokens there.
            counts: int64 [n], documents that end in each.
        """
        for index in np.unique(shards).tolist():
            shard, mine = self._shard(index), np.flatnonzero(shards == index)
            least, most = shard.num_ends(begins[mine], stops[mine])
            for wrong in np.flatnonzero((counts[mine] < least) | (counts[mine] > most))[:1].tolist():
                stretch = mine[wrong]
                raise DamagedCorpusError(
                    f"{shard.path}: {counts[stretch]} documents end in the tokens {begins[stretch]} to "
                    f"{stops[stretch]}, by their delimiters; the shard table says {least[wrong]} to {most[wrong]}",
                    hint=RESTORE,
                )

    def _ends_by_offsets(
        self, inside: Sequence[tuple[int, int, int]], delimiters: Sequence[NDArray[np.int64]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ends of documents that also begin with a delimiter: the offsets show which delimiters are ends.

        Args:
            inside: the shard of each stretch, its first token there, and the one after its last.
            delimiters: for each stretch int64, the position after each of its delimiters, in the shard.
        """
        start = self.cache.fetchers.start
        tasks = [start(partial(self._offsets_around, *each), is_urgent=True) for each in inside]
        found = []
        for (index, begin, stop), here, task in zip(inside, delimiters, tasks, strict=True):
            _, offsets = task.result()
            expected = np.union1d(offsets[:-1] + 1, offsets[1:])
            if not np.array_equal(here, expected[(expected > begin) & (expected <= stop)]):
                raise DamagedCorpusError(
                    f"{self._shard(index).path}: the documents in the tokens {begin} to {stop} do not begin and "
                    "end at delimiters",
                    hint=RESTORE,
                )
            found.append(offsets[1:][(offsets[1:] > begin) & (offsets[1:] <= stop)] + self._first_tokens[index])
        return np.repeat(np.arange(len(found)), [len(ends) for ends in found]), np.concatenate(found)

    def _chunks_of_blocks(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
        """The chunks that hold blocks and the token after each block, which may be a label."""
        shards = self._first_tokens.searchsorted(stops - 1, "right") - 1
        return self._base + self._strides.covering(starts, np.minimum(stops + 1, self._first_tokens[shards + 1]))


def stride_tokens_of(block_tokens: int) -> int:
    """The most tokens of the strides that hold a block and the token after it."""
    return (ceil_div(block_tokens, HASH_STRIDE) + 1) * HASH_STRIDE
