"""What a document is in plain text: the file, a line, a paragraph; and its name."""

from __future__ import annotations

import pytest

from tests.pipeline.inputs import COMPRESSIONS, build, texts_of

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
