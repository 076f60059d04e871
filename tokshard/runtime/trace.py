"""From samples to the documents that they read, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.bytes.source import documents_at
from tokshard.runtime.cursor import MAX_SAMPLE
from tokshard.runtime.order.inverse import find_document
from tokshard.runtime.order.mixture import Mixture
from tokshard.runtime.order.pieces import PieceReader
from tokshard.runtime.rows.masks import MaskedTokens

_MASKED = np.array([None, "labels"], object)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document in a sample.

    Args:
        corpus: its name in the plan.
        shard: file name.
        document: number in the corpus.
        start, stop: tokens of the document.
        masked: ``"labels"`` if a mask removes its labels; None: nothing is masked.
    """

    corpus: str
    shard: str
    document: int
    start: int
    stop: int
    masked: str | None = None


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A part of a document, and the sample that reads it.

    Args:
        epoch: pass over the corpus, from 0.
        sample: global sample; None if it comes before the first weights that the cursor keeps, so that its number is
            lost.
        start, stop: tokens of the document.
    """

    epoch: int
    sample: int | None
    start: int
    stop: int


def pieces_of_samples(
    corpora: Sequence[tuple[str, PieceReader]],
    mixture: Mixture,
    samples: NDArray[np.int64],
    masked: MaskedTokens | None,
) -> list[list[Piece]]:
    """The parts of documents that global samples read, in order.

    Args:
        corpora: name and reader of each, in plan order.
        samples: int64 [n], ascending within each stream, all of them in the plan.
        masked: documents that are out of the loss.
    """
    located, corpus_samples = mixture.locate(samples)
    found: list[list[Piece]] = [[] for _ in samples]
    for number in np.unique(located).tolist():
        mine, (name, reader) = np.flatnonzero(located == number), corpora[number]
        here, *of_parts = reader.order.by_part(samples[mine], corpus_samples[mine])
        counts, pieces = reader.pieces_of(*of_parts)
        rows = np.repeat(mine[here], counts)
        starts = pieces.starts.tolist()
        places = documents_at(reader.order.source, starts)
        whats = masked_parts(masked, number, pieces.starts, samples[rows])
        for row, place, start, length, what in zip(
            rows.tolist(), places, starts, pieces.lengths.tolist(), whats, strict=True
        ):
            begin = start - place.start
            found[row].append(Piece(name, place.shard, place.document, begin, begin + length, what))
    return found


def masked_parts(
    masked: MaskedTokens | None, corpus: int, starts: NDArray[np.int64], samples: NDArray[np.int64]
) -> list[str | None]:
    """The masking of each piece, as a word or None; arguments as for `MaskedTokens.covers`."""
    found: list[str | None] = [None] * len(starts)
    return found if masked is None else _MASKED[masked.covers(corpus, starts, samples).astype(int)].tolist()


def occurrences(
    readers: Sequence[tuple[PieceReader, Sequence[int] | None]],
    mixture: Mixture,
    number: int,
    document: int,
    epochs: Iterable[int],
) -> list[Occurrence]:
    """The samples that read a document in some epochs of its corpus, or of the parts that have its blocks.

    Args:
        readers: for each length that samples had, a reader of the corpus, and the samples of each stream at which the
            next reader took over; None for the last.
        number: number of the corpus in plan order.
        document: number in the corpus.

    Raises:
        IndexError: the corpus has no such document.
    """
    place = readers[0][0].order.source.place_of(document)
    first = mixture.balance_before(mixture.segments[0].start).counts[number]
    found = []
    for epoch in epochs:
        in_epoch = []
        for reader, ends in readers:
            ones = find_document(reader, epoch, place.start, place.stop)
            asked = [reader.order.stream_of(one.part, one.part_sample) for one in ones]
            # together, as a long document is read by many; none has a number near the bound
            numbers = np.array([(stream, min(of_corpus, (1 << 63) - 1)) for stream, of_corpus in asked], np.int64)
            streams, of_corpus = numbers.reshape(-1, 2).T
            is_known = of_corpus >= first[streams]
            samples = np.full(len(ones), -1, np.int64)
            known = streams[is_known]
            samples[is_known] = mixture.samples_of(np.full_like(known, number), of_corpus[is_known], known)
            is_read = ~is_known | ((samples >= 0) & (samples <= MAX_SAMPLE))
            is_read &= True if ends is None else of_corpus < np.array(ends)[streams]
            for at in np.flatnonzero(is_read).tolist():
                sample, start, stop = int(samples[at]) if is_known[at] else None, ones[at].start, ones[at].stop
                in_epoch.append(Occurrence(epoch, sample, start - place.start, stop - place.start))
        found += sorted(in_epoch, key=lambda one: -1 if one.sample is None else one.sample)
    return found
