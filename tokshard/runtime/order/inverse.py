"""The samples that read a stretch of a corpus: the inverse of a plan.

    document ──▶ blocks ──▶ places in the epoch of a part ──▶ window ──▶ pieces in the sequence ──▶ slices ──▶ samples

Nothing is replayed. The pieces come from the table of their window; every other arrow inverts a permutation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.numbers import ceil_div
from tokshard.runtime.order.packing import ENDS_DOCUMENT, PADDING
from tokshard.runtime.order.pieces import PieceReader
from tokshard.runtime.order.windows import CorpusOrder, Window


class FoundTokens(NamedTuple):
    """The part of a stretch that one sample reads.

    Args:
        part: of the corpus.
        part_sample: sample of the part.
        start, stop: positions in the corpus.
    """

    part: int
    part_sample: int
    start: int
    stop: int


def find_document(reader: PieceReader, epoch: int, start: int, stop: int) -> list[FoundTokens]:
    """The samples of an epoch that read a document. Makes the table of each window that holds one of its blocks.

    Args:
        epoch: pass over each part, from 0.
        start, stop: the document's tokens in the corpus.

    Returns:
        Each token of the document that is read, once; ascending by part, sample and position.

    Raises:
        DamagedCorpusError: a window has no piece at the document's place: its shard has changed meanwhile.
    """
    order, size = reader.order, reader.order.shape.block_tokens
    blocks = np.arange(start // size, ceil_div(stop, size))
    parts, places = places_of_blocks(order, epoch, blocks)
    # a block has the sections that start in it; of a document that is cut at blocks, each token is one
    bounds = np.clip(np.stack([blocks * size, (blocks + 1) * size]), start, stop) - start
    section = max(1, order.section_tokens)
    first, last = np.minimum(ceil_div(bounds, section) * section, stop - start)
    places[first == last] = -1
    found: list[FoundTokens] = []
    for part in np.unique(parts[places >= 0]).tolist():
        pass_stop = order.pass_stop(part)
        if pass_stop is not None and epoch * order.part_tokens(part) >= pass_stop:
            continue
        indices = np.minimum(places // order.shape.window_blocks, order.part_windows(part) - 1)
        indices[(places < 0) | (parts != part)] = -1
        for index in np.unique(indices[indices >= 0]).tolist():
            window, here = order.window(part, epoch, index), indices == index
            found += _found_in_window(reader, window, start, stop, int((last - first)[here].sum()))
    if (place := order.place) is not None and reader.before is not None:
        ratio = order.shape.seq_len // place.before.shape.seq_len
        for one in find_document(reader.before, epoch, start, stop) if place.joined.any() else ():
            if place.first[one.part] <= one.part_sample < place.stop[one.part] and place.joined[one.part]:
                sample = (one.part_sample - int(place.first[one.part])) // ratio
                found.append(one._replace(part_sample=sample))
    return sorted(found)


def _found_in_window(reader: PieceReader, window: Window, start: int, stop: int, length: int) -> Iterator[FoundTokens]:
    """The samples that read pieces of a document in a window.

    Args:
        start, stop: the document's tokens in the corpus.
        length: how many of these tokens the window has.
    """
    table, slices, place = reader.table(window), reader.order.slices, reader.order.place
    first_slice = 0 if place is None else int(place.joined[window.part])
    positions = table.positions(slice(None))
    entries = np.flatnonzero((positions >= start) & (positions < stop) & (table.kinds != PADDING))
    starts, lengths = positions[entries], np.diff(table.shuffled_starts)[entries].astype(np.int64)
    ends = (starts + lengths)[table.kinds[entries] == ENDS_DOCUMENT]
    if lengths.sum() != length or (ends != stop).any():
        shard = reader.order.source.document_at(start).shard
        raise DamagedCorpusError(
            f"{shard}: the document at token {start} of the corpus is not a piece of window {window.index} of "
            f"epoch {window.epoch}: the shard was changed during the run",
            hint=RESTORE,
        )
    numbers: list[int] = []
    stretches: list[tuple[int, int]] = []
    for entry, piece_start, piece_length in zip(entries.tolist(), starts.tolist(), lengths.tolist(), strict=True):
        # Python integers: a position can lie beyond 2**63
        position = window.start + int(table.shuffled_starts[entry])
        # tokens before the first slice are read with another seq_len
        begin, end = (slices.slice_at(window.part, place) for place in (position, position + piece_length - 1))
        for number in range(max(first_slice, begin), end + 1):
            first = max(slices.starts(window.part, number), position)
            last = min(slices.starts(window.part, number + 1), position + piece_length)
            numbers.append(number)
            stretches.append((piece_start + first - position, piece_start + last - position))
    for sample, stretch in zip(samples_of(reader.order, numbers, window), stretches, strict=True):
        yield FoundTokens(window.part, sample, *stretch)


def samples_of(order: CorpusOrder, slices: list[int], window: Window) -> list[int]:
    """The samples of a part whose slices reach into a window: the inverse of `CorpusOrder.runs`."""
    first, permutation = order.slices.first_at_or_after(window.part, window.start), order.sample_permutation(window)
    inside = [number - first for number in slices if 0 <= number - first < permutation.length]
    known = dict(zip(inside, permutation.inverse(np.array(inside, np.uint64)).tolist(), strict=True))
    return [
        # the first may start in a window before
        samples_of(order, [number], order.window_at(window.part, order.slices.starts(window.part, number)))[0]
        if number < first
        else first + known.get(number - first, number - first)
        for number in slices
    ]


def places_of_blocks(
    order: CorpusOrder, epoch: int, blocks: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The places of blocks in the shuffled order of an epoch, by part: the inverse of `CorpusOrder.blocks`.

    Args:
        blocks: int64 [n], numbers of blocks in the corpus; the tail comes after all full blocks.

    Returns:
        int64 [n] each: the part, and the place in it; -1 for blocks that `take` leaves out.
    """
    parts, places = np.full(len(blocks), order.num_parts - 1, np.int64), np.full(len(blocks), -1, np.int64)
    if order.tail_tokens:
        places[blocks == order.num_corpus_blocks] = order.part_blocks(order.num_parts - 1)
    here = np.flatnonzero(blocks < order.num_corpus_blocks)
    dealt = order.deal.inverse(blocks[here].astype(np.uint64))
    here, dealt = here[dealt < order.num_full_blocks], dealt[dealt < order.num_full_blocks].astype(np.int64)
    parts[here] = dealt % order.num_parts
    for part in np.unique(parts[here]).tolist():
        mine = parts[here] == part
        numbers = (dealt[mine] // order.num_parts).view(np.uint64)
        places[here[mine]] = order.block_permutation(part, epoch).inverse(numbers)
    return parts, places
