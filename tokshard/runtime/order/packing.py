"""Packing whole: rows of uncut chunks; the sizes of a window fix the number of rows.

    blocks of a window ──sections──▶ chunks ──best fit──▶ rows ──▶ pieces and padding, row after row

The rows of a window take one position of the sequence for each token and each place of padding. So windows, samples,
epochs and their inverses are the same arithmetic as for slices. Only the table of a window is made differently.
ORDER.md, section 5, has the rules.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tokshard.numbers import ceil_div
from tokshard.runtime.bytes.source import TokenSource, documents_at

GOES_ON, ENDS_DOCUMENT, PADDING = range(3)
"""Kinds of pieces: whether the last token of a piece is the delimiter of its document, or the piece is padding."""

STEP_TOKENS, STEP_PIECES = 1 << 22, 1 << 16
"""Tokens whose document ends are read in a step, and pieces that are placed in one: some milliseconds. Arrays of all
pieces would be slower, because they leave the cache."""

Chunks = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]
"""[n] each: unshuffled starts, lengths, and whether each chunk ends its document."""

Blocks = tuple[NDArray[np.int64], NDArray[np.int64]]
"""The starts of blocks in a corpus, and the latest stops of their tokens: int64 [blocks] each."""

Result = TypeVar("Result")

SPARE_ROWS = 128
"""If the rows of a window are counted, one is added for so many: room to place chunks in any order."""

_PUT_OFF = -1


class Laid(NamedTuple):
    """The pieces of a window in their order, [n] each, as in `PieceTable`."""

    unshuffled_starts: NDArray[np.uint32]
    lengths: NDArray[np.uint32]
    kinds: NDArray[np.uint8]


class Sizes(NamedTuple):
    """Tokens of a block, of a section, which belongs to the block in which it starts, and of a row.

    Args:
        is_counted: whether a window is an epoch, and has as many rows as `rows_needed` counts.
    """

    block: int
    section: int
    row: int
    is_counted: bool


def packed_whole(
    source: TokenSource,
    sizes: Sizes,
    num_rows: int,
    order_of: Callable[[int], NDArray[np.int64]],
    blocks: Blocks,
) -> Iterator[float | Laid]:
    """The pieces of a window and the padding of its rows, row after row, made step by step.

    Args:
        num_rows: of the window.
        order_of: the order in which so many chunks are taken, int64 [n].
        blocks: starts and stops, as `CorpusOrder.blocks` returns them.

    Yields:
        After each step the finished part, and at last the pieces.
    """
    seq_len = sizes.row
    starts, lengths, ends_document = yield from _chunks(source, sizes, *blocks)
    entry = order_of(len(starts))
    yield 0.3
    starts, lengths, ends_document = starts[entry], lengths[entry], ends_document[entry]
    yield 0.35
    rows, late = yield from placed(lengths, num_rows, sizes)
    yield 0.85
    is_early = rows != _PUT_OFF
    room = np.full(num_rows, seq_len) - np.bincount(rows[is_early], lengths[is_early], num_rows).astype(np.int64)
    which, late_rows, offsets, late_lengths = cut_into(lengths[late], room)
    is_last = offsets + late_lengths == lengths[late][which]
    room -= np.bincount(late_rows, late_lengths, num_rows).astype(np.int64)
    padded = np.flatnonzero(room)
    yield 0.9
    rows = np.concatenate([rows[is_early], late_rows, padded])
    starts = np.concatenate([starts[is_early], starts[late][which] + offsets, np.zeros_like(padded)])
    lengths = np.concatenate([lengths[is_early], late_lengths, room[padded]])
    kinds = np.full(len(rows), PADDING, np.uint8)
    kinds[: len(rows) - len(padded)] = np.concatenate([ends_document[is_early], ends_document[late][which] & is_last])
    yield 0.95
    by_row = np.argsort(rows, kind="stable")
    yield Laid(starts[by_row].astype(np.uint32), lengths[by_row].astype(np.uint32), kinds[by_row])


def rows_needed(source: TokenSource, sizes: Sizes, blocks: Blocks) -> int:
    """The rows of a window that is an epoch: as many as its chunks open, longest first, and one in 128 more.

    Costs about as much as the window's table.
    """
    _, lengths, _ = result_of(_chunks(source, sizes, *blocks))
    lengths = np.sort(lengths)[::-1]
    num_long = int(np.count_nonzero(_is_long(lengths, sizes.row)))
    room_left = (sizes.row - lengths[:num_long]).tolist()
    short = lengths[num_long:].tolist()
    opened = result_of(_placed_short(short, room_left, num_long + len(short), sizes.row, opens_early=False))
    count = max(num_long, int(opened.max(initial=-1)) + 1)
    return count + ceil_div(count, SPARE_ROWS)


def count_put_off(
    source: TokenSource,
    sizes: Sizes,
    num_rows: int,
    order_of: Callable[[int], NDArray[np.int64]],
    blocks: Blocks,
) -> tuple[int, int, int]:
    """The chunks of a window that are put off, the pieces that they are cut into, and all its chunks. Costs a table."""
    _, lengths, _ = result_of(_chunks(source, sizes, *blocks))
    lengths = lengths[order_of(len(lengths))]
    rows, late = result_of(placed(lengths, num_rows, sizes))
    room = np.full(num_rows, sizes.row) - np.bincount(rows[rows != _PUT_OFF], lengths[rows != _PUT_OFF], num_rows)
    pieces, _, _, _ = cut_into(lengths[late], room.astype(np.int64))
    return len(late), len(pieces), len(rows)


def result_of(steps: Generator[float, None, Result]) -> Result:
    """The result of a function that works in steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Result = end.value
            return found


def _chunks(
    source: TokenSource, sizes: Sizes, block_starts: NDArray[np.int64], block_stops: NDArray[np.int64]
) -> Generator[float, None, Chunks]:
    """The chunks of a window, block after block, in steps."""
    at_once = max(1, STEP_TOKENS // sizes.block)
    parts = []
    for low in range(0, len(block_starts), at_once):
        some = slice(low, low + at_once)
        parts.append(_chunks_of(source, sizes, low, block_starts[some], block_stops[some]))
        yield min(0.25, 0.25 * (low + at_once) / len(block_starts))
    starts, lengths, ends_document = (np.concatenate(found) for found in zip(*parts, strict=True))
    return starts, lengths, ends_document


def _chunks_of(
    source: TokenSource,
    sizes: Sizes,
    first_block: int,
    block_starts: NDArray[np.int64],
    block_stops: NDArray[np.int64],
) -> Chunks:
    """The chunks of consecutive blocks of a window.

    Args:
        first_block: number of the first block in the window.
    """
    section, seq_len = sizes.section, sizes.row
    own_stops = np.minimum(block_starts + sizes.block, source.num_tokens)
    offsets, ends = source.ends(block_starts, block_stops)
    # a document begins before each block or with it, and at each end in it; where the last one ends is not known
    firsts = np.array([place.start for place in documents_at(source, block_starts.tolist())], np.int64)
    begins = np.insert(ends, offsets[:-1], firsts)
    stops = np.insert(ends, offsets[1:], block_stops + section)
    blocks = np.arange(len(block_starts)).repeat(np.diff(offsets) + 1)
    # of each document, the block has the sections from the first that starts in it to the last
    begins += ceil_div(np.maximum(block_starts[blocks] - begins, 0), section) * section
    is_here = begins < np.minimum(stops, own_stops[blocks])
    begins, stops, blocks = begins[is_here], stops[is_here], blocks[is_here]
    last = begins + ceil_div(np.minimum(stops, own_stops[blocks]) - begins, section) * section
    last = np.minimum(last, stops)
    counts = ceil_div(last - begins, seq_len)
    after = counts.cumsum()
    starts = begins.repeat(counts) + (np.arange(counts.sum()) - (after - counts).repeat(counts)) * seq_len
    lengths = np.minimum(last.repeat(counts) - starts, seq_len)
    ends_document = np.zeros(len(starts), np.bool_)
    ends_document[after - 1] = last == stops
    # from positions in the corpus to unshuffled ones, where each block has its room
    shifts = (blocks + first_block) * (sizes.block + section) - block_starts[blocks]
    return starts + shifts.repeat(counts), lengths, ends_document


def placed(
    lengths: NDArray[np.int64], num_rows: int, sizes: Sizes
) -> Generator[float, None, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The row of each chunk, found in steps.

    Chunks above half a row come first, then the others. Each goes to the open row with the least room in which it fits;
    of several such rows, to the one that got a chunk last. If one fits in none, and rows are counted, all are placed
    again, longest first: then each has room.

    Args:
        lengths: int64 [n], tokens of the chunks, in the order in which they are placed.

    Returns:
        int64 [n], the rows, -1 for chunks that are put off; and those chunks, in the order in which they were taken.
    """
    rows = yield from _placed_once(lengths, num_rows, sizes.row)
    if sizes.is_counted and (rows == _PUT_OFF).any():
        longest_first = np.argsort(-lengths, kind="stable")
        rows[longest_first] = yield from _placed_once(lengths[longest_first], num_rows, sizes.row)
    late = np.flatnonzero(rows == _PUT_OFF)
    # as they were taken: the long ones first
    return rows, late[np.argsort(~_is_long(lengths[late], sizes.row), kind="stable")]


def _placed_once(lengths: NDArray[np.int64], num_rows: int, seq_len: int) -> Generator[float, None, NDArray[np.int64]]:
    found = np.full(len(lengths), _PUT_OFF, np.int64)
    is_long = _is_long(lengths, seq_len)
    long = np.flatnonzero(is_long)[:num_rows]  # no two of them fit into a row
    found[long] = np.arange(len(long))
    short = np.flatnonzero(~is_long)
    room_left = (seq_len - lengths[long]).tolist()
    found[short] = yield from _placed_short(lengths[short].tolist(), room_left, num_rows, seq_len)
    return found


def _is_long(lengths: NDArray[np.int64], seq_len: int) -> NDArray[np.bool_]:
    """Whether each chunk is above half a row, and so is taken first: bool [n]."""
    return lengths * 2 > seq_len


class _OpenRows:
    """Open rows by their room; among equals, the row that got a chunk last comes last."""

    def __init__(self) -> None:
        # Two dummy rows without room: `take(-1)` needs no check for "no row is left", and gives `_PUT_OFF` as the row.
        self._rows_with, self.rooms = defaultdict(list, {0: [_PUT_OFF, _PUT_OFF]}), [0]

    def put(self, row: int, room: int) -> None:
        """Add a row that got a chunk."""
        same = self._rows_with[room]
        if not same:
            insort(self.rooms, room)
        same.append(row)

    def take(self, at: int) -> tuple[int, int]:
        """Take a row out, with its room: the last one of those with ``rooms[at]``."""
        room = self.rooms[at]
        same = self._rows_with[room]
        row = same.pop()
        if not same:
            del self.rooms[at]
        return row, room


def _placed_short(
    lengths: list[int], room_left: list[int], num_rows: int, seq_len: int, *, opens_early: bool = True
) -> Generator[float, None, NDArray[np.int64]]:
    """The row of each chunk of at most half a row, given the room of the open rows.

    Args:
        opens_early: each of the last chunks opens a row if there are no more of them than rows are left.
    """
    rows, opened, count, taken = _OpenRows(), len(room_left), len(lengths), 0
    put, take, rooms = rows.put, rows.take, rows.rooms
    for number, left in enumerate(room_left):
        put(number, left)
    # a row is kept apart, the one with the most room when it was: of chunks that are short, most fit in no other. Only
    # chunks after which another one is kept are noted: their number, their row, and the row that is kept from then on
    (row, room), below = take(-1), rooms[-1]
    noted, noted_rows, kept = [0], [], [row]
    while taken < (last := count - (num_rows - opened) * opens_early):
        yield 0.4 + 0.45 * taken / count
        first, taken = taken, min(taken + STEP_PIECES, last)
        for number, length in enumerate(lengths[first:taken], first):
            if below < length <= room:
                room -= length
                continue
            noted.append(number)
            if length <= below:
                put(row, room)
                least, left = take(bisect_left(rooms, length))
                put(least, left - length)
                noted_rows.append(least)
            elif opened < num_rows:
                put(row, room)
                put(opened, seq_len - length)
                noted_rows.append(opened)
                opened += 1
            else:
                noted_rows.append(_PUT_OFF)
                kept.append(row)
                continue
            row, room = take(-1)
            kept.append(row)
            below = rooms[-1]
    found = np.repeat(kept, np.diff([*noted, taken]))
    found[noted[1:]] = noted_rows
    return np.concatenate([found, np.arange(opened, opened + count - taken)])  # each of the rest opens a row


def cut_into(
    lengths: NDArray[np.int64], room: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut chunks so that they fill the room of rows, both in order.

    Args:
        lengths: int64 [chunks].
        room: int64 [rows], together at least the tokens of the chunks.

    Returns:
        int64 [parts] each: number of the chunk, row, start of the part in the chunk, and its tokens.
    """
    chunk_stops, row_stops = np.cumsum(lengths), np.cumsum(room)
    total = int(lengths.sum())
    starts = np.union1d(chunk_stops - lengths, row_stops - room)
    starts = starts[starts < total]
    chunks = np.searchsorted(chunk_stops, starts, "right")
    rows = np.searchsorted(row_stops, starts, "right")
    return chunks, rows, starts - (chunk_stops - lengths)[chunks], np.diff(starts, append=total)
