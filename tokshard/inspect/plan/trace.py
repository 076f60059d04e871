"""What a training job read: every document of a step, from the plan alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.corpus import Corpus
from tokshard.format.decode import Decode, load_decoder
from tokshard.format.tables import SourceInfo
from tokshard.inspect.corpus.summary import source_name
from tokshard.inspect.plan.run import Run, check_sample
from tokshard.runtime.plan import Piece
from tokshard.runtime.shards import CorpusSource

ID = "id"
"""The column that ``--id-field`` makes."""

_SAMPLES_AT_ONCE = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentFacts:
    """A document, and where it comes from.

    Args:
        corpus: its name in the plan.
        shard: file name.
        document: number in the corpus, from 0.
        id: from ``--id-field``, if the corpus was built with it.
        source: the input that it comes from.
        record_number: of its record in that input, counted from 1.
        num_tokens: of the whole document.
        metadata: kept columns but `id`.
    """

    corpus: str
    shard: str
    document: int
    id: str | None
    source: str
    record_number: int
    num_tokens: int
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """A part of a document in a sample.

    Args:
        step: counted from 1; None for a sample that belongs to no step, or to one that is not known.
        rank, row: data-parallel rank, and row of its batch; None with `step`.
        sample: global.
        start, stop: tokens of the document.
        text: their start, decoded; None if that was not asked for.
    """

    step: int | None
    rank: int | None
    row: int | None
    sample: int
    document: DocumentFacts
    start: int
    stop: int
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """Which ranks are looked at.

    Args:
        world_size: data-parallel ranks that share the rows of a step.
        rank: the only one that is shown; None: all.
    """

    world_size: int = 1
    rank: int | None = None

    def place_of(self, row: int, global_batch_size: int) -> tuple[int, int]:
        """Rank and row of its batch of a row of the global batch; ranks get contiguous slices."""
        return divmod(row, -(-global_batch_size // self.world_size))

    def shows(self, rank: int | None) -> bool:
        """Whether a row of this rank is shown."""
        return self.rank is None or self.rank == rank


class DocumentReader:
    """Facts and text of the documents of a plan's corpora.

    Every corpus is on disk. Costs a look at the tables, and with metadata the check of a record batch's columns once;
    the tokenizer is loaded when text is first asked for.
    """

    def __init__(self, corpora: dict[str, Corpus]) -> None:
        self._corpora = corpora
        self._sources: dict[str, Sequence[SourceInfo]] = {}
        self._decode: Decode | None = None
        self._facts: dict[tuple[str, int], DocumentFacts] = {}

    @classmethod
    def of(cls, run: Run) -> DocumentReader:
        """Of the corpora of a run."""
        sources = zip(run.plan.names, run.plan.sources, strict=True)
        return cls({name: source.corpus for name, source in sources if isinstance(source, CorpusSource)})

    def facts(self, name: str, document: int, shard: str) -> DocumentFacts:
        """What is known of a document, which lies in a shard."""
        known = self._facts.get((name, document))
        if known is not None:
            return known
        corpus = self._corpora[name]
        if name not in self._sources:
            self._sources[name] = corpus.sources()
        sources, origin = self._sources[name], corpus.provenance(document)
        metadata = corpus.metadata(document) if corpus.manifest.columns else {}
        known = self._facts[name, document] = DocumentFacts(
            corpus=name,
            shard=shard,
            document=document,
            id=metadata.pop(ID, None),
            source=source_name(corpus.manifest, sources, origin.source),
            record_number=origin.record,
            num_tokens=len(corpus.document(document)),
            metadata=metadata,
        )
        return known

    def text(self, name: str, document: int, start: int, stop: int, *, num_characters: int) -> str:
        """The start of a part of a document, decoded; what is left out is marked by three dots."""
        if self._decode is None:
            self._decode = load_decoder(self._corpora[name])  # the corpora of a plan share their tokenizer
        # a token is seldom less than a character
        end = min(stop, start + num_characters)
        text = self._decode(self._corpora[name].document(document)[start:end])
        if len(text) > num_characters or end < stop:
            return text[:num_characters] + "..."
        return text

    def forget(self) -> None:
        """Drop the documents that were looked at."""
        self._facts.clear()


def trace_steps(
    run: Run, steps: range, *, ranks: RankView, num_characters: int | None = None
) -> Iterator[list[TraceRow]]:
    """Every document of steps, step by step.

    Args:
        steps: counted from 1, see `Run`.
        num_characters: of text per row; None: no text.

    Raises:
        UsageError: there is no such step, or it is not known.
        CorpusError: a corpus cannot be read.
    """
    reader = DocumentReader.of(run)
    size, stop = run.global_batch_size, run.plan.num_samples
    if not steps:
        raise UsageError(f"--step {steps.start}:{steps.stop} holds no step", hint="N:M is steps N to M - 1")
    run.start_of(steps[-1])  # a range that goes too far is refused before anything is shown
    for step in steps:
        start = run.start_of(step)
        rows = np.array([row for row in range(size) if ranks.shows(ranks.place_of(row, size)[0])], np.int64)
        samples = rows + start
        if stop is not None:
            samples = samples[samples < stop]
        yield _rows(run, reader, samples, ranks, num_characters)
        reader.forget()


def trace_samples(
    run: Run, samples: range, *, ranks: RankView, num_characters: int | None = None
) -> Iterator[list[TraceRow]]:
    """Every document of global samples, some at a time. Arguments and errors as for `trace_steps`."""
    reader = DocumentReader.of(run)
    num_samples = run.plan.num_samples
    check_sample(samples.stop)
    if not samples or (num_samples is not None and samples.stop > num_samples):
        raise UsageError(
            f"--sample {samples.start}:{samples.stop} is no range of the plan's samples",
            hint=f"the plan has {'endless' if num_samples is None else f'{num_samples:,}'} samples, counted from 0; "
            "N:M is samples N to M - 1",
        )
    for start in range(samples.start, samples.stop, _SAMPLES_AT_ONCE):
        some = np.arange(start, min(start + _SAMPLES_AT_ONCE, samples.stop))
        yield _rows(run, reader, some, ranks, num_characters)
        reader.forget()


def _rows(
    run: Run, reader: DocumentReader, samples: NDArray[np.int64], ranks: RankView, num_characters: int | None
) -> list[TraceRow]:
    first = run.cursor.segments[0].start
    if len(samples) and int(samples[0]) < first:
        raise UsageError(
            f"sample {samples[0]} was read under weights that {run.checkpoint} does not keep: it keeps those from "
            f"sample {first} on",
            hint="give an earlier checkpoint",
        )
    found = []
    for sample, pieces in zip(samples.tolist(), run.plan.traces(samples, run.cursor), strict=True):
        place = run.place_of(sample)
        rank, row = (None, None) if place is None else ranks.place_of(place.row, run.global_batch_size)
        if ranks.shows(rank):
            for piece in pieces:
                step = None if place is None else place.step
                found.append(_row(reader, piece, step, rank, row, sample, num_characters))
    return found


def _row(  # noqa: PLR0917
    reader: DocumentReader,
    piece: Piece,
    step: int | None,
    rank: int | None,
    row: int | None,
    sample: int,
    num_characters: int | None,
) -> TraceRow:
    text = None
    if num_characters is not None:
        text = reader.text(piece.corpus, piece.document, piece.start, piece.stop, num_characters=num_characters)
    return TraceRow(
        step=step,
        rank=rank,
        row=row,
        sample=sample,
        document=reader.facts(piece.corpus, piece.document, piece.shard),
        start=piece.start,
        stop=piece.stop,
        text=text,
    )
