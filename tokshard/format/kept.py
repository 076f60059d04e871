"""The documents that views keep or share, by number and place: tables of stretches, and bisection in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tokshard.wording import counted

_RANGES_AT_ONCE, _FEWEST_AT_ONCE = 1 << 20, 1 << 10
"""Ranges that are compared at once, of all views together, but at least so many of each."""


class Ascending:
    """Ascending numbers from 0 on, whose low 32 bits a table holds.

    Args:
        low: uint32 [n].
        carries: ascending; the first row of a number from 2**32 on, of one from 2 * 2**32 on, and so on.
    """

    def __init__(self, low: NDArray[np.uint32], carries: Sequence[int]) -> None:
        self._low, self._carries = low, np.array(carries, np.int64)
        self._bounds = [0, *carries, len(low)]

    def __len__(self) -> int:
        return len(self._low)

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self._low[rows].astype(np.int64)
        if len(self._carries):
            found += self._carries.searchsorted(rows, "right") << 32
        return found

    def searchsorted(self, numbers: NDArray[np.int64], side: Literal["left", "right"] = "left") -> NDArray[np.int64]:
        """The places of numbers, as numpy's `searchsorted` finds them."""
        high, low = numbers >> 32, numbers.astype(np.uint32)
        found = np.full(len(numbers), len(self))
        is_one = len(high) > 0 and high.min() == high.max()
        wanted = high[:1] if is_one else np.unique(high)
        for number in wanted[wanted < len(self._bounds) - 1].tolist():
            start, stop = self._bounds[number : number + 2]
            places = slice(None) if is_one else np.flatnonzero(high == number)
            found[places] = start + self._low[start:stop].searchsorted(low[places], side)
        return found


class Kept:
    """The documents of a view.

    Args:
        columns: document, position, number and token, as in the table.

    Attributes:
        documents, positions: [stretches + 1], the first document of each in the base, and its first token there; then
            the ends of the last stretch.
        numbers, tokens: [stretches + 1], the same in the view.
    """

    def __init__(self, columns: Sequence[Ascending]) -> None:
        self.documents, self.positions, self.numbers, self.tokens = columns

    def __len__(self) -> int:
        return len(self.documents) - 1

    def ranges(self, low: int, high: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The kept documents among some of the base, as ranges of their numbers there.

        Args:
            low, high: number of the first of these documents, and of the one after the last.

        Returns:
            starts and stops: int64 [ranges] each, ascending.
        """
        first, stop = self.documents.searchsorted(np.array([low, high])).tolist()
        rows = np.arange(max(0, first - 1), min(stop, len(self)) + 1)  # the one before may reach into them
        starts = self.documents[rows[:-1]]
        stops = np.minimum(starts + np.diff(self.numbers[rows]), high)
        starts = np.maximum(starts, low)
        return starts[starts < stops], stops[starts < stops]

    def stretch_of_document(self, number: NDArray[np.int64]) -> NDArray[np.int64]:
        """The stretches of documents of the view."""
        return self.numbers.searchsorted(number, "right") - 1

    def stretch_of_token(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """The stretches of positions in the view."""
        return self.tokens.searchsorted(position, "right") - 1

    def in_base(self, number: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers in the base of documents of the view."""
        stretch = self.stretch_of_document(number)
        return self.documents[stretch] + number - self.numbers[stretch]

    def of_base(self, document: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers in the view of documents of the base; -1 for one that is not kept."""
        stretch = np.clip(self.documents.searchsorted(document, "right") - 1, 0, len(self) - 1)
        behind = document - self.documents[stretch]
        found = self.numbers[stretch] + behind
        return np.where((behind >= 0) & (found < self.numbers[stretch + 1]), found, -1)


@dataclass(frozen=True, slots=True)
class Shared:
    """How many documents two corpora share, or at most share."""

    num_documents: int
    is_exact: bool = True

    def __bool__(self) -> bool:
        return self.num_documents > 0

    def __str__(self) -> str:
        return ("" if self.is_exact else "up to ") + counted(self.num_documents, "document")


def ranges_of(tables: Sequence[Kept]) -> Iterator[list[tuple[NDArray[np.int64], NDArray[np.int64]]]]:
    """The documents that several views of one corpus keep, side by side. Memory does not grow with the views.

    Yields:
        For one part of the base after another the ranges of each view, as `Kept.ranges` gives them.
    """
    at_once = max(_FEWEST_AT_ONCE, _RANGES_AT_ONCE // len(tables))
    borders = [kept.documents[np.append(np.arange(0, len(kept), at_once), len(kept))] for kept in tables]
    for low, high in pairwise(np.unique(np.concatenate(borders)).tolist()):
        yield [kept.ranges(low, high) for kept in tables]
