"""A corpus as the streams of a plan read it: in parts, one for each stream, or whole if it is small.

A plan with C streams is C plans side by side: global sample g is sample ``g div C`` of stream ``g mod C``. A large
corpus is dealt to them once, block by block, so that what a stream reads never changes place. Of a small one a part
would be too little to shuffle: the streams read its samples in turn. ORDER.md, section 4, has the rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.bytes.source import TokenSource
from tokshard.runtime.order.shuffled import ShuffledCorpus
from tokshard.runtime.order.windows import Shape

MIN_PART_WINDOWS = 4
"""A corpus is dealt to streams if the part of each has so many windows."""

_MANY = (1 << 63) - 1
"""More samples than a run has."""


def min_blocks(window_blocks: int, num_streams: int) -> int:
    """Full blocks from which on a corpus is dealt to streams."""
    return MIN_PART_WINDOWS * num_streams * window_blocks


def is_dealt(num_full_blocks: int, window_blocks: int, num_streams: int) -> bool:
    """Whether a corpus of so many full blocks is dealt to streams."""
    return num_streams > 1 and num_full_blocks >= min_blocks(window_blocks, num_streams)


class PlannedCorpus:
    """A corpus as the streams of a plan read it. Parts, and their tables, are made when they are first read.

    Args:
        seed: of the plan.
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
        start_epoch: int = 0,
        take: float = 1.0,
        num_streams: int = 1,
    ) -> None:
        self.source, self.shape, self.seed, self.take = source, shape, seed, take
        self.start_epoch, self.num_streams = start_epoch, num_streams
        self._whole = self._shuffled(0, 1)
        self._parts: dict[int, ShuffledCorpus] = {}

    def reader(self) -> PlannedCorpus:
        """The same with tables of its own."""
        return PlannedCorpus(
            self.source,
            self.shape,
            seed=self.seed,
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
        per_part = self.shape.window_blocks
        return num_larger * -(-(small + 1) // per_part) + (self.num_streams - num_larger) * -(-small // per_part)

    def part(self, number: int) -> ShuffledCorpus:
        """A part by its number: of the stream that owns it, or 0 for the whole corpus."""
        if not self.is_dealt:
            return self._whole
        part = self._parts.get(number)
        if part is None:
            # two threads may make it
            part = self._parts.setdefault(number, self._shuffled(number, self.num_streams))
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

    def parts_of(self, start: int, stop: int) -> list[int]:
        """The parts that read some of a stretch of the corpus."""
        if not self.is_dealt:
            return [0]
        order, size = self._whole.order, self.shape.block_tokens
        blocks = np.arange(start // size, -(-stop // size), dtype=np.uint64)
        is_full = blocks < order.num_corpus_blocks
        numbers = order.deal.inverse(blocks[is_full])
        owners = set((numbers[numbers < self.num_full_blocks] % np.uint64(self.num_streams)).tolist())
        if order.has_tail and not is_full.all():
            owners.add(self.num_streams - 1)
        return sorted(owners)

    def _shuffled(self, stream: int, num_parts: int) -> ShuffledCorpus:
        return ShuffledCorpus(
            self.source,
            self.shape,
            seed=self.seed,
            start_epoch=self.start_epoch,
            take=self.take,
            stream=stream,
            num_parts=num_parts,
        )
