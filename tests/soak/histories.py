"""Trials of jobs to which something happens again and again, read from real corpora, against the model of the pages."""

from __future__ import annotations

import random
import shutil
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.corpora import TINY_TOKENIZER, Source, write_corpus
from tests.runtime.histories import EVENTS, Dice, Held, Job
from tests.runtime.page_model import Documents
from tests.soak.kinds import Try
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS
from tokshard.format.opening import open_corpus
from tokshard.runtime.bytes.corpus import CorpusSource

LENGTHS = {
    "a": [7, 30, 11, 2] * 9,
    "b": [5, 17, 40, 1, 1] * 7,
    "c": [3],
    "chat": [60, 2, 9, 130, 24, 1] * 6,
    "longer": [9, 30, 1, 5, 12, 2, 1] * 60,
    "halves": [5, 4, 5, 5] * 70,  # with rows of 8, more chunks above half a row than rows
    "spans": [9, 31, 1, 80, 5, 12, 2, 1] * 50,
}
SPANS = {"chat": True, "spans": False}
"""Corpora with loss spans, and whether the spans have weights."""
VOCABULARY = TINY_TOKENIZER.replace(b'"three": 3', b'"three": 99999')


def prepare(folder: Path, stack: ExitStack) -> Try:
    """Write the corpora."""
    warnings.simplefilter("ignore")  # passes end
    rng, first = random.Random(3), 1
    found: dict[str, tuple[Path, Held]] = {}
    for name, lengths in LENGTHS.items():
        path = folder / name
        found[name] = path, write(path, lengths, first, rng, spans=SPANS.get(name))
        first += sum(lengths)

    def try_(seed: int) -> str:
        rng = random.Random(f"histories {seed}")
        place = folder / "lists"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        has_spans = rng.random() < 0.6
        names = [name for name in found if has_spans or name not in SPANS]
        held = {name: replaced(found[name], access=rng.choice(["mmap", "pread"])) for name in names}
        packs: dict[str, Any] = dict.fromkeys(names, "cut")
        if rng.random() < 0.6:
            packs = {name: rng.choice(["cut", "whole"]) for name in names}
        return history(Job(Dice(rng), place.resolve(), held, packs), rng)

    return try_


def history(job: Job, rng: random.Random) -> str:
    """Let things happen to a job."""
    resumes = 0
    for _ in range(rng.choice([12, 25, 60])):
        event = rng.choice((*EVENTS, "read"))
        getattr(job, event)()
        resumes += event == "resume"
    job.read()
    job.resume()
    return f"{'whole' if 'whole' in job.packs.values() else 'cut'}, {'spans' if 'chat' in job.held else 'no spans'}"


def replaced(found: tuple[Path, Held], *, access: Any) -> Held:
    path, held = found
    return Held(
        source=CorpusSource(path, access=access),
        documents=held.documents,
        lengths=held.lengths,
    )


def write(path: Path, lengths: list[int], first: int, rng: random.Random, *, spans: bool | None) -> Held:
    """A corpus whose tokens all differ, in several shards.

    Args:
        spans: whether its loss spans have weights; None: it has none.
    """
    documents, weights = [], []
    for length in lengths:
        documents.append([*range(first, first + length - 1), 0])
        first += length
        weights.append([0.0, *(rng.choice([0.0, 0.0, 1.0, 0.25 if spans else 1.0]) for _ in range(length - 1))])
    metadata: dict[str, Any] = {}
    columns: dict[str, str] = {}
    if spans is not None:
        found = [spans_of(each) for each in weights]
        metadata[LOSS] = [[bound for start, stop, _ in each for bound in (start, stop)] for each in found]
        columns[LOSS] = LOSS_COLUMNS[LOSS]
    if spans:
        metadata[WEIGHTS] = [[weight for _, _, weight in each] for each in found]
        columns[WEIGHTS] = LOSS_COLUMNS[WEIGHTS]
    source = Source(documents=documents, metadata=metadata)
    write_corpus(path, sources=[source], columns=columns, shard_tokens=700, tokenizer=VOCABULARY)
    tokens = [token for document in documents for token in document]
    with open_corpus(path) as corpus:
        content = bytes.fromhex(corpus.fingerprint)
    return Held(
        source=path,
        documents=Documents.of_lengths(content, lengths, tokens.__getitem__, None if spans is None else weights),
        lengths=lengths,
    )


def spans_of(weights: list[float]) -> list[tuple[int, int, float]]:
    """Start, stop and weight of each stretch of one weight above 0."""
    found: list[tuple[int, int, float]] = []
    for place, weight in enumerate(weights):
        if weight and found and found[-1][1:] == (place, weight):
            found[-1] = found[-1][0], place + 1, weight
        elif weight:
            found.append((place, place + 1, weight))
    return found
