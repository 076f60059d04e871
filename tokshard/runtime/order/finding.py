"""Which samples of a corpus read a stretch of it: the arrows of a plan, followed backwards.

    document ──▶ blocks ──▶ their places in the epoch ──▶ window ──▶ pieces in the stream ──▶ slices ──▶ samples

Nothing is replayed: every arrow is the inverse of a permutation, but for the pieces, which their window's table holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.runtime.order.windows import NOT_TAKEN, CorpusStream, Window


@dataclass(frozen=True, slots=True)
class FoundTokens:
    """What a sample reads of a stretch.

    Args:
        ordinal: sample of the corpus.
        start, stop: positions in the corpus.
    """

    ordinal: int
    start: int
    stop: int


def find_document(
    stream: CorpusStream, epoch: int, start: int, stop: int, *, stream_stop: int | None = None
) -> list[FoundTokens]:
    """Where an epoch reads a document. Costs the table of each window that holds one of its blocks.

    Args:
        epoch: pass over the corpus, from 0.
        start, stop: the document's tokens in the corpus.
        stream_stop: where a finite pass ends.

    Returns:
        Each token of the document that is read, once; ascending by sample and position.

    Raises:
        DamagedCorpusError: a window has no piece where the document lies: its shard was changed meanwhile.
    """
    if stream_stop is not None and epoch * stream.num_tokens >= stream_stop:
        return []
    size = stream.shape.block_tokens
    blocks = np.arange(start // size, -(-stop // size))
    places = stream.places_of_blocks(epoch, blocks)
    indices = np.minimum(places // stream.shape.window_blocks, stream.num_windows - 1)
    indices[places == NOT_TAKEN] = NOT_TAKEN
    found: list[FoundTokens] = []
    for index in np.unique(indices[indices != NOT_TAKEN]).tolist():
        window = stream.window(epoch, index)
        here = np.flatnonzero(indices == index)
        starts = np.maximum(blocks[here] * size, start)
        lengths = np.minimum((blocks[here] + 1) * size, stop) - starts
        in_window = (places[here] - window.first_block) * size + starts - blocks[here] * size
        found += _found_in_window(stream, window, in_window, starts, lengths)
    return sorted(found, key=lambda part: (part.ordinal, part.start))


def _found_in_window(
    stream: CorpusStream,
    window: Window,
    places: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> list[FoundTokens]:
    """The samples that read whole pieces of a window.

    Args:
        places: int64 [pieces], of their first tokens in the window before it is shuffled.
        starts, lengths: int64 [pieces], in the corpus.
    """
    table, seq_len = stream.table(window), stream.shape.seq_len
    entries = np.flatnonzero(np.isin(table.place_starts, places.astype(np.uint32)))
    entries = entries[np.argsort(table.place_starts[entries])]
    by_place = np.argsort(places)
    starts, lengths = starts[by_place], lengths[by_place]
    if not np.array_equal(table.stream_starts[entries + 1] - table.stream_starts[entries], lengths):
        shard = stream.source.document_at(int(starts[0])).shard
        raise DamagedCorpusError(
            f"{shard}: the document at token {starts[0]} of the corpus is not a piece of window {window.index} of "
            f"epoch {window.epoch}: the shard was changed under the running job",
            hint=RESTORE,
        )
    found = []
    for entry, start, length in zip(entries.tolist(), starts.tolist(), lengths.tolist(), strict=True):
        # Python integers: a position can lie beyond 2**63
        position = window.start + int(table.stream_starts[entry])
        slices = np.arange(position // seq_len, (position + length - 1) // seq_len + 1)
        for number, ordinal in zip(slices.tolist(), _samples_of(stream, slices, window), strict=True):
            first = max(position, number * seq_len)
            last = min(position + length, (number + 1) * seq_len)
            found.append(FoundTokens(ordinal, start + first - position, start + last - position))
    return found


def _samples_of(stream: CorpusStream, slices: NDArray[np.int64], window: Window) -> list[int]:
    """The samples of ascending slices that reach into a window: the first may start in one before."""
    start = int(slices[0]) * stream.shape.seq_len
    num_before = int(start < window.start)
    found = [stream.samples_of(slices[num_before:], window)]
    if num_before:
        found.insert(0, stream.samples_of(slices[:1], stream.window_at(start)))
    samples: list[int] = np.concatenate(found).tolist()
    return samples
