"""What builds and copies refuse: the commands of `transcripts/` that have a name, and a few calls.

``python -m tests.pipeline.test_refusals`` writes what is printed now: read the difference.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.cli.transcripts import commands, is_as_expected, refusals, renewed, workplace
from tests.contract import small
from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tests.pipeline.encode.chat import chats
from tests.pipeline.encode.chat.templates import BARE, CHATML
from tests.pipeline.inputs import write_byte_tokenizer
from tests.pipeline.places import write
from tests.pipeline.vocabularies import write_vocabulary
from tests.refusals import Call, Refusal, check, refused, said_in
from tokshard import build_corpus, copy_corpus, select_corpus
from tokshard.errors import BadRecordError, SourceError
from tokshard.pipeline.encode import tokenizer_file

TRANSCRIPTS = sorted(Path(__file__).with_name("transcripts").glob("*.txt"))


def write_tokenizers(directory: Path) -> None:
    """What is there when a transcript starts."""
    write_byte_tokenizer(directory / "tok")
    write_vocabulary(directory / "chat", chats.bytes_alone(), {**chats.VARIABLES, "chat_template": CHATML})
    (directory / "chat" / "chatml.jinja").write_text(CHATML)
    (directory / "chat" / "bare.jinja").write_text(BARE)


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_commands_print_what_their_transcript_says(path: Path) -> None:
    with workplace() as directory:
        write_tokenizers(directory)
        for command in commands(path.read_text(encoding="utf-8")):
            shown = command.printed(directory)
            assert is_as_expected(shown, command.expected), f"$ {command.line}\n{shown}"


def mistyped(directory: Path) -> None:
    """A tokenizer of a path without a file is looked for, and the hub does not answer."""

    def refuse(location: str) -> None:
        raise SourceError(f"{location} cannot be fetched: no network", hint="check the network")

    (directory / "tok").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_file, "fetch_tokenizer", refuse)
        tokenizer_file.read_tokenizer("tok/typo", eos=None, bos=None)


def in_a_directory_that_is_gone(directory: Path) -> None:
    tokenizer, source = write_byte_tokenizer(directory / "tok"), write(directory / "a.jsonl", ["a"])
    (directory / "gone").mkdir()
    os.chdir(directory / "gone")
    (directory / "gone").rmdir()
    try:
        build_corpus(source, tokenizer=tokenizer, out=directory / "out")
    finally:
        os.chdir(directory)


def beside(directory: Path) -> None:
    """The name of the tokenizer is not UTF-8."""
    odd = os.fsdecode(b"odd\xff")
    shutil.copytree(write_byte_tokenizer(directory / "tok"), odd)
    try:
        build_corpus(write(directory / "a.jsonl", ["a"]), tokenizer=odd, out="out")
    finally:
        assert not (directory / "out").exists()


def with_package(name: str, module: Any, sources: Any, **options: Any) -> Call:
    """A build with a package, which is installed as this module, or is not if it is None; it writes nothing."""

    def call(directory: Path) -> None:
        write_byte_tokenizer(directory / "tok")
        write(directory / "a.jsonl", ["a"])
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(sys.modules, name, module)
                build_corpus(sources, tokenizer="tok", out="out", **options)
        finally:
            assert not (directory / "out").exists()

    return call


def asked(**options: Any) -> Call:
    """A build with these options."""
    return lambda _: build_corpus("a.jsonl", **{"tokenizer": "tok", "out": "out", **options})


def with_another_stream(directory: Path) -> None:
    bad = directory / "bad.jsonl"
    bad.write_text("bad\n")
    with contextlib.suppress(BadRecordError):
        build_corpus([iter(["a"]), bad], tokenizer=write_byte_tokenizer(directory / "bytes"), out="stopped")
    build_corpus([iter(["b"]), bad], tokenizer=write_byte_tokenizer(directory / "bytes"), out="stopped")


def joining(columns: dict[str, Any], *, rows: int = 100, **options: Any) -> Call:
    """A view of 3 documents without ids, with a joined column `score`; so many rows of its file may be in memory."""
    given = options or {"where": "score>=0.5"}

    def call(directory: Path) -> None:
        write_byte_tokenizer(directory / "tok")
        build_corpus(write(directory / "a.jsonl", ["a", "b", "c"]), tokenizer="tok", out="corpus", workers=1)
        scores = {"score": [0.5] * len(next(iter(columns.values())))}
        parquet.write_table(pa.table(columns | scores), "scores.parquet", row_group_size=2)
        with pytest.MonkeyPatch.context() as patch:
            small.shrink(patch.setattr, join_rows=rows)
            select_corpus("corpus", **{"out": "view", "join": "scores.parquet", "workers": 1} | given)

    return call


def repeated(_: Path) -> None:
    parquet.write_table(pa.table([["a"], ["b"]], ["id", "id"]), "ids.parquet")
    write_corpus(Path("corpus"), documents_of([3]), tokenizer=TINY_TOKENIZER)
    select_corpus("corpus", out="view", join="ids.parquet", where="score>1")


def piped(_: Path) -> None:
    os.mkfifo("ids.txt")
    write_corpus(Path("corpus"), documents_of([3]), tokenizer=TINY_TOKENIZER)
    select_corpus("corpus", out="view", drop_ids="ids.txt")


NUMBERED = {"document": [0, 1, 2]}
LARGE = np.full(3, 1 << 63, np.uint64)

CALLS: dict[str, Call] = {
    "joined columns of no documents": joining({"name": ["a"]}),
    "joined columns by id, of a corpus without ids": joining({"id": ["a"]}),
    "joined columns by ids that are not texts or integers": joining({"id": [1.0, 2.0, None]}),
    "joined columns by numbers that are not integers": joining({"document": [0.0, 1.0, 2.0]}),
    "joined columns by numbers, one of which is missing": joining({"document": [0, 1, None]}),
    "joined columns of some documents of a corpus that is not named": joining({"document": [0, 1]}),
    "joined columns of another corpus": joining({"document": [0, 1, 2], "fingerprint": ["0"] * 3}),
    "joined columns that have a document twice": joining({"document": [0, 2, 2]}),
    "joined columns by numbers beyond int64": joining({"document": np.array([0, 1 << 63, 1 << 63], np.uint64)}),
    "joined columns of many documents, not sorted": joining({"document": [0, 2, 1]}, rows=2),
    "a joined column that cannot be compared": joining(NUMBERED | {"vector": [[0.5]] * 3}, where="vector=1"),
    "a joined column of numbers beyond int64": joining(NUMBERED | {"large": LARGE}, where="large>1"),
    "a joined file whose columns no condition names": joining(NUMBERED, min_tokens=2),
    "a joined file with two columns of one name": repeated,
    "a list of documents in a pipe": piped,
    "two joined columns of one name": joining(NUMBERED, join=["scores.parquet"] * 2, where="score>=0.5"),
    "cells of a column that is missing": joining(NUMBERED, join=(), by="topic"),
    "cells of a column of lists": joining(NUMBERED | {"vector": [[0.5]] * 3}, by="vector"),
    "cells of columns in a set": lambda _: select_corpus("corpus", out="out", by={"n"}),
    "cells of a column that is not a name": lambda _: select_corpus("corpus", out="out", by=["n", 1]),
    "cells of a long text": joining(NUMBERED | {"topic": ["a", "b", "c" * 300]}, by="topic"),
    "--ray without the package": with_package("ray", None, "a.jsonl", ray="auto"),
    **{f"--ray {each}": with_package("ray", io, "a.jsonl", ray=each) for each in ("notes.jsonl", f"head:{10**20}")},
    "--engine without the package": with_package("fastokens", None, "a.jsonl", engine="fastokens"),
    "--engine with an iterator": with_package("fastokens", io, [iter(["a"])], engine="fastokens"),
    "an unknown engine": asked(engine="tiktoken"),
    "another iterator than the one that a stopped build has read": with_another_stream,
    "a name that is not a path, and a hub that does not answer": mistyped,
    "a tokenizer whose name is not UTF-8": beside,
    "a working directory that is gone": in_a_directory_that_is_gone,
    "an --out that is not UTF-8": asked(out=os.fsdecode(b"odd\xff")),
    "an --out with a zero byte": asked(out="o\0dd"),
    "an option with a value that is not one of the choices": asked(on_bad_source="ignore"),
    "an option with a value of the wrong type": lambda _: copy_corpus("corpus", out="out", min_tokens="3"),
    "an option with a set, which has another order in each process": asked(keep_field={"n"}),
    "a number of 2^63 or more": asked(max_documents=1 << 64),
    "an empty range of hashes": lambda _: select_corpus("corpus", out="out", hash_range=(0.5, 0.5)),
    "an option of builds, given to a copy": lambda _: copy_corpus("corpus", out="out", text_field="body"),
    "a copy without a corpus": lambda _: copy_corpus([], out="out"),
    "a copy of corpora by name": lambda _: copy_corpus({"web": "corpus"}, out="out"),  # type: ignore[arg-type]
}
OF_CALLS = said_in(Path(__file__).with_name("refusals.txt"), CALLS)
REFUSALS = [*(row for path in TRANSCRIPTS for row in refusals(path.read_text(encoding="utf-8"))), *OF_CALLS]


@refused(OF_CALLS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)


if __name__ == "__main__":
    for each in TRANSCRIPTS:
        each.write_text(renewed(each.read_text(encoding="utf-8"), write_tokenizers), encoding="utf-8")
