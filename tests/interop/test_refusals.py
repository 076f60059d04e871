"""What exports are refused for; nothing is written, and nothing that is there is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tests.refusals import Refusal, check, refused
from tokshard.errors import ExportError, UsageError
from tokshard.interop.export.export import FORMATS, export_corpus
from tokshard.interop.export.megatron import MegatronFormat


def export(directory: Path, out: str = "out", lengths: tuple[int, ...] = (3, 700, 2), **options: Any) -> None:
    """A corpus, into a place beside a directory, a file and a link that are somebody's."""
    write_corpus(directory / "corpus", documents_of(lengths), tokenizer=TINY_TOKENIZER)
    (directory / "full").mkdir()
    (directory / "full/mine.txt").write_text("mine")
    (directory / "file").write_text("mine")
    (directory / "link").symlink_to(directory / "nowhere")
    before = {path: path.is_file() and path.read_bytes() for path in directory.rglob("*")}
    try:
        export_corpus(directory / "corpus", out=directory / out, **options)
    finally:
        assert {path: path.is_file() and path.read_bytes() for path in directory.rglob("*")} == before


def export_documents_that_are_too_long(directory: Path) -> None:
    with patch.object(MegatronFormat, "max_document_tokens", 600):
        export(directory, format="megatron")


def of_options(problem: str, hint: str, **options: Any) -> Refusal:
    given = (f"{name.replace('_', '-')} {value}" for name, value in options.items())
    call = lambda directory: export(directory, **{"format": "mds", **options})  # noqa: E731
    return Refusal(f"an export with {' and '.join(given)}", call, UsageError, problem, hint)


TOO_LONG = "document 1 of the export has 700 tokens; this format holds at most {}"
OTHERS = "choose another --format"
IS_THERE = "is there already, and is not a directory"
INSIDE = "--out DIR/corpus/inside lies inside the corpus DIR/corpus"
NO_ENDS = "olmo: only EOS says where a document ends in the files"
OUTSIDE = "give a place outside of it; what is added to a corpus goes into it by 'tokshard build --append'"
LARGE = "files of 4,294,967,296 bytes are too large: places in a file of this format are 32 bits long"

REFUSALS = [
    of_options(LARGE, "give less than 4GiB", file_bytes=4 << 30),
    of_options("files of 100 bytes are too small", "give at least 1KiB; most loaders like 64MiB", file_bytes=100),
    of_options("mds holds no columns but the ids", "leave out --no-columns, which is for hf", with_columns=False),
    of_options(NO_ENDS, "leave out --drop-eos", format="olmo", drop_eos=True),
    of_options("no format 'pickle'", "formats are " + ", ".join(FORMATS), format="pickle"),
    of_options(
        "every document holds nothing but its delimiters", "write them: --keep-eos", drop_eos=True, lengths=(1, 1)
    ),
    of_options("DIR/full is not empty: it has mine.txt", "give a new --out, or remove it", out="full"),
    of_options(f"DIR/file {IS_THERE}", "give another --out, or remove it", out="file"),
    of_options(f"DIR/link {IS_THERE}", "give another --out, or remove it", out="link"),
    of_options(INSIDE, OUTSIDE, out="corpus/inside"),
    Refusal(
        "an export of documents that are too long for Megatron-LM",
        export_documents_that_are_too_long,
        UsageError,
        TOO_LONG.format(600),
        OTHERS,
    ),
    Refusal(
        "an export into a folder that is a file",
        lambda directory: export(directory, out="file/out", format="mds"),
        ExportError,
        "DIR/file/out cannot be written: Not a directory",
        "make room, or give another --out",
    ),
]


@refused(REFUSALS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)
