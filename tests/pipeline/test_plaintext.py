"""What a document is in plain text: the file, a line, a paragraph."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_promise_01_cuts import documents_of
from tests.pipeline.inputs import build, tar_bytes, texts_of, zstd
from tokshard.errors import BadRecordError, UsageError

VERSE = "first line\nsecond line\r\n\n \t\n  indented\n\n\nlast, without an end"
COMPRESSIONS = {"": bytes, ".gz": gzip.compress, ".zst": zstd, ".bz2": bz2.compress, ".xz": lzma.compress}
every_compression = pytest.mark.parametrize("suffix", COMPRESSIONS)


@pytest.mark.slow
@every_compression
@pytest.mark.parametrize("is_member", [False, True], ids=["file", "member of a tar"])
@pytest.mark.parametrize(
    ("mode", "expected", "num_empty"),
    [
        ("file", [VERSE], 0),
        ("line", ["first line", "second line", " \t", "  indented", "last, without an end"], 3),
        ("paragraph", ["first line\nsecond line", "  indented", "last, without an end"], 0),
    ],
)
def test_the_text_unit_says_what_a_document_is(mode, expected, num_empty, suffix, is_member, tmp_path):
    path = tmp_path / (f"a.tar{suffix}" if is_member else f"a.txt{suffix}")
    path.write_bytes(COMPRESSIONS[suffix](tar_bytes([("a.txt", VERSE.encode())]) if is_member else VERSE.encode()))
    corpus = build(path, tmp_path / "out", text_unit=mode)
    assert texts_of(corpus) == expected
    assert corpus.sources()[0].left_out == ({"empty": num_empty} if num_empty else {})
    assert corpus.manifest.build.text_unit == mode


@pytest.mark.slow
@every_compression
@pytest.mark.parametrize(("mode", "per_file"), [("file", 1), ("line", 2), ("paragraph", 2)])
def test_the_name_of_a_text_file_is_a_field_of_its_documents(mode, per_file, suffix, tmp_path):
    paths = [f"in/sub/b.txt{suffix}", f"in/z.txt{suffix}"]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(COMPRESSIONS[suffix](b"one\n\ntwo\n"))
    corpus = build(tmp_path / "in", tmp_path / "out", text_unit=mode, id_field="__name__")
    expected = [path.removeprefix("in/") for path in paths for _ in range(per_file)]
    assert [corpus.metadata(index)["id"] for index in range(len(corpus))] == expected
    corpus = build(tmp_path / paths[0], tmp_path / "alone", text_unit=mode, keep_field=["__name__"])
    assert corpus.metadata(0) == {"__name__": f"b.txt{suffix}"}


def test_a_name_is_kept_as_a_string_only(tmp_path):
    (tmp_path / "1.txt").write_text("a")
    with pytest.raises(UsageError, match="__name__ is always a string"):
        build(tmp_path / "1.txt", tmp_path / "out", keep_field=["__name__:int64"])


def test_an_unknown_text_unit_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UsageError, match="text_unit is 'word'") as caught:
        build(tmp_path / "a.txt", tmp_path / "out", text_unit="word")
    assert caught.value.hint == "give one of file, line, paragraph"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "suffix"),
    [
        ("paragraph", ".xz"),
        pytest.param("line", "", marks=pytest.mark.slow),
        *(pytest.param(*kind, marks=pytest.mark.soak) for kind in (("paragraph", ""), ("line", ".xz"))),
    ],
)
def test_several_workers_share_one_text_and_give_the_corpus_of_one_process(mode, suffix, tmp_path):
    path = tmp_path / f"a.txt{suffix}"
    text = "".join(
        f"line {number} {random.Random(number).randbytes(700).hex()}\n" + "\n" * (number % 3) for number in range(3_000)
    )
    path.write_bytes(lzma.compress(text.encode(), preset=0) if suffix else text.encode())
    options: dict[str, Any] = {"text_unit": mode, "task_bytes": 1 << 20}
    alone = build(path, tmp_path / "alone", **options)
    shared = build(path, tmp_path / "shared", workers=3, **options)
    assert len({shard.name[:24] for shard in alone.shards}) >= 3
    assert shared.manifest == alone.manifest
    assert texts_of(alone) == [part.decode() for part in documents_of(text.encode(), mode) if part]


@pytest.mark.parametrize("mode", ["line", "paragraph"])
def test_a_document_that_is_too_long_is_named_by_its_number(mode, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(f"good\n\n{'x' * 60}\n\ngood\n")
    with pytest.raises(BadRecordError, match=r"record [23]: over max-document-bytes: .* has 6[01] bytes, at most 50"):
        build(path, tmp_path / "out", text_unit=mode, max_document_bytes=50)
    corpus = build(path, tmp_path / "out", text_unit=mode, max_document_bytes=50, on_bad_record="skip")
    assert texts_of(corpus) == ["good", "good"]
    assert corpus.sources()[0].left_out["over max-document-bytes"] == 1


@pytest.mark.parametrize("end", ["", "\n", "\r\n"], ids=["nothing", "LF", "CRLF"])
@pytest.mark.parametrize("mode", ["line", "paragraph"])
def test_a_text_of_exactly_the_largest_size_is_a_document_whatever_ends_it(mode, end, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 50 + end.encode())
    corpus = build(path, tmp_path / "out", text_unit=mode, max_document_bytes=50)
    assert texts_of(corpus) == ["x" * 50]


def test_lines_of_many_files_keep_their_record_numbers(tmp_path: Path):
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.txt").write_text("one\n\nthree\n")
    corpus = build(tmp_path / "in", tmp_path / "out", text_unit="line")
    places = [(corpus.provenance(i).source, corpus.provenance(i).record) for i in range(len(corpus))]
    assert places == [(source, record) for source in range(3) for record in (1, 3)]
