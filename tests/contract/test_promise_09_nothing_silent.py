"""Promise 9: whatever is left out is counted and shown; read = written + left out."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract import builds
from tests.examples import examples
from tokshard import build_corpus, open_corpus
from tokshard.format import names
from tokshard.pipeline.sources.records import EMPTY, INVALID_UTF8, MALFORMED, MISSING_TEXT, NOT_A_STRING, TOO_LONG

RECORDS = {
    None: b'{"text": "a document"}',
    EMPTY: b'{"text": ""}',
    MALFORMED: b'{"text": "open',
    MISSING_TEXT: b'{"body": "x"}',
    NOT_A_STRING: b'{"text": [1]}',
    INVALID_UTF8: b'{"text": "\xff"}',
    TOO_LONG: json.dumps({"text": "x" * 200}).encode(),
}


@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.lists(st.lists(st.sampled_from(list(RECORDS)), max_size=30), min_size=1, max_size=4))
def test_every_record_is_a_document_or_counted_with_its_reason_and_source(
    files: list[list[str | None]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("records")
    sources = []
    for number, kinds in enumerate([*files, [None]]):
        path = directory / f"{number}.jsonl"
        path.write_bytes(b"".join(RECORDS[kind] + b"\n" for kind in kinds))
        sources.append(path)
    result = build_corpus(
        sources,
        tokenizer=builds.TOKENIZER,
        out=directory / "out",
        on_bad_record="skip",
        max_document_bytes=100,
        workers=1,
    )
    records = result.manifest.records
    assert records.read == sum(map(len, files)) + 1
    assert records.read == records.written + sum(records.left_out.values())
    with open_corpus(directory / "out") as corpus:
        for kinds, source in zip([*files, [None]], corpus.sources(), strict=True):
            assert source.records_read == len(kinds)
            assert source.documents == kinds.count(None)
            assert source.left_out == {kind: kinds.count(kind) for kind in set(kinds) - {None}}
    rejects_file = directory / "out" / names.REJECTS
    rejects = [json.loads(line) for line in rejects_file.read_text().splitlines()] if rejects_file.exists() else []
    expected = [
        (f"{number}.jsonl", line, kind)
        for number, kinds in enumerate(files)
        for line, kind in enumerate(kinds, 1)
        if kind not in (None, EMPTY)
    ]
    assert [(reject["source"], reject["record"], reject["reason"]) for reject in rejects] == expected
