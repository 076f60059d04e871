"""What exports are refused for: `exports.txt` of the transcripts of commands, and a few calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.cli.transcripts import FOLDER, refusals
from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tests.refusals import Call, Refusal, check, refused
from tokshard.errors import UsageError
from tokshard.interop.export.export import FORMATS, export_corpus
from tokshard.interop.export.megatron import MegatronFormat


def export(*lengths: int, **options: Any) -> Call:
    """An export of documents of these lengths; Megatron-LM takes 600 tokens in one."""

    def call(directory: Path) -> None:
        write_corpus(directory / "corpus", documents_of(lengths), tokenizer=TINY_TOKENIZER)
        with patch.object(MegatronFormat, "max_document_tokens", 600):
            export_corpus(directory / "corpus", **{"out": directory / "out", **options})

    return call


TOO_LONG = "document 1 of the export has 700 tokens; this format holds at most 600"
A_PATH = "give a path or a URI; . is the working directory"
OTHERS = "choose another --format"
NOTHING = "every document holds nothing but its delimiters"
OF_CALLS = [
    Refusal(what, call, UsageError, problem, hint)
    for what, call, problem, hint in [
        ("documents that are too long for Megatron-LM", export(3, 700, 2, format="megatron"), TOO_LONG, OTHERS),
        ("an unknown format", export(3, format="pickle"), "no format 'pickle'", "formats are " + ", ".join(FORMATS)),
        ("an empty --out", export(3, format="mds", out=""), "a location is empty", A_PATH),
        ("documents of nothing but EOS", export(1, 1, format="mds", drop_eos=True), NOTHING, "write them: --keep-eos"),
    ]
]
REFUSALS = [*refusals((FOLDER / "exports.txt").read_text(encoding="utf-8")), *OF_CALLS]


@refused(OF_CALLS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)
