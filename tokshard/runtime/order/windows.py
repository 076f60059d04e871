"""One corpus as an endless stream of shuffled pieces: epochs, windows, and the tables of their pieces.

A corpus of T tokens is cut into blocks, the blocks of an epoch are permuted, and consecutive ones form windows.
Inside a window
the blocks are cut at document boundaries and the pieces are permuted. Windows and epochs follow each other without a
gap, so a position in the stream is plain arithmetic; only what lies inside a window needs its table.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError
from tokshard.runtime.order.forking import ForkLock
from tokshard.runtime.order.permutation import KEY_WORDS, Permutation
from tokshard.runtime.order.seeds import MAX_EPOCHS, Purpose, derive_key
from tokshard.runtime.source import TokenSource

_MAX_TABLES = 2
_MAX_PERMUTATIONS = 8

_READY_AT = 0.8
"""The table of the next window is done when this part of the current one was read."""

_SHORT = 0.25
"""A window of less than this part of a full one is prepared together with the one after it."""

NOT_TAKEN = -1
"""The place of a block that `take` leaves out."""

_BLOCKS_PER_STEP = 4
_PIECES_PER_STEP = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of an order, in tokens and blocks.

    Args:
        seq_len: tokens of a sample.
        block_tokens: consecutive tokens of a corpus that stay together until they are cut at documents.
        window_blocks: blocks of a window.
    """

    seq_len: int
    block_tokens: int
    window_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Where a window lies.

    Args:
        epoch: pass over the corpus, from 0.
        index: window of that epoch, from 0.
        start, stop: its tokens in the endless stream.
        first_block, num_blocks: its full blocks in the shuffled order of the epoch.
        tail_tokens: tokens of the short block that it holds besides, or 0.
    """

    epoch: int
    index: int
    start: int
    stop: int
    first_block: int
    num_blocks: int
    tail_tokens: int


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
    """The pieces of one window in their shuffled order. 8 bytes per piece, 12 while it is made.

    A place is a position in the window before the pieces are permuted: block after block.

    Args:
        stream_starts: uint32 [n + 1], where each piece starts in the window, and the window's length.
        place_starts: uint32 [n], the place of each piece's first token.
        block_tokens: places per block.
        block_starts: int64 [blocks], position in the corpus of each block's first token.
        block_stops: int64 [blocks], the place after each block's last token.
        ends_document: bool [blocks], whether the last token of each block is a delimiter.
    """

    stream_starts: NDArray[np.uint32]
    place_starts: NDArray[np.uint32]
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
        first = self.stream_starts.searchsorted(starts.astype(np.uint32), "right") - 1
        counts = self.stream_starts.searchsorted(stops.astype(np.uint32), "left") - first
        # piece k of a stretch is entry first + k of the table
        after = np.cumsum(counts)
        entry = np.arange(int(after[-1])) + np.repeat(first - after + counts, counts)
        piece_starts = self.stream_starts[entry].astype(np.int64)
        piece_stops = self.stream_starts[entry + 1].astype(np.int64)
        cut_starts, cut_stops = piece_starts.copy(), piece_stops.copy()
        cut_starts[after - counts] = starts
        cut_stops[after - 1] = stops
        places = self.place_starts[entry] + (cut_starts - piece_starts)
        lengths_cut = cut_stops - cut_starts
        blocks = places // self.block_tokens
        # a whole piece ends with its document, unless it ends with its block, of which that is known
        at_block_end = places + lengths_cut == self.block_stops[blocks]
        ends = (cut_stops == piece_stops) & (~at_block_end | self.ends_document[blocks])
        within = places - blocks * self.block_tokens
        return counts, Pieces(starts=self.block_starts[blocks] + within, lengths=lengths_cut, ends_document=ends)

    @property
    def num_pieces(self) -> int:
        """Pieces of the window."""
        return len(self.place_starts)


class _Preparation:
    """A table that is being made.

    Args:
        begun_at: the part of the current window that was read before: a job that begins in a window has less time.
    """

    def __init__(self, window: Window, steps: Generator[float, None, PieceTable], begun_at: float) -> None:
        self.window, self._steps, self._done, self._begun_at = window, steps, 0.0, begun_at
        self._table: PieceTable | None = None

    def advance_with(self, part_of_current: float) -> None:
        """Go on as the current window is read."""
        end = _READY_AT if self._begun_at < _READY_AT else 1.0
        if self._begun_at < 1:
            self.advance((part_of_current - self._begun_at) / (end - self._begun_at))

    def advance(self, part: float) -> None:
        """Go on until this part of it is done."""
        try:
            while self._table is None and self._done < part:
                self._done = next(self._steps)
        except StopIteration as finished:
            self._table = finished.value

    def finish(self) -> PieceTable:
        self.advance(math.inf)
        assert self._table is not None
        return self._table


class CorpusStream:
    """One corpus as the endless stream of shuffled pieces that a plan reads.

    Which window a sample starts in is arithmetic. The table of a window costs its piece table to keep and a scan of its
    document boundaries to make; those of two windows are kept, the current and the next. Safe to use from several
    threads, and in a forked child; who reads at another place than others takes a `reader` of its own.

    Args:
        seed: of the plan.
        ordinal: how often the same content is listed before it in the plan.
        start_epoch: epoch that counts as the first.
        take: read only this part of the full blocks, the same for every seed; a smaller part lies inside a larger one.
    """

    def __init__(
        self,
        source: TokenSource,
        shape: Shape,
        *,
        seed: int,
        ordinal: int = 0,
        start_epoch: int = 0,
        take: float = 1.0,
    ) -> None:
        self.source, self.shape, self.take = source, shape, take
        self.ordinal, self.start_epoch, self._seed = ordinal, start_epoch, seed
        self._content = bytes.fromhex(source.fingerprint)
        self._tables: OrderedDict[tuple[int, int], PieceTable] = OrderedDict()
        self._permutations: OrderedDict[tuple[Purpose, int, int, int], Permutation] = OrderedDict()
        self._ahead: list[_Preparation] = []
        self._lock = ForkLock()

    def reader(self) -> CorpusStream:
        """The same stream with tables of its own."""
        return CorpusStream(
            self.source,
            self.shape,
            seed=self._seed,
            ordinal=self.ordinal,
            start_epoch=self.start_epoch,
            take=self.take,
        )

    @cached_property
    def num_full_blocks(self) -> int:
        """Blocks of `block_tokens` tokens that are read; what is left is the tail."""
        # down to a whole block, but 0.29 of 100 blocks are 29, although 0.29 * 100 is 28.999999999999996
        return int(self.take * (self.source.num_tokens // self.shape.block_tokens) * (1 + 2**-50))

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of an epoch."""
        return self.source.num_tokens if self.take == 1 else self.num_full_blocks * self.shape.block_tokens

    @cached_property
    def num_windows(self) -> int:
        """Windows of an epoch."""
        return max(1, -(-self.num_full_blocks // self.shape.window_blocks))

    def window_at(self, position: int) -> Window:
        """The window that holds a position of the stream."""
        epoch, within = divmod(position, self.num_tokens)
        index = min(within // (self.shape.window_blocks * self.shape.block_tokens), self.num_windows - 1)
        return self.window(epoch, index)

    def window(self, epoch: int, index: int) -> Window:
        """A window by epoch and index."""
        tokens, blocks = self.num_tokens, self.shape.window_blocks
        is_last = index == self.num_windows - 1
        start = epoch * tokens + index * blocks * self.shape.block_tokens
        return Window(
            epoch=epoch,
            index=index,
            start=start,
            stop=(epoch + 1) * tokens if is_last else start + blocks * self.shape.block_tokens,
            first_block=index * blocks,
            num_blocks=self.num_full_blocks - index * blocks if is_last else blocks,
            tail_tokens=tokens - self.num_full_blocks * self.shape.block_tokens if is_last else 0,
        )

    def pieces_of(
        self,
        samples: NDArray[np.int64],
        stream_stop: int | None = None,
        *,
        extra_tokens: int = 0,
        is_sequential: bool = False,
    ) -> tuple[NDArray[np.int64], Pieces]:
        """The pieces that samples read.

        Sample k reads slice ``[j * seq_len, (j + 1) * seq_len)`` of the stream, where j is the entry of k in a
        permutation of all samples that lie in the same window. One that goes on in the next window comes last, so that
        the next window is not needed before.

        Args:
            samples: int64 [n], ascending.
            stream_stop: where a finite pass ends; slices are cut there.
            extra_tokens: read so many tokens of the stream beyond each slice.
            is_sequential: the samples that follow will be asked for next: do a part of making the next window's table.

        Returns:
            int64 [n], how many pieces each sample has, and the pieces of all of them one after another.
        """
        seq_len = self.shape.seq_len
        counts: list[NDArray[np.int64]] = []
        parts: list[Pieces] = []
        done = 0
        while done < len(samples):
            # Python integers: a position can lie beyond 2**63
            window = self.window_at(int(samples[done]) * seq_len)
            first, stop = -(-window.start // seq_len), -(-window.stop // seq_len)
            here = samples[done : done + int(np.searchsorted(samples[done:], stop))]
            starts = self._slices(window, first, here - first) * seq_len + (first * seq_len - window.start)
            found = self._read(window, starts, seq_len + extra_tokens, stream_stop)
            counts += found[0]
            parts += found[1]
            done += len(here)
            if is_sequential and (stream_stop is None or stream_stop > window.stop):
                before, after = int(here[0]) - first, int(here[-1]) + 1 - first
                self._prepare(self.window_at(window.stop), before / (stop - first), after / (stop - first))
        if not parts:
            none = np.empty(0, np.int64)
            return none, Pieces(starts=none, lengths=none, ends_document=np.empty(0, np.bool_))
        if len(parts) == 1:
            return counts[0], parts[0]
        return np.concatenate(counts), Pieces(
            starts=np.concatenate([part.starts for part in parts]),
            lengths=np.concatenate([part.lengths for part in parts]),
            ends_document=np.concatenate([part.ends_document for part in parts]),
        )

    def samples_of(self, slices: NDArray[np.int64], window: Window) -> NDArray[np.int64]:
        """The samples that read slices of the stream; `pieces_of` says which slice a sample reads.

        Args:
            slices: int64 [n], each starts in `window`.
        """
        first = -(-window.start // self.shape.seq_len)
        num_inside = window.stop // self.shape.seq_len - first
        samples = slices - first
        inside = np.flatnonzero(samples < num_inside)
        if len(inside):
            order = self._permutation("samples", window.epoch, window.index, num_inside)
            samples[inside] = order.inverse(samples[inside].astype(np.uint64)).astype(np.int64)
        return samples + first

    def places_of_blocks(self, epoch: int, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where an epoch has blocks in its shuffled order; the tail, if it is read, comes after all full blocks.

        Args:
            blocks: int64 [n], numbers of blocks in the corpus.

        Returns:
            int64 [n], -1 for blocks that are not taken.
        """
        num_blocks = self.source.num_tokens // self.shape.block_tokens
        places = np.where(blocks == num_blocks, self.num_full_blocks if self.take == 1 else NOT_TAKEN, blocks)
        full = np.flatnonzero(blocks < num_blocks)
        order = places[full].astype(np.uint64)
        if self.take != 1 and len(order):
            order = self._subset.inverse(order)
        is_taken = order < self.num_full_blocks
        places[full[~is_taken]] = NOT_TAKEN
        if is_taken.any():
            shuffled = self._permutation("blocks", epoch, 0, self.num_full_blocks)
            places[full[is_taken]] = shuffled.inverse(order[is_taken]).astype(np.int64)
        return places

    def _slices(self, window: Window, first: int, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which slice each sample of a window reads; both count from the first that starts in the window."""
        num_inside = window.stop // self.shape.seq_len - first
        slices = samples.copy()
        inside = slices[: int(np.searchsorted(samples, num_inside))]
        if len(inside):
            order = self._permutation("samples", window.epoch, window.index, num_inside)
            inside[:] = order(inside.astype(np.uint64)).astype(np.int64)
        return slices

    def _read(
        self,
        window: Window,
        starts: NDArray[np.int64],
        length: int,
        stream_stop: int | None,
    ) -> tuple[list[NDArray[np.int64]], list[Pieces]]:
        """The pieces of stretches that start in one window, in order; few of them reach beyond it."""
        counts: list[NDArray[np.int64]] = []
        parts: list[Pieces] = []
        room = window.stop - window.start
        if stream_stop is not None:
            room = min(room, stream_stop - window.start)
        lengths = np.minimum(length, room - starts)
        is_over = starts + length > window.stop - window.start
        if stream_stop is not None and stream_stop <= window.stop:
            is_over[:] = False
        table = self.table(window)
        for group in np.split(np.arange(len(starts)), np.flatnonzero(is_over) + 1):
            if not len(group):
                continue
            found, pieces = table.cut(starts[group], lengths[group])
            counts.append(found)
            parts.append(pieces)
            if is_over[group[-1]]:  # goes on in the next window, or in several if they are short
                more = self._continue(window.stop, length - int(lengths[group[-1]]), stream_stop)
                found[-1] += sum(len(part.starts) for part in more)
                parts.extend(more)
        return counts, parts

    def _continue(self, position: int, length: int, stream_stop: int | None) -> list[Pieces]:
        if stream_stop is not None:
            length = min(length, stream_stop - position)
        parts = []
        while length > 0:
            window = self.window_at(position)
            take = min(length, window.stop - position)
            start = np.array([position - window.start], np.int64)
            parts.append(self.table(window).cut(start, np.array([take], np.int64))[1])
            position, length = position + take, length - take
        return parts

    def table(self, window: Window) -> PieceTable:
        """The pieces of a window, made when it is first asked for."""
        key = (window.epoch, window.index)
        with self._lock:
            table = self._tables.get(key)
            if table is None:
                table = self._preparation(window).finish()
                self._tables[key] = table
                if len(self._tables) > _MAX_TABLES:
                    self._tables.popitem(last=False)
            else:
                self._tables.move_to_end(key)
        return table

    def _prepare(self, window: Window, before: float, after: float) -> None:
        """Make so much of the next table that it is done shortly before the current window is.

        A short window, the last of an epoch, leaves no time for the one after it: that is made along with it.

        Args:
            before, after: the part of the current window that was read before these samples, and with them.
        """
        with self._lock:
            following = [window]
            if window.stop - window.start < _SHORT * self.shape.window_blocks * self.shape.block_tokens:
                following.append(self.window_at(window.stop))
            ahead = []
            for one in following:
                if (one.epoch, one.index) not in self._tables:
                    preparation = self._preparation(one, begun_at=before)
                    preparation.advance_with(after)
                    ahead.append(preparation)
            self._ahead = ahead

    def _preparation(self, window: Window, *, begun_at: float = 0.0) -> _Preparation:
        """The one that is under way, which is forgotten, or a new one. So a fork never finds one that is running."""
        for index, ahead in enumerate(self._ahead):
            if ahead.window == window:
                return self._ahead.pop(index)  # an error ends its generator: it is not used again
        return _Preparation(window, self._table_steps(window), begun_at)

    def _table_steps(self, window: Window) -> Generator[float, None, PieceTable]:
        """Make the table of a window in many small steps; yields which part of it is done."""
        size = self.shape.block_tokens
        block_starts = self._blocks(window) * size
        length = window.stop - window.start
        if length >= 1 << 32:
            raise ValueError(f"a window of {length} tokens does not fit: make window_blocks less")
        places: list[NDArray[np.uint32]] = []
        ends_document = np.empty(len(block_starts), np.bool_)
        block_stops = np.minimum(np.arange(1, len(block_starts) + 1) * size, length)
        for number, start in enumerate(block_starts.tolist()):
            first_place = number * size
            tokens = int(block_stops[number]) - first_place
            _, ends = self.source.ends(np.array([start]), np.array([start + tokens]))
            is_end = len(ends) > 0 and int(ends[-1]) == start + tokens
            ends_document[number] = is_end
            found = np.empty(len(ends) + 1 - is_end, np.uint32)
            found[0] = first_place
            found[1:] = ends[: len(ends) - is_end] - (start - first_place)
            places.append(found)
            if number % _BLOCKS_PER_STEP == 0:
                yield 0.5 * number / len(block_starts)
        places.append(np.array([length], np.uint32))
        starts = np.concatenate(places)
        del places
        count = len(starts) - 1
        order = Permutation(length=count, key=self._key("pieces", window.epoch, window.index))
        stream_starts, place_starts = np.zeros(count + 1, np.uint32), np.empty(count, np.uint32)
        for first in range(0, count, _PIECES_PER_STEP):
            yield 0.5 + 0.5 * first / count
            stop = min(first + _PIECES_PER_STEP, count)
            entry = order(np.arange(first, stop, dtype=np.uint64)).astype(np.int64)
            place_starts[first:stop] = starts[entry]
            lengths = starts[entry + 1] - place_starts[first:stop]
            np.cumsum(lengths, out=stream_starts[first + 1 : stop + 1])
            stream_starts[first + 1 : stop + 1] += stream_starts[first]
        return PieceTable(
            stream_starts=stream_starts,
            place_starts=place_starts,
            block_tokens=size,
            block_starts=block_starts,
            block_stops=block_stops,
            ends_document=ends_document,
        )

    def _blocks(self, window: Window) -> NDArray[np.int64]:
        """The blocks of a window, by their number in the corpus; the tail comes last."""
        order = np.arange(window.first_block, window.first_block + window.num_blocks, dtype=np.uint64)
        if len(order):
            order = self._permutation("blocks", window.epoch, 0, self.num_full_blocks)(order)
        if self.take != 1:
            order = self._subset(order)
        blocks = order.astype(np.int64)
        return np.append(blocks, self.num_full_blocks) if window.tail_tokens else blocks

    @cached_property
    def _subset(self) -> Permutation:
        """All full blocks in the order in which larger parts take them in; neither the plan nor its seed matters."""
        key = derive_key(0, "take", corpus=self._content, words=KEY_WORDS)
        return Permutation(length=self.source.num_tokens // self.shape.block_tokens, key=key)

    def _key(self, purpose: Purpose, epoch: int, window: int, *, words: int = KEY_WORDS) -> NDArray[np.uint64]:
        if epoch + self.start_epoch >= MAX_EPOCHS:
            raise PlanError(
                f"epoch {epoch + self.start_epoch} of a corpus was asked for, and an order has 2**64 epochs "
                f"(num_tokens is {self.num_tokens}, seq_len {self.shape.seq_len})",
                hint="ask for an earlier sample, or read a larger corpus",
            )
        return derive_key(
            self._seed,
            purpose,
            corpus=self._content,
            ordinal=self.ordinal,
            epoch=epoch + self.start_epoch,
            window=window,
            words=words,
        )

    def _permutation(self, purpose: Purpose, epoch: int, window: int, length: int) -> Permutation:
        """A permutation that many samples share, kept for the next of them."""
        key = (purpose, epoch, window, length)
        with self._lock:
            found = self._permutations.get(key)
            if found is None:
                found = Permutation(length=length, key=self._key(purpose, epoch, window))
                self._permutations[key] = found
                if len(self._permutations) > _MAX_PERMUTATIONS:
                    self._permutations.popitem(last=False)
            else:
                self._permutations.move_to_end(key)
        return found
