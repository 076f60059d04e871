"""The samples of a run, past and future, that contain a document: the inverse of a trace."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tokshard.errors import UsageError
from tokshard.inspect.corpus.documents import document_numbers
from tokshard.inspect.plan.run import Run
from tokshard.inspect.plan.trace import DocumentFacts, DocumentReader
from tokshard.runtime import trace
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.options import MAX_EPOCHS, integer

_MAX_EPOCHS = 16
"""Epochs that are searched by default: the next one, the current one, and those before."""

When = Literal["read", "skipped", "to come", "never", "not kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOccurrence:
    """A part of a document in a sample, and where that sample is in the run.

    Args:
        sample: global number; None if it is older than what the checkpoint keeps.
        step, rank, row: as in a trace.
        start, stop: which tokens of the document.
        when: ``"never"``: the run ends earlier. ``"not kept"``: it was read, but the checkpoint no longer says where.
        masked: what a mask takes out of the loss: ``"labels"``; None: nothing.
    """

    epoch: int
    sample: int | None
    step: int | None
    rank: int | None
    row: int | None
    start: int
    stop: int
    when: When
    masked: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentOccurrences:
    """A document and where it occurs in some epochs."""

    document: DocumentFacts
    epochs: range
    occurrences: Sequence[PlacedOccurrence]


def find_documents(
    run: Run, wanted: str, *, epochs: range | None, rank: int | None = None
) -> Iterator[DocumentOccurrences]:
    """Find where documents occur in a run.

    Args:
        wanted: ``CORPUS:ID``. ID is the number of the document or, in a corpus that keeps ids, its id, which several
            documents may share, if one has it; ``CORPUS:#N`` is always the number. Finding an id reads the ids of the
            whole corpus.
        epochs: passes over the corpus, from 0; None: up to the one after the current one.
        rank: only samples of this rank; None: of all.

    Raises:
        UsageError: the corpus or the document does not exist, or no plan has so many epochs.
        CorpusError: a corpus cannot be read.
    """
    name, source, key = _corpus_of(run, wanted)
    reader, masks = DocumentReader(run), run.plan.masked(run.cursor)
    if epochs is None:
        stop = min(current_epoch(run, name) + 2, run.plan.epochs or sys.maxsize)
        epochs = range(max(0, stop - _MAX_EPOCHS), stop)
    integer("an epoch", epochs.stop - 1, most=MAX_EPOCHS)  # all others would be searched before it is refused
    for document in document_numbers(source.corpus, key, corpus_name=f"corpus {name!r}", prefix=f"{name}:"):
        found, span = run.plan.find(name, document, run.cursor, epochs=epochs), source.place_of(document)
        samples = np.array([-1 if reading.sample is None else reading.sample for reading in found], np.int64)
        starts = np.full(len(found), span.start)
        masked = trace.masked_parts(masks, run.plan.names.index(name), starts, samples)
        readings = (_occurrence(run, reading, part) for reading, part in zip(found, masked, strict=True))
        yield DocumentOccurrences(
            document=reader.facts(name, document, span.shard),
            epochs=epochs,
            occurrences=[reading for reading in readings if rank in (None, reading.rank)],
        )


def current_epoch(run: Run, name: str) -> int:
    """The epoch of a corpus that the run is in."""
    number = run.plan.names.index(name)
    counts = run.plan.mixture(run.cursor).counts_before(run.cursor.sample)
    left_out = run.plan.left_out(run.cursor)[number]
    return (run.cursor.tokens_of(counts, run.plan.seq_len)[number] + left_out) // run.plan.corpora[number].padded_tokens


def _occurrence(run: Run, reading: trace.Occurrence, masked: str | None) -> PlacedOccurrence:
    sample = reading.sample
    place = None if sample is None else run.place_of(sample)
    when: When = "to come" if sample is not None and run.stop.has_step(sample) else "never"
    if sample is None:
        when = "not kept"
    elif run.is_skipped(sample):
        when = "skipped"
    elif sample < run.cursor.sample:
        when = "read"
    step, rank, row = place or (None, None, None)
    return PlacedOccurrence(
        epoch=reading.epoch,
        sample=sample,
        step=step,
        rank=rank,
        row=row,
        start=reading.start,
        stop=reading.stop,
        when=when,
        masked=masked,
    )


def _corpus_of(run: Run, wanted: str) -> tuple[str, CorpusSource, str]:
    # names and ids may contain colons: the longest matching name wins
    for name, source in sorted(zip(run.plan.names, run.plan.sources, strict=True), key=lambda pair: -len(pair[0])):
        if wanted.startswith(f"{name}:") and isinstance(source, CorpusSource):
            return name, source, wanted.removeprefix(f"{name}:")
    raise UsageError(
        f"{wanted!r} names no document of the plan", hint=f"give CORPUS:ID; corpora are {', '.join(run.plan.names)}"
    )
