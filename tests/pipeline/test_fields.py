"""Fields that are asked for and missing, and byte order marks, from the file to what the user reads."""

from __future__ import annotations

import bz2
import json
from pathlib import Path

import pytest

from tests.pipeline.inputs import (
    build,
    csv_bytes,
    jsonl,
    parquet_bytes,
    patch_chunk_bytes,
    table,
    tar_bytes,
    texts_of,
    write_byte_tokenizer,
)
from tokshard import build_corpus
from tokshard.errors import UsageError

MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("options", "name"), [({"keep_field": ["urll"]}, "--keep-field urll"), ({"id_field": "urll"}, "--id-field urll")]
)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.bz2"])
def test_a_kept_field_that_no_line_has_is_an_error(suffix, options, name, tmp_path):
    lines = jsonl([{"text": "a", "url": "u"}] * 3)
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(bz2.compress(lines) if suffix.endswith("bz2") else lines)
    with pytest.raises(UsageError, match="none of 3 records has the field 'urll'") as caught:
        build(path, tmp_path / "out", **options)
    assert caught.value.hint == f"correct or leave out {name}, and start over with --force"
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_kept_field_that_one_record_of_one_task_has_is_kept(tmp_path, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([{"text": "a" * 50}] * 9 + [{"text": "b", "url": None}] + [{"text": "c"}] * 9))
    corpus = build(path, tmp_path / "out", keep_field=["url"], task_bytes=64)
    assert corpus.num_documents == 19
    assert corpus.metadata(9) == {"url": None}


def test_plain_text_has_no_fields_to_keep(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UsageError, match="none of 1 records has the field 'url'"):
        build(tmp_path / "a.txt", tmp_path / "out", keep_field=["url"])
    (tmp_path / "b.jsonl").write_bytes(jsonl([{"text": "b", "url": "u"}]))
    corpus = build([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "both", keep_field=["url"])
    assert [corpus.metadata(index)["url"] for index in (0, 1)] == [None, "u"]


@pytest.mark.parametrize(
    ("options", "name"), [({"keep_field": ["m"]}, "--keep-field"), ({"id_field": "m"}, "--id-field")]
)
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_missing_column_names_the_option_that_asked_for_it(kind, options, name, tmp_path):
    rows = [{"text": "a", "n": "b"}]
    path = tmp_path / f"a.{kind}"
    path.write_bytes(csv_bytes(rows) if kind == "csv" else parquet_bytes(table(rows)))
    with pytest.raises(UsageError, match="'m'; it") as caught:
        build(path, tmp_path / "out", **options)
    assert f"with {name}, or" in str(caught.value.hint)


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_another_delimiter_of_csv_is_named(mark, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"id{mark}text\n1{mark}a\n")
    with pytest.raises(UsageError, match=r"its fields seem to be separated by .*, not by commas") as caught:
        build(path, tmp_path / "out")
    assert repr(mark) in caught.value.problem


MARKED: dict[str, tuple[bytes, dict[str, str]]] = {
    "a.jsonl": (MARK + jsonl([{"text": "a"}, {"text": "b"}]), {}),
    "a.jsonl.bz2": (bz2.compress(MARK + jsonl([{"text": "a"}, {"text": "b"}])), {}),
    "a.csv": (MARK + b"text\na\nb\n", {}),
    "b.csv": (MARK + b'"text"\na\nb\n', {}),
    "a.txt": (MARK + b"a\n\nb\n", {"text_unit": "paragraph"}),
    "b.txt": (MARK + b"a\nb\n", {"text_unit": "line"}),
    "b.txt.bz2": (bz2.compress(MARK + b"a\nb\n"), {"text_unit": "line"}),
    "a.tar": (tar_bytes([("a.txt", MARK + b"a"), ("b.txt", b"b")]), {}),
    "b.tar": (tar_bytes([("a.json", MARK + b'{"text": "a"}'), ("b.json", b'{"text": "b"}')]), {}),
    "c.tar": (tar_bytes([("a.txt", MARK + b"a"), ("b.txt", b"b")]), {"text_field": "txt"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MARKED)
def test_a_byte_order_mark_is_dropped_and_counted(name, tmp_path):
    content, options = MARKED[name]
    (tmp_path / name).write_bytes(content)
    result = build_corpus([tmp_path / name], out=tmp_path / "out", tokenizer=_tokenizer(tmp_path), workers=1, **options)
    assert "1 byte order mark dropped: not part of a text" in result.notes
    report = json.loads((tmp_path / "out" / "build-report.json").read_text())
    assert "1 byte order mark dropped: not part of a text" in report["notes"]
    (tmp_path / "again").mkdir()
    assert texts_of(build(tmp_path / name, tmp_path / "again" / "out", **options)) == ["a", "b"]


def test_a_text_file_may_be_as_long_as_a_document_and_have_a_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(MARK + b"a" * 10)
    assert texts_of(build(tmp_path / "a.txt", tmp_path / "out", max_document_bytes=10)) == ["a" * 10]


def test_a_mark_inside_of_a_text_stays(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\n" + MARK + b"b\n")
    assert texts_of(build(tmp_path / "a.txt", tmp_path / "out", text_unit="line")) == ["a", "\ufeffb"]


def _tokenizer(directory: Path) -> str:
    return str(write_byte_tokenizer(directory / ".tokenizer"))
