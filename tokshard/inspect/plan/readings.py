"""When a document was or will be read: the way back from a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc

from tokshard.errors import UsageError
from tokshard.format.corpus import Corpus
from tokshard.inspect.plan.run import Run
from tokshard.inspect.plan.trace import ID, DocumentFacts, DocumentReader, RankView
from tokshard.inspect.plan.trace_report import facts_json, metadata_text
from tokshard.inspect.terminal import aligned, table
from tokshard.runtime.plan import Reading
from tokshard.runtime.shards import CorpusSource
from tokshard.wording import counted

_MAX_EPOCHS = 16
"""Epochs that are searched unless others are asked for: the next one, the current one, and those before."""

_MAX_DOCUMENTS = 16

When = Literal["read", "skipped", "to come", "never", "not kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlace:
    """A part of a document in a sample, and where that is in the run.

    Args:
        sample: global; None if it came before what the checkpoint keeps.
        step, rank, row: as in a trace.
        start, stop: tokens of the document.
        when: ``"never"``: the run ends before. ``"not kept"``: it was read, the checkpoint no longer says where.
    """

    epoch: int
    sample: int | None
    step: int | None
    rank: int | None
    row: int | None
    start: int
    stop: int
    when: When


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentReadings:
    """A document and when it is read in some epochs."""

    document: DocumentFacts
    epochs: range
    readings: Sequence[ReadingPlace]


def find_documents(run: Run, wanted: str, *, epochs: range | None, ranks: RankView) -> Iterator[DocumentReadings]:
    """When documents are read.

    Args:
        wanted: ``CORPUS:ID``. ID is the number of the document, or in a corpus that keeps ids its id, which several
            documents may share; ``CORPUS:#N`` is always the number. Finding an id reads the ids of the whole corpus.
        epochs: passes over the corpus, from 0; None: up to the one after the current.

    Raises:
        UsageError: there is no such corpus or document.
        CorpusError: a corpus cannot be read.
    """
    name, source, key = _corpus_of(run, wanted)
    reader = DocumentReader.of(run)
    if epochs is None:
        epochs = _default_epochs(run, name)
    for document in _numbers(name, source.corpus, key):
        found = run.plan.find(name, document, run.cursor, epochs=epochs)
        places = [_place(run, reading, ranks) for reading in found]
        yield DocumentReadings(
            document=reader.facts(name, document, source.place_of(document).shard),
            epochs=epochs,
            readings=[place for place in places if ranks.shows(place.rank)],
        )


def readings_text(found: DocumentReadings, run: Run, *, width: int) -> str:
    """A document and its readings as text."""
    facts = found.document
    place = f"record {facts.record_number:,} of {facts.source}, in {facts.shard}"
    epochs = f"epoch {found.epochs[0]}" if len(found.epochs) == 1 else f"epochs {found.epochs[0]} to {found.epochs[-1]}"
    current = f"; the run is in epoch {_epoch(run, facts.corpus)} of this corpus" if run.checkpoint else ""
    lines = [
        ("document", f"{facts.corpus}:{facts.document:,}, {counted(facts.num_tokens, 'token')}, {place}"),
        *([("metadata", metadata)] if (metadata := metadata_text(facts)) else []),
        ("searched", f"{epochs}{current}"),
    ]
    rows: list[Sequence[str]] = [("epoch", "step", "rank", "row", "sample", "tokens", "when")]
    for one in found.readings:
        numbers = ("-" if number is None else f"{number:,}" for number in (one.step, one.rank, one.row, one.sample))
        rows.append((f"{one.epoch:,}", *numbers, f"{one.start:,}-{one.stop:,}", one.when))
    if len(rows) == 1:
        return aligned([*lines, ("", "it is not read in these epochs")], width=width)
    return aligned(lines, width=width) + "\n\n" + table(rows, width=width)


def readings_json(found: DocumentReadings) -> dict[str, Any]:
    """A document and its readings as plain values."""
    return {
        **facts_json(found.document),
        "epochs": [found.epochs.start, found.epochs.stop],
        "readings": [asdict(place) for place in found.readings],
    }


def _default_epochs(run: Run, name: str) -> range:
    stop = _epoch(run, name) + 2
    if run.plan.epochs is not None:
        stop = min(stop, run.plan.epochs)
    return range(max(0, stop - _MAX_EPOCHS), stop)


def _epoch(run: Run, name: str) -> int:
    """The epoch of a corpus that the cursor is in."""
    number = run.plan.names.index(name)
    count = run.plan.mixture(run.cursor).counts_before(run.cursor.sample)[number]
    return count * run.plan.seq_len // run.plan.streams[number].num_tokens


def _place(run: Run, reading: Reading, ranks: RankView) -> ReadingPlace:
    sample = reading.sample
    place = None if sample is None else run.place_of(sample)
    rank, row = (None, None) if place is None else ranks.place_of(place.row, run.global_batch_size)
    return ReadingPlace(
        epoch=reading.epoch,
        sample=sample,
        step=None if place is None else place.step,
        rank=rank,
        row=row,
        start=reading.start,
        stop=reading.stop,
        when=_when(run, sample, is_placed=place is not None),
    )


def _when(run: Run, sample: int | None, *, is_placed: bool) -> When:
    if sample is None:
        return "not kept"
    if any(start <= sample < stop for start, stop in run.cursor.skipped):
        return "skipped"
    if sample < run.cursor.sample:
        return "read"
    return "to come" if is_placed or run.step is None else "never"


def _corpus_of(run: Run, wanted: str) -> tuple[str, CorpusSource, str]:
    # names may hold colons, and so may ids: the longest name counts
    for name, source in sorted(zip(run.plan.names, run.plan.sources, strict=True), key=lambda pair: -len(pair[0])):
        if wanted.startswith(f"{name}:") and isinstance(source, CorpusSource):
            return name, source, wanted.removeprefix(f"{name}:")
    raise UsageError(
        f"{wanted!r} names no document of the plan", hint=f"give CORPUS:ID; corpora are {', '.join(run.plan.names)}"
    )


def _numbers(name: str, corpus: Corpus, key: str) -> list[int]:
    number = key.removeprefix("#")
    has_ids = ID in corpus.manifest.columns
    if key.startswith("#") or not has_ids:
        if not (number.isascii() and number.isdecimal() and int(number) < corpus.num_documents):
            raise UsageError(
                f"corpus {name!r} has no document {key!r}: it has {corpus.num_documents:,}, counted from 0",
                hint=f"give {name}:0 to {name}:{corpus.num_documents - 1}"
                + ("" if has_ids else "; it was built without --id-field, so it keeps no ids"),
            )
        return [int(number)]
    found = _with_id(corpus, key)
    if not found:
        raise UsageError(
            f"corpus {name!r} has no document with id {key!r}", hint=f"{name}:#0 is its first document, by number"
        )
    if len(found) > _MAX_DOCUMENTS:
        raise UsageError(
            f"{len(found):,} documents of corpus {name!r} have id {key!r}",
            hint=f"give one by its number, such as {name}:#{found[0]}",
        )
    return found


def _with_id(corpus: Corpus, key: str) -> list[int]:
    """The documents with an id."""
    found: list[int] = []
    for index in range(len(corpus.shards)):
        shard, first = corpus.shard(index), corpus.shards.first_document(index)
        for number, place in enumerate(shard.places):
            is_equal = pc.equal(pc.cast(shard.columns(number)[ID], "string"), key)
            rows = np.flatnonzero(is_equal.fill_null(False).to_numpy(zero_copy_only=False))
            found += (rows + first).tolist()
            first += place.num_documents
    return found
