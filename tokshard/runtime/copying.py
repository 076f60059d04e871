"""Many pieces of tokens copied into one array: short ones gathered with an index, long ones as slices.

A slice costs about a quarter of a microsecond, whatever its length; gathering costs about a nanosecond per token,
whatever the pieces are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

GATHER_BELOW = 350
"""Mean tokens of a piece below which gathering is faster than slices. Changes speed only, not results."""

_GATHER_TOKENS = 1 << 15
"""Tokens that are gathered at a time, so that their index stays in the cache."""


@cache
def _numbers() -> NDArray[np.int64]:
    return np.arange(_GATHER_TOKENS)


def are_short(lengths: NDArray[np.int64]) -> bool:
    """Whether pieces are so short that gathering them is faster."""
    return bool(lengths.sum() < GATHER_BELOW * len(lengths))


def copy_pieces(
    memory: NDArray[Any],
    elements: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out: NDArray[Any],
    at: NDArray[np.int64],
) -> None:
    """Copy pieces of one array in the faster way; arguments as for `gather`."""
    if are_short(lengths):
        gather(memory, elements, lengths, out, at)
        return
    stops = (elements + lengths).tolist()
    views = [memory[start:stop] for start, stop in zip(elements.tolist(), stops, strict=True)]
    copy_slices(views, lengths, out, at)


def gather(
    memory: NDArray[Any],
    elements: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out: NDArray[Any],
    at: NDArray[np.int64],
) -> None:
    """Copy pieces of one array with an index.

    Args:
        memory: one-dimensional. What lies outside of the pieces is not touched.
        elements, lengths: int64 [n], where in it each piece starts, and its tokens.
        out, at: as in `TokenSource.read`.
    """
    ends = np.cumsum(lengths)
    low = 0
    while low < len(lengths):
        done = int(ends[low - 1]) if low else 0
        high = max(low + 1, int(ends.searchsorted(done + _GATHER_TOKENS, "right")))
        part = slice(low, high)
        _gather_some(memory, elements[part], lengths[part], out, at[part])
        low = high


def _gather_some(
    memory: NDArray[Any],
    elements: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out: NDArray[Any],
    at: NDArray[np.int64],
) -> None:
    # short pieces wait for memory: the first and the last token of each, asked for in a row, bring many at a time
    memory.take(elements, mode="wrap")
    memory.take(elements + (lengths - 1), mode="wrap")
    index = np.repeat(elements - np.cumsum(lengths) + lengths, lengths)
    index += _numbers()[: len(index)] if len(index) <= _GATHER_TOKENS else np.arange(len(index))
    low = 0
    for _, place, stop in _runs(lengths, at):
        high = low + stop - place
        # 'wrap' checks nothing that was not checked, and needs no second buffer as 'raise' does
        memory.take(index[low:high], out=out[place:stop], mode="wrap")
        low = high


def copy_slices(
    views: Sequence[NDArray[Any]], lengths: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]
) -> None:
    """Copy pieces, each given as an array of its own.

    Args:
        lengths: int64 [n], their tokens.
        out, at: as in `TokenSource.read`.
    """
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
