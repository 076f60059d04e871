"""What a document is in plain text: the file, a line, a paragraph; its name, and byte order marks."""

from __future__ import annotations

import pytest

from tests.pipeline.inputs import COMPRESSIONS, build, jsonl, texts_of

VERSE = "first line\nsecond line\r\n\n \t\n  indented\n\n\nlast, without an end"
UNITS = {
    "file": [VERSE],
    "line": ["first line", "second line", " \t", "  indented", "last, without an end"],
    "paragraph": ["first line\nsecond line", "  indented", "last, without an end"],
}


@pytest.mark.parametrize("suffix", COMPRESSIONS)
@pytest.mark.parametrize("unit", UNITS)
def test_the_text_unit_says_what_a_document_is_and_the_name_of_the_file_is_a_field_of_it(unit, suffix, tmp_path):
    path = tmp_path / "in" / "sub" / f"a.txt{suffix}"
    path.parent.mkdir(parents=True)
    path.write_bytes(COMPRESSIONS[suffix](VERSE.encode()))
    for source, name in ((tmp_path / "in", f"sub/{path.name}"), (path, path.name)):
        corpus = build(
            source, tmp_path / "out", text_unit=unit, id_field="__name__", keep_field=["__name__"], force=True
        )
        assert texts_of(corpus) == UNITS[unit]
        assert corpus.sources()[0].left_out == ({"empty": 3} if unit == "line" else {})
        assert corpus.manifest.build.text_unit == unit
        assert corpus.metadata(len(corpus) - 1) == {"id": name, "__name__": name}


@pytest.mark.parametrize("end", ["", "\n", "\r\n"], ids=["nothing", "LF", "CRLF"])
@pytest.mark.parametrize("unit", UNITS)
def test_a_text_of_exactly_the_largest_size_is_a_document_whatever_is_around_it(unit, end, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"x" * 50 + end.encode())
    text = "x" * 50 + (end if unit == "file" else "")
    corpus = build(path, tmp_path / "out", text_unit=unit, max_document_bytes=len(text))
    assert texts_of(corpus) == [text]


MARKED = {
    "a.jsonl": jsonl([{"text": "a"}, {"text": "b"}]),
    "a.csv": b"text\na\nb\n",
    "b.csv": b'"text"\na\nb\n',
    "a.txt": b"a\n\nb\n",
}


@pytest.mark.parametrize("suffix", ["", ".bz2"])
@pytest.mark.parametrize("name", MARKED)
def test_a_byte_order_mark_is_dropped_and_counted_and_one_inside_of_a_text_stays(name, suffix, tmp_path):
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(COMPRESSIONS[suffix]("\ufeff".encode() + MARKED[name].replace(b"b", "\ufeffb".encode(), 1)))
    for unit in ("line", "paragraph") if "txt" in name else ("file",):
        corpus = build(path, tmp_path / "out", text_unit=unit, force=True)
        assert texts_of(corpus) == ["a", "\ufeffb"]
        assert "1 byte order mark dropped" in (tmp_path / "out" / "build-report.json").read_text()
