"""The order of one corpus as arithmetic: blocks, epochs, windows, and the slices that samples read.

A corpus is cut into blocks. Every epoch permutes the full ones, and consecutive blocks of that order form windows.
Windows and epochs follow each other without a gap, so that the window of any sample is found by a division. `tables`
has the pieces inside a window. ORDER.md, sections 4 and 6, has the rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError
from tokshard.runtime.order.permutation import KEY_WORDS, Permutation
from tokshard.runtime.order.seeds import MAX_EPOCHS, derive_key

_MAX_PERMUTATIONS, _MAX_DEALS = 8, 64
"""Permutations that are kept, because those of up to 65,536 items take milliseconds to make."""


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
    """The place of a window in the sequence of a corpus.

    Args:
        epoch: pass over the corpus, from 0.
        index: window of that epoch, from 0.
        start, stop: its tokens in the endless sequence.
        first_block, num_blocks: its full blocks in the shuffled order of the epoch.
        tail_tokens: tokens of the corpus's last, short block if this window has it, or 0.
        first_slice: the first slice of the sequence that starts in it.
        num_inside: slices that lie wholly in it; negative if it is shorter than its parts of two slices.
    """

    epoch: int
    index: int
    start: int
    stop: int
    first_block: int
    num_blocks: int
    tail_tokens: int
    first_slice: int
    num_inside: int


class CorpusOrder:
    """Which blocks a window has, and which slice of the sequence a sample reads: of a corpus, or of a part of it.

    The full blocks are dealt once, in an order that no seed changes. `take` is the beginning of this deal, and each
    part every `num_parts`-th block of that. Positions are Python integers, because they can exceed 2**63. The only
    state is a cache of permutations, so readers at different places have an order each.

    Args:
        corpus_tokens: tokens of the corpus.
        content: its fingerprint, 32 bytes.
        seed: of the plan.
        start_epoch: epoch that counts as the first.
        take: read only this part of the full blocks; a smaller part lies inside a larger one.
        stream, num_parts: read only what was dealt to one of so many streams. The last one has the tail.

    Attributes:
        window_tokens: tokens of every window but the last of an epoch.
    """

    def __init__(
        self,
        corpus_tokens: int,
        content: bytes,
        shape: Shape,
        *,
        seed: int,
        start_epoch: int = 0,
        take: float = 1.0,
        stream: int = 0,
        num_parts: int = 1,
    ) -> None:
        self.corpus_tokens, self.shape, self.seed, self.start_epoch = corpus_tokens, shape, seed, start_epoch
        self.take, self.stream, self.num_parts = take, stream, num_parts
        self.window_tokens = shape.window_blocks * shape.block_tokens
        self._content = content
        self._permutation = lru_cache(_MAX_PERMUTATIONS)(self._make_permutation)

    @cached_property
    def num_corpus_blocks(self) -> int:
        """Full blocks of the corpus; the rest is the tail."""
        return self.corpus_tokens // self.shape.block_tokens

    @cached_property
    def num_taken_blocks(self) -> int:
        """Full blocks that all parts read together."""
        return math.floor(Fraction(self.take) * self.num_corpus_blocks + Fraction(1, 2))

    @cached_property
    def num_full_blocks(self) -> int:
        """Full blocks that are read."""
        return -(-(self.num_taken_blocks - self.stream) // self.num_parts)

    @cached_property
    def has_tail(self) -> bool:
        """Whether what is left over from the full blocks of the corpus is read, after all of them."""
        return self.take == 1 and self.stream == self.num_parts - 1

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of an epoch."""
        tail_tokens = self.corpus_tokens % self.shape.block_tokens if self.has_tail else 0
        return self.num_full_blocks * self.shape.block_tokens + tail_tokens

    @cached_property
    def num_windows(self) -> int:
        """Windows of an epoch."""
        return max(1, -(-self.num_full_blocks // self.shape.window_blocks))

    def window_at(self, position: int) -> Window:
        """The window that holds a position of the sequence."""
        epoch, within = divmod(position, self.num_tokens)
        return self.window(epoch, min(within // self.window_tokens, self.num_windows - 1))

    def window(self, epoch: int, index: int) -> Window:
        """A window by epoch and index."""
        tokens, blocks = self.num_tokens, self.shape.window_blocks
        is_last = index == self.num_windows - 1
        start = epoch * tokens + index * self.window_tokens
        stop = (epoch + 1) * tokens if is_last else start + self.window_tokens
        first_slice = -(-start // self.shape.seq_len)
        return Window(
            epoch=epoch,
            index=index,
            start=start,
            stop=stop,
            first_block=index * blocks,
            num_blocks=self.num_full_blocks - index * blocks if is_last else blocks,
            tail_tokens=tokens - self.num_full_blocks * self.shape.block_tokens if is_last else 0,
            first_slice=first_slice,
            num_inside=stop // self.shape.seq_len - first_slice,
        )

    def blocks(self, window: Window) -> NDArray[np.int64]:
        """The blocks of a window, by their number in the corpus; the tail comes last."""
        numbers = np.arange(window.first_block, window.first_block + window.num_blocks, dtype=np.uint64)
        if len(numbers):
            numbers = self.block_permutation(window.epoch)(numbers)
        blocks = self.deal(numbers * np.uint64(self.num_parts) + np.uint64(self.stream)).astype(np.int64)
        return np.append(blocks, self.num_corpus_blocks) if window.tail_tokens else blocks

    def slices(self, window: Window, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which slice each sample of a window reads.

        Args:
            samples: int64 [n], ascending, counted from the first that starts in the window, as are the slices.
        """
        slices = samples.copy()
        inside = slices[: int(np.searchsorted(samples, window.num_inside))]
        if len(inside):
            inside[:] = self.sample_permutation(window)(inside.astype(np.uint64)).astype(np.int64)
        return slices

    @property
    def deal(self) -> Permutation:
        """The order in which full blocks are taken and dealt to streams, for every plan and seed."""
        return _deal(self._content, self.num_corpus_blocks)

    def block_permutation(self, epoch: int) -> Permutation:
        """The order of the full blocks in an epoch."""
        return self._permutation("blocks", epoch, 0, self.num_full_blocks)

    def sample_permutation(self, window: Window) -> Permutation:
        """The order of the slices that lie wholly in a window."""
        return self._permutation("samples", window.epoch, window.index, window.num_inside)

    def piece_permutation(self, window: Window, num_pieces: int) -> Permutation:
        """The order of the pieces of a window. Not cached, because a table needs it once."""
        return self._make_permutation("pieces", window.epoch, window.index, num_pieces)

    def _make_permutation(
        self, purpose: Literal["blocks", "pieces", "samples"], epoch: int, window: int, length: int
    ) -> Permutation:
        epoch += self.start_epoch
        if epoch >= MAX_EPOCHS:
            raise PlanError(
                f"epoch {epoch} of a corpus was asked for, and an order has 2**64 epochs "
                f"(num_tokens is {self.num_tokens}, seq_len {self.shape.seq_len})",
                hint="ask for an earlier sample, or read a larger corpus",
            )
        key = derive_key(
            self.seed,
            purpose,
            corpus=self._content,
            stream=self.stream,
            epoch=epoch,
            window=window,
            words=KEY_WORDS,
        )
        return Permutation(length=length, key=key)


@lru_cache(maxsize=_MAX_DEALS)
def _deal(content: bytes, num_blocks: int) -> Permutation:
    return Permutation(length=num_blocks, key=derive_key(0, "deal", corpus=content, words=KEY_WORDS))
