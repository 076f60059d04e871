"""Tokens of many pieces copied into rows: as slices, all at once by their addresses, or read batch by batch.

A slice costs about a quarter of a microsecond, whatever its length; by address a token costs about a nanosecond,
whatever the pieces are. So pieces of a few hundred tokens and less are gathered. What does not lie in memory is read
when its batch is copied: a layout of many batches would read seconds' worth at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

GATHER_BELOW = 350
"""Mean tokens of a piece below which gathering is faster than slices. Changes speed only, not results."""


class Memory:
    """Arrays of tokens in the memory of this process, which stay where they are while this object lives.

    Threads that `add` at the same time need a lock. Reading needs none: the range only grows.
    """

    def __init__(self, arrays: Iterable[NDArray[Any]] = ()) -> None:
        self.arrays: list[NDArray[Any]] = []
        self.lowest: NDArray[Any] | None = None
        self.stop = 0
        """The address after the highest byte of all."""
        for array in arrays:
            self.add(array)

    def add(self, array: NDArray[Any]) -> int:
        """Keep one more; gives its address."""
        self.arrays.append(array)
        address = address_of(array)
        if self.lowest is None or address < address_of(self.lowest):
            self.lowest = array
        self.stop = max(self.stop, address + array.nbytes)
        return address


@dataclass(frozen=True, slots=True)
class Spans:
    """Tokens that lie in the memory of this process.

    Args:
        addresses: int64 [n], of the first token of each, a multiple of the size of a token.
        memory: holds them.
    """

    addresses: NDArray[np.int64]
    memory: Memory


class Copier(Protocol):
    """Pieces of a layout that can be copied."""

    def copy(self, start: int, stop: int, out: NDArray[Any]) -> None:
        """Copy the pieces ``[start, stop)`` one after another into `out`, which has their length."""


@dataclass(frozen=True, slots=True)
class Slices:
    """Pieces as one array each."""

    views: Sequence[NDArray[Any]]

    def copy(self, start: int, stop: int, out: NDArray[Any]) -> None:
        """Concatenate them."""
        np.concatenate(self.views[start:stop], out=out)


ReadViews = Callable[[NDArray[np.int64], NDArray[np.int64]], Sequence[NDArray[Any]]]
"""From starts and lengths of pieces to an array of tokens each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Pieces that are read when they are copied.

    Args:
        reads: one per corpus.
        corpora: int64 [n], which of them reads each piece.
        starts: int64 [n], position of each piece in its corpus.
        lengths: int64 [n], tokens of each.
    """

    reads: Sequence[ReadViews]
    corpora: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def copy(self, start: int, stop: int, out: NDArray[Any]) -> None:
        """Read those of each corpus together."""
        corpora, starts, lengths = self.corpora[start:stop], self.starts[start:stop], self.lengths[start:stop]
        stops = np.cumsum(lengths)
        for number in np.unique(corpora).tolist():
            mine = np.flatnonzero(corpora == number)
            views = self.reads[number](starts[mine], lengths[mine])
            for end, view in zip(stops[mine].tolist(), views, strict=True):
                out[end - len(view) : end] = view


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Pieces by their addresses.

    All memory that the spans name is looked at as one array, from the lowest address to the highest. Most of that is
    not mapped, and is not touched: whoever makes the spans has checked that each lies within an array.

    Args:
        addresses: int64 [n], of the pieces.
        lengths: int64 [n], tokens of each, at least 1.
        memories: hold them.
        dtype: of a token.
    """

    addresses: NDArray[np.int64]
    lengths: NDArray[np.int64]
    memories: Sequence[Memory]
    dtype: np.dtype[Any]

    def copy(self, start: int, stop: int, out: NDArray[Any]) -> None:
        """Take them with one index."""
        memory, elements = self._memory
        lengths, first_elements = self.lengths[start:stop], elements[start:stop]
        # short pieces wait for memory: the first and the last token of each, asked for in a row, bring many at a time
        memory.take(first_elements, mode="wrap")
        memory.take(first_elements + (lengths - 1), mode="wrap")
        ends = np.cumsum(lengths)
        index = np.repeat(first_elements - ends + lengths, lengths)
        index += self._numbers[: len(index)] if len(index) <= len(self._numbers) else np.arange(len(index))
        # 'wrap' checks nothing that was not checked, and needs no second buffer as 'raise' does
        np.take(memory, index, out=out, mode="wrap")

    @cached_property
    def _numbers(self) -> NDArray[np.int64]:
        return np.arange(1 << 16)

    @cached_property
    def _memory(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """All memory as one array, and where in it each piece starts."""
        lowest = min((memory.lowest for memory in self.memories if memory.lowest is not None), key=address_of)
        start, size = address_of(lowest), self.dtype.itemsize
        length = (max(memory.stop for memory in self.memories) - start) // size
        memory = np.lib.stride_tricks.as_strided(lowest, shape=(length,), strides=(size,), writeable=False)
        return memory, (self.addresses - start) // size


def address_of(array: NDArray[Any]) -> int:
    """Where the first byte of an array lies."""
    address: int = array.__array_interface__["data"][0]
    return address
