"""Packing whole: rows of uncut chunks; the sizes of a window fix the number of rows.

    blocks of a window ──sections──▶ chunks ──best fit──▶ rows ──▶ pieces and padding, row after row

The rows of a window take one position of the sequence for each token and each place of padding. So windows, samples,
epochs and their inverses are the same arithmetic as for slices. Only the table of a window is made differently.
ORDER.md, section 5, has the rules.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Generator, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.bytes.source import documents_at
from tokshard.runtime.order.windows import CorpusOrder, Window

GOES_ON, ENDS_DOCUMENT, PADDING = range(3)
"""Kinds of pieces: whether the last token of a piece is the delimiter of its document, or the piece is padding."""

STEP_TOKENS, STEP_PIECES = 1 << 22, 1 << 16
"""Tokens of which the document ends are asked for in a step, and pieces that are placed in one: some milliseconds.
Arrays of all pieces would be slower, because they leave the cache."""

Laid = tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint8]]
"""The pieces of a window in their order, [n] each, as in `PieceTable`: unshuffled starts, lengths and kinds."""

Chunks = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]
"""[n] each: unshuffled starts, lengths, and whether each chunk ends its document."""

Result = TypeVar("Result")

_PUT_OFF = -1


def packed_whole(
    order: CorpusOrder, window: Window, block_starts: NDArray[np.int64], block_stops: NDArray[np.int64]
) -> Iterator[float | Laid]:
    """The pieces of a window and the padding of its rows, row after row, made step by step.

    Args:
        block_starts, block_stops: as `CorpusOrder.blocks` returns them.

    Yields:
        After each step the finished part, and at last the pieces.
    """
    starts, lengths, ends_document = yield from _chunks(order, block_starts, block_stops)
    entry = order.piece_permutation(window, len(starts)).all()
    starts, lengths, ends_document = starts[entry], lengths[entry], ends_document[entry]
    seq_len = order.shape.seq_len
    num_rows = (window.stop - window.start) // seq_len
    rows = yield from placed(lengths, num_rows, seq_len)
    room = np.full(num_rows, seq_len) - np.bincount(rows[rows != _PUT_OFF], lengths[rows != _PUT_OFF], num_rows)
    room = room.astype(np.int64)
    late = np.flatnonzero(rows == _PUT_OFF)
    late = late[np.argsort(~_is_long(lengths[late], seq_len), kind="stable")]  # in the order in which they were taken
    which, late_rows, offsets, late_lengths = cut_into(lengths[late], room)
    is_last = offsets + late_lengths == lengths[late][which]
    room -= np.bincount(late_rows, late_lengths, num_rows).astype(np.int64)
    padded, early = np.flatnonzero(room), np.flatnonzero(rows != _PUT_OFF)
    rows = np.concatenate([rows[early], late_rows, padded])
    by_row = np.sort(rows << 32 | np.arange(len(rows))) & 0xFFFFFFFF
    starts = np.concatenate([starts[early], starts[late][which] + offsets, np.zeros_like(padded)])
    lengths = np.concatenate([lengths[early], late_lengths, room[padded]])
    kinds = np.full(len(rows), PADDING, np.uint8)
    kinds[: len(rows) - len(padded)] = np.concatenate([ends_document[early], ends_document[late][which] & is_last])
    yield starts[by_row].astype(np.uint32), lengths[by_row].astype(np.uint32), kinds[by_row]


def count_put_off(order: CorpusOrder, window: Window) -> tuple[int, int]:
    """The chunks of a window that are put off, and so cut, and all its chunks: two counts. Costs a table."""
    _, lengths, _ = result_of(_chunks(order, *order.blocks(window)))
    lengths = lengths[order.piece_permutation(window, len(lengths)).all()]
    rows = result_of(placed(lengths, (window.stop - window.start) // order.shape.seq_len, order.shape.seq_len))
    return int(np.count_nonzero(rows == _PUT_OFF)), len(rows)


def result_of(steps: Generator[float, None, Result]) -> Result:
    """The result of a function that works in steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Result = end.value
            return found


def _chunks(
    order: CorpusOrder, block_starts: NDArray[np.int64], block_stops: NDArray[np.int64]
) -> Generator[float, None, Chunks]:
    """The chunks of a window, block after block, in steps."""
    at_once = max(1, STEP_TOKENS // order.shape.block_tokens)
    parts = []
    for low in range(0, len(block_starts), at_once):
        some = slice(low, low + at_once)
        parts.append(_chunks_of(order, low, block_starts[some], block_stops[some]))
        yield min(0.3, 0.3 * (low + at_once) / len(block_starts))
    starts, lengths, ends_document = (np.concatenate(found) for found in zip(*parts, strict=True))
    return starts, lengths, ends_document


def _chunks_of(
    order: CorpusOrder, first_block: int, block_starts: NDArray[np.int64], block_stops: NDArray[np.int64]
) -> Chunks:
    """The chunks of consecutive blocks of a window.

    Args:
        first_block: number of the first block in the window.
    """
    seq_len, section = order.shape.seq_len, order.section_tokens
    own_stops = np.minimum(block_starts + order.shape.block_tokens, order.source.num_tokens)
    offsets, ends = order.source.ends(block_starts, block_stops)
    # a document begins before each block or with it, and at each end in it; where the last one ends is not known
    firsts = np.array([place.start for place in documents_at(order.source, block_starts.tolist())], np.int64)
    begins = np.insert(ends, offsets[:-1], firsts)
    stops = np.insert(ends, offsets[1:], block_stops + section)
    blocks = np.arange(len(block_starts)).repeat(np.diff(offsets) + 1)
    # of each document, the block has the sections from the first that starts in it to the last
    begins += -(-np.maximum(block_starts[blocks] - begins, 0) // section) * section
    is_here = begins < np.minimum(stops, own_stops[blocks])
    begins, stops, blocks = begins[is_here], stops[is_here], blocks[is_here]
    last = begins + -(-(np.minimum(stops, own_stops[blocks]) - begins) // section) * section
    last = np.minimum(last, stops)
    counts = -(-(last - begins) // seq_len)
    after = counts.cumsum()
    starts = begins.repeat(counts) + (np.arange(after[-1]) - (after - counts).repeat(counts)) * seq_len
    lengths = np.minimum(last.repeat(counts) - starts, seq_len)
    ends_document = np.zeros(len(starts), np.bool_)
    ends_document[after - 1] = last == stops
    shifts = (blocks + first_block) * order.block_room - block_starts[blocks]
    return starts + shifts.repeat(counts), lengths, ends_document


def placed(lengths: NDArray[np.int64], num_rows: int, seq_len: int) -> Generator[float, None, NDArray[np.int64]]:
    """The row of each chunk, found in steps.

    Chunks above half a row come first, then the others. Each goes to the open row with the least room in which it fits;
    of several such rows, to the one that got a chunk last.

    Args:
        lengths: int64 [n], tokens of the chunks, in the order in which they are placed.

    Returns:
        int64 [n], -1 for chunks that are put off.
    """
    found = np.full(len(lengths), _PUT_OFF, np.int64)
    is_long = _is_long(lengths, seq_len)
    long = np.flatnonzero(is_long)[:num_rows]  # no two of them fit into a row
    found[long] = np.arange(len(long))
    short = np.flatnonzero(~is_long)
    room_left = (seq_len - lengths[long]).tolist()
    found[short] = yield from _placed_short(lengths[short].tolist(), room_left, num_rows, seq_len)
    return found


def _is_long(lengths: NDArray[np.int64], seq_len: int) -> NDArray[np.bool_]:
    """Which chunks are taken first: those above half a row, bool [n]."""
    return lengths * 2 > seq_len


class _OpenRows:
    """Open rows by their room; among equals, the row that got a chunk last comes last."""

    def __init__(self) -> None:
        # what has no room is never taken, but for a row that is not there
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
    lengths: list[int], room_left: list[int], num_rows: int, seq_len: int
) -> Generator[float, None, list[int]]:
    """The row of each chunk of at most half a row, given the room of the open rows."""
    found: list[int] = []
    rows, opened = _OpenRows(), len(room_left)
    for number, left in enumerate(room_left):
        rows.put(number, left)
    # a row is kept apart, the one with the most room when it was: of chunks that are short, most fit in no other
    (row, room), below = rows.take(-1), rows.rooms[-1]
    for taken, length in enumerate(lengths):
        if len(lengths) - taken <= num_rows - opened:  # each of the rest opens a row
            return found + list(range(opened, opened + len(lengths) - taken))
        if not taken % STEP_PIECES:
            yield 0.3 + 0.7 * taken / len(lengths)
        if below < length <= room:
            found.append(row)
            room -= length
            continue
        if length <= below:
            rows.put(row, room)
            least, left = rows.take(bisect_left(rows.rooms, length))
            found.append(least)
            rows.put(least, left - length)
        elif opened < num_rows:
            found.append(opened)
            rows.put(row, room)
            rows.put(opened, seq_len - length)
            opened += 1
        else:
            found.append(_PUT_OFF)
            continue
        row, room = rows.take(-1)
        below = rows.rooms[-1]
    return found


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
