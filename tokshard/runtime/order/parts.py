"""A corpus as the streams of a plan read it: in parts, one for each stream, or whole if it is small.

A plan with C streams is C plans side by side: global sample g is sample ``g div C`` of stream ``g mod C``. A large
corpus is dealt to them once, block by block, so that what a stream reads never changes place. Of a small one a part
would be too little to shuffle: the streams read its samples in turn. ORDER.md, section 13, has the rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.order.permutation import KEY_WORDS, Permutation
from tokshard.runtime.order.seeds import derive_key
from tokshard.runtime.order.shuffled import ShuffledCorpus
from tokshard.runtime.order.windows import Part, Shape
from tokshard.runtime.source import TokenSource

MIN_PART_WINDOWS = 4
"""A corpus is dealt to streams if the part of each has so many windows."""

MIN_PART_WINDOW_BLOCKS = 64
"""A window of a part has at least so many blocks, unless the windows of the plan have fewer."""

_MANY = (1 << 63) - 1
"""More samples than a run has."""


def part_window_blocks(window_blocks: int, num_streams: int) -> int:
    """Blocks of the windows of parts. The windows of all streams together have as many as one of a plan without."""
    return min(window_blocks, max(MIN_PART_WINDOW_BLOCKS, window_blocks // num_streams))


def min_blocks(window_blocks: int, num_streams: int) -> int:
    """Full blocks from which on a corpus is dealt to streams."""
    return MIN_PART_WINDOWS * num_streams * part_window_blocks(window_blocks, num_streams)


def is_dealt(num_full_blocks: int, window_blocks: int, num_streams: int) -> bool:
    """Whether a corpus of so many full blocks is dealt to streams."""
    return num_streams > 1 and num_full_blocks >= min_blocks(window_blocks, num_streams)


class PlannedCorpus:
    """A corpus as the streams of a plan read it. Parts, and their tables, are made when they are first read.

    Args:
        seed: of the plan.
        copy_index: corpora before it in the plan that have the same content.
        start_epoch: epoch that counts as the first.
        take: read only this part of the full blocks.
        num_streams: of the plan.
    """

    def __init__(
        self,
        source: TokenSource,
        shape: Shape,
        *,
        seed: int,
        copy_index: int = 0,
        start_epoch: int = 0,
        take: float = 1.0,
        num_streams: int = 1,
    ) -> None:
        self.source, self.shape, self.seed, self.take = source, shape, seed, take
        self.copy_index, self.start_epoch, self.num_streams = copy_index, start_epoch, num_streams
        self._whole = self._shuffled(shape, None)
        self._parts: dict[int, ShuffledCorpus] = {}

    def reader(self) -> PlannedCorpus:
        """The same with tables of its own."""
        return PlannedCorpus(
            self.source,
            self.shape,
            seed=self.seed,
            copy_index=self.copy_index,
            start_epoch=self.start_epoch,
            take=self.take,
            num_streams=self.num_streams,
        )

    @property
    def num_full_blocks(self) -> int:
        """Blocks of `block_tokens` tokens that are read; the rest is the tail."""
        return self._whole.num_full_blocks

    @property
    def num_tokens(self) -> int:
        """Tokens of an epoch, over all streams."""
        return self._whole.num_tokens

    @cached_property
    def is_dealt(self) -> bool:
        """Whether each stream owns a part of it."""
        return is_dealt(self.num_full_blocks, self.shape.window_blocks, self.num_streams)

    @property
    def num_parts(self) -> int:
        """Parts that are shuffled by themselves."""
        return self.num_streams if self.is_dealt else 1

    @property
    def num_windows(self) -> int:
        """Windows of an epoch, over all parts."""
        if not self.is_dealt:
            return self._whole.num_windows
        small, num_larger = divmod(self.num_full_blocks, self.num_streams)
        per_part = self.part_shape.window_blocks
        return num_larger * -(-(small + 1) // per_part) + (self.num_streams - num_larger) * -(-small // per_part)

    @property
    def part_shape(self) -> Shape:
        """The sizes of a part: its windows have fewer blocks."""
        if not self.is_dealt:
            return self.shape
        return replace(self.shape, window_blocks=part_window_blocks(self.shape.window_blocks, self.num_streams))

    def part(self, number: int) -> ShuffledCorpus:
        """A part by its number: of the stream that owns it, or 0 for the whole corpus."""
        if not self.is_dealt:
            return self._whole
        part = self._parts.get(number)
        if part is None:
            words = derive_key(self.seed, "stream", window=number, words=1)
            dealt = Part(stream=number, num_streams=self.num_streams, seed=int(words[0]), deal=self._deal)
            part = self._parts.setdefault(number, self._shuffled(self.part_shape, dealt))  # two threads may make it
        return part

    def by_part(
        self, samples: NDArray[np.int64], corpus_samples: NDArray[np.int64]
    ) -> Iterator[tuple[ShuffledCorpus, NDArray[np.int64] | slice, NDArray[np.int64]]]:
        """Group samples of this corpus by the part that they read.

        Args:
            samples: int64 [n], global; ascending within each stream.
            corpus_samples: int64 [n], which samples of this corpus they are in their streams.

        Returns:
            Of each part: the part, which of the samples read it, and which samples of the part these are, ascending.
        """
        if self.num_streams == 1:
            yield self._whole, slice(None), corpus_samples
            return
        streams = samples % self.num_streams
        if not self.is_dealt:
            numbers = corpus_samples * self.num_streams + streams
            order = np.argsort(numbers)
            yield self._whole, order, numbers[order]
            return
        for stream in np.unique(streams).tolist():
            mine = np.flatnonzero(streams == stream)
            yield self.part(stream), mine, corpus_samples[mine]

    def stream_of(self, part: int, part_sample: int) -> tuple[int, int]:
        """The stream that reads a sample of a part, and which sample of this corpus it is there."""
        if self.is_dealt:
            return part, part_sample
        corpus_sample, stream = divmod(part_sample, self.num_streams)
        return stream, corpus_sample

    def num_samples(self, epochs: float) -> NDArray[np.int64]:
        """Samples of this corpus in each stream before its part, or the whole corpus, was read so often."""
        streams = np.arange(self.num_streams)
        tokens = np.full(1, self.num_tokens)
        if self.is_dealt:
            tokens = -(-(self.num_full_blocks - streams) // self.num_streams) * self.shape.block_tokens
            tokens[-1] += self.num_tokens - self.num_full_blocks * self.shape.block_tokens
        sizes, which = np.unique(tokens, return_inverse=True)
        counts = [min(math.ceil(Fraction(epochs) * size / self.shape.seq_len), _MANY) for size in sizes.tolist()]
        found: NDArray[np.int64] = np.array(counts, np.int64)[which]
        return found if self.is_dealt else np.maximum(-(-(found - streams) // self.num_streams), 0)

    @cached_property
    def _deal(self) -> Permutation:
        content = bytes.fromhex(self.source.fingerprint)
        key = derive_key(self.seed, "deal", corpus=content, copy_index=self.copy_index, words=KEY_WORDS)
        return Permutation(length=self.num_full_blocks, key=key)

    def _shuffled(self, shape: Shape, part: Part | None) -> ShuffledCorpus:
        return ShuffledCorpus(
            self.source,
            shape,
            seed=self.seed,
            copy_index=self.copy_index,
            start_epoch=self.start_epoch,
            take=self.take,
            part=part,
        )
