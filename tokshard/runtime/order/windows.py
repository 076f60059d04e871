"""The order of one corpus as arithmetic: parts, epochs, windows and slices. ORDER.md, sections 4 and 6, has the rules.

A corpus is cut into blocks. Its full blocks are dealt once to the streams of a plan. The deal does not depend on the
seed, so a stream always reads the same blocks. A part of a small corpus would be too small to shuffle: the corpus is
*shared*, all of it is part 0, and the streams read its samples in turn. Every epoch of a part permutes its blocks, and
consecutive blocks of that order form windows. Windows and epochs follow each other without a gap, so a division finds
the window of any sample. `pieces` handles the inside of a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Generic, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError
from tokshard.forking import cached_property
from tokshard.numbers import Numbers, ceil_div
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


class Windows(NamedTuple, Generic[Numbers]):
    """As many windows of parts as its arrays have entries; of integers, one window.

    Args:
        part: of the corpus.
        epoch: pass over the part, from 0.
        index: window of that epoch, from 0.
        start, stop: its tokens in the endless sequence of the part.
    """

    part: Numbers
    epoch: Numbers
    index: Numbers
    start: Numbers
    stop: Numbers


Window = Windows[int]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Place:
    """The places where a corpus continued after a run changed its `seq_len`: STATE.md, section 4.

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
    """The starts of slices in the sequences of parts, and the slice at a position.

    Args:
        seq_len: tokens of a slice.
        origins: as in `Place`; None: all 0.
    """

    seq_len: int
    origins: NDArray[Any] | None = None

    def starts(self, part: Numbers, slices: Numbers) -> Numbers:
        """The positions at which slices start."""
        is_large = isinstance(slices, np.ndarray) and len(slices) and int(slices.max()) >= _SAFE // self.seq_len
        starts: Numbers = (_exact(slices) if is_large else slices) * self.seq_len + self._origin(part)
        return starts

    def first_at_or_after(self, part: Numbers, position: Numbers) -> Numbers:
        """The first slice that starts at a position, or after it."""
        first = ceil_div(position - self._origin(part), self.seq_len)
        found: Numbers = first * (first > 0)
        return found

    def slice_at(self, part: Numbers, position: Numbers) -> Numbers:
        """The slice that holds a position; negative before the first slice."""
        found: Numbers = (position - self._origin(part)) // self.seq_len
        return found

    def _origin(self, part: Numbers) -> Any:
        if self.origins is None:
            return 0
        return self.origins[part] if isinstance(part, np.ndarray) else int(self.origins[part])


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
        return ceil_div(self.tail_tokens + self.section_tokens, self.shape.seq_len) * self.shape.seq_len

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

    def part_blocks(self, part: Numbers) -> Numbers:
        """Full blocks of parts."""
        blocks: Numbers = ceil_div(-(part - self.num_full_blocks), self.num_parts)
        return blocks

    def part_tokens(self, part: Numbers) -> Numbers:
        """Tokens of an epoch of parts, with padding."""
        is_last, counted = part == self.num_parts - 1, self.counted_tokens
        tokens: Numbers = (
            counted + part * 0 if counted else self.part_blocks(part) * self.block_room + is_last * self.tail_room
        )
        return tokens

    def part_windows(self, part: Numbers) -> Numbers:
        """Windows of an epoch of parts."""
        blocks = self.part_blocks(part)
        windows: Numbers = ceil_div(blocks, self.shape.window_blocks) + (blocks == 0)
        return windows

    def pass_stop(self, part: Numbers) -> Numbers | None:
        """The positions at which the sequences of parts end; None: they are endless."""
        return None if self.epochs is None else self._end_of(part, self.epochs)

    def _end_of(self, part: Numbers, epochs: Fraction | float) -> Numbers:
        """The positions of the sequences of parts after so many epochs, rounded up."""
        tokens, epochs = self.part_tokens(part), Fraction(epochs)
        stops: Numbers = ceil_div(_exact(tokens) * epochs.numerator, epochs.denominator)
        return stops

    def runs(
        self, parts: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> tuple[Windows[NDArray[Any]], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
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
        windows = Windows(*(field[firsts] for field in found))
        first = slices.first_at_or_after(windows.part, windows.start)
        numbers = (samples - first.repeat(bounds[1:] - firsts)).astype(np.int64)
        gaps = slices.starts(windows.part, first) - windows.start
        return windows, bounds, numbers, gaps.astype(np.int64)

    def window_at(self, part: Numbers, position: Numbers) -> Windows[Numbers]:
        """The windows that hold positions of the sequences of parts."""
        epoch_tokens, last = self._epoch_of(part)
        epoch = position // epoch_tokens
        index = (position - epoch * epoch_tokens) // self.window_tokens
        # the last one has the tail, too, and may be longer
        return self._window(part, epoch, index - (index > last) * (index - last), epoch_tokens, last)

    def window(self, part: Numbers, epoch: Numbers, index: Numbers) -> Windows[Numbers]:
        """Windows by part, epoch and index."""
        return self._window(part, epoch, index, *self._epoch_of(part))

    def _window(
        self, part: Numbers, epoch: Numbers, index: Numbers, epoch_tokens: Numbers, last: Numbers
    ) -> Windows[Numbers]:
        start = epoch * epoch_tokens + index * self.window_tokens
        stop = start + self.window_tokens + (index == last) * (epoch_tokens - (last + 1) * self.window_tokens)
        return Windows(part, epoch, index, start, stop)

    def _epoch_of(self, part: Any) -> tuple[Any, Any]:
        """Tokens of an epoch of parts, with padding, and the number of its last window."""
        return (self.part_tokens(part), self.part_windows(part) - 1) if self.is_dealt else self._only_epoch

    @cached_property
    def _only_epoch(self) -> tuple[int, int]:
        """The same of a shared corpus, whose only part has all blocks."""
        return self.padded_tokens, max(1, ceil_div(self.num_full_blocks, self.shape.window_blocks)) - 1

    def blocks(self, window: Window) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The starts of a window's blocks in the corpus, and the latest stops of their tokens.

        Returns:
            int64 [blocks] each, the tail last.
        """
        blocks, first = self.part_blocks(window.part), window.index * self.shape.window_blocks
        stop = first + self.shape.window_blocks
        places = np.arange(first, min(stop, blocks), dtype=np.uint64)
        dealt = self.block_permutation(window.part, window.epoch)(places) if len(places) else places
        numbers = self.deal(dealt * np.uint64(self.num_parts) + np.uint64(window.part)).view(np.int64)
        has_tail = window.part == self.num_parts - 1 and stop >= blocks
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

    def epochs_of(self, tokens: int) -> float:
        """Epochs in so many tokens that were read or left out, padding included; at most those of its pass."""
        return min(tokens / self.padded_tokens, math.inf if self.epochs is None else float(self.epochs))

    def num_samples(self, epochs: float) -> NDArray[np.int64]:
        """Samples of this corpus in each stream until its part, or a shared corpus, is read a number of times."""
        streams = np.arange(self.num_streams)
        parts = streams[: self.num_parts]
        if self.place is None:  # the parts have few sizes
            _, parts, which = np.unique(self.part_tokens(parts), return_index=True, return_inverse=True)
        counts = np.minimum(self.slices.first_at_or_after(parts, self._end_of(parts, epochs)), _MANY).astype(np.int64)
        found: NDArray[np.int64] = counts if self.place is not None else counts[which]
        if not self.is_dealt:
            found = np.maximum(ceil_div(found - streams, self.num_streams), 0)
        return found if self.place is None else np.minimum(found, _MANY - self.place.bases) + self.place.bases

    def resized(self, bases: NDArray[np.int64], seq_len: int) -> CorpusOrder:
        """The order with another length of samples, after some samples of each stream: STATE.md, section 4.

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
        stop[begun] = self.slices.first_at_or_after(parts[begun], self.window_at(parts[begun], last).stop)
        if self.place is not None:  # joined samples belong to a window that has no other
            stop = np.where(used <= self.place.joined, self.place.joined, stop)
        rest = (stop - used).astype(np.int64)
        ratio = 0 if seq_len % self.shape.seq_len else seq_len // self.shape.seq_len
        joined = ceil_div(rest, ratio) if ratio else np.zeros_like(rest)
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
        slices, part = self.slices, window.part
        length = slices.slice_at(part, window.stop) - slices.first_at_or_after(part, window.start)
        return self._permutation("samples", part, window.epoch, window.index, max(0, length))

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


def _exact(numbers: Any) -> Any:
    """Python's integers, one or an array of them."""
    return numbers.astype(object) if isinstance(numbers, np.ndarray) else numbers


@lru_cache(maxsize=_MAX_DEALS)
def _deal(content: bytes, num_blocks: int) -> Permutation:
    return Permutation.seeded(num_blocks, 0, "deal", corpus=content)
