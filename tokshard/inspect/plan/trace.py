"""Every document that a step or a sample reads, computed only from the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.decode import Decode
from tokshard.format.tables import SourceInfo
from tokshard.inspect.corpus.documents import ID, metadata_of, origin_of
from tokshard.inspect.plan.run import Run, check_sample
from tokshard.runtime.rows.narrow import PADDING_INDEX

_SAMPLES_AT_ONCE = 1_024
_MAX_ROWS = 1 << 20
"""Rows of one step. All are held in memory."""

_KEPT_FACTS = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentFacts:
    """A document, and where it comes from.

    Args:
        corpus: name of the corpus in the plan.
        shard: file name.
        document: number in the corpus, from 0.
        id: from ``--id-field``, if the corpus was built with it.
        source, record_number: its origin, as in `DocumentView`.
        num_tokens: length of the whole document.
        metadata: kept columns except `id`.
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
        step: from 1; None for a sample that belongs to no step or whose step is unknown.
        rank, row: data-parallel rank, and row in the batch of that rank; None together with `step`.
        sample: global number.
        start, stop: which tokens of the document.
        text: the start of these tokens, decoded; None if that was not requested.
        masked: what a mask takes out of the loss: ``"labels"``; None: nothing.
        num_targets: how many of the labels of this part are targets, masks included; None where the corpus has no loss
            spans, so that all are.
    """

    step: int | None
    rank: int | None
    row: int | None
    sample: int
    document: DocumentFacts
    start: int
    stop: int
    text: str | None
    masked: str | None = None
    num_targets: int | None = None


class DocumentReader:
    """Facts and text of the documents in the corpora of a run, which are all on disk.

    Costs a lookup in the tables and, with metadata, one check of each record batch's columns. The tokenizer is loaded
    when text is first requested.
    """

    def __init__(self, run: Run) -> None:
        self._corpora = run.corpora
        self._sources: dict[str, Sequence[SourceInfo]] = {}
        self._decode: Decode | None = None
        self.facts = lru_cache(_KEPT_FACTS)(self._facts)

    def _facts(self, name: str, document: int, shard: str) -> DocumentFacts:
        """The facts about a document; `shard` is the name of the shard that contains it."""
        corpus = self._corpora[name]
        if name not in self._sources:
            self._sources[name] = corpus.sources()
        metadata = metadata_of(corpus, document) if corpus.manifest.columns else {}
        return DocumentFacts(
            corpus=name,
            shard=shard,
            document=document,
            id=metadata.pop(ID, None),
            **origin_of(corpus, self._sources[name], document),
            num_tokens=len(corpus.document(document)),
            metadata=metadata,
        )

    def num_targets(self, name: str, document: int, start: int, stop: int) -> int | None:
        """The targets among the labels of some tokens: the tokens after them. None: the corpus has no spans."""
        corpus = self._corpora[name]
        return int((corpus.target_weights(document)[start + 1 : stop + 1] > 0).sum()) if corpus.has_spans else None

    def text(self, name: str, document: int, start: int, stop: int, *, num_characters: int) -> str:
        """The start of a part of a document, decoded; three dots mark omitted text."""
        corpus = self._corpora[name]
        if self._decode is None:
            self._decode = corpus.decode  # all corpora of a plan have the same tokenizer
        # a token rarely has less than one character
        end = min(stop, start + num_characters)
        text = self._decode(corpus.document(document)[start:end])
        return text[:num_characters] + "..." if len(text) > num_characters or end < stop else text


def trace_steps(
    run: Run, steps: range, *, rank: int | None = None, num_characters: int | None = None
) -> Iterator[list[TraceRow]]:
    """Every document of some steps, step by step, without those that the run left out.

    Args:
        steps: from 1, see `Run`.
        rank: only the rows of this one; None: of all ranks.
        num_characters: length of the text in each row; None: no text.

    Raises:
        UsageError: the step does not exist or was left out, has more than `_MAX_ROWS` rows, or its samples are unknown.
        CorpusError: a corpus cannot be read.
    """
    reader = DocumentReader(run)
    if not steps:
        raise UsageError(f"--step {steps.start}:{steps.stop} contains no step", hint="N:M is steps N to M - 1")
    left_out = set(run.left_out(steps))
    last = next((step for step in reversed(steps) if step not in left_out), steps[-1])
    run.start_of(last)  # refuses a range that is too long, or left out, before anything is shown
    for step in steps:
        if step in left_out:
            continue
        start = np.array([run.start_of(step)], np.int64)
        rows = run.ranks(run.size_of(step), rank)
        num_ranks = rows.num_dealt_together
        if rows.rows_per_rank > _MAX_ROWS:
            raise UsageError(
                f"step {step} has {rows.rows_per_rank:,} rows, and at most {_MAX_ROWS:,} are shown at once",
                hint="show a part of them: --dp-rank R, or --sample N:M",
            )
        samples = rows.samples(start, run.stop.sample, num_ranks=num_ranks)
        yield _rows(run, reader, samples[samples != PADDING_INDEX], rank, num_characters)


def trace_samples(
    run: Run, samples: range, *, rank: int | None = None, num_characters: int | None = None
) -> Iterator[list[TraceRow]]:
    """Every document of some global samples, in parts. Arguments and errors as for `trace_steps`."""
    reader, num_samples = DocumentReader(run), run.stop.sample
    check_sample(samples.stop - 1)
    if not samples or (num_samples is not None and samples.stop > num_samples):
        raise UsageError(
            f"--sample {samples.start}:{samples.stop} is not a range of the plan's samples",
            hint=f"the plan has {'endless' if num_samples is None else f'{num_samples:,}'} samples, counted from 0; "
            "N:M is samples N to M - 1",
        )
    for start in range(samples.start, samples.stop, _SAMPLES_AT_ONCE):
        some = np.arange(start, min(start + _SAMPLES_AT_ONCE, samples.stop))
        yield _rows(run, reader, some, rank, num_characters)


def _rows(
    run: Run, reader: DocumentReader, samples: NDArray[np.int64], only: int | None, length: int | None
) -> list[TraceRow]:
    first = run.cursor.segments[0].start
    if len(samples) and int(samples.min()) < first:
        raise UsageError(
            f"sample {samples.min()} was read under weights that {run.checkpoint} does not keep: it keeps those from "
            f"sample {first} on",
            hint="give an earlier checkpoint",
        )
    found = []
    for sample, pieces in zip(samples.tolist(), run.plan.traces(samples, run.cursor), strict=True):
        step, rank, row = run.place_of(sample) or (None, None, None)
        if only not in (None, rank):
            continue
        for piece in pieces:
            part = piece.corpus, piece.document, piece.start, piece.stop
            num_targets = reader.num_targets(*part)
            found.append(
                TraceRow(
                    step=step,
                    rank=rank,
                    row=row,
                    sample=sample,
                    document=reader.facts(piece.corpus, piece.document, piece.shard),
                    start=piece.start,
                    stop=piece.stop,
                    text=None if length is None else reader.text(*part, num_characters=length),
                    masked=piece.masked,
                    num_targets=0 if num_targets and piece.masked else num_targets,
                )
            )
    return found
