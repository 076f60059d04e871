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
    first = mixture.balance_before(mixture.segments[0].start).counts[number].tolist()
    found = []
    for epoch in epochs:
        in_epoch = []
        for reader, ends in readers:
            for one in find_document(reader, epoch, place.start, place.stop):
                stream, corpus_sample = reader.order.stream_of(one.part, one.part_sample)
                if ends is not None and corpus_sample >= ends[stream]:
                    continue
                is_known = corpus_sample >= first[stream]
                sample = mixture.sample_of(number, corpus_sample, stream) if is_known else None
                if not is_known or (sample is not None and sample <= MAX_SAMPLE):
                    in_epoch.append(Occurrence(epoch, sample, one.start - place.start, one.stop - place.start))
        found += sorted(in_epoch, key=lambda one: -1 if one.sample is None else one.sample)
    return found
