"""What is said when a file is damaged that a stopped build or copy left, or that a copy reads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract import small
from tests.corpora import TINY_TOKENIZER, change_table, documents_of, write_corpus
from tests.damage import Damage, Edit, any_byte, check, damaged
from tests.pipeline.inputs import write_byte_tokenizer
from tests.pipeline.places import StoppedError, write
from tests.pipeline.test_copy import corpus_of
from tokshard import build_corpus, copy_corpus
from tokshard.errors import BuildError, DamagedCorpusError
from tokshard.format import names

WORK = names.WORK


def command(directory: Path) -> None:
    """A build with duplicates, or a shuffled copy."""
    out: dict[str, Any] = {"out": directory / "out", "workers": 1}
    if (directory / "corpus").exists():
        copy_corpus(directory / "corpus", shuffle=17, **out)
    else:
        build_corpus(directory / "a.jsonl", tokenizer=directory / "tok", dedup="exact", **out)


def stopped(kind: str, pattern: str) -> Callable[[Path], Path]:
    """Stop a build or a copy before its end; the largest of the files that the pattern finds in its work folder."""

    def begin(directory: Path) -> Path:
        if kind == "copy":
            write_corpus(directory / "corpus", documents_of(range(1, 60)), tokenizer=TINY_TOKENIZER, shard_tokens=400)
        else:
            write_byte_tokenizer(directory / "tok")
            write(directory / "a.jsonl", [f"text {number % 20}" for number in range(60)])
        with small.stopped_before_the_corpus(StoppedError()), pytest.raises(StoppedError):
            command(directory)
        return max((directory / "out" / WORK).glob(pattern), key=lambda path: path.stat().st_size)

    return begin


def go_on(directory: Path, *without: str) -> None:
    """Run the same command, as if some stages had not begun, and put back what was there before."""
    shutil.copytree(directory / "out", directory / "kept")
    for stage in without:
        shutil.rmtree(directory / "out" / WORK / stage, ignore_errors=True)
    try:
        command(directory)
    finally:
        shutil.rmtree(directory / "out")
        (directory / "kept").rename(directory / "out")


def start_writing(directory: Path) -> None:
    """The same, when nothing was written yet, nor duplicates were found."""
    go_on(directory, "write", "find")


def of_a_corpus(name: str) -> Callable[[Path], Path]:
    """Write a corpus that is copied; one of its files."""
    return lambda directory: corpus_of(directory / "corpus") / name


def copied(directory: Path) -> None:
    copy_corpus(directory / "corpus", out=directory / "out", workers=1, force=True)


def from_nowhere(shard_table: Path) -> None:
    """All documents come from a source that the corpus does not have."""

    def change(table: dict[str, list[Any]]) -> dict[str, list[Any]]:
        first = {"run_document": [[0]], "run_record": [[0]], "run_source": [[255]]}
        return table | {name: value * len(table[name]) for name, value in first.items()}

    change_table(shard_table.parent, shard_table.name, change)


SHARD = "shard-00-0000000-000000-0000.arrow"
NOWHERE = f"FILE: documents of {SHARD} come from the sources 255 to 255, and the corpus has 2"
LEFT: list[tuple[str, str, str, Any, Any, str]] = [
    ("a receipt", "build", "write/receipts/*.receipt", any_byte, go_on, "FILE is damaged: *"),
    ("hashes of texts", "build", "hash/files/*.bin", any_byte, start_writing, "FILE is damaged: *"),
    ("documents that a shuffle deals", "copy", "deal*/files/*", any_byte, start_writing, "FILE is damaged*"),
]
DAMAGE = [
    *(
        Damage(what, stopped(kind, pattern), change, read, BuildError, message)
        for what, kind, pattern, change, read, message in LEFT
    ),
    *(
        Damage(f"{name} of a copied corpus", of_a_corpus(name), any_byte, copied, DamagedCorpusError, "*FILE*")
        for name in (SHARD, names.SHARD_TABLE, names.SOURCE_TABLE, names.TOKENIZER)
    ),
    Damage("sources", of_a_corpus(names.SHARD_TABLE), Edit(from_nowhere), copied, DamagedCorpusError, NOWHERE),
]


@damaged(DAMAGE)
def test_damage(damage: Damage, tmp_path: Path) -> None:
    check(damage, tmp_path)
