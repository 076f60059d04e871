"""What the format room refuses of its callers: no corpus, no such document, no spans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tests.refusals import Call, Refusal, check, refused, said_in
from tokshard.format import names
from tokshard.format.conditions import parse_conditions
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS
from tokshard.format.opening import open_corpus


def opening(directory: Path, *folders: str) -> None:
    """Open a directory with these folders and nothing else."""
    for folder in folders:
        (directory / folder).mkdir()
    open_corpus(directory)


def opening_a_file(directory: Path, name: str) -> None:
    (directory / name).touch()
    open_corpus(directory / name)


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
    *(("document", 5), ("__getitem__", -6), ("text", 5), ("stride_hashes", 3)),
    *(("__getitem__", "1"), ("__getitem__", 1.0), ("__getitem__", slice(0, 2))),
]
NO_SPANS = [[0, 2], [2, 2], [3, 2], [1, 5], [2, 3, 1, 2], [1, 2, 2, 3], [1, 2, 3]]

CALLS: dict[str, Call] = {
    "a directory that holds no corpus": opening,
    "a directory that does not exist": lambda directory: open_corpus(directory / "nothing"),
    "a directory that is a file": lambda directory: opening_a_file(directory, "file"),
    "a mix in place of a corpus": lambda directory: opening_a_file(directory, "mix.toml"),
    "an unfinished build": lambda directory: opening(directory, names.WORK),
    "the two corpora of a split": opening_a_split,
    **{f"{read} of {index!r}": of_a_corpus(read, index) for read, index in NO_DOCUMENT},
    **{f"loss spans {spans}": writing(spans) for spans in NO_SPANS},
    "a text that is not UTF-8 as a value of a column": lambda _: parse_conditions(
        ["lang in fr,a\udcef"], {"lang": "string"}
    ),
    "a condition on a column of a corpus without columns": lambda _: parse_conditions(["lang=en"], {}),
    **{f"the weight {one}": writing([1, 3], one) for one in (0.0, -1.0, float("nan"), float("inf"))},
}
REFUSALS = said_in(Path(__file__).with_name("refusals.txt"), CALLS)


@refused(REFUSALS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)
