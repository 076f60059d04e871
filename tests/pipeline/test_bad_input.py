"""Records that cannot become documents: the first one stops a build, or all are left out and counted."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline import inputs
from tests.pipeline.bad_records import BAD_RECORDS, BadRecord
from tests.pipeline.inputs import (
    build,
    jsonl,
    texts_of,
)
from tests.refusals import pattern
from tokshard import Corpus, open_corpus
from tokshard.errors import BadRecordError, BadSourceError
from tokshard.format import names
from tokshard.pipeline.tasks import running


def rejects_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / names.REJECTS).read_text().splitlines()]


def records_of(corpus: Corpus) -> list[int]:
    return [corpus.provenance(index).record for index in range(len(corpus))]


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.what) for bad in BAD_RECORDS])
def test_a_bad_record_is_left_out_counted_and_listed_if_that_is_asked_for(bad: BadRecord, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = bad.build(tmp_path, on_bad_record="skip")
    records = result.manifest.records
    assert (records.read, records.written, records.left_out, records.padding_ids) == (3, 2, {bad.reason: 1}, 0)
    (reject,) = rejects_of(tmp_path / "out")
    assert (reject["source"], reject["record"], reject["reason"]) == (bad.file, 2, bad.reason)
    assert re.fullmatch(pattern(bad.said.partition(": ")[2]), reject["detail"])
    with open_corpus("out") as corpus:
        assert records_of(corpus) == [1, 3]
        first, second = (document.tolist() for document in corpus.documents())
        assert first == second
        assert corpus.sources()[0].left_out == {bad.reason: 1}


@pytest.mark.parametrize("encode", [inputs.arrow_bytes, inputs.arrow_stream_bytes], ids=["Arrow file", "Arrow stream"])
def test_an_arrow_input_that_is_cut_while_it_is_read_is_a_damaged_source(encode, tmp_path, monkeypatch):
    file = tmp_path / "b.arrow"
    content = encode(inputs.table([{"text": "a" * 50_000}] * 3), 1)
    original = running.read_span

    def read_span(source: Any, *arguments: Any) -> Any:
        for chunk in original(source, *arguments):
            yield chunk
            if source.location == str(file):
                os.truncate(file, len(content) // 2)  # a map of the file would end the process here

    monkeypatch.setattr(running, "read_span", read_span)
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": "good"}]))
    file.write_bytes(content)
    sources = [tmp_path / "a.jsonl", file]
    with pytest.raises(BadSourceError, match=r"b\.arrow is damaged: "):
        build(sources, tmp_path / "out")
    file.write_bytes(content)
    corpus = build(sources, tmp_path / "out", on_bad_source="skip", force=True)
    assert (texts_of(corpus), corpus.sources()[1].left_out) == (["good"], {"damaged input": 1})
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"body": "bad"}]))  # whose file is not damaged
    with pytest.raises(BadRecordError, match=r"a\.jsonl"):
        build(sources, tmp_path / "out", on_bad_source="skip", force=True)
