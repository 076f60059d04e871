"""The order of one corpus as arithmetic: parts, epochs, windows and slices. ORDER.md, sections 4 and 6, has the rules.

A corpus is cut into blocks. Its full blocks are dealt once to the streams of a plan, in an order that no seed changes,
so that what a stream reads never changes place. Of a small corpus a part would be too little to shuffle: it stays
whole, as part 0, and the streams read its samples in turn. Every epoch of a part permutes its blocks, and consecutive
blocks of that order form windows. Windows and epochs follow each other without a gap, so that the window of any sample
is found by a division. `pieces` has what is inside a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError
from tokshard.runtime.bytes.source import TokenSource
from tokshard.runtime.order.permutation import KEY_WORDS, Permutation
from tokshard.runtime.order.seeds import MAX_EPOCHS, derive_key

MIN_PART_WINDOWS = 4
"""A corpus is dealt to streams if the part of each has so many windows."""

_MANY = (1 << 63) - 1
"""More samples than a run has."""

_SAFE = 1 << 62
"""Positions below it are int64, also after the tokens of an epoch are added."""

_MAX_PERMUTATIONS, _MAX_DEALS = 8, 64
"""Permutations that are kept, because those of up to 65,536 items take milliseconds to make."""

Ints = Any
"""A Python integer, or an array of integers: int64, or Python's where positions exceed 2**63."""


def min_blocks(window_blocks: int, num_streams: int) -> int:
    """Full blocks from which on a corpus is dealt to streams."""
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


@dataclass(frozen=True, slots=True)
class Slices:
    """Where the slices of a part's sequence are. Whatever turns numbers of samples into positions asks here.

    Args:
        seq_len: tokens of a slice.
    """

    seq_len: int

    def starts(self, slices: Ints) -> Ints:
        """The positions at which slices start."""
        if isinstance(slices, np.ndarray) and len(slices) and int(slices.max()) >= _SAFE // self.seq_len:
            slices = slices.astype(object)
        return slices * self.seq_len

    def first_from(self, position: Ints) -> Ints:
        """The first slice that starts at a position, or after it."""
        return -(-position // self.seq_len)

    def holding(self, position: Ints) -> Ints:
        """The slice that holds a position."""
        return position // self.seq_len


@dataclass(frozen=True, eq=False, kw_only=True)
class CorpusOrder:
    """One corpus in the order of a plan. It is a value, and keeps permutations that are slow to make.

    Args:
        start_epoch: epoch that counts as the first.
        take: read only this part of the full blocks; a smaller part lies inside a larger one.
        num_streams: of the plan.
        epochs: after which the sequence of each part ends; None: it is endless.
    """

    source: TokenSource
    shape: Shape
    seed: int
    start_epoch: int = 0
    take: float = 1.0
    num_streams: int = 1
    epochs: Fraction | float | None = None

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
        """Tokens that are left over from the full blocks and are read, by the last part at the end of its epochs."""
        return self.source.num_tokens % self.shape.block_tokens if self.take == 1 else 0

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of an epoch, of all parts together."""
        return self.num_full_blocks * self.shape.block_tokens + self.tail_tokens

    @cached_property
    def is_dealt(self) -> bool:
        """Whether each stream owns a part of it."""
        return is_dealt(self.num_full_blocks, self.shape.window_blocks, self.num_streams)

    @cached_property
    def num_parts(self) -> int:
        """Parts that are shuffled by themselves."""
        return self.num_streams if self.is_dealt else 1

    @cached_property
    def num_windows(self) -> int:
        """Windows of an epoch, of all parts together."""
        return int(np.sum(self.part_windows(np.arange(self.num_parts))))

    @cached_property
    def window_tokens(self) -> int:
        """Tokens of every window but the last of an epoch."""
        return self.shape.window_blocks * self.shape.block_tokens

    @cached_property
    def slices(self) -> Slices:
        """The slices that samples read."""
        return Slices(self.shape.seq_len)

    def part_blocks(self, part: Ints) -> Ints:
        """Full blocks of parts."""
        return -((part - self.num_full_blocks) // self.num_parts)

    def part_tokens(self, part: Ints) -> Ints:
        """Tokens of an epoch of parts."""
        return self.part_blocks(part) * self.shape.block_tokens + (part == self.num_parts - 1) * self.tail_tokens

    def part_windows(self, part: Ints) -> Ints:
        """Windows of an epoch of parts."""
        blocks = self.part_blocks(part)
        return -(-blocks // self.shape.window_blocks) + (blocks == 0)

    def pass_stop(self, part: Ints) -> Ints | None:
        """The positions at which the sequences of parts end; None: they are endless."""
        if self.epochs is None:
            return None
        tokens, epochs = self.part_tokens(part), Fraction(self.epochs)
        if isinstance(tokens, np.ndarray):
            tokens = tokens.astype(object)
        return -(-tokens * epochs.numerator // epochs.denominator)

    def runs(
        self, parts: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> tuple[Window, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Runs of samples whose slices start in the same window.

        Args:
            parts: int64 [n], the part of each sample; those of a part are side by side.
            samples: int64 [n], of the parts, ascending within each.

        Returns:
            The windows of the runs; int64 [runs + 1], the bounds of the runs; int64 [n], the number of each sample
            among those of its window; int64 [runs], where in its window the first slice starts.
        """
        found, slices = self.window_at(parts, self.slices.starts(samples)), self.slices
        is_first = np.ones(len(samples) + 1, np.bool_)
        is_first[1:-1] = (found.start[1:] != found.start[:-1]) | (parts[1:] != parts[:-1])
        bounds = is_first.nonzero()[0]
        windows = Window(*(field[bounds[:-1]] for field in found))
        first = slices.first_from(windows.start)
        numbers = (samples - first.repeat(bounds[1:] - bounds[:-1])).astype(np.int64)
        return windows, bounds, numbers, (slices.starts(first) - windows.start).astype(np.int64)

    def window_at(self, part: Ints, position: Ints) -> Window:
        """The windows that hold positions of the sequences of parts."""
        tokens = self.part_tokens(part if self.is_dealt else 0)
        epoch = position // tokens
        index = (position - epoch * tokens) // self.window_tokens
        return self.window(part, epoch, index - (index == self.part_windows(part if self.is_dealt else 0)))

    def window(self, part: Ints, epoch: Ints, index: Ints) -> Window:
        """Windows by part, epoch and index."""
        of = part if self.is_dealt else 0
        tokens, last = self.part_tokens(of), self.part_windows(of) - 1
        start = epoch * tokens + index * self.window_tokens
        stop = start + self.window_tokens + (index == last) * (tokens - (last + 1) * self.window_tokens)
        return Window(part, epoch, index, start, stop)

    def blocks(self, window: Window) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the blocks of a window start and stop in the corpus: int64 [blocks] each, the tail last."""
        blocks = self.part_blocks(window.part)
        first = window.index * self.shape.window_blocks
        places = np.arange(first, min(first + self.shape.window_blocks, blocks), dtype=np.uint64)
        numbers = self.block_permutation(window.part, window.epoch)(places) if len(places) else places
        starts = self.deal(numbers * np.uint64(self.num_parts) + np.uint64(window.part)).view(np.int64)
        starts = starts * self.shape.block_tokens
        stops = starts + self.shape.block_tokens
        if window.stop - window.start > len(places) * self.shape.block_tokens:
            starts = np.append(starts, self.num_corpus_blocks * self.shape.block_tokens)
            stops = np.append(stops, self.source.num_tokens)
        return starts, stops

    def by_part(
        self, samples: NDArray[np.int64], corpus_samples: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Sort samples of this corpus by the part that they read.

        Args:
            samples: int64 [n], global; ascending within each stream.
            corpus_samples: int64 [n], which samples of this corpus they are in their streams.

        Returns:
            int64 [n] each, part after part: which of the samples they are, the part of each, and which sample of the
            part it is, ascending within the part.
        """
        parts = np.zeros(len(samples), np.int64)
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
        """The stream that reads a sample of a part, and which sample of this corpus it is there."""
        if self.is_dealt:
            return part, part_sample
        corpus_sample, stream = divmod(part_sample, self.num_streams)
        return stream, corpus_sample

    def num_samples(self, epochs: float) -> NDArray[np.int64]:
        """Samples of this corpus in each stream before its part, or the whole corpus, was read so often."""
        streams = np.arange(self.num_streams)
        sizes, which = np.unique(self.part_tokens(streams[: self.num_parts]), return_inverse=True)
        counts = [min(math.ceil(Fraction(epochs) * size / self.shape.seq_len), _MANY) for size in sizes.tolist()]
        found: NDArray[np.int64] = np.array(counts, np.int64)[which]
        return found if self.is_dealt else np.maximum(-(-(found - streams) // self.num_streams), 0)

    @cached_property
    def deal(self) -> Permutation:
        """The order in which full blocks are taken and dealt to streams, for every plan and seed."""
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
        length = self.slices.holding(window.stop) - self.slices.first_from(window.start)
        return self._permutation("samples", window.part, window.epoch, window.index, max(0, length))

    def piece_permutation(self, window: Window, num_pieces: int) -> Permutation:
        """The order of the pieces of a window."""
        return self._permutation("pieces", window.part, window.epoch, window.index, num_pieces)

    def _permutation(
        self, purpose: Literal["blocks", "pieces", "samples"], part: int, epoch: int, window: int, length: int
    ) -> Permutation:
        epoch += self.start_epoch
        if epoch >= MAX_EPOCHS:
            raise PlanError(
                f"epoch {epoch} of a corpus was asked for, and an order has 2**64 epochs "
                f"(num_tokens is {self.num_tokens}, seq_len {self.shape.seq_len})",
                hint="ask for an earlier sample, or read a larger corpus",
            )
        key = derive_key(
            self.seed, purpose, corpus=self._content, stream=part, epoch=epoch, window=window, words=KEY_WORDS
        )
        return Permutation(length=length, key=key)

    @cached_property
    def _content(self) -> bytes:
        return bytes.fromhex(self.source.fingerprint)


@lru_cache(maxsize=_MAX_DEALS)
def _deal(content: bytes, num_blocks: int) -> Permutation:
    return Permutation(length=num_blocks, key=derive_key(0, "deal", corpus=content, words=KEY_WORDS))
