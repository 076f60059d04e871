"""What `inspect`, `scan`, `report`, `diff` and `verify` refuse: the session ``refusals``, and a page without plotly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.transcripts import refusals
from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tests.refusals import Refusal, Said, check, refused, tokshard


def without_plotly(directory: Path) -> Said:
    write_corpus(directory / "corpus", documents_of([3]), tokenizer=TINY_TOKENIZER)
    # not `mock.patch.dict`, which afterwards forgets all modules that were imported meanwhile
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "plotly", None)
        return tokshard("report", "corpus", "--out", "x")


PLOTLY = "an HTML report needs plotly, which is not installed"
OF_CALLS = [Refusal("a page without plotly", without_plotly, 2, PLOTLY, "pip install 'tokshard[report]'")]
REFUSALS = [*refusals(Path(__file__).with_name("sessions").joinpath("refusals.txt").read_text("utf-8")), *OF_CALLS]


@refused(OF_CALLS)
def test_refusals(refusal, tmp_path):
    check(refusal, tmp_path)
