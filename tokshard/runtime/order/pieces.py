"""The pieces of documents that samples read: the tables of windows, how they are made, kept and cut.

To make a table, the corpus is asked for its document ends, and the pieces between them are permuted: milliseconds for
a window of 64M tokens in documents of 1,000, seconds in documents of 10. So the table of the next window is made
shortly before the current one ends, in the thread that makes batches ahead. A source whose answers are slow learns
the blocks well before. ORDER.md, section 5, has the rules.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.bytes.source import TokenSource
from tokshard.runtime.order.forking import ForkLock
from tokshard.runtime.order.permutation import Permutation
from tokshard.runtime.order.windows import CorpusOrder, Window

_MAX_TABLES = 3
"""Of a part: the current window and the next, or the next two if one of them is short."""

_MAX_ANNOUNCED = 4
"""Windows of a part: the current one, the next two, and one more if one of them is short."""

_READY_AT = 0.8
"""The table of the next window is made when this part of what a job reads of the current one has been read."""

AHEAD = 1.5
"""Blocks are announced this many windows ahead. What is beyond the next window is fetched while its table is made: a
store never waits for the reader, and is asked as evenly as a loop reads."""

_ANNOUNCED_PER_READ = 2
"""At the start, two tokens are announced for each that is read, so that the first batches are not delayed."""

_SHORT = 0.25
"""A window shorter than this part of a full one is prepared together with the one after it."""

_Key = tuple[int, int, int]
"""Part, epoch and index of a window."""

_Blocks = tuple[NDArray[np.int64], NDArray[np.int64], int]
"""Where the blocks of a window start and stop, and how many of them were announced."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTable:
    """The pieces of windows in their shuffled order. 8 bytes per piece, 12 while it is made.

    A table has one window, or several, each of which starts at a multiple of `block_tokens`. What is between two of
    them is no piece. Unshuffled positions count tokens before the pieces are permuted: block after block.

    Args:
        shuffled_starts: uint32 [n], or int64 if the windows have 2**32 tokens together: where each piece starts, and
            where each window stops.
        unshuffled_starts: like them, the unshuffled position of each piece's first token, and where each window stops.
        block_tokens: tokens of each block but a tail.
        block_starts: int64 [blocks], position in the corpus of each block's first token.
        block_stops: int64 [blocks], the unshuffled position after each block's last token.
        ends_document: bool [blocks], whether the last token of each block is a delimiter.
    """

    shuffled_starts: NDArray[Any]
    unshuffled_starts: NDArray[Any]
    block_tokens: int
    block_starts: NDArray[np.int64]
    block_stops: NDArray[np.int64]
    ends_document: NDArray[np.bool_]

    def cut(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], Pieces]:
        """The pieces in stretches of the windows.

        Args:
            starts, lengths: int64 [stretches], each within a window; each length at least 1.

        Returns:
            int64 [stretches], how many pieces each has, and the pieces of all of them one after another. The first
            and the last piece of a stretch are cut to it.
        """
        stops, dtype = starts + lengths, self.shuffled_starts.dtype
        first = self.shuffled_starts.searchsorted(starts.astype(dtype), "right") - 1
        counts = self.shuffled_starts.searchsorted(stops.astype(dtype), "left") - first
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
        """Pieces of a table of one window."""
        return len(self.shuffled_starts) - 1

    def window(self, start: int, stop: int) -> PieceTable:
        """The table of one of the windows alone."""
        first = int(np.searchsorted(self.shuffled_starts, start, "right")) - 1
        last = int(np.searchsorted(self.shuffled_starts, stop, "left"))
        if last - first == self.num_pieces:
            return self
        entries = slice(first, last + 1)
        blocks = slice(start // self.block_tokens, -(-stop // self.block_tokens))
        return PieceTable(
            shuffled_starts=(self.shuffled_starts[entries] - start).astype(np.uint32),
            unshuffled_starts=(self.unshuffled_starts[entries] - start).astype(np.uint32),
            block_tokens=self.block_tokens,
            block_starts=self.block_starts[blocks],
            block_stops=self.block_stops[blocks] - start,
            ends_document=self.ends_document[blocks],
        )

    @classmethod
    def joined(cls, tables: Sequence[PieceTable]) -> tuple[PieceTable, list[int]]:
        """One table for several of one window each, and where each of these starts in it."""
        size = tables[0].block_tokens
        *starts, length = itertools.accumulate((len(table.block_starts) * size for table in tables), initial=0)
        dtype = np.uint32 if length < 1 << 32 else np.int64
        moved = {
            name: np.concatenate(
                [getattr(table, name).astype(kind) + kind(start) for table, start in zip(tables, starts, strict=True)]
            )
            for name, kind in (("shuffled_starts", dtype), ("unshuffled_starts", dtype), ("block_stops", np.int64))
        }
        return cls(
            **moved,
            block_tokens=size,
            block_starts=np.concatenate([table.block_starts for table in tables]),
            ends_document=np.concatenate([table.ends_document for table in tables]),
        ), starts


def make_table(
    order: CorpusOrder, window: Window, block_starts: NDArray[np.int64], block_ends: NDArray[np.int64]
) -> PieceTable:
    """Make the table of a window.

    Args:
        block_starts, block_ends: as `CorpusOrder.blocks` has them.

    Raises:
        ValueError: the window has 2**32 tokens or more.
    """
    length = window.stop - window.start
    if length >= 1 << 32:
        raise ValueError(f"a window of {length} tokens does not fit: give a smaller window_blocks")
    block_stops = np.cumsum(block_ends - block_starts)
    firsts = np.concatenate([[0], block_stops[:-1]])
    offsets, ends = order.source.ends(block_starts, block_ends)
    counts = np.diff(offsets)
    has_end = np.flatnonzero(counts)
    ends_document = np.zeros(len(counts), np.bool_)
    ends_document[has_end] = ends[offsets[1:][has_end] - 1] == block_ends[has_end]
    # a piece starts at the start of each block, and at each end of a document but that of the block
    ends += np.repeat(firsts - block_starts, counts)
    starts = np.insert(ends, offsets[:-1], firsts)
    last = offsets[1:] + np.arange(len(counts))
    starts = np.delete(starts, last[ends_document]).astype(np.uint32)
    entry = order.piece_permutation(window, len(starts)).all()
    unshuffled_starts = np.append(starts[entry], np.uint32(length))
    shuffled_starts = np.zeros(len(starts) + 1, np.uint32)
    np.cumsum(np.diff(starts, append=np.uint32(length))[entry], out=shuffled_starts[1:])
    return PieceTable(
        shuffled_starts=shuffled_starts,
        unshuffled_starts=unshuffled_starts,
        block_tokens=order.shape.block_tokens,
        block_starts=block_starts,
        block_stops=block_stops,
        ends_document=ends_document,
    )


class _Kept(NamedTuple):
    """A window that a reader keeps: where its table has it, and the order of its slices."""

    key: _Key
    table: PieceTable
    start: int
    stop: int
    samples: Permutation


class PieceReader:
    """The pieces that samples of one corpus read.

    Making the table of a window scans its document boundaries. The tables of a few windows of each part are kept, and
    those that samples read together are joined. Safe to use from several threads, and in a forked child. Readers at
    different places have one each.
    """

    def __init__(self, order: CorpusOrder) -> None:
        self.order = order
        self._kept: defaultdict[int, OrderedDict[_Key, _Kept]] = defaultdict(OrderedDict)
        self._last: tuple[list[_Key], list[_Kept]] = [], []
        self._reading: dict[int, tuple[_Key, float, bool]] = {}  # window, where its reading began, is the next ready
        self._announced: defaultdict[int, OrderedDict[_Key, _Blocks]] = defaultdict(OrderedDict)
        self._lock = ForkLock()
        weakref.finalize(self, _release_all, order.source, self._announced).atexit = False

    def pieces_of(
        self, parts: NDArray[np.int64], samples: NDArray[np.int64], *, is_sequential: bool = False
    ) -> tuple[NDArray[np.int64], Pieces]:
        """The pieces that samples read.

        A slice that continues in the next window is read last, so the next window is not needed earlier.

        Args:
            parts: int64 [n], the part of each sample; those of a part are side by side.
            samples: int64 [n], of the parts, ascending within each.
            is_sequential: the following samples will be read next, so tables are made ahead.

        Returns:
            int64 [n], how many pieces each sample has, and the pieces of all of them one after another.
        """
        if not len(samples):
            none = np.empty(0, np.int64)
            return none, Pieces(starts=none, lengths=none, ends_document=np.empty(0, np.bool_))
        order, seq_len = self.order, self.order.shape.seq_len
        windows, bounds, numbers, within = order.runs(parts, samples)
        keys, sizes = _keys(windows), np.diff(bounds)
        kept = self._windows(keys)
        rooms = (windows.stop - windows.start).astype(np.int64)
        if is_sequential:  # before the numbers are permuted
            num_slices = -((within - rooms) // seq_len)
            read = numbers[bounds[:-1]] / num_slices, (numbers[bounds[1:] - 1] + 1) / num_slices
        is_inside = numbers < np.repeat((rooms - within) // seq_len, sizes)
        stops = bounds[:-1] + np.add.reduceat(is_inside, bounds[:-1])
        for low, stop, one in zip(bounds.tolist(), stops.tolist(), kept, strict=False):
            if low < stop:
                numbers[low:stop] = one.samples(numbers[low:stop].view(np.uint64))
        starts = np.repeat(within, sizes) + numbers * seq_len
        left = np.full(len(samples), seq_len)
        pass_stop = order.pass_stop(windows.part)
        if pass_stop is not None:
            left = np.minimum(left, np.repeat(pass_stop - windows.start, sizes) - starts).astype(np.int64)
        lengths = np.minimum(left, np.repeat(rooms, sizes) - starts)
        if (lengths < left).any():
            runs = np.repeat(np.arange(len(keys)), sizes)
            found = self._cut_over(kept, windows, np.stack([np.arange(len(samples)), runs, starts, lengths]), left)
        else:
            firsts = np.repeat([one.start for one in kept], sizes)
            found = kept[0].table.cut(starts + firsts, lengths)
        if is_sequential:
            for number, key in enumerate(keys):
                if pass_stop is None or pass_stop[number] > windows.stop[number]:
                    self._prepare(key, float(read[0][number]), float(read[1][number]))
        return found

    def _cut_over(
        self, kept: list[_Kept], windows: Window, stretches: NDArray[np.int64], left: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], Pieces]:
        """Cut slices of which some go on in the next window, or in several if they are short.

        Args:
            kept, windows: of the runs.
            stretches: int64 [4, n], of each slice: its number, its run, and where in its window it starts, and its
                tokens there.
            left: int64 [n], tokens of each slice in all windows.
        """
        found = [stretches]
        windows = Window(*(field[stretches[1]] for field in windows))
        while len(is_over := np.flatnonzero(left > found[-1][3])):
            numbers, left = found[-1][0, is_over], left[is_over] - found[-1][3, is_over]
            windows = self.order.window_at(windows.part[is_over], windows.stop[is_over])
            lengths = np.minimum(left, windows.stop - windows.start).astype(np.int64)
            found.append(np.stack([numbers, len(kept) + np.arange(len(numbers)), np.zeros_like(numbers), lengths]))
            kept = self._windows(_keys(windows), kept)
        joined = np.concatenate(found, axis=1)
        numbers, of, starts, lengths = joined[:, np.argsort(joined[0], kind="stable")]
        counts, pieces = kept[0].table.cut(starts + np.array([one.start for one in kept])[of], lengths)
        return np.add.reduceat(counts, np.flatnonzero(np.diff(numbers, prepend=-1))), pieces

    def table(self, window: Window) -> PieceTable:
        """The pieces of one window, found when they are first needed."""
        with self._lock:
            one = self._window(window[:3])
        return one.table.window(one.start, one.stop)

    def _windows(self, keys: list[_Key], known: Sequence[_Kept] = ()) -> list[_Kept]:
        """Windows whose tables are one, after known ones of that table."""
        if keys == self._last[0] and not known:
            return self._last[1]
        with self._lock:
            found = [*known, *map(self._window, keys)]
            tables = {id(one.table) for one in found}
            if len(tables) > 1:
                found = self._joined(found, tables)
            if not known:
                self._last = keys, found
        return found

    def _window(self, key: _Key) -> _Kept:
        kept = self._kept[key[0]]
        one = kept.get(key)
        if one is not None:
            kept.move_to_end(key)
            return one
        window = self.order.window(*key)
        table = make_table(self.order, window, *self._announce(window))
        kept[key] = one = _Kept(key, table, 0, window.stop - window.start, self.order.sample_permutation(window))
        if len(kept) > _MAX_TABLES:
            kept.popitem(last=False)
        return one

    def _joined(self, found: list[_Kept], tables: Collection[int]) -> list[_Kept]:
        """The same windows in one table, together with what is kept of other parts in their tables."""
        windows, parts = {one.key: one for one in found}, {one.key[0] for one in found}
        for part, kept in self._kept.items():
            if part not in parts:
                windows |= {key: one for key, one in kept.items() if id(one.table) in tables}
        table, starts = PieceTable.joined([one.table.window(one.start, one.stop) for one in windows.values()])
        for one, start in zip(list(windows.values()), starts, strict=True):
            windows[one.key] = moved = one._replace(table=table, start=start, stop=start + one.stop - one.start)
            if one.key in self._kept[one.key[0]]:
                self._kept[one.key[0]][one.key] = moved
        return [windows[one.key] for one in found]

    def _prepare(self, key: _Key, before: float, after: float) -> None:
        """Make the next table shortly before a window ends, and announce blocks.

        If the next window is very short, the table of the one after it is made, too.

        Args:
            before, after: the part of the window that is read before and after some samples.
        """
        reading, begun_at, is_ready = self._reading.get(key[0], (None, 0.0, False))
        if reading != key:
            # the last rows of the window before are laid out, and perhaps not read yet
            begun_at, is_ready = before, False
        elif not self.order.source.is_in_memory:
            with self._lock:
                self._announce_ahead(self.order.window(*key), begun_at, after)
        if not is_ready and _since(begun_at, after) >= _READY_AT:
            is_ready = True
            current = self.order.window(*key)
            following = self.order.window_at(key[0], current.stop)
            self.table(following)
            if following.stop - following.start < _SHORT * self.order.window_tokens:
                self.table(self.order.window_at(key[0], following.stop))
        self._reading[key[0]] = key, begun_at, is_ready

    def _announce_ahead(self, current: Window, begun_at: float, after: float) -> None:
        """Announce the blocks of the next windows little by little."""
        order, part = self.order, current.part
        size = min(order.window_tokens, order.part_tokens(part))
        ahead = min(
            AHEAD * size - (1 - after) * (current.stop - current.start),
            _ANNOUNCED_PER_READ * _since(begun_at, after) * size,
        )
        pass_stop = order.pass_stop(part)
        reach = current.stop + ahead if pass_stop is None else min(current.stop + ahead, pass_stop)
        following = list(itertools.islice(_following(order, current, reach), _MAX_ANNOUNCED - 1))
        _release(order.source, self._announced[part], {window[:3] for window in (current, *following)})
        for window in following:
            self._announce(window, (reach - window.start) / (window.stop - window.start))

    def _announce(self, window: Window, share: float = 1.0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Announce the blocks of a window, up to a share of them, and say where they are."""
        announced, key = self._announced[window.part], window[:3]
        starts, stops, done = announced.get(key) or (*self.order.blocks(window), 0)
        high = min(len(starts), math.ceil(share * len(starts)))
        if high > done:
            announced[key] = starts, stops, high
            # more than that are of a reader at places that do not follow each other
            _release(self.order.source, announced, list(announced)[-_MAX_ANNOUNCED:])
            self.order.source.will_read(starts[done:high], stops[done:high])
        return starts, stops


def _keys(windows: Window) -> list[_Key]:
    """Part, epoch and index of each window, as Python integers."""
    return list(zip(windows.part.tolist(), windows.epoch.tolist(), windows.index.tolist(), strict=True))


def _following(order: CorpusOrder, window: Window, reach: float) -> Iterator[Window]:
    """The windows after one that start before a position."""
    while window.stop < reach:
        window = order.window_at(window.part, window.stop)
        yield window


def _since(begun_at: float, part: float) -> float:
    """A part of a window as a part of what was left of it when the reading began."""
    return 1.0 if begun_at >= 1 else (part - begun_at) / (1 - begun_at)


def _release(source: TokenSource, announced: OrderedDict[_Key, _Blocks], kept: Collection[_Key]) -> None:
    """The reader is done with all but these windows."""
    for key in [key for key in announced if key not in kept]:
        starts, stops, done = announced.pop(key)
        source.has_read(starts[:done], stops[:done])


def _release_all(source: TokenSource, announced: dict[int, OrderedDict[_Key, _Blocks]]) -> None:
    for of_part in announced.values():
        _release(source, of_part, ())
