"""The order of one corpus as arithmetic: parts, epochs, windows and slices. ORDER.md, sections 4 and 6, has the rules.

A corpus is cut into blocks. Its full blocks are dealt once to the streams of a plan, in an order that does not depend
on the seed, so a stream always reads the same blocks. A part of a small corpus would be too small to shuffle: the
corpus is *shared*, all of it is part 0, and the streams read its samples in turn. Every epoch of a part permutes its
blocks, and consecutive blocks of that order form windows. Windows and epochs follow each other without a gap, so a
division finds the window of any sample. `pieces` handles the inside of a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError
from tokshard.forking import cached_property
from tokshard.runtime.bytes.source import TokenSource
from tokshard.runtime.order.packing import Sizes, rows_needed
from tokshard.runtime.order.permutation import NUM_EPOCHS, Permutation

MIN_PART_WINDOWS = 4
"""A corpus is dealt to streams if each part has at least so many windows."""

_MANY = (1 << 63) - 1
"""More samples than a run has."""

_SAFE = 1 << 62
"""Positions below it are int64, also after the tokens of an epoch are added."""

_MAX_PERMUTATIONS, _MAX_DEALS = 8, 64
"""The number of kept permutations. Up to 65,536 items, a permutation takes milliseconds to make."""

Pack = Literal["cut", "whole"]
"""How the rows of a corpus are filled: slices of the sequence of its pieces, or chunks that are not cut."""

BLOCK_SECTIONS = 128
"""Sections of a block of a corpus that is packed whole."""

Ints = Any
"""A Python integer, or an array of integers: int64, or Python's where positions exceed 2**63."""


def min_blocks(window_blocks: int, num_streams: int) -> int:
    """The number of full blocks from which a corpus is dealt to streams."""
    return MIN_PART_WINDOWS * num_streams * window_blocks


def is_dealt(num_full_blocks: int, window_blocks: int, num_streams: int) -> bool:
    """Whether a corpus of so many full blocks is dealt to streams."""
    return num_streams > 1 and num_full_blocks >= min_blocks(window_blocks, num_streams)


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


class Window(NamedTuple):
    """A window of a part, or as many windows as its arrays have entries.

    Args:
        part: of the corpus.
        epoch: pass over the part, from 0.
        index: window of that epoch, from 0.
        start, stop: its tokens in the endless sequence of the part.
    """

    part: Ints
    epoch: Ints
    index: Ints
    start: Ints
    stop: Ints


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Place:
    """Where a corpus continued after a run changed its `seq_len`: STATE.md, section 5.

    The first samples of a part may be *joined*: each has several samples of the order before, one after the other.

    Args:
        before: the order until the change.
        bases: int64 [streams], samples of the corpus in each stream before.
        origins: [parts], the position of the slice with number 0 of each part, if it had one: int64, or Python integers
            above 2**62.
        joined: int64 [parts], how many samples of each part are joined.
        first, stop: int64 [parts], the samples of the order before that they are joined from.
        left_out: tokens that this change and those before it left out.
    """

    before: CorpusOrder
    bases: NDArray[np.int64]
    origins: NDArray[Any]
    joined: NDArray[np.int64]
    first: NDArray[np.int64]
    stop: NDArray[np.int64]
    left_out: int


@dataclass(frozen=True, eq=False, slots=True)
class Slices:
    """The positions of slices in the sequences of parts. Only this class turns numbers of samples into positions.

    Args:
        seq_len: tokens of a slice.
        origins: as in `Place`; None: all 0.
    """

    seq_len: int
    origins: NDArray[Any] | None = None

    def starts(self, part: Ints, slices: Ints) -> Ints:
        """The positions at which slices start."""
        if isinstance(slices, np.ndarray) and len(slices) and int(slices.max()) >= _SAFE // self.seq_len:
            slices = slices.astype(object)
        starts = slices * self.seq_len
        return starts if self.origins is None else starts + self._origin(part)

    def first_from(self, part: Ints, position: Ints) -> Ints:
        """The first slice that starts at a position, or after it."""
        if self.origins is None:
            return -(-position // self.seq_len)
        first = -((self._origin(part) - position) // self.seq_len)
        return first * (first > 0)

    def lead(self, part: Ints, position: Ints) -> Ints:
        """Tokens from a position to the first slice that starts there or later."""
        if self.origins is None:
            return -position % self.seq_len
        gap = self._origin(part) - position
        return np.where(gap > 0, gap, gap % self.seq_len)

    def holding(self, part: Ints, position: Ints) -> Ints:
        """The slice that holds a position; negative before the first slice."""
        return (position if self.origins is None else position - self._origin(part)) // self.seq_len

    def _origin(self, part: Ints) -> Ints:
        assert self.origins is not None
        found = self.origins[part]
        return found if isinstance(part, np.ndarray) else int(found)


@dataclass(frozen=True, eq=False, kw_only=True)
class CorpusOrder:
    """One corpus in the order of a plan: an immutable value. It caches permutations that are slow to make.

    Args:
        start_epoch: number of the first epoch.
        take: read only this part of the full blocks; a smaller part lies inside a larger one.
        num_streams: streams of the plan.
        pack: how its rows are filled. The sequence of a corpus that is packed whole is its rows with their padding.
        epochs: number of epochs after which the sequence of each part ends; None: it is endless.
        place: where it continued with this `seq_len`; None: at its start.
    """

    source: TokenSource
    shape: Shape
    seed: int
    start_epoch: int = 0
    take: float = 1.0
    num_streams: int = 1
    pack: Pack = "cut"
    epochs: Fraction | float | None = None
    place: Place | None = None

    @cached_property
    def num_corpus_blocks(self) -> int:
        """Full blocks of the corpus; the rest is the tail."""
        return self.source.num_tokens // self.shape.block_tokens

    @cached_property
    def num_full_blocks(self) -> int:
        """Full blocks that are read, by all parts together."""
        return math.floor(Fraction(self.take) * self.num_corpus_blocks + Fraction(1, 2))

    @cached_property
    def tail_tokens(self) -> int:
        """Tokens after the last full block, if they are read: by the last part, at the end of its epochs."""
        return self.source.num_tokens % self.shape.block_tokens if self.take == 1 else 0

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of an epoch, of all parts together."""
        return self.num_full_blocks * self.shape.block_tokens + self.tail_tokens

    @cached_property
    def section_tokens(self) -> int:
        """Tokens of a section, which belongs to one block and may end in the next; 0: blocks cut documents."""
        return self.shape.block_tokens // BLOCK_SECTIONS if self.pack == "whole" else 0

    @cached_property
    def block_room(self) -> int:
        """Positions of a full block in the sequence of a part."""
        return self.shape.block_tokens + self.section_tokens

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes that decide how a corpus is packed whole."""
        is_counted = self.num_full_blocks <= self.shape.window_blocks
        return Sizes(self.shape.block_tokens, self.section_tokens, self.shape.seq_len, is_counted)

    @cached_property
    def tail_room(self) -> int:
        """Positions of the tail in the sequence of a part that has several windows, or of a corpus that is cut."""
        if not self.section_tokens or not self.tail_tokens:
            return self.tail_tokens
        return -(-(self.tail_tokens + self.section_tokens) // self.shape.seq_len) * self.shape.seq_len

    @cached_property
    def counted_tokens(self) -> int | None:
        """Positions of an epoch that is one window of a corpus packed whole: its rows are counted. None: of any other.

        Raises:
            PlanError: these are 2**32 or more.
        """
        if not self.section_tokens or not self.sizes.is_counted:
            return None
        numbers = self.deal(np.arange(self.num_full_blocks, dtype=np.uint64)).view(np.int64)
        tokens = rows_needed(self.source, self.sizes, self._bounds(numbers, self.tail_tokens > 0)) * self.shape.seq_len
        if tokens >= 1 << 32:
            raise PlanError(
                f"the rows of a window of {self.num_full_blocks} blocks have {tokens} tokens, expected less than 2**32",
                hint="give a smaller window_blocks",
            )
        return tokens

    @cached_property
    def padded_tokens(self) -> int:
        """Tokens of the samples of an epoch, padding included, of all parts together."""
        return self.counted_tokens or self.num_full_blocks * self.block_room + self.tail_room

    @cached_property
    def is_dealt(self) -> bool:
        """Whether each stream owns a part of the corpus."""
        return is_dealt(self.num_full_blocks, self.shape.window_blocks, self.num_streams)

    @cached_property
    def num_parts(self) -> int:
        """The number of parts. Each is shuffled separately."""
        return self.num_streams if self.is_dealt else 1

    @cached_property
    def num_windows(self) -> int:
        """Windows of an epoch, of all parts together."""
        return int(np.sum(self.part_windows(np.arange(self.num_parts))))

    @cached_property
    def window_tokens(self) -> int:
        """Tokens of every window but the last of an epoch, with padding."""
        return self.shape.window_blocks * self.block_room

    @cached_property
    def slices(self) -> Slices:
        """The slices that samples read."""
        return Slices(self.shape.seq_len, None if self.place is None else self.place.origins)

    def part_blocks(self, part: Ints) -> Ints:
        """Full blocks of parts."""
        return -((part - self.num_full_blocks) // self.num_parts)

    def part_tokens(self, part: Ints) -> Ints:
        """Tokens of an epoch of parts, with padding."""
        if self.counted_tokens:
            return self.counted_tokens + part * 0
        return self.part_blocks(part) * self.block_room + (part == self.num_parts - 1) * self.tail_room

    def part_windows(self, part: Ints) -> Ints:
        """Windows of an epoch of parts."""
        blocks = self.part_blocks(part)
        return -(-blocks // self.shape.window_blocks) + (blocks == 0)

    def pass_stop(self, part: Ints) -> Ints | None:
        """The positions at which the sequences of parts end; None: they are endless."""
        return None if self.epochs is None else self._end_of(part, self.epochs)

    def _end_of(self, part: Ints, epochs: Fraction | float) -> Ints:
        """The positions of the sequences of parts after so many epochs, rounded up."""
        tokens, epochs = self.part_tokens(part), Fraction(epochs)
        if isinstance(tokens, np.ndarray):
            tokens = tokens.astype(object)
        return -(-tokens * epochs.numerator // epochs.denominator)

    def runs(
        self, parts: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> tuple[Window, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Runs of samples whose slices start in the same window.

        Args:
            parts: int64 [n], the part of each sample; samples of one part are adjacent.
            samples: int64 [n], of the parts, ascending within each.

        Returns:
            The windows of the runs; int64 [runs + 1], the bounds of the runs; int64 [n], the number of each sample in
            its window; int64 [runs], the start of the first slice in its window.
        """
        slices = self.slices
        found = self.window_at(parts, slices.starts(parts, samples))
        is_first = np.ones(len(samples) + 1, np.bool_)
        is_first[1:-1] = found.start[1:] != found.start[:-1]
        if self.is_dealt:
            is_first[1:-1] |= parts[1:] != parts[:-1]
        bounds = is_first.nonzero()[0]
        firsts = bounds[:-1]
        windows = Window(*(field[firsts] for field in found))
        first = slices.first_from(windows.part, windows.start)
        numbers = (samples - first.repeat(bounds[1:] - firsts)).astype(np.int64)
        return windows, bounds, numbers, slices.lead(windows.part, windows.start).astype(np.int64)

    def window_at(self, part: Ints, position: Ints) -> Window:
        """The windows that hold positions of the sequences of parts."""
        tokens = self.part_tokens(part if self.is_dealt else 0)
        epoch = position // tokens
        index = (position - epoch * tokens) // self.window_tokens
        last = self.part_windows(part if self.is_dealt else 0) - 1  # it has the tail, too, and may be longer
        return self.window(part, epoch, index - (index > last) * (index - last))

    def window(self, part: Ints, epoch: Ints, index: Ints) -> Window:
        """Windows by part, epoch and index."""
        of = part if self.is_dealt else 0
        tokens, last = self.part_tokens(of), self.part_windows(of) - 1
        start = epoch * tokens + index * self.window_tokens
        stop = start + self.window_tokens + (index == last) * (tokens - (last + 1) * self.window_tokens)
        return Window(part, epoch, index, start, stop)

    def blocks(self, window: Window) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The starts of a window's blocks in the corpus, and the latest stops of their tokens.

        Returns:
            int64 [blocks] each, the tail last.
        """
        blocks = self.part_blocks(window.part)
        first = window.index * self.shape.window_blocks
        places = np.arange(first, min(first + self.shape.window_blocks, blocks), dtype=np.uint64)
        dealt = self.block_permutation(window.part, window.epoch)(places) if len(places) else places
        numbers = self.deal(dealt * np.uint64(self.num_parts) + np.uint64(window.part)).view(np.int64)
        has_tail = window.part == self.num_parts - 1 and window.index == self.part_windows(window.part) - 1
        return self._bounds(numbers, has_tail and self.tail_tokens > 0)

    def _bounds(self, numbers: NDArray[np.int64], has_tail: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The starts of blocks, and the latest stops of their tokens."""
        starts = numbers * self.shape.block_tokens
        stops = starts + self.shape.block_tokens
        if has_tail:
            starts = np.append(starts, self.num_corpus_blocks * self.shape.block_tokens)
            stops = np.append(stops, self.source.num_tokens)
        return starts, np.minimum(stops + self.section_tokens, self.source.num_tokens)

    def by_part(
        self, samples: NDArray[np.int64], corpus_samples: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Sort samples of this corpus by the part that they read.

        Args:
            samples: int64 [n], global; ascending within each stream.
            corpus_samples: int64 [n], which samples of this corpus they are in their streams.

        Returns:
            int64 [n] each, part after part: the index of each in `samples`, its part, and its number in the part,
            ascending within the part.
        """
        parts = np.zeros(len(samples), np.int64)
        if self.place is not None:
            corpus_samples = corpus_samples - self.place.bases[samples % self.num_streams]
        if self.num_streams == 1:
            return np.arange(len(samples)), parts, corpus_samples
        streams = samples % self.num_streams
        if self.is_dealt:
            order = np.argsort(streams, kind="stable")
            return order, streams[order], corpus_samples[order]
        numbers = corpus_samples * self.num_streams + streams
        order = np.argsort(numbers)
        return order, parts, numbers[order]

    def stream_of(self, part: int, part_sample: int) -> tuple[int, int]:
        """The stream that reads a sample of a part, and the sample's number in this corpus there."""
        corpus_sample, stream = (part_sample, part) if self.is_dealt else divmod(part_sample, self.num_streams)
        return stream, corpus_sample + (0 if self.place is None else int(self.place.bases[stream]))

    def num_samples(self, epochs: float) -> NDArray[np.int64]:
        """Samples of this corpus in each stream until its part, or a shared corpus, is read a number of times."""
        streams = np.arange(self.num_streams)
        parts = streams[: self.num_parts]
        if self.place is None:  # the parts have few sizes
            _, parts, which = np.unique(self.part_tokens(parts), return_index=True, return_inverse=True)
        counts = np.minimum(self.slices.first_from(parts, self._end_of(parts, epochs)), _MANY).astype(np.int64)
        found: NDArray[np.int64] = counts if self.place is not None else counts[which]
        if not self.is_dealt:
            found = np.maximum(-(-(found - streams) // self.num_streams), 0)
        return found if self.place is None else np.minimum(found, _MANY - self.place.bases) + self.place.bases

    def resized(self, bases: NDArray[np.int64], seq_len: int) -> CorpusOrder:
        """The order with another length of samples, after some samples of each stream: STATE.md, section 5.

        Every part continues at its first window that no sample has begun. If the new length is a multiple, what is left
        of the window before is joined to rows of that length; else it is left out.

        Args:
            bases: int64 [streams], samples of this corpus in each so far.
        """
        streams, parts = np.arange(self.num_streams), np.arange(self.num_parts)
        given = bases if self.place is None else bases - self.place.bases
        used = given
        if not self.is_dealt:  # the number behind the last sample that was given
            used = np.max((given - 1) * self.num_streams + streams + 1, where=given > 0, initial=0, keepdims=True)
        begun = np.flatnonzero(used)
        last = self.slices.starts(parts[begun], used[begun] - 1)
        stop = np.zeros(self.num_parts, object)
        stop[begun] = self.slices.first_from(parts[begun], self.window_at(parts[begun], last).stop)
        if self.place is not None:  # joined samples belong to a window that has no other
            stop = np.where(used <= self.place.joined, self.place.joined, stop)
        rest = (stop - used).astype(np.int64)
        ratio = 0 if seq_len % self.shape.seq_len else seq_len // self.shape.seq_len
        joined = -(-rest // ratio) if ratio else np.zeros_like(rest)
        origins = self.slices.starts(parts, stop)
        resized = replace(self, shape=replace(self.shape, seq_len=seq_len))
        tokens, now = (order.part_tokens(parts).astype(object) for order in (self, resized))
        origins = origins + origins // tokens * (now - tokens) - joined * seq_len  # epochs may have other lengths now
        if not len(origins) or int(max(abs(origins))) < _SAFE:
            origins = origins.astype(np.int64)
        left_out = (int(used.sum()) - int(given.sum()) + (0 if ratio else int(rest.sum()))) * self.shape.seq_len
        place = Place(
            before=self,
            bases=bases,
            origins=origins,
            joined=joined,
            first=used.astype(np.int64),
            stop=stop.astype(np.int64),
            left_out=left_out + (0 if self.place is None else self.place.left_out),
        )
        return replace(resized, place=place)

    @cached_property
    def deal(self) -> Permutation:
        """The order in which full blocks are taken and dealt to streams: the same for every plan and seed."""
        return _deal(self._content, self.num_corpus_blocks)

    @cached_property
    def block_permutation(self) -> Callable[[int, int], Permutation]:
        """The order of the full blocks of a part in an epoch."""

        @lru_cache(maxsize=_MAX_PERMUTATIONS - 2 + 2 * self.num_parts)
        def made(part: int, epoch: int) -> Permutation:
            return self._permutation("blocks", part, epoch, 0, self.part_blocks(part))

        return made

    def sample_permutation(self, window: Window) -> Permutation:
        """The order of the slices that lie wholly in a window."""
        length = self.slices.holding(window.part, window.stop) - self.slices.first_from(window.part, window.start)
        return self._permutation("samples", window.part, window.epoch, window.index, max(0, length))

    def piece_permutation(self, window: Window, num_pieces: int) -> Permutation:
        """The order of the pieces of a window."""
        return self._permutation("pieces", window.part, window.epoch, window.index, num_pieces)

    def _permutation(
        self, purpose: Literal["blocks", "pieces", "samples"], part: int, epoch: int, window: int, length: int
    ) -> Permutation:
        epoch += self.start_epoch
        if epoch >= NUM_EPOCHS:
            raise PlanError(
                f"epoch {epoch} of a corpus was requested, and an order has 2**64 epochs "
                f"(num_tokens is {self.num_tokens}, seq_len {self.shape.seq_len})",
                hint="read an earlier sample, or a larger corpus",
            )
        fields = {"corpus": self._content, "stream": part, "epoch": epoch, "window": window}
        return Permutation.seeded(length, self.seed, purpose, **fields)

    @cached_property
    def _content(self) -> bytes:
        return bytes.fromhex(self.source.fingerprint)


@lru_cache(maxsize=_MAX_DEALS)
def _deal(content: bytes, num_blocks: int) -> Permutation:
    return Permutation.seeded(num_blocks, 0, "deal", corpus=content)
