"""Tokens of many pieces copied into rows: as slices, or all at once by their addresses.

A slice costs about a quarter of a microsecond, whatever its length; by address a token costs about a nanosecond,
whatever the pieces are. So pieces of a few hundred tokens and less are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

GATHER_BELOW = 350
"""Mean tokens of a piece below which gathering is faster than slices. Changes speed only, not results."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Tokens that lie in the memory of this process.

    Args:
        addresses: int64 [n], of the first token of each, a multiple of the size of a token.
        owners: what keeps that memory where it is.
    """

    addresses: NDArray[np.int64]
    owners: Sequence[NDArray[Any]]


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


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Pieces by their addresses.

    All memory that the spans name is looked at as one array, from the lowest address to the highest. Most of that is
    not mapped, and is not touched: whoever makes the spans has checked that each lies within its owner.

    Args:
        spans: of the pieces.
        lengths: int64 [n], tokens of each, at least 1.
        dtype: of a token.
    """

    spans: Spans
    lengths: NDArray[np.int64]
    dtype: np.dtype[Any]

    def copy(self, start: int, stop: int, out: NDArray[Any]) -> None:
        """Take them with one index."""
        memory, first_elements = self._memory
        lengths = self.lengths[start:stop]
        ends = np.cumsum(lengths)
        index = np.repeat(first_elements[start:stop] - ends + lengths, lengths)
        index += self._numbers[: len(index)] if len(index) <= len(self._numbers) else np.arange(len(index))
        # 'wrap' checks nothing that was not checked, and needs no second buffer as 'raise' does
        np.take(memory, index, out=out, mode="wrap")

    @cached_property
    def _numbers(self) -> NDArray[np.int64]:
        return np.arange(1 << 16)

    @cached_property
    def _memory(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """All memory as one array, and where in it each piece starts."""
        lowest = min(self.spans.owners, key=address_of)
        size = self.dtype.itemsize
        base = address_of(lowest)
        stop = max(address_of(owner) + owner.nbytes for owner in self.spans.owners)
        memory = np.lib.stride_tricks.as_strided(
            lowest, shape=((stop - base) // size,), strides=(size,), writeable=False
        )
        return memory, (self.spans.addresses - base) // size


def address_of(array: NDArray[Any]) -> int:
    """Where the first byte of an array lies."""
    address: int = array.__array_interface__["data"][0]
    return address
