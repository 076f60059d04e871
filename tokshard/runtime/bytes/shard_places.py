"""Where the tokens and offsets of one shard are, and what those mean."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format.corpus import Corpus
from tokshard.format.schema import ORDINAL_STRIDE
from tokshard.runtime.bytes.shard_bytes import ShardFile
from tokshard.store.record_cache import RecordFile


class ShardPlaces:
    """Where the tokens and offsets of one shard are, and what those mean.

    Reads nothing, but for `rows` and `num_ends` in a corpus whose shard table is read in parts.

    Positions of tokens and documents count from the first ones of the shard.
    """

    def __init__(self, corpus: Corpus, index: int) -> None:
        info = corpus.shards[index]
        self.file = ShardFile(name=info.name, path=corpus.store.where(info.name), num_bytes=info.num_bytes)
        self._sha256, self._item = info.sha256, corpus.dtype.itemsize
        self._places = corpus.shards.batch_places(index)
        self._index, self._shards = index, corpus.shards
        self._starts = _starts([place.num_tokens for place in self._places])
        self._first_documents = _starts([place.num_documents for place in self._places])

    @property
    def num_tokens(self) -> int:
        """Tokens of the shard."""
        return self._starts[-1]

    def records(self, tokens: int) -> RecordFile:
        """The shard as records of so many tokens."""
        count = -(-self.num_tokens // tokens)
        last = self.num_tokens - (count - 1) * tokens
        return RecordFile(
            content=self._sha256, num_records=count, record_bytes=tokens * self._item, last_bytes=last * self._item
        )

    def token_ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where the tokens ``[start, stop)`` are, as far as there are any: a place for each record batch."""
        found = []
        stop = min(stop, self.num_tokens)
        while start < stop:
            batch = bisect_right(self._starts, start) - 1
            end = min(stop, self._starts[batch + 1])
            position = self._places[batch].values_position + (start - self._starts[batch]) * self._item
            found.append((position, (end - start) * self._item))
            start = end
        return found

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """The first and the last document that may end in a stretch of tokens, as the shard table says."""
        # the documents of the strides that hold the first and the last token bound those in between
        beyond, documents = -(-stop // ORDINAL_STRIDE), self._stride_documents()
        last = int(documents[beyond]) if beyond < len(documents) else self._first_documents[-1] - 1
        return int(documents[start // ORDINAL_STRIDE]), last

    def num_ends(self, start: int, stop: int) -> tuple[int, int]:
        """How many documents end in the tokens ``[start, stop)`` at least and at most, as the shard table says."""
        # of the tokens at multiples of the stride the table names the document, and so how many end before them
        inside, beyond = -(-start // ORDINAL_STRIDE), -(-stop // ORDINAL_STRIDE)
        last = beyond if stop == self.num_tokens else stop // ORDINAL_STRIDE
        ended = np.append(self._stride_documents(), self._first_documents[-1])
        least = int(ended[last] - ended[inside]) if inside <= last else 0
        return least, int(ended[beyond] - ended[start // ORDINAL_STRIDE])

    def _stride_documents(self) -> NDArray[np.int64]:
        # not kept: those of thousands of shards would take hundreds of megabytes
        return self._shards.stride_documents(self._index)

    def offset_ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """Where the offsets of some documents are: a place for each record batch."""
        return [
            (self._places[batch].offsets_position + 8 * row, 8 * (row_stop - row + 1))
            for batch, row, row_stop in self._rows_of_batches(first, last)
        ]

    def offsets(self, first: int, last: int, start: int, stop: int, answers: Sequence[bytes]) -> NDArray[np.int64]:
        """Starts of the documents ``[first, last]``, which hold the tokens ``[start, stop)``, and where they end.

        Args:
            answers: what lies in `offset_ranges`.

        Raises:
            DamagedCorpusError: they do not ascend, or the documents do not hold these tokens.
        """
        parts = [np.empty(0, np.int64)]
        end = 0
        for (batch, row, row_stop), answer in zip(self._rows_of_batches(first, last), answers, strict=True):
            place = self._places[batch]
            found = np.frombuffer(answer, np.int64)
            is_whole = (row > 0 or found[0] == 0) and (row_stop < place.num_documents or found[-1] == place.num_tokens)
            if not is_whole or not bool(np.all(found[1:] > found[:-1])) or found[0] < 0 or found[-1] > place.num_tokens:
                raise DamagedCorpusError(
                    f"{self.file.path}, batch {batch}: offsets of documents {row} to {row_stop} must ascend within "
                    f"[0, {place.num_tokens}], found {found[0]} to {found[-1]}",
                    hint=RESTORE,
                )
            parts.append(found[:-1] + self._starts[batch])
            end = int(found[-1]) + self._starts[batch]
        offsets = np.append(np.concatenate(parts), end)
        if offsets[0] > start or offsets[-1] < stop:  # else pieces would run over the ends of documents
            raise DamagedCorpusError(
                f"{self.file.path}: the shard table says that documents {first} to {last} hold tokens {start} to "
                f"{stop}, they hold {offsets[0]} to {offsets[-1]}",
                hint=RESTORE,
            )
        return offsets

    def bounds_range(self, row: int) -> tuple[int, int]:
        """Where the start and the stop of one document are."""
        batch = bisect_right(self._first_documents, row) - 1
        position = self._places[batch].offsets_position + 8 * (row - self._first_documents[batch])
        return position, 16

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
                f"{self.file.path}, batch {batch}: document {row - self._first_documents[batch]} is at {start} to "
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
