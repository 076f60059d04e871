"""The tables of the pieces of windows: how they are made, cut into stretches, and kept.

To make a table, the corpus is asked for its document ends, and the pieces between them are permuted: milliseconds for
a window of 64M tokens in documents of 1,000, seconds in documents of 10. So the table of the next window is made
shortly before the current one ends, in the thread that makes batches ahead. A source whose answers are slow learns
the blocks well before. ORDER.md, section 5, has the rules.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.bytes.source import TokenSource
from tokshard.runtime.order.announcing import MAX_WINDOWS, Announcements, blocks_of
from tokshard.runtime.order.forking import ForkLock
from tokshard.runtime.order.windows import CorpusOrder, Window

_MAX_TABLES = 3
"""The current window and the next, or the next two if one of them is short."""

_READY_AT = 0.8
"""The table of the next window is made when this part of what a job reads of the current one has been read."""

AHEAD = 1.5
"""Blocks are announced this many windows ahead. What is beyond the next window is fetched while its table is made: a
store never waits for the reader, and is asked as evenly as a loop reads."""

_ANNOUNCED_PER_READ = 2
"""A job that begins comes there by announcing so many tokens for each that it reads: the first batches come first."""

_SHORT = 0.25
"""A window shorter than this part of a full one is prepared together with the one after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Parts of documents.

    Args:
        starts: int64 [n], position of the first token of each in its corpus.
        lengths: int64 [n], tokens of each.
        ends_document: bool [n], whether its last token is the document's delimiter.
    """

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    ends_document: NDArray[np.bool_]

    @classmethod
    def joined(cls, parts: Sequence[Pieces]) -> Pieces:
        """All of them, one after another; there is at least one."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            starts=np.concatenate([part.starts for part in parts]),
            lengths=np.concatenate([part.lengths for part in parts]),
            ends_document=np.concatenate([part.ends_document for part in parts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTable:
    """The pieces of one window in their shuffled order. 8 bytes per piece, 12 while it is made.

    Unshuffled positions count the tokens of the window before the pieces are permuted: block after block.

    Args:
        shuffled_starts: uint32 [n + 1], where each piece starts in the window, and the window's length.
        unshuffled_starts: uint32 [n], the unshuffled position of each piece's first token.
        block_tokens: tokens of each block but a tail.
        block_starts: int64 [blocks], position in the corpus of each block's first token.
        block_stops: int64 [blocks], the unshuffled position after each block's last token.
        ends_document: bool [blocks], whether the last token of each block is a delimiter.
    """

    shuffled_starts: NDArray[np.uint32]
    unshuffled_starts: NDArray[np.uint32]
    block_tokens: int
    block_starts: NDArray[np.int64]
    block_stops: NDArray[np.int64]
    ends_document: NDArray[np.bool_]

    def cut(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], Pieces]:
        """The pieces in stretches of the window.

        Args:
            starts, lengths: int64 [stretches], in tokens of the window; each length at least 1.

        Returns:
            int64 [stretches], how many pieces each has, and the pieces of all of them one after another. The first
            and the last piece of a stretch are cut to it.
        """
        stops = starts + lengths
        first = self.shuffled_starts.searchsorted(starts.astype(np.uint32), "right") - 1
        counts = self.shuffled_starts.searchsorted(stops.astype(np.uint32), "left") - first
        # piece k of a stretch is entry first + k of the table
        after = np.cumsum(counts)
        entry = np.arange(int(after[-1])) + np.repeat(first - after + counts, counts)
        piece_starts = self.shuffled_starts[entry].astype(np.int64)
        piece_stops = self.shuffled_starts[entry + 1].astype(np.int64)
        cut_starts, cut_stops = piece_starts.copy(), piece_stops.copy()
        cut_starts[after - counts] = starts
        cut_stops[after - 1] = stops
        positions = self.unshuffled_starts[entry] + (cut_starts - piece_starts)
        lengths_cut = cut_stops - cut_starts
        blocks = positions // self.block_tokens
        # a whole piece ends with its document, unless it ends with its block, of which that is known
        at_block_end = positions + lengths_cut == self.block_stops[blocks]
        ends = (cut_stops == piece_stops) & (~at_block_end | self.ends_document[blocks])
        within = positions - blocks * self.block_tokens
        return counts, Pieces(starts=self.block_starts[blocks] + within, lengths=lengths_cut, ends_document=ends)

    @property
    def num_pieces(self) -> int:
        """Pieces of the window."""
        return len(self.unshuffled_starts)


def make_table(source: TokenSource, order: CorpusOrder, window: Window) -> PieceTable:
    """Make the table of a window.

    Raises:
        ValueError: the window has 2**32 tokens or more.
    """
    length = window.stop - window.start
    if length >= 1 << 32:
        raise ValueError(f"a window of {length} tokens does not fit: give a smaller window_blocks")
    block_starts, block_ends = blocks_of(order, window)
    block_stops = np.cumsum(block_ends - block_starts)
    starts, ends_document = _cut_blocks(source, block_starts, block_stops)
    count = len(starts)
    entry = order.piece_permutation(window, count).all()
    unshuffled_starts, shuffled_starts = starts[entry], np.zeros(count + 1, np.uint32)
    np.cumsum(np.diff(starts, append=np.uint32(length))[entry], out=shuffled_starts[1:])
    return PieceTable(
        shuffled_starts=shuffled_starts,
        unshuffled_starts=unshuffled_starts,
        block_tokens=order.shape.block_tokens,
        block_starts=block_starts,
        block_stops=block_stops,
        ends_document=ends_document,
    )


def _cut_blocks(
    source: TokenSource, block_starts: NDArray[np.int64], block_stops: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Where the pieces of the blocks of a window start, and which of the blocks end with a document.

    Args:
        block_starts: int64 [blocks], positions in the corpus.
        block_stops: int64 [blocks], unshuffled positions.
    """
    firsts = np.concatenate([[0], block_stops[:-1]])
    block_ends = block_starts + (block_stops - firsts)
    offsets, ends = source.ends(block_starts, block_ends)
    counts = np.diff(offsets)
    has_end = np.flatnonzero(counts)
    ends_document = np.zeros(len(counts), np.bool_)
    ends_document[has_end] = ends[offsets[1:][has_end] - 1] == block_ends[has_end]
    # a piece starts at the start of each block, and at each end of a document but that of the block
    ends += np.repeat(firsts - block_starts, counts)
    starts = np.insert(ends, offsets[:-1], firsts)
    last = offsets[1:] + np.arange(len(counts))
    return np.delete(starts, last[ends_document]).astype(np.uint32), ends_document


class Tables:
    """The tables of the windows that one reader needs. Safe to use from several threads, and in a forked child."""

    def __init__(self, source: TokenSource, order: CorpusOrder) -> None:
        self._source, self._order = source, order
        self._kept: OrderedDict[tuple[int, int], PieceTable] = OrderedDict()
        self._announced = Announcements(source, order)
        self._current: Window | None = None
        self._begun_at = 0.0
        self._lock = ForkLock()
        weakref.finalize(self, self._announced.keep, ()).atexit = False

    def table(self, window: Window) -> PieceTable:
        """The pieces of a window, made when it is first asked for."""
        key = (window.epoch, window.index)
        with self._lock:
            table = self._kept.get(key)
            if table is None:
                if not self._source.is_in_memory:
                    self._announced.announce(window)
                self._kept[key] = table = make_table(self._source, self._order, window)
                if len(self._kept) > _MAX_TABLES:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(key)
        return table

    def prepare(self, window: Window, before: float, after: float, stop: int | None = None) -> None:
        """Make the next table shortly before the current window ends, and announce blocks.

        If the next window is very short, the table of the one after it is made, too.

        Args:
            before, after: the part of the current window that is read before and after these samples.
            stop: where a finite pass ends: nothing beyond is announced.
        """
        with self._lock:
            current = self._order.window_at(window.start - 1)
            if current != self._current:
                # the last rows of the window before are laid out, and perhaps not read yet
                self._current, self._begun_at = current, before
            elif not self._source.is_in_memory:
                self._announce(current, after, stop)
            if _since(self._begun_at, after) >= _READY_AT:
                self.table(window)
                if window.stop - window.start < _SHORT * self._order.window_tokens:
                    self.table(self._order.window_at(window.stop))

    def _announce(self, current: Window, after: float, stop: int | None) -> None:
        """Announce the blocks of the next windows little by little."""
        size = min(self._order.window_tokens, self._order.num_tokens)
        ahead = min(
            AHEAD * size - (1 - after) * (current.stop - current.start),
            _ANNOUNCED_PER_READ * _since(self._begun_at, after) * size,
        )
        reach = current.stop + ahead if stop is None else min(current.stop + ahead, stop)
        following = list(itertools.islice(self._following(current, reach), MAX_WINDOWS - 1))
        self._announced.keep([current, *following])
        for window in following:
            self._announced.announce(window, (reach - window.start) / (window.stop - window.start))

    def _following(self, window: Window, reach: float) -> Iterator[Window]:
        """The windows after one that start before a position."""
        while window.stop < reach:
            window = self._order.window_at(window.stop)
            yield window

    def clear(self) -> None:
        """Drop all tables."""
        with self._lock:
            self._kept.clear()


def _since(begun_at: float, part: float) -> float:
    """A part of a window as a part of what was left of it when the reading began."""
    return 1.0 if begun_at >= 1 else (part - begun_at) / (1 - begun_at)
