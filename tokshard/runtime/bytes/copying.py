"""Many pieces of tokens copied into one array: short ones gathered with an index, long ones as slices.

A slice costs about a quarter of a microsecond, whatever its length; gathering costs about a nanosecond per token,
whatever the pieces are. In between, many pieces are copied as overlapping halves: a few calls for all of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

GATHER_BELOW = 350
"""Mean tokens of a piece below which gathering is faster than slices. Changes speed only, not results."""

HALVES_FROM, HALVES_BELOW, MANY = 30, 1_500, 1_000
"""Least and greatest mean tokens of a piece for which so many pieces are copied fastest as halves."""

_GATHER_TOKENS = 1 << 15
"""Tokens that are gathered at a time, so that their index stays in the cache."""

_HALVES_TOKENS = 1 << 17
"""Tokens of first halves copied before the second halves, which overlap them: they should stay in the cache."""


@cache
def _numbers() -> NDArray[np.int64]:
    return np.arange(_GATHER_TOKENS)


def spread(first: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Runs of consecutive numbers, one after another: the run of each number, and the number.

    Args:
        first, counts: int64 [n], the first number of each run, and its length.
    """
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) + np.repeat(first - np.cumsum(counts) + counts, counts)


def cut_at(
    bounds: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Stretches cut at the start of units, such as shards.

    Args:
        bounds: int64 [units + 1], the start of each unit, and the end of the last one.
        starts, stops: int64 [n], each start below its stop.

    Returns:
        int64 [parts] each: number of the stretch, number of the unit, start and stop of the part.
    """
    first = bounds.searchsorted(starts, "right") - 1
    owners, units = spread(first, bounds.searchsorted(stops, "left") - first)
    return owners, units, np.maximum(starts[owners], bounds[units]), np.minimum(stops[owners], bounds[units + 1])


def copy_pieces(
    memory: NDArray[Any],
    elements: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out: NDArray[Any],
    at: NDArray[np.int64],
) -> None:
    """Copy pieces of one array in the fastest way; arguments as for `gather`."""
    count, total = len(lengths), int(lengths.sum())
    if count >= MANY and HALVES_FROM * count <= total < HALVES_BELOW * count:
        copy_halves(memory, elements, lengths, out, at)
    elif total < GATHER_BELOW * count:
        gather(memory, elements, lengths, out, at)
    else:
        copy_slices(memory, elements, lengths, out, at)


def copy_halves(
    memory: NDArray[Any],
    elements: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out: NDArray[Any],
    at: NDArray[np.int64],
) -> None:
    """Copy each piece of one array as its first and its last 2**k tokens, for the largest k that fits.

    Many pieces with the same k take two calls, in which an item is 2**k tokens. Arguments as for `gather`.
    """
    powers = np.frexp(lengths)[1].astype(np.int8) - 1
    order = np.argsort(powers, kind="stable")
    elements, lengths, at = elements[order], lengths[order], at[order]
    first = 0
    for power, count in enumerate(np.bincount(powers).tolist()):
        if not count:
            continue
        source, target = _stretches(memory, 1 << power), _stretches(out, 1 << power)
        stop, step = first + count, max(1, _HALVES_TOKENS >> power)
        for low in range(first, stop, step):
            part = slice(low, min(low + step, stop))
            second = lengths[part] - (1 << power)
            target[at[part]] = source[elements[part]]
            target[at[part] + second] = source[elements[part] + second]
        first = stop


def _stretches(array: NDArray[Any], size: int) -> NDArray[Any]:
    """Overlapping windows of so many elements as an array: item i starts at element i."""
    items = array[:size].view(np.dtype((np.void, size * array.itemsize)))
    shape, strides = (len(array) - size + 1,), array.strides
    return np.lib.stride_tricks.as_strided(items, shape, strides, writeable=array.flags.writeable)


def gather(
    memory: NDArray[Any],
    elements: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out: NDArray[Any],
    at: NDArray[np.int64],
) -> None:
    """Copy pieces of one array with an index.

    Args:
        memory: one-dimensional. Bytes outside of the pieces are not touched.
        elements, lengths: int64 [n], the start of each piece in it, and its tokens.
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
    memory: NDArray[Any],
    elements: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out: NDArray[Any],
    at: NDArray[np.int64],
) -> None:
    """Copy pieces of one array as slices; arguments as for `gather`."""
    stops = (elements + lengths).tolist()
    views = [memory[start:stop] for start, stop in zip(elements.tolist(), stops, strict=True)]
    low = 0
    for high, place, stop in _runs(lengths, at):
        np.concatenate(views[low:high], out=out[place:stop])
        low = high


def _runs(lengths: NDArray[np.int64], at: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Runs of pieces without a gap: the piece after each run, and the start and stop of the run in `at`."""
    stops = at + lengths
    is_last = np.ones(len(at), np.bool_)
    np.not_equal(at[1:], stops[:-1], out=is_last[:-1])
    last = np.flatnonzero(is_last)
    first = np.concatenate([[0], last[:-1] + 1])
    return list(zip((last + 1).tolist(), at[first].tolist(), stops[last].tolist(), strict=True))
