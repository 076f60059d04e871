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

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.cli.transcripts import commands, is_as_expected, refusals, renewed, workplace
from tests.contract import small
from tests.pipeline.encode.chat import chats
from tests.pipeline.encode.chat.templates import BARE, CHATML
from tests.pipeline.inputs import write_byte_tokenizer
from tests.pipeline.places import write
from tests.pipeline.vocabularies import write_vocabulary
from tests.refusals import Call, Refusal, check, refused
from tokshard import build_corpus, copy_corpus, select_corpus
from tokshard.errors import BadRecordError, ConfigurationChangedError, SourceError, UsageError
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


GIVE = "give auto, local or HOST:PORT; in front of a SOURCE, write --ray=auto"


def with_another_stream(directory: Path) -> None:
    bad = directory / "bad.jsonl"
    bad.write_text("bad\n")
    with contextlib.suppress(BadRecordError):
        build_corpus([iter(["a"]), bad], tokenizer=write_byte_tokenizer(directory / "bytes"), out="stopped")
    build_corpus([iter(["b"]), bad], tokenizer=write_byte_tokenizer(directory / "bytes"), out="stopped")


def joining(columns: dict[str, Any], *, rows: int = 100) -> Call:
    """A view of a corpus of 3 documents, without ids, with a joined file of which so many rows may be in memory."""

    def call(directory: Path) -> None:
        write_byte_tokenizer(directory / "tok")
        build_corpus(write(directory / "a.jsonl", ["a", "b", "c"]), tokenizer="tok", out="corpus", workers=1)
        parquet.write_table(pa.table(columns), "scores.parquet", row_group_size=2)
        with pytest.MonkeyPatch.context() as patch:
            small.shrink(patch.setattr, join_rows=rows)
            select_corpus("corpus", out="view", join="scores.parquet", where="score>=0.5", workers=1)

    return call


OF_JOINS = "give a parquet file with a column 'id', or 'document' and 'fingerprint', and the columns to join"

CALLS = [
    Refusal(
        "joined columns of no documents",
        joining({"name": ["a"], "score": [0.5]}),
        UsageError,
        "DIR/scores.parquet has the columns name, score",
        OF_JOINS,
    ),
    Refusal(
        "joined columns by id, of a corpus without ids",
        joining({"id": ["a"], "score": [0.5]}),
        UsageError,
        "DIR/scores.parquet lists ids, and the corpus has no column 'id'",
        "build it with --id-field, or list documents by their numbers ('document' and 'fingerprint')",
    ),
    Refusal(
        "joined columns by numbers that are none",
        joining({"document": [0.0, 1.0, 2.0], "score": [0.5, 0.5, 0.5]}),
        UsageError,
        "DIR/scores.parquet: the column 'document' has to be integers without nulls",
        OF_JOINS,
    ),
    Refusal(
        "joined columns by numbers, one of which is missing",
        joining({"document": [0, 1, None], "score": [0.5, 0.5, 0.5]}),
        UsageError,
        "DIR/scores.parquet: the column 'document' has to be integers without nulls",
        OF_JOINS,
    ),
    Refusal(
        "joined columns of some documents of a corpus that is not named",
        joining({"document": [0, 1], "score": [0.5, 0.5]}),
        UsageError,
        "DIR/scores.parquet has 2 rows, and this is * with 3 documents",
        "give the file of this corpus, with its fingerprint ('tokshard inspect --json' shows it)",
    ),
    Refusal(
        "joined columns of another corpus",
        joining({"document": [0, 1, 2], "fingerprint": ["0"] * 3, "score": [0.5, 0.5, 0.5]}),
        UsageError,
        "DIR/scores.parquet is for another corpus, and this is * with 3 documents",
        "give the file of this corpus, with its fingerprint ('tokshard inspect --json' shows it)",
    ),
    Refusal(
        "joined columns that have a document twice",
        joining({"document": [0, 2, 2], "score": [0.5, 0.5, 0.5]}),
        UsageError,
        "two rows of DIR/scores.parquet name 2",
        "give each document once",
    ),
    Refusal(
        "joined columns of many documents, not sorted",
        joining({"document": [0, 2, 1], "score": [0.5, 0.5, 0.5]}, rows=2),
        UsageError,
        "DIR/scores.parquet is not sorted: any of 3 rows may name the same documents",
        "sort its rows by 'document', and write row groups of about a million",
    ),
    Refusal(
        "--ray without the package",
        with_package("ray", None, "a.jsonl", ray="auto"),
        UsageError,
        "--ray needs the package ray: *",
        "pip install 'tokshard[ray]'",
    ),
    *(
        Refusal(
            f"--ray {each}",
            with_package("ray", io, "a.jsonl", ray=each),
            UsageError,
            f"ray is {each!r}, which is not *",
            GIVE,
        )
        for each in ("notes.jsonl", f"head:{10**20}")
    ),
    Refusal(
        "--engine without the package",
        with_package("fastokens", None, "a.jsonl", engine="fastokens"),
        UsageError,
        "the engine fastokens is not installed",
        "pip install 'tokshard[fastokens]'",
    ),
    Refusal(
        "--engine with an iterator",
        with_package("fastokens", io, [iter(["a"])], engine="fastokens"),
        UsageError,
        "--engine fastokens first tries the beginning of the sources, and <list_iterator> can be read only once",
        "write it to a file, or leave out --engine",
    ),
    Refusal(
        "an unknown engine",
        lambda directory: build_corpus("a.jsonl", tokenizer="tok", out="out", engine="tiktoken"),
        UsageError,
        "engine is 'tiktoken'",
        "give fastokens, or leave out --engine",
    ),
    Refusal(
        "another iterator than the one that a stopped build has read",
        with_another_stream,
        ConfigurationChangedError,
        "stopped belongs to another build: <list_iterator> is not the data that it has read",
        "give it again from its start, give another --out, or start over with --force",
    ),
    Refusal(
        "a name that is no path, and a hub that does not answer",
        mistyped,
        SourceError,
        "there is no file or folder tok/typo, and on the hub: tok/typo cannot be fetched: no network",
        "correct the path; or, if a model of the hub is meant: check the network",
    ),
    Refusal(
        "a tokenizer whose name is not UTF-8",
        beside,
        UsageError,
        "b'odd\\xff': the path is not UTF-8, and the build records it",
        "rename it, or run the command in another folder",
    ),
    Refusal(
        "an --out that is not UTF-8",
        lambda directory: build_corpus("a.jsonl", tokenizer="tok", out=os.fsdecode(b"odd\xff")),
        UsageError,
        "b'odd\\xff': the path of the corpus is not UTF-8",
        "give a directory, or a URI such as s3://bucket/folder",
    ),
    Refusal(
        "an option with a value that is not one of the choices",
        lambda directory: build_corpus("a.jsonl", tokenizer="tok", out="out", on_bad_source="ignore"),
        UsageError,
        "on_bad_source is 'ignore'",
        "give one of fail, skip",
    ),
    Refusal(
        "an option with a value of the wrong type",
        lambda directory: copy_corpus("corpus", out="out", min_tokens="3"),
        UsageError,
        "min_tokens is '3': expected int | null, got str",
        "give --min-tokens another value, or leave it out",
    ),
    Refusal(
        "a number of 2^63 or more",
        lambda directory: build_corpus("a.jsonl", tokenizer="tok", out="out", max_documents=1 << 64),
        UsageError,
        "max_documents is 18446744073709551616: expected int <= 9223372036854775807",
        "give --max-documents another value, or leave it out",
    ),
    Refusal(
        "an empty range of hashes",
        lambda directory: select_corpus("corpus", out="out", hash_range=(0.5, 0.5)),
        UsageError,
        "hash_range is 0.5:0.5, expected a part of 0:1",
        "give a part such as 0:0.9",
    ),
    Refusal(
        "an option of builds, given to a copy",
        lambda directory: copy_corpus("corpus", out="out", text_field="body"),
        UsageError,
        "text_field is given, and the sources are read as documents",
        "leave out --text-field, or use tokshard build",
    ),
    Refusal(
        "a copy without a corpus",
        lambda directory: copy_corpus([], out="out"),
        UsageError,
        "no corpus is given",
        "give files, directories or globs",
    ),
]
REFUSALS = [*(row for path in TRANSCRIPTS for row in refusals(path.read_text(encoding="utf-8"))), *CALLS]


@refused(CALLS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)


if __name__ == "__main__":
    for each in TRANSCRIPTS:
        each.write_text(renewed(each.read_text(encoding="utf-8"), write_tokenizers), encoding="utf-8")
