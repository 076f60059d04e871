"""The samples that read a stretch of a corpus: a plan followed backwards.

    document ──▶ blocks ──▶ their positions in the epoch ──▶ window ──▶ pieces in the sequence ──▶ slices ──▶ samples

Nothing is replayed. The pieces come from the table of their window; every other arrow inverts a permutation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.runtime.order.shuffled import ShuffledCorpus
from tokshard.runtime.order.windows import CorpusOrder, Window

_NOT_TAKEN = -1
"""The position of a block that `take` leaves out, or that belongs to another stream."""


@dataclass(frozen=True, slots=True)
class FoundTokens:
    """The part of a stretch that one sample reads.

    Args:
        part_sample: sample of the corpus, or of the part of it.
        start, stop: positions in the corpus.
    """

    part_sample: int
    start: int
    stop: int


def find_document(
    corpus: ShuffledCorpus, epoch: int, start: int, stop: int, *, pass_stop: int | None = None
) -> list[FoundTokens]:
    """The samples of an epoch that read a document. Costs the table of each window that holds one of its blocks.

    Args:
        epoch: pass over the corpus, from 0.
        start, stop: the document's tokens in the corpus.
        pass_stop: where a finite pass ends.

    Returns:
        Each token of the document that is read, once; ascending by sample and position.

    Raises:
        DamagedCorpusError: a window has no piece where the document lies: its shard was changed meanwhile.
    """
    if pass_stop is not None and epoch * corpus.num_tokens >= pass_stop:
        return []
    size = corpus.shape.block_tokens
    blocks = np.arange(start // size, -(-stop // size))
    positions = positions_of_blocks(corpus.order, epoch, blocks)
    indices = np.minimum(positions // corpus.shape.window_blocks, corpus.num_windows - 1)
    indices[positions == _NOT_TAKEN] = _NOT_TAKEN
    found: list[FoundTokens] = []
    for index in np.unique(indices[indices != _NOT_TAKEN]).tolist():
        window = corpus.window(epoch, index)
        here = np.flatnonzero(indices == index)
        starts = np.maximum(blocks[here] * size, start)
        lengths = np.minimum((blocks[here] + 1) * size, stop) - starts
        in_window = (positions[here] - window.first_block) * size + starts - blocks[here] * size
        found += _found_in_window(corpus, window, in_window, starts, lengths)
    return sorted(found, key=lambda part: (part.part_sample, part.start))


def _found_in_window(
    corpus: ShuffledCorpus,
    window: Window,
    positions: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> list[FoundTokens]:
    """The samples that read whole pieces of a window.

    Args:
        positions: int64 [pieces], of their first tokens in the window before it is shuffled.
        starts, lengths: int64 [pieces], in the corpus.
    """
    table, seq_len = corpus.table(window), corpus.shape.seq_len
    entries = np.flatnonzero(np.isin(table.unshuffled_starts, positions.astype(np.uint32)))
    entries = entries[np.argsort(table.unshuffled_starts[entries])]
    by_position = np.argsort(positions)
    starts, lengths = starts[by_position], lengths[by_position]
    if not np.array_equal(table.shuffled_starts[entries + 1] - table.shuffled_starts[entries], lengths):
        shard = corpus.source.document_at(int(starts[0])).shard
        raise DamagedCorpusError(
            f"{shard}: the document at token {starts[0]} of the corpus is not a piece of window {window.index} of "
            f"epoch {window.epoch}: the shard was changed under the running job",
            hint=RESTORE,
        )
    found = []
    for entry, start, length in zip(entries.tolist(), starts.tolist(), lengths.tolist(), strict=True):
        # Python integers: a position can lie beyond 2**63
        position = window.start + int(table.shuffled_starts[entry])
        slices = np.arange(position // seq_len, (position + length - 1) // seq_len + 1)
        for number, sample in zip(slices.tolist(), _samples_of(corpus, slices, window), strict=True):
            first = max(position, number * seq_len)
            last = min(position + length, (number + 1) * seq_len)
            found.append(FoundTokens(sample, start + first - position, start + last - position))
    return found


def _samples_of(corpus: ShuffledCorpus, slices: NDArray[np.int64], window: Window) -> list[int]:
    """The samples of ascending slices that reach into a window: the first may start in one before."""
    order, start = corpus.order, int(slices[0]) * corpus.shape.seq_len
    num_before = int(start < window.start)
    found = [samples_of(order, slices[num_before:], window)]
    if num_before:
        found.insert(0, samples_of(order, slices[:1], order.window_at(start)))
    samples: list[int] = np.concatenate(found).tolist()
    return samples


def samples_of(order: CorpusOrder, slices: NDArray[np.int64], window: Window) -> NDArray[np.int64]:
    """The samples that read slices of the sequence: the inverse of `CorpusOrder.slices`.

    Args:
        slices: int64 [n], each starts in `window`.
    """
    first = window.first_slice
    samples = slices - first
    inside = np.flatnonzero(samples < window.num_inside)
    if len(inside):
        permutation = order.sample_permutation(window)
        samples[inside] = permutation.inverse(samples[inside].astype(np.uint64)).astype(np.int64)
    return samples + first


def positions_of_blocks(order: CorpusOrder, epoch: int, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where an epoch has blocks in its shuffled order: the inverse of `CorpusOrder.blocks`.

    Args:
        blocks: int64 [n], numbers of blocks in the corpus; the tail, if it is read, comes after all full blocks.

    Returns:
        int64 [n], -1 for blocks that are not taken, or not of this part.
    """
    num_blocks = order.num_corpus_blocks
    positions = np.full(len(blocks), _NOT_TAKEN, np.int64)
    if order.has_tail:
        positions[blocks == num_blocks] = order.num_full_blocks
    here = np.flatnonzero(blocks < num_blocks)
    dealt = order.deal.inverse(blocks[here].astype(np.uint64))
    numbers, streams = np.divmod(dealt, np.uint64(order.num_parts))
    is_read = (dealt < order.num_taken_blocks) & (streams == order.stream)
    here, numbers = here[is_read], numbers[is_read]
    if len(here):
        positions[here] = order.block_permutation(epoch).inverse(numbers).astype(np.int64)
    return positions
