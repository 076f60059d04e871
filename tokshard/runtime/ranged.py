"""A corpus of which only the ranges of its shards that are asked for are read."""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format.corpus import Corpus
from tokshard.format.schema import ORDINAL_STRIDE
from tokshard.runtime.shard_bytes import ByteRange, ShardFile, shard_bytes

_MAX_SHARDS = 8_192
"""Shards whose places of record batches are kept."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one shard holds of a stretch of the corpus.

    Args:
        stretch: number of the stretch.
        base: where the shard begins in the corpus.
        first, last: documents of the shard; those that end in the part are among them.
        start, stop: the part, counted from the first token of the shard.
    """

    stretch: int
    shard: RangedShard
    base: int
    first: int
    last: int
    start: int
    stop: int


class RangedCorpus:
    """A corpus of which only the tokens and offsets that are asked for are read, all of one call together.

    Args:
        touch: called with the path of a shard before it is read.
    """

    def __init__(self, corpus: Corpus, touch: Callable[[str], None]) -> None:
        self._corpus = corpus
        self._first_tokens = corpus.shards.first_tokens
        self._starts: list[int] = self._first_tokens.tolist()
        self._bytes = shard_bytes(corpus.store, touch)
        self._shards: OrderedDict[int, RangedShard] = OrderedDict()

    def read(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]
    ) -> None:
        """Copy the tokens of pieces, as `TokenSource.read` does, one shard after another.

        Raises:
            DamagedCorpusError: a shard is missing or not what the manifest says.
        """
        order = np.argsort(starts)  # so that each shard is opened once
        starts, lengths, at = starts[order], lengths[order], at[order]
        shards = np.searchsorted(self._first_tokens, starts, "right") - 1
        within = starts - self._first_tokens[shards]
        wanted = [
            self._shard(shard).token_range(start, length)
            for shard, start, length in zip(shards.tolist(), within.tolist(), lengths.tolist(), strict=True)
        ]
        answers = self._bytes.read(wanted)
        for place, length, data in zip(at.tolist(), lengths.tolist(), answers, strict=True):
            out[place : place + length] = np.frombuffer(data, self._corpus.dtype)

    def ends(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where documents end in stretches of the corpus, as `TokenSource.ends` does.

        Raises:
            DamagedCorpusError: a shard is missing or not what the manifest says.
        """
        parts = self._cut_at_shards(starts, stops)
        answers = self._bytes.read([each for part in parts for each in part.shard.offset_ranges(part.first, part.last)])
        found = [np.empty(0, np.int64)]
        for part in parts:
            offsets = part.shard.offsets(part.first, part.last, part.start, part.stop, answers)
            low, high = np.searchsorted(offsets, [part.start, part.stop], "right")
            found.append(offsets[low:high] + part.base)
        counts = np.bincount([part.stretch for part in parts], [len(ends) for ends in found[1:]], len(starts))
        return np.concatenate([[0], np.cumsum(counts.astype(np.int64))]), np.concatenate(found)

    def document_at(self, position: int) -> tuple[int, int, int]:
        """The document that holds a token: its number, and its start and stop in the corpus."""
        index = bisect_right(self._starts, position) - 1
        shard, base = self._shard(index), self._starts[index]
        within = position - base
        first, last = shard.rows(within, within + 1)
        offsets = shard.offsets(first, last, within, within + 1, self._bytes.read(shard.offset_ranges(first, last)))
        row = int(np.searchsorted(offsets, within, "right")) - 1
        document = int(self._corpus.shards.first_documents[index]) + first + row
        return document, base + int(offsets[row]), base + int(offsets[row + 1])

    def bounds(self, shard: int, row: int) -> tuple[int, int]:
        """Start and stop in the corpus of a document of a shard."""
        found = self._shard(shard)
        start, stop = found.bounds(row, next(self._bytes.read([found.bounds_range(row)])))
        return self._starts[shard] + start, self._starts[shard] + stop

    def _cut_at_shards(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[_Part]:
        parts = []
        for stretch, (begin, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            position = begin
            while position < stop:
                index = bisect_right(self._starts, position) - 1
                base, end = self._starts[index], min(stop, self._starts[index + 1])
                shard = self._shard(index)
                first, last = shard.rows(position - base, end - base)
                parts.append(_Part(stretch, shard, base, first, last, position - base, end - base))
                position = end
        return parts

    def _shard(self, index: int) -> RangedShard:
        # every step is atomic: threads that race for a shard may make it twice, which is harmless
        shard = self._shards.get(index)
        if shard is None:
            shard = self._shards[index] = RangedShard(self._corpus, index)
            if len(self._shards) > _MAX_SHARDS:
                with contextlib.suppress(KeyError):
                    self._shards.popitem(last=False)
        return shard


class RangedShard:
    """Where the tokens and offsets of one shard are, and what those mean. Reads nothing.

    Positions of tokens and documents count from the first ones of the shard.
    """

    def __init__(self, corpus: Corpus, index: int) -> None:
        info = corpus.shards[index]
        self._file = ShardFile(name=info.name, path=corpus.store.where(info.name), num_bytes=info.num_bytes)
        self._item = corpus.dtype.itemsize
        self._places = corpus.shards.batch_places(index)
        self._strides = corpus.shards.stride_documents(index)
        self._starts = _starts([place.num_tokens for place in self._places])
        self._first_documents = _starts([place.num_documents for place in self._places])

    def token_range(self, start: int, length: int) -> ByteRange:
        """Where some tokens are, all of one record batch."""
        batch = bisect_right(self._starts, start) - 1
        position = self._places[batch].values_position + (start - self._starts[batch]) * self._item
        return ByteRange(self._file, position, length * self._item)

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """The first and the last document that may end in a stretch of tokens, as the shard table says."""
        # the documents of the strides that hold the first and the last token bound those in between
        beyond = -(-stop // ORDINAL_STRIDE)
        last = int(self._strides[beyond]) if beyond < len(self._strides) else self._first_documents[-1] - 1
        return int(self._strides[start // ORDINAL_STRIDE]), last

    def offset_ranges(self, first: int, last: int) -> list[ByteRange]:
        """Where the offsets of some documents are; one range per record batch."""
        return [
            ByteRange(self._file, self._places[batch].offsets_position + 8 * row, 8 * (row_stop - row + 1))
            for batch, row, row_stop in self._rows_of_batches(first, last)
        ]

    def offsets(self, first: int, last: int, start: int, stop: int, answers: Iterator[bytes]) -> NDArray[np.int64]:
        """Starts of the documents ``[first, last]``, which hold the tokens ``[start, stop)``, and where they end.

        Args:
            answers: the next ones are to `offset_ranges`.

        Raises:
            DamagedCorpusError: they do not ascend, or the documents do not hold these tokens.
        """
        parts = [np.empty(0, np.int64)]
        end = 0
        for batch, row, row_stop in self._rows_of_batches(first, last):
            place = self._places[batch]
            found = np.frombuffer(next(answers), np.int64)
            is_whole = (row > 0 or found[0] == 0) and (row_stop < place.num_documents or found[-1] == place.num_tokens)
            if not is_whole or not bool(np.all(found[1:] > found[:-1])) or found[0] < 0 or found[-1] > place.num_tokens:
                raise DamagedCorpusError(
                    f"{self._file.path}, batch {batch}: offsets of documents {row} to {row_stop} must ascend within "
                    f"[0, {place.num_tokens}], found {found[0]} to {found[-1]}",
                    hint=RESTORE,
                )
            parts.append(found[:-1] + self._starts[batch])
            end = int(found[-1]) + self._starts[batch]
        offsets = np.append(np.concatenate(parts), end)
        if offsets[0] > start or offsets[-1] < stop:  # else pieces would run over the ends of documents
            raise DamagedCorpusError(
                f"{self._file.path}: the shard table says that documents {first} to {last} hold tokens {start} to "
                f"{stop}, they hold {offsets[0]} to {offsets[-1]}",
                hint=RESTORE,
            )
        return offsets

    def bounds_range(self, row: int) -> ByteRange:
        """Where the start and the stop of one document are."""
        batch = bisect_right(self._first_documents, row) - 1
        position = self._places[batch].offsets_position + 8 * (row - self._first_documents[batch])
        return ByteRange(self._file, position, 16)

    def bounds(self, row: int, answer: bytes) -> tuple[int, int]:
        """Start and stop of one document.

        Args:
            answer: to `bounds_range`.
        """
        batch = bisect_right(self._first_documents, row) - 1
        place, base = self._places[batch], self._starts[batch]
        start, stop = np.frombuffer(answer, np.int64).tolist()
        if not 0 <= start < stop <= place.num_tokens:
            raise DamagedCorpusError(
                f"{self._file.path}, batch {batch}: document {row - self._first_documents[batch]} is at {start} to "
                f"{stop}, expected within [0, {place.num_tokens}]",
                hint=RESTORE,
            )
        return base + start, base + stop

    def _rows_of_batches(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """The documents ``[first, last]``: record batch, the first there, and the one after the last there."""
        row = first
        while row <= min(last, self._first_documents[-1] - 1):
            batch = bisect_right(self._first_documents, row) - 1
            base = self._first_documents[batch]
            row_stop = min(last + 1, base + self._places[batch].num_documents)
            yield batch, row - base, row_stop - base
            row = row_stop


def _starts(counts: list[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)]
