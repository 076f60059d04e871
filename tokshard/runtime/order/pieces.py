"""The pieces of documents that samples read: tables of windows are made, kept and cut here.

To make a table, the document ends are read from the corpus, and the pieces between them are permuted. This takes
milliseconds for a window of 64M tokens in documents of 1,000, and seconds in documents of 10. So the thread that makes
batches ahead makes the table of the next window in small steps before the current one ends. No batch waits for a table.
The blocks are announced to the source well before. ORDER.md, section 5, has the rules.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokshard.forking import ForkLock
from tokshard.numbers import ceil_div
from tokshard.runtime.bytes.source import TokenSource
from tokshard.runtime.order.packing import (
    ENDS_DOCUMENT,
    GOES_ON,
    PADDING,
    STEP_PIECES,
    STEP_TOKENS,
    Laid,
    Sizes,
    packed_whole,
)
from tokshard.runtime.order.permutation import Permutation
from tokshard.runtime.order.windows import CorpusOrder, Place, Window, Windows

_MAX_TABLES = 3
"""Windows kept of a part: the current window and the next, or the next two if one of them is short."""

_MAX_ANNOUNCED = 4
"""Windows announced of a part: the current one, the next two, and one more if one of them is short."""

_MADE_FROM, _MADE_UNTIL = 0.65, 0.95
"""The table of the next window is made step by step between these shares of what a job reads of the current window."""

AHEAD = 1.5
"""Blocks are announced this many windows ahead. What is beyond the next window is fetched while its table is made: a
store never waits for the reader, and is asked as evenly as a loop reads."""

_ANNOUNCED_PER_READ = 2
"""At the start, two tokens are announced for each that is read, so that the first batches are not delayed."""

_AT_ONCE = 2
"""Parts of at most so many windows are announced as a whole when reading begins: neighbouring blocks are then one
request, and the first batch waits for at most twice as much. Such windows are kept together anyway."""

_CUT_APART = 2
"""Windows in at most so many tables are cut separately: joining two long tables takes as long as making
one. Tables of many streams are joined, so one call cuts all."""

_SHORT = 0.25
"""A window shorter than this share of a full one is prepared together with the window after it."""


class _Blocks(NamedTuple):
    """The blocks of a window, the first of which are announced."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    num_announced: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Parts of documents.

    Args:
        starts: int64 [n], position of the first token of each in its corpus.
        lengths: int64 [n], tokens of each.
        ends_document: bool [n], whether the last token is the document's delimiter.
    """

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    ends_document: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTable:
    """The pieces of windows in their shuffled order. 9 bytes per piece, 13 while it is made.

    A table has one window, or several, each starting at a multiple of `block_tokens`. The gaps between windows hold no
    pieces. Unshuffled positions count tokens before the pieces are permuted: block after block.

    Args:
        shuffled_starts: uint32 [n + 1], or int64 if the windows have 2**32 tokens together: the start of each piece,
            and the stop of each window.
        unshuffled_starts: same dtype, [n], the unshuffled position of each piece's first token; undefined at the stop
            of a window, and for padding.
        kinds: uint8 [n], `GOES_ON`, `ENDS_DOCUMENT` or `PADDING`.
        block_tokens: unshuffled positions of each block except a tail.
        block_starts: int64 [blocks], position in the corpus of each block's first token.
    """

    shuffled_starts: NDArray[Any]
    unshuffled_starts: NDArray[Any]
    kinds: NDArray[np.uint8]
    block_tokens: int
    block_starts: NDArray[np.int64]

    def cut(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], Pieces]:
        """The pieces in stretches of the windows.

        Args:
            starts, lengths: int64 [stretches], each within a window; each length at least 1.

        Returns:
            int64 [stretches], the number of pieces of each, and the pieces of all, one after another, without padding.
            The first and the last piece of a stretch are cut to it.
        """
        shuffled, stops = self.shuffled_starts, starts + lengths
        # the first and the last token of a stretch in turn: in a large table, they are found in the same cache lines
        tokens = np.empty((len(starts), 2), shuffled.dtype)
        tokens[:, 0], tokens[:, 1] = starts, stops - 1
        first, counts = (shuffled.searchsorted(tokens.ravel(), "right") - 1).reshape(-1, 2).T
        counts = counts - first + 1
        # piece k of a stretch is entry first + k of the table
        after = counts.cumsum()
        before = after - counts
        entry = np.arange(after[-1]) + (first - before).repeat(counts)
        piece_starts, piece_stops = shuffled[entry].astype(np.int64), shuffled[entry + 1].astype(np.int64)
        cut_starts, cut_stops = piece_starts.copy(), piece_stops.copy()
        cut_starts[before] = starts
        cut_stops[after - 1] = stops
        kinds = self.kinds[entry]
        is_padding = kinds[after - 1] == PADDING  # the last piece of a row
        if is_padding.any():
            is_left = np.ones(len(entry), np.bool_)
            is_left[after[is_padding] - 1] = False
            entry, kinds, piece_starts, piece_stops, cut_starts, cut_stops = (
                values[is_left] for values in (entry, kinds, piece_starts, piece_stops, cut_starts, cut_stops)
            )
            counts = counts - is_padding
        ends = (cut_stops == piece_stops) & (kinds == ENDS_DOCUMENT)
        starts_cut = self.positions(entry) + (cut_starts - piece_starts)
        return counts, Pieces(starts=starts_cut, lengths=cut_stops - cut_starts, ends_document=ends)

    def positions(self, entries: Any) -> NDArray[np.int64]:
        """Starts of pieces in the corpus: int64 [n], by their numbers or a slice."""
        found: NDArray[np.int64] = self.unshuffled_starts[entries].astype(np.int64)
        blocks = found // self.block_tokens
        found += self.block_starts[blocks] - blocks * self.block_tokens
        return found

    @property
    def num_pieces(self) -> int:
        """The number of pieces of a table with one window."""
        return len(self.unshuffled_starts)

    def window(self, start: int, stop: int) -> PieceTable:
        """The table of only one of the windows, with its blocks."""
        first = int(np.searchsorted(self.shuffled_starts, start, "right")) - 1
        last = int(np.searchsorted(self.shuffled_starts, stop, "left"))
        if last - first == self.num_pieces:
            return self
        unshuffled = self.unshuffled_starts[first:last] - start
        first_block = start // self.block_tokens
        return PieceTable(
            shuffled_starts=(self.shuffled_starts[first : last + 1] - start).astype(np.uint32),
            unshuffled_starts=unshuffled.astype(np.uint32),
            kinds=self.kinds[first:last],
            block_tokens=self.block_tokens,
            block_starts=self.block_starts[first_block : first_block + int(unshuffled.max()) // self.block_tokens + 1],
        )

    @classmethod
    def joined(cls, tables: Sequence[PieceTable]) -> tuple[PieceTable, list[int]]:
        """One table from several tables of one window each, and the start of each in it."""
        size = tables[0].block_tokens
        # the rows of a window may have more positions than its blocks
        rooms = [max(len(table.block_starts), ceil_div(int(table.shuffled_starts[-1]), size)) for table in tables]
        *starts, length = itertools.accumulate((room * size for room in rooms), initial=0)
        dtype = np.uint32 if length < 1 << 32 else np.int64

        def moved(arrays: Iterable[NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
            return np.concatenate([one.astype(dtype) + dtype(start) for one, start in zip(arrays, starts, strict=True)])

        return cls(
            shuffled_starts=moved((table.shuffled_starts for table in tables), dtype),
            unshuffled_starts=moved((np.append(table.unshuffled_starts, 0) for table in tables), dtype)[:-1],
            kinds=np.concatenate([np.append(table.kinds, np.uint8(PADDING)) for table in tables])[:-1],
            block_tokens=size,
            block_starts=np.concatenate(
                [
                    np.pad(table.block_starts, (0, room - len(table.block_starts)))
                    for table, room in zip(tables, rooms, strict=True)
                ]
            ),
        ), starts


def table_steps(
    order: CorpusOrder, window: Window, block_starts: NDArray[np.int64], block_stops: NDArray[np.int64]
) -> Iterator[float | PieceTable]:
    """Make the table of a window step by step.

    Args:
        block_starts, block_stops: as `CorpusOrder.blocks` has them.

    Yields:
        After each step the finished part, and at last the table.

    Raises:
        ValueError: the window has 2**32 tokens or more.
    """
    length = window.stop - window.start
    if length >= 1 << 32:
        raise ValueError(f"a window of {length} tokens does not fit: give a smaller window_blocks")
    for step in _laid(order, window, block_starts, block_stops):
        if isinstance(step, float):
            yield step
            continue
        shuffled_starts = np.zeros(len(step.lengths) + 1, np.uint32)
        np.cumsum(step.lengths, out=shuffled_starts[1:])
        yield PieceTable(
            shuffled_starts=shuffled_starts,
            unshuffled_starts=step.unshuffled_starts,
            kinds=step.kinds,
            block_tokens=order.block_room,
            block_starts=block_starts,
        )


def _laid(
    order: CorpusOrder, window: Window, block_starts: NDArray[np.int64], block_stops: NDArray[np.int64]
) -> Iterator[float | Laid]:
    if order.pack == "cut":
        return _shuffled(order, window, block_starts, block_stops)
    return packed_whole(order.source, *packing_of(order, window), (block_starts, block_stops))


def packing_of(order: CorpusOrder, window: Window) -> tuple[Sizes, int, Callable[[int], NDArray[np.int64]]]:
    """How a window of a corpus is packed whole: sizes, the number of rows, and the order of so many chunks."""

    def order_of(num_chunks: int) -> NDArray[np.int64]:
        return order.piece_permutation(window, num_chunks).all().view(np.int64)

    return order.sizes, (window.stop - window.start) // order.shape.seq_len, order_of


def _shuffled(
    order: CorpusOrder, window: Window, block_starts: NDArray[np.int64], block_stops: NDArray[np.int64]
) -> Iterator[float | Laid]:
    """The pieces of a window, cut at documents and blocks, in shuffled order, step by step."""
    shifts = np.cumsum(block_stops - block_starts) - block_stops  # from positions in the corpus to unshuffled ones
    at_once = max(1, STEP_TOKENS // order.shape.block_tokens)
    parts, kinds_of_parts = [], []
    for low in range(0, len(block_starts), at_once):
        some = slice(low, low + at_once)
        offsets, ends = order.source.ends(block_starts[some], block_stops[some])
        counts = np.diff(offsets)
        has_end = np.flatnonzero(counts)
        ends_document = np.zeros(len(counts), np.bool_)
        ends_document[has_end] = ends[offsets[1:][has_end] - 1] == block_stops[some][has_end]
        # a piece stops at each end of a document, and where a block stops inside of one
        inside = np.flatnonzero(~ends_document)
        stops = (block_stops + shifts)[some][inside]
        parts.append(np.insert(ends + np.repeat(shifts[some], counts), offsets[1:][inside], stops).astype(np.uint32))
        kinds = np.full(len(parts[-1]), ENDS_DOCUMENT, np.uint8)
        kinds[offsets[1:][inside] + np.arange(len(inside))] = GOES_ON
        kinds_of_parts.append(kinds)
        yield min(0.5, 0.5 * (low + at_once) / len(block_starts))
    starts = np.concatenate([np.zeros(1, np.uint32), *parts])
    all_kinds, count = np.concatenate(kinds_of_parts), len(starts) - 1
    permutation = order.piece_permutation(window, count)
    laid = Laid(np.empty(count, np.uint32), np.empty(count, np.uint32), np.empty(count, np.uint8))
    # a short last step would take almost as long as the others, because the permutation walks to the last piece
    size = ceil_div(count, max(1, round(count / STEP_PIECES)))
    for first in range(0, count, size):
        yield 0.5 + 0.5 * first / count
        some = slice(first, min(first + size, count))
        entry = permutation(np.arange(some.start, some.stop)).view(np.int64)
        laid.unshuffled_starts[some] = begins = starts[entry]
        np.subtract(starts[entry + 1], begins, out=laid.lengths[some])
        laid.kinds[some] = all_kinds[entry]
    yield laid


class _Reading(NamedTuple):
    """The window that a part is read in.

    Args:
        begun_at: the share of the window that was read before.
        due_at: the share from which on there is something to prepare.
    """

    window: Window | None
    begun_at: float
    due_at: float


_NOTHING = _Reading(None, 0.0, 0.0)


class _Kept(NamedTuple):
    """A window that a reader keeps: its place in its table, and the order of its slices."""

    window: Window
    table: PieceTable
    start: int
    samples: Permutation

    def alone(self) -> PieceTable:
        return self.table.window(self.start, self.start + self.window.stop - self.window.start)


class PieceReader:
    """The pieces that samples of one corpus read.

    Making the table of a window scans its document boundaries. The tables of a few windows of each part are kept. If
    samples read many of them together, they are joined. Safe to use from several threads, and in a forked child. Make
    one reader for each position of reading.
    """

    def __init__(self, order: CorpusOrder) -> None:
        self.order = order
        self.before = None if order.place is None else PieceReader(order.place.before)  # for samples that are joined
        self._kept: defaultdict[int, OrderedDict[Window, _Kept]] = defaultdict(OrderedDict)
        # tables that are made step by step
        self._begun: defaultdict[int, dict[Window, Iterator[float | PieceTable]]] = defaultdict(dict)
        self._last: tuple[list[Window], list[_Kept]] = [], []
        # of each part: the window that is read in sequence, where that began, and from where on there is work to do
        self._reading: dict[int, _Reading] = {}
        self._announced: defaultdict[int, OrderedDict[Window, _Blocks]] = defaultdict(OrderedDict)
        self._lock = ForkLock()
        weakref.finalize(self, _release_all, order.source, self._announced).atexit = False

    def pieces_of(
        self, parts: NDArray[np.int64], samples: NDArray[np.int64], *, is_sequential: bool = False
    ) -> tuple[NDArray[np.int64], Pieces]:
        """The pieces that samples read.

        A slice that continues in the next window is read last, so that window is not needed earlier.

        Args:
            parts: int64 [n], the part of each sample; samples of one part are adjacent.
            samples: int64 [n], numbers within the parts, ascending within each.
            is_sequential: whether the following samples will be read next; then tables are made ahead.

        Returns:
            int64 [n], the number of pieces of each sample, and the pieces of all, one after another.
        """
        if not len(samples):
            none = np.empty(0, np.int64)
            return none, Pieces(starts=none, lengths=none, ends_document=np.empty(0, np.bool_))
        place = self.order.place
        if place is not None and (is_joined := samples < place.joined[parts]).any():
            joined, others = is_joined.nonzero()[0], (~is_joined).nonzero()[0]
            of_joined = self._joined_pieces(place, parts[joined], samples[joined], is_sequential=is_sequential)
            of_others = self.pieces_of(parts[others], samples[others], is_sequential=is_sequential)
            return _together([(joined, *of_joined), (others, *of_others)], len(samples))
        return self._pieces_of_slices(parts, samples, is_sequential=is_sequential)

    def _pieces_of_slices(
        self, parts: NDArray[np.int64], samples: NDArray[np.int64], *, is_sequential: bool
    ) -> tuple[NDArray[np.int64], Pieces]:
        """`pieces_of` of samples that are not joined."""
        if is_sequential and self.before is not None:
            self.before.release()  # no row needs what the order before has announced
        order, seq_len = self.order, self.order.shape.seq_len
        runs, bounds, numbers, within = order.runs(parts, samples)
        windows, firsts = _listed(runs), bounds[:-1]
        if is_sequential and not (self._reading or order.source.is_in_memory):
            with self._lock.now:
                self._announce_small_parts(windows)
        kept = self._windows(windows)
        rooms = (runs.stop - runs.start).astype(np.int64)

        def spread(values: NDArray[Any]) -> NDArray[Any]:
            """Repeat a value of each run for each of its samples."""
            return values if len(values) == 1 else values.repeat(bounds[1:] - firsts)

        if is_sequential:  # before the numbers are permuted
            num_slices = -((within - rooms) // seq_len)
            read = numbers[firsts] / num_slices, (numbers[bounds[1:] - 1] + 1) / num_slices
        stops = firsts + np.add.reduceat(numbers < spread((rooms - within) // seq_len), firsts, dtype=np.int64)
        for low, stop, one in zip(firsts.tolist(), stops.tolist(), kept, strict=True):
            # all but a slice that continues in the next window
            numbers[low:stop] = one.samples(numbers[low:stop])
        starts = spread(within) + numbers * seq_len
        left: NDArray[np.int64] | int = seq_len
        if order.epochs is not None:
            left = np.minimum(seq_len, spread(order.pass_stop(runs.part) - runs.start) - starts).astype(np.int64)
        lengths = np.minimum(left, spread(rooms) - starts)
        of = np.arange(len(windows)).repeat(bounds[1:] - firsts)
        if np.count_nonzero(lengths < left):
            found = self._cut_over(kept, np.stack([np.arange(len(samples)), of, starts, lengths]), left)
        else:
            found = _cut(kept, of, starts, lengths)
        if is_sequential:
            self._look_ahead(windows, *read)
        return found

    def _joined_pieces(
        self, place: Place, parts: NDArray[np.int64], samples: NDArray[np.int64], *, is_sequential: bool
    ) -> tuple[NDArray[np.int64], Pieces]:
        """The pieces of samples that each join several samples of the order before."""
        assert self.before is not None, "samples are joined only after a change"
        ratio = self.order.shape.seq_len // place.before.shape.seq_len
        starts = place.first[parts] + samples * ratio
        sizes = np.minimum(ratio, place.stop[parts] - starts)
        before = sizes.cumsum() - sizes
        of_each = np.arange(sizes.sum()) + (starts - before).repeat(sizes)
        counts, pieces = self.before.pieces_of(parts.repeat(sizes), of_each, is_sequential=is_sequential)
        return np.add.reduceat(counts, before), pieces

    def release(self) -> None:
        """Release all windows that were announced."""
        _release_all(self.order.source, self._announced)

    def _cut_over(
        self, kept: list[_Kept], stretches: NDArray[np.int64], left: NDArray[np.int64] | int
    ) -> tuple[NDArray[np.int64], Pieces]:
        """Cut slices, some of which continue in the next window, or in several short ones.

        Args:
            stretches: int64 [4, n], for each slice: its number, the number of its window in `kept`, its start in that
                window, and its tokens there.
            left: int64 [n], tokens of each slice in all windows; or one number for all slices.
        """
        found, rest, windows = [stretches], left - stretches[3], [one.window for one in kept]
        while len(is_over := rest.nonzero()[0]):
            (numbers, of), rest = found[-1][:2, is_over], rest[is_over]
            following = [self.order.window_at(windows[one].part, windows[one].stop) for one in of.tolist()]
            lengths = np.minimum(rest, [window.stop - window.start for window in following])
            found.append(np.stack([numbers, len(windows) + np.arange(len(numbers)), np.zeros_like(numbers), lengths]))
            windows, rest = windows + following, rest - lengths
        kept = self._windows(windows[len(kept) :], kept)
        numbers, of, starts, lengths = (joined := np.concatenate(found, axis=1))[:, joined[0].argsort(kind="stable")]
        counts, pieces = _cut(kept, of, starts, lengths)
        return np.add.reduceat(counts, np.flatnonzero(np.diff(numbers, prepend=-1))), pieces

    def table(self, window: Window) -> PieceTable:
        """The pieces of one window, made when they are first needed."""
        with self._lock.now:
            return self._window(window).alone()

    def _windows(self, windows: list[Window], known: Sequence[_Kept] = ()) -> list[_Kept]:
        """Put windows into few tables, after the known ones."""
        last, found = self._last  # at once: another thread may replace both
        if windows == last and not known:
            return found
        with self._lock.now:
            found = [*known, *map(self._window, windows)]
            if len(tables := {id(one.table) for one in found}) > _CUT_APART:
                found = self._joined(found, tables)
            if not known:
                self._last = windows, found
        return found

    def _window(self, window: Window) -> _Kept:
        kept = self._kept[window.part]
        if window not in kept:
            self._make(window, math.inf)
        kept.move_to_end(window)
        return kept[window]

    def _make(self, window: Window, part: float) -> None:
        """Continue making the table of a window until this part of it is done."""
        kept, begun = self._kept[window.part], self._begun[window.part]
        # taken out while it runs: a fork finds none that does, and one that failed is not used again
        steps = begun.pop(window, None) or table_steps(self.order, window, *self._announce(window))
        for done in steps:
            if isinstance(done, PieceTable):
                kept[window] = _Kept(window, done, 0, self.order.sample_permutation(window))
            elif done >= part:
                begun[window] = steps
                break
        for tables in (kept, begun):
            if len(tables) > _MAX_TABLES:
                tables.pop(next(iter(tables)))

    def _joined(self, found: list[_Kept], tables: Collection[int]) -> list[_Kept]:
        """The same windows in one table, together with the kept windows of other parts in their tables."""
        windows, parts = {one.window: one for one in found}, {one.window.part for one in found}
        for part in self._kept.keys() - parts:
            windows |= {window: one for window, one in self._kept[part].items() if id(one.table) in tables}
        table, starts = PieceTable.joined([one.alone() for one in windows.values()])
        for (window, one), start in zip(list(windows.items()), starts, strict=True):
            windows[window] = one._replace(table=table, start=start)
            if window in self._kept[window.part]:
                self._kept[window.part][window] = windows[window]
        return [windows[one.window] for one in found]

    def _look_ahead(self, windows: list[Window], before: NDArray[np.float64], after: NDArray[np.float64]) -> None:
        """Make tables and announce blocks when they are due."""
        for window, begun, until in zip(windows, before.tolist(), after.tolist(), strict=True):
            reading = self._reading.get(window.part, _NOTHING)
            if reading.window != window:
                self._begin(window, begun, until)
            elif until >= reading.due_at:
                self._prepare(window, reading.begun_at, until)

    def _begin(self, window: Window, before: float, after: float) -> None:
        """Note that a part is now read in a window, and which share of it is read before and after some samples."""
        order = self.order
        pass_stop = order.pass_stop(window.part)
        is_last = pass_stop is not None and pass_stop <= window.stop
        make_at = math.inf if is_last else before + _MADE_FROM * (1 - before)
        # the last rows of the window before are laid out, and perhaps not read yet: nothing is announced now
        announces_nothing = is_last or order.source.is_in_memory
        self._reading[window.part] = _Reading(window, before, make_at if announces_nothing else 0.0)
        if after >= make_at:
            self._make_next(window, before, after)

    def _prepare(self, window: Window, begun_at: float, after: float) -> None:
        """Make the next table shortly before a window ends, and announce blocks.

        Args:
            begun_at, after: the share of the window before its reading began, and after some samples.
        """
        if not self.order.source.is_in_memory:
            with self._lock.now:
                self._announce_ahead(window, _since(begun_at, after), after)
        self._make_next(window, begun_at, after)

    def _make_next(self, window: Window, begun_at: float, after: float) -> None:
        """Make what is due of the table of the next window; if that is very short, also of the one after it.

        Args:
            begun_at, after: as for `_prepare`.
        """
        part = (_since(begun_at, after) - _MADE_FROM) / (_MADE_UNTIL - _MADE_FROM)
        if part <= 0:
            return
        following = [self.order.window_at(window.part, window.stop)]
        if following[0].stop - following[0].start < _SHORT * self.order.window_tokens:
            following.append(self.order.window_at(window.part, following[0].stop))
        with self._lock.now:
            for one in following:
                if one not in self._kept[window.part]:
                    self._make(one, math.inf if part >= 1 else part)
        if self.order.source.is_in_memory and part >= 1:
            self._reading[window.part] = _Reading(window, begun_at, math.inf)

    def _announce_ahead(self, window: Window, since: float, after: float) -> None:
        """Announce the blocks of the next windows little by little.

        Args:
            since, after: the share of the window that is read, relative to the rest when reading began, and to all.
        """
        order, windows = self.order, [window]
        size = min(order.window_tokens, order.part_tokens(window.part))
        ahead = AHEAD * size - (1 - after) * (window.stop - window.start)
        reach = window.stop + min(ahead, _ANNOUNCED_PER_READ * since * size)
        if (pass_stop := order.pass_stop(window.part)) is not None:
            reach = min(reach, pass_stop)
        while windows[-1].stop < reach and len(windows) < _MAX_ANNOUNCED:
            windows.append(order.window_at(window.part, windows[-1].stop))
        _release(order.source, self._announced[window.part], windows)
        for one in windows[1:]:
            self._announce(one, (reach - one.start) / (one.stop - one.start))

    def _announce_small_parts(self, windows: list[Window]) -> None:
        """Announce parts of few windows as a whole, as far as they are read."""
        order = self.order
        for window in windows:
            pass_stop = order.pass_stop(window.part)
            is_last = pass_stop is not None and pass_stop <= window.stop
            if not is_last and order.part_tokens(window.part) <= _AT_ONCE * order.window_tokens:
                both = [window, order.window_at(window.part, window.stop)]
                blocks = [_Blocks(*places, len(places[0])) for places in map(order.blocks, both)]
                self._announced[window.part].update(zip(both, blocks, strict=True))
                starts, stops, _ = zip(*blocks, strict=True)
                order.source.will_read(np.concatenate(starts), np.concatenate(stops))

    def _announce(self, window: Window, share: float = 1.0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Announce the blocks of a window, up to a share of them, and return their places."""
        if self.order.source.is_in_memory:
            return self.order.blocks(window)
        announced = self._announced[window.part]
        starts, stops, done = announced.get(window) or _Blocks(*self.order.blocks(window), 0)
        high = min(len(starts), math.ceil(share * len(starts)))
        if high > done:
            announced[window] = _Blocks(starts, stops, high)
            # more than that come from a reader at places that do not follow each other
            _release(self.order.source, announced, list(announced)[-_MAX_ANNOUNCED:])
            self.order.source.will_read(starts[done:high], stops[done:high])
        return starts, stops


def _cut(
    kept: Sequence[_Kept], of: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], Pieces]:
    """The pieces in stretches of windows, as `PieceTable.cut` returns them.

    Args:
        of: int64 [stretches], the window of each.
        starts, lengths: int64 [stretches], start of each in its window, and its tokens.
    """
    starts = starts + np.array([one.start for one in kept])[of]
    tables = {id(one.table): one.table for one in kept}
    if len(tables) == 1:
        return kept[0].table.cut(starts, lengths)
    which = np.array([id(one.table) for one in kept])[of]
    found = []
    for name, table in tables.items():
        here = np.flatnonzero(which == name)
        if len(here):
            found.append((here, *table.cut(starts[here], lengths[here])))
    return _together(found, len(of))


def _together(
    found: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], Pieces]], count: int
) -> tuple[NDArray[np.int64], Pieces]:
    """The pieces of all stretches from those of some: their numbers, the pieces of each, and these pieces."""
    counts = np.empty(count, np.int64)
    for here, some_counts, _ in found:
        counts[here] = some_counts
    order = np.concatenate([here.repeat(some_counts) for here, some_counts, _ in found]).argsort(kind="stable")
    return counts, Pieces(
        starts=np.concatenate([pieces.starts for _, _, pieces in found])[order],
        lengths=np.concatenate([pieces.lengths for _, _, pieces in found])[order],
        ends_document=np.concatenate([pieces.ends_document for _, _, pieces in found])[order],
    )


def _since(begun_at: float, after: float) -> float:
    """The share that is read of the part of a window after `begun_at`."""
    return 1.0 if begun_at >= 1 else (after - begun_at) / (1 - begun_at)


def _listed(windows: Windows[NDArray[Any]]) -> list[Window]:
    """The windows one by one, with Python integers."""
    return [Windows(*fields) for fields in zip(*(field.tolist() for field in windows), strict=True)]


def _release(source: TokenSource, announced: OrderedDict[Window, _Blocks], kept: Collection[Window]) -> None:
    """Release all windows but these."""
    for window in [window for window in announced if window not in kept]:
        blocks = announced.pop(window)
        source.has_read(blocks.starts[: blocks.num_announced], blocks.stops[: blocks.num_announced])


def _release_all(source: TokenSource, announced: dict[int, OrderedDict[Window, _Blocks]]) -> None:
    for of_part in announced.values():
        _release(source, of_part, ())
