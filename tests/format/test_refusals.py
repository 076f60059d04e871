"""What the format room refuses of its callers: no corpus, no such document, no spans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tests.refusals import Refusal, check, refused
from tokshard.errors import MissingCorpusError, UnfinishedCorpusError
from tokshard.format import names
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS
from tokshard.format.opening import open_corpus

GIVE = "give the directory that 'tokshard build --out' wrote"


def opening(directory: Path, *folders: str) -> None:
    """Open a directory with these folders and nothing else."""
    for folder in folders:
        (directory / folder).mkdir()
    open_corpus(directory)


def opening_a_file(directory: Path) -> None:
    (directory / "file").touch()
    open_corpus(directory / "file")


def opening_a_split(directory: Path) -> None:
    for split in (names.TRAIN, names.VALIDATION):
        write_corpus(directory / split, documents_of([3]), tokenizer=TINY_TOKENIZER)
    open_corpus(directory)


def of_a_corpus(read: str, *arguments: Any) -> Any:
    """Call a method of a corpus of five documents in two shards."""

    def call(directory: Path) -> None:
        write_corpus(directory / "corpus", documents_of([3, 1, 4, 2, 5]), shard_tokens=9, tokenizer=TINY_TOKENIZER)
        with open_corpus(directory / "corpus") as corpus:
            getattr(corpus, read)(*arguments)

    return call


def writing(spans: list[int], weight: float | None = None) -> Any:
    """Write a document of four tokens with loss spans."""

    def call(directory: Path) -> None:
        columns = {LOSS: "spans"} if weight is None else LOSS_COLUMNS
        held = {LOSS: [spans], WEIGHTS: [[weight]]}
        source = Source(documents=[[1, 2, 3, 0]], metadata={name: held[name] for name in columns})
        write_corpus(directory / "corpus", sources=[source], columns=columns, tokenizer=TINY_TOKENIZER)

    return call


NO_DOCUMENT = [
    ("document", 5, IndexError, "document 5 of a corpus of 5 documents"),
    ("__getitem__", -6, IndexError, "document -6 of a corpus of 5 documents"),
    ("text", 5, IndexError, "document 5 of a corpus of 5 documents"),
    ("stride_hashes", 3, IndexError, "range object index out of range"),
    ("__getitem__", "1", TypeError, "'str' object cannot be interpreted as an integer"),
    ("__getitem__", 1.0, TypeError, "'float' object cannot be interpreted as an integer"),
    ("__getitem__", slice(0, 2), TypeError, "'slice' object cannot be interpreted as an integer"),
]
NO_SPANS = [
    ([0, 2], "has the span 0 to 2, expected ascending spans that do not touch, within 1 to 4"),
    ([2, 2], "has the span 2 to 2, expected ascending spans that do not touch, within 1 to 4"),
    ([3, 2], "has the span 3 to 2, expected ascending spans that do not touch, within 1 to 4"),
    ([1, 5], "has the span 1 to 5, expected ascending spans that do not touch, within 1 to 4"),
    ([2, 3, 1, 2], "has the span 1 to 2, expected ascending spans that do not touch, within 1 to 4"),
    ([1, 2, 2, 3], "has the span 2 to 3, expected ascending spans that do not touch, within 1 to 4"),
    ([1, 2, 3], "has an odd number of values"),
]

REFUSALS = [
    *(
        Refusal(f"a directory that {what}", call, MissingCorpusError, f"DIR{problem}", GIVE)
        for what, call, problem in [
            ("holds no corpus", opening, " is not a corpus: it has no manifest.json"),
            ("does not exist", lambda directory: open_corpus(directory / "nothing"), "/nothing does not exist"),
            ("is a file", opening_a_file, "/file is a file"),
        ]
    ),
    Refusal(
        "an unfinished build",
        lambda directory: opening(directory, names.WORK),
        UnfinishedCorpusError,
        "DIR holds an unfinished build: it has no manifest.json",
        "run its command again, which 'tokshard status DIR' shows; finished tasks are kept",
    ),
    Refusal(
        "the two corpora of a split",
        opening_a_split,
        MissingCorpusError,
        "DIR is not a corpus, but holds two: a build with a validation split wrote them",
        "give DIR/train or DIR/validation",
    ),
    *(
        Refusal(f"{read} of {index!r}", of_a_corpus(read, index), error, said)
        for read, index, error, said in NO_DOCUMENT
    ),
    *(
        Refusal(f"loss spans {spans}", writing(spans), ValueError, f"loss of document 0 {said}")
        for spans, said in NO_SPANS
    ),
    *(
        Refusal(
            f"the weight {one}",
            writing([1, 3], one),
            ValueError,
            f"{WEIGHTS} has a number that is not above 0 and finite",
        )
        for one in (0.0, -1.0, float("nan"), float("inf"))
    ),
]


@refused(REFUSALS)
def test_refusals(refusal, tmp_path):
    check(refusal, tmp_path)
