"""Documents of a flat file of ids, with an index of their places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokshard.interop.tokens.batches import BATCH_BYTES, NumberFile, TokenBatch, damaged
from tokshard.interop.tokens.loss import mask_weights
from tokshard.store import Store

_DOCUMENTS_AT_ONCE = 65_536
"""The index is read in pieces of so many documents."""


class DocumentIndex(Protocol):
    """Where the documents of a file lie. Large indices are not read whole."""

    @property
    def num_documents(self) -> int:
        """Number of documents."""

    def bounds(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where documents ``[start, stop)`` begin and the last of them ends: int64 [documents + 1], in bytes.

        All are within the file, and no document begins before the previous one ends.

        Raises:
            BadSourceError: the index says otherwise.
        """


def read_located(
    ids: NumberFile, *, index: DocumentIndex, start: int, stop: int | None, mask: NumberFile | None = None
) -> Iterator[TokenBatch]:
    """The documents whose first byte lies in ``[start, stop)`` of a file; with `stop` None, to the end.

    Ranges that share a bound find the same document there. Each checks that its part of the index ascends, so ranges
    that cover the file check the whole index.

    Args:
        mask: says which ids are trained.

    Raises:
        BadSourceError: the index is damaged.
    """
    first = _first_at(index, start)
    last = index.num_documents if stop is None else _first_at(index, stop)
    if first > last:
        raise damaged(ids.store, ids.name, "its index is out of order")
    for begin in range(first, last, _DOCUMENTS_AT_ONCE):
        bounds = index.bounds(begin, min(begin + _DOCUMENTS_AT_ONCE, last))
        if begin == first and start and int(bounds[0]) < start:
            raise damaged(ids.store, ids.name, "its index is out of order")
        for document, end in batches_of(bounds):
            places = (bounds[document : end + 1] - ids.start) // ids.dtype.itemsize
            low, high = int(places[0]), int(places[-1])
            loss = None if mask is None else mask_weights(mask, low, high)
            input_bytes = int(bounds[end] - bounds[document])
            yield TokenBatch(tokens=ids.read(low, high), ends=places[1:] - low, input_bytes=input_bytes, loss=loss)


def _first_at(index: DocumentIndex, position: int) -> int:
    """The first document that begins at `position` or after it; at 0, the first of all."""
    low, high = 0, index.num_documents if position else 0
    while low < high:
        middle = (low + high) // 2
        if int(index.bounds(middle, middle + 1)[0]) < position:
            low = middle + 1
        else:
            high = middle
    return low


def batches_of(bounds: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Half-open ranges of documents of at most `BATCH_BYTES`, or one document.

    Args:
        bounds: int64 [documents + 1], in bytes: where each begins, and the end of the last.
    """
    start, count = 0, len(bounds) - 1
    while start < count:
        fit = int(np.searchsorted(bounds, bounds[start] + BATCH_BYTES, "right")) - 1
        stop = max(start + 1, fit)
        yield start, stop
        start = stop


def check_bounds(store: Store, name: str, bounds: NDArray[np.int64], num_bytes: int, first: int) -> NDArray[np.int64]:
    """The bounds of documents, if they ascend and lie in a file of ids.

    Args:
        name: of the index, for the message.
        num_bytes: size of the file of ids.
        first: number of the first document.

    Raises:
        BadSourceError: with the first document that is wrong.
    """
    is_wrong = (bounds < 0) | (bounds > num_bytes)
    is_wrong[1:] |= bounds[1:] < bounds[:-1]
    if is_wrong.any():
        place = int(np.argmax(is_wrong))
        raise damaged(
            store,
            name,
            f"document {first + max(0, place - 1):,} has a bound at byte {int(bounds[place]):,}; expected it "
            f"{'after the bound before it, ' + format(int(bounds[place - 1]), ',') + ', and ' if place else ''}"
            f"at most at {num_bytes:,}, the size of the file of ids",
        )
    return bounds
