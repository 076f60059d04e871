"""From samples to the documents that they read, and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.order.finding import find_document
from tokshard.runtime.order.mixture import Mixture

if TYPE_CHECKING:
    from tokshard.runtime.plan import StreamPlan


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document in a sample.

    Args:
        corpus: its name in the plan.
        shard: file name.
        document: number in the corpus.
        start, stop: tokens of the document.
    """

    corpus: str
    shard: str
    document: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A part of a document, and the sample that reads it.

    Args:
        epoch: pass over the corpus, from 0.
        sample: global; None if it comes before the first weights that the cursor keeps, so that its number is lost.
        start, stop: tokens of the document.
    """

    epoch: int
    sample: int | None
    start: int
    stop: int


def pieces_of_samples(plan: StreamPlan, mixture: Mixture, samples: NDArray[np.int64]) -> list[list[Piece]]:
    """The parts of documents that global samples read, in order.

    Args:
        samples: int64 [n], ascending, all of them in the plan.
    """
    located, corpus_samples = mixture.locate(samples)
    found: list[list[Piece]] = [[] for _ in samples]
    for number in np.unique(located).tolist():
        mine = np.flatnonzero(located == number)
        counts, pieces = plan.corpora[number].pieces_of(corpus_samples[mine], plan.pass_stop)
        source, name = plan.sources[number], plan.names[number]
        rows = np.repeat(mine, counts).tolist()
        for row, start, length in zip(rows, pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
            place = source.document_at(start)
            begin = start - place.start
            found[row].append(Piece(name, place.shard, place.document, begin, begin + length))
    return found


def occurrences(
    plan: StreamPlan, mixture: Mixture, number: int, document: int, epochs: Iterable[int]
) -> list[Occurrence]:
    """The samples that read a document in some epochs.

    Args:
        number: of the corpus, in plan order.
        document: number in the corpus.

    Raises:
        IndexError: the corpus has no such document.
    """
    corpus, place = plan.corpora[number], plan.sources[number].place_of(document)
    found = []
    for epoch in epochs:
        parts = find_document(corpus, epoch, place.start, place.stop, pass_stop=plan.pass_stop)
        for part in parts:
            is_known = part.corpus_sample >= mixture.balance.counts[number]
            sample = mixture.sample_of(number, part.corpus_sample) if is_known else None
            if sample is not None or not is_known:
                found.append(Occurrence(epoch, sample, part.start - place.start, part.stop - place.start))
    return found
