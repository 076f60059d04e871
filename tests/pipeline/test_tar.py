"""Archives: their members in order, in every dialect of tar, and hostile ones that touch nothing."""

from __future__ import annotations

import io
import os
import random
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.inputs import build, jsonl, patch_chunk_bytes, tar_bytes, texts_of
from tokshard.errors import BadRecordError, SourceError, TokshardError
from tokshard.pipeline.sources.discover import discover
from tokshard.pipeline.sources.division import Span
from tokshard.pipeline.sources.formats import read_span
from tokshard.pipeline.sources.records import RecordSpec

DIALECTS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)
TEXT = b"some text of a member\n"


def write(content: bytes, directory: Path) -> Path:
    path = directory / "a.tar"
    path.write_bytes(content)
    return path


def archive_of(*members: tarfile.TarInfo, form: int = tarfile.PAX_FORMAT) -> bytes:
    """An archive of any members, regular ones filled with x, and a good text at its end."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size) if member.isreg() else None)
        last = tarfile.TarInfo("last.txt")
        last.size = len(TEXT)
        archive.addfile(last, io.BytesIO(TEXT))
    return file.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type = kind
    for field, value in fields.items():
        setattr(found, field, value)
    return found


@every_dialect
def test_members_become_records_in_archive_order(dialect, tmp_path):
    long = f"{'d' * 80}/{'n' * 90}" if dialect == "ustar" else f"{'é' * 200}/{'n' * 300}"
    content = tar_bytes(
        [
            ("z.txt", b"first\n"),
            (f"{long}.json", b'{\n  "text": "second",\n  "n": 2\n}\n'),
            ("a.jsonl", jsonl([{"text": "third", "n": 3}, {"text": ""}, {"text": "fourth"}])),
            ("EMPTY.TXT", b""),
            ("b.NDJSON", b'{"text": "fifth"}'),
        ],
        form=DIALECTS[dialect],
    )
    corpus = build(write(content, tmp_path), tmp_path / "out", keep_field=["n:int64"])
    assert texts_of(corpus) == ["first\n", "second", "third", "fourth", "fifth"]
    assert [corpus.provenance(index).record for index in range(5)] == [1, 2, 3, 5, 7]
    assert [corpus.metadata(index)["n"] for index in range(5)] == [None, 2, 3, None, None]
    assert corpus.sources()[0].left_out == {"empty": 2}


names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=150)


@given(
    labels=st.lists(names, max_size=5),
    sizes=st.lists(st.integers(0, 1_500), min_size=5, max_size=5),
    dialect=st.sampled_from(["gnu", "pax"]),
)
def test_every_archive_that_tarfile_writes_is_read(labels, sizes, dialect, tmp_path_factory):
    contents = [random.Random(size).randbytes(size).hex()[:size].encode() for size in sizes]
    found = [(f"{label}/{n}.txt", content) for n, (label, content) in enumerate(zip(labels, contents, strict=False))]
    path = write(tar_bytes([*found, ("z.txt", b"z")], form=DIALECTS[dialect]), tmp_path_factory.mktemp("archive"))
    (source,) = discover([str(path)], input_format=None).inputs
    spec = RecordSpec(text_field="text", columns={}, max_document_bytes=10_000)
    parts: list[Any] = list(read_span(source, Span(), spec))
    hidden = [any(part.startswith(".") and part.strip(".") for part in name.split("/")) for name, _ in found]
    kept = [
        content.decode() for (_, content), is_hidden in zip(found, hidden, strict=True) if content and not is_hidden
    ]
    assert [text for part in parts for text in part.texts] == [*kept, "z"]
    assert sum(len(part.passed_over) for part in parts) == sum(hidden)
    assert sum(part.count for part in parts) == len(found) + 1


def test_members_of_other_kinds_are_left_out_and_counted_by_reason(tmp_path):
    content = archive_of(
        member("folder", tarfile.DIRTYPE),
        member("picture.jpg", size=700),
        member("no suffix", size=5),
        member("._apple.txt", size=9),
        member("folder/.git/x.txt", size=3),
        member("link.txt", tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("hard.txt", tarfile.LNKTYPE, linkname="last.txt", size=9_000),
        member("pipe.txt", tarfile.FIFOTYPE),
        member("disk.txt", tarfile.BLKTYPE, devmajor=8),
        member("sparse.txt", size=512, pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
    )
    corpus = build(write(content, tmp_path), tmp_path / "out")
    assert texts_of(corpus) == [TEXT.decode()]
    (source,) = corpus.sources()
    assert source.left_out == {
        "archive member of another format": 2,
        "hidden archive member": 2,
        "archive member that is a link": 2,
        "archive member that is no regular file": 3,
    }
    assert (source.records_read, corpus.provenance(0).record) == (10, 10)


def test_an_old_gnu_sparse_member_is_passed_over_with_its_map(tmp_path):
    header = bytearray(member("sparse.txt", tarfile.GNUTYPE_SPARSE, size=600).tobuf(tarfile.GNU_FORMAT))
    header[482] = 1  # a block of the map follows, and another one
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    blocks = bytes(504) + b"\1" + bytes(7) + bytes(512)
    content = bytes(header) + blocks + b"x" * 600 + bytes(424) + tar_bytes([("a.txt", b"a")])
    corpus = build(write(content, tmp_path), tmp_path / "out")
    assert (texts_of(corpus), corpus.sources()[0].left_out) == (["a"], {"archive member that is no regular file": 1})


def test_the_name_of_a_member_is_a_field_of_its_records(tmp_path):
    members = [
        ("a/b.txt", b"one"),
        ("lines.jsonl", jsonl([{"text": "two", "__name__": "mine"}, {"text": 5}, {"text": "three"}])),
        ("c.d/x.json", b'{"text": "four"}'),
    ]
    path = write(tar_bytes(members), tmp_path)
    corpus = build(path, tmp_path / "out", id_field="__name__", keep_field=["__name__"], on_bad_record="skip")
    assert texts_of(corpus) == ["one", "two", "three", "four"]
    names = ["a/b.txt", "lines.jsonl", "lines.jsonl", "c.d/x.json"]
    assert [corpus.metadata(index) for index in range(4)] == [{"id": name, "__name__": name} for name in names]


HOSTILE_NAMES = ["/etc/cron.d/x.txt", "../../x.txt", "a/../../../x.txt", "C:\\x.txt", "x\n\x1b[31m.txt", "./x.txt"]


def test_names_are_labels_and_nothing_is_written_beside_the_corpus(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    write(tar_bytes([(name, name.encode()) for name in HOSTILE_NAMES]), tmp_path / "work")
    opened = []
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **named: opened.append(path) or real_open(path, *rest, **named))
    corpus = build("a.tar", tmp_path / "work" / "out")
    assert texts_of(corpus) == HOSTILE_NAMES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work"]
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == [".tokenizer", "a.tar", "out"]
    assert not any("x.txt" in os.fspath(path) for path in opened if not isinstance(path, int))


def changed(content: bytes, start: int, field: bytes) -> bytes:
    """With a field of the first header changed, and its checksum mended."""
    header = bytearray(content[:512])
    header[start : start + len(field)] = field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + content[512:]


PLAIN = tar_bytes([("a.txt", TEXT * 100), ("b.jsonl", jsonl([{"text": "b"}] * 50)), ("c.txt", TEXT)])
DAMAGED = {
    "an empty file": (b"", "the file is empty"),
    "no end-of-archive marker": (PLAIN.rstrip(b"\0") + bytes(-len(PLAIN.rstrip(b"\0")) % 512), "lacks its end-of"),
    "a cut in a header": (PLAIN[:300], "the header at byte 0 is broken: truncated header"),
    "a cut in a member": (PLAIN[:1_000], "cut off at byte 1,000"),
    "a cut in the padding": (PLAIN[: 512 + len(TEXT) * 100 + 5], "cut off at byte 2,717"),
    "a flipped byte in a header": (b"\xff" + PLAIN[1:], "the header at byte 0 is broken: bad checksum"),
    "text": (TEXT * 100, "the header at byte 0 is broken"),
    "two archives": (PLAIN + PLAIN, "something follows the end-of-archive marker"),
    "a size beyond the file": (changed(PLAIN, 124, b"77777777777\0"), "cut off at byte"),
    "a size of many exabytes": (changed(PLAIN, 124, b"\x80" + b"\x7f" * 11), "cut off at byte"),
    "a size below zero": (changed(PLAIN, 124, b"\xff" * 12), "has the size -1"),
    "a long name without end": (
        changed(changed(PLAIN, 124, b"77777777777\0"), 156, tarfile.GNUTYPE_LONGNAME),
        "the extended header before byte 512 has 8,589,934,591 bytes",
    ),
    "a pax header without records": (changed(PLAIN, 156, tarfile.XHDTYPE), "the pax header before byte .* is broken"),
}


@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_a_damaged_archive_is_refused_under_both_policies_and_named(what, policy, tmp_path):
    content, problem = DAMAGED[what]
    with pytest.raises(SourceError, match=rf"a\.tar is damaged: .*{problem}"):
        build(write(content, tmp_path), tmp_path / "out", on_bad_record=policy)


def test_a_pax_size_that_is_no_number_is_damage(tmp_path):
    content = archive_of(member("a.txt", size=3, pax_headers={"size": "many"}))
    with pytest.raises(SourceError, match="has the size -1"):
        build(write(content, tmp_path), tmp_path / "out")


@pytest.mark.slow
def test_pax_headers_are_not_kept_but_for_what_is_used(tmp_path):
    headers = b""
    for number in range(8):
        data = b"".join(
            b"21 key%06d=value%02d\n" % (key, number) for key in range(number * 10_000, (number + 1) * 10_000)
        )
        header = member("pax", tarfile.XGLTYPE if number % 2 else tarfile.XHDTYPE, size=len(data)).tobuf()
        headers += header + data + bytes(-len(data) % 512)
    path = write(headers + archive_of(member("a.txt", size=3)), tmp_path)
    tracemalloc.start()
    assert read(path) == ["xxx", TEXT.decode()]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 << 20


@pytest.mark.parametrize(
    "broken",
    [b"9 path=a", b"11 path=a\n", b"8 path=a\n", b"x path=a\n", b" path=a\n", b"9path=ab\n", b"6 path\n", b"0 a=b\n"],
)
def test_a_pax_header_that_is_no_list_of_records_is_damage(broken, tmp_path):
    header = member("pax", tarfile.XHDTYPE, size=len(broken)).tobuf()
    content = header + broken + bytes(-len(broken) % 512) + archive_of()
    with pytest.raises(SourceError, match="the pax header before byte 1,024 is broken"):
        build(write(content, tmp_path), tmp_path / "out")


def test_links_without_end_do_not_pile_up_behind_a_sample(tmp_path):
    links = member("a.lnk", tarfile.SYMTYPE).tobuf() * 3_000
    content = member("0.txt", size=3).tobuf() + b"xxx".ljust(512, b"\0") + links + archive_of()
    path = write(content, tmp_path)
    (source,) = discover([str(path)], input_format=None).inputs
    spec = RecordSpec(text_field="txt", columns={}, max_document_bytes=10_000)
    parts: list[Any] = list(read_span(source, Span(), spec))
    assert [text for part in parts for text in part.texts] == ["xxx", TEXT.decode()]
    assert sum(part.count for part in parts) == 3_002
    assert parts[0].input_bytes < 1_100 * 512


def read(path: Path) -> list[str]:
    (source,) = discover([str(path)], input_format=None).inputs
    spec = RecordSpec(text_field="text", columns={}, max_document_bytes=10_000)
    parts: list[Any] = list(read_span(source, Span(), spec))
    return [text for part in parts for text in part.texts]


def test_a_cut_anywhere_is_refused(tmp_path):
    end = len(PLAIN.rstrip(b"\0"))
    marker = end + -end % 512 + 1_024
    whole = read(write(PLAIN, tmp_path))
    for cut in {*range(0, marker, 97), *range(0, marker, 512), *range(marker - 1_025, marker, 16), marker - 1}:
        with pytest.raises(SourceError, match="damaged"):
            read(write(PLAIN[:cut], tmp_path))
    assert read(write(PLAIN[:marker], tmp_path)) == whole


def test_an_archive_with_any_flipped_bytes_is_read_or_refused_but_never_crashes(tmp_path):
    refused = 0
    for seed in range(120):
        rng = random.Random(seed)
        damaged = bytearray(PLAIN)
        for _ in range(rng.choice([1, 1, 2, 8])):
            damaged[rng.randrange(5_000)] = rng.choice([0, 255, rng.randrange(256)])
        try:
            read(write(bytes(damaged), tmp_path))
        except TokshardError:
            refused += 1
    assert refused > 30


def test_a_member_that_is_too_long_is_one_bad_record_and_never_held(tmp_path):
    content = tar_bytes([("a.txt", b"x" * 51), ("b.json", b" " * 2_000_000), ("c.txt", b"good")])
    path = write(content, tmp_path)
    with pytest.raises(BadRecordError, match="record 1: over max-document-bytes: the file holds more than 50 bytes"):
        build(path, tmp_path / "out", max_document_bytes=50)
    corpus = build(path, tmp_path / "out", max_document_bytes=50, on_bad_record="skip")
    assert (texts_of(corpus), corpus.sources()[0].left_out) == (["good"], {"over max-document-bytes": 2})


def test_json_members_that_are_wrong_are_bad_records_by_number(tmp_path):
    members = [
        ("a.json", b'{"text": "a"}'),
        ("b.json", b'{"text": "two\nlines"}'),
        ("c.json", b"[]"),
        ("d.json", b"\n "),
    ]
    corpus = build(write(tar_bytes(members), tmp_path), tmp_path / "out", on_bad_record="skip")
    assert (texts_of(corpus), corpus.sources()[0].left_out) == (["a"], {"malformed": 2, "empty": 1})


# WebDataset


SAMPLES = [
    ("shard/0001.jpg", b"\xff\xd8"),
    ("shard/0001.txt", b"a cat"),
    ("shard/0001.json", b'{"url": "u1",\n "caption": "A cat."}'),
    ("shard/0002.json", b'{"caption": "A dog."}'),
    ("shard/0002.txt", b'ein Hund, quoted "so"\n'),
    ("shard/0003.txt", b""),
    ("other/0003.txt", b"a third"),
    ("other/0003.seg.png", b"x"),
]


def test_the_text_of_a_sample_may_be_its_txt_member(tmp_path):
    corpus = build(
        write(tar_bytes(SAMPLES), tmp_path),
        tmp_path / "out",
        text_field="txt",
        id_field="__key__",
        keep_field=["json.url"],
    )
    assert texts_of(corpus) == ["a cat", 'ein Hund, quoted "so"\n', "a third"]
    assert [corpus.metadata(index) for index in range(3)] == [
        {"id": "shard/0001", "json.url": "u1"},
        {"id": "shard/0002", "json.url": None},
        {"id": "other/0003", "json.url": None},
    ]
    (source,) = corpus.sources()
    assert (source.records_read, source.left_out) == (4, {"empty": 1})
    assert [corpus.provenance(index).record for index in range(3)] == [1, 2, 4]


def test_members_of_a_sample_of_which_nothing_is_wanted_are_not_read(tmp_path):
    members = [("1.txt", b"one"), ("1.json", b"{broken"), ("2.json", b"{}"), ("2.txt", b"two")]
    corpus = build(write(tar_bytes(members), tmp_path), tmp_path / "out", text_field="txt")
    assert texts_of(corpus) == ["one", "two"]


def test_a_key_ends_at_the_first_dot_of_the_name_without_its_folders(tmp_path):
    members = [
        ("v1.2/a.b/0001.txt", b"dots in folders"),
        ("v1.2/a.b/0001.json", b'{"n": 1}'),
        ("README", b"no extension, and so no sample"),
        ("0002.txt", b"text"),
        ("0002.seg.json", b"another member of the sample"),
        ("notes.v2.txt", b"the extension is v2.txt"),
    ]
    path = write(tar_bytes(members), tmp_path)
    options: dict[str, Any] = {"text_field": "txt", "id_field": "__key__", "keep_field": ["json.n"]}
    with pytest.raises(BadRecordError, match=r"no field 'txt'; it has: __key__, v2\.txt; the members .* --sort=name"):
        build(path, tmp_path / "out", **options)
    corpus = build(path, tmp_path / "out", on_bad_record="skip", force=True, **options)
    assert texts_of(corpus) == ["dots in folders", "text"]
    assert [corpus.metadata(index)["id"] for index in (0, 1)] == ["v1.2/a.b/0001", "0002"]
    assert corpus.metadata(0)["json.n"] == "1"
    assert corpus.sources()[0].left_out == {"archive member of another format": 1, "missing text": 1}


def test_the_text_of_a_sample_may_be_a_field_of_its_json_member(tmp_path):
    path = write(tar_bytes(SAMPLES), tmp_path)
    corpus = build(path, tmp_path / "out", text_field="json.caption", keep_field=["txt"], on_bad_record="skip")
    assert texts_of(corpus) == ["A cat.", "A dog."]
    assert corpus.metadata(0) == {"txt": "a cat"}
    assert corpus.sources()[0].left_out == {"missing text": 2}


def test_samples_that_are_wrong_are_bad_records(tmp_path):
    members = [
        ("1.txt", b"good"),
        ("1.json", b'{"x": 1}'),
        ("2.txt", b"\xff"),
        ("3.txt", b"one"),
        ("3.txt", b"two"),
        ("4.txt", b"x" * 51),
        ("5.json", b"{}"),
        ("6.txt", b"text"),
        ("6.json", b'1, "txt": "smuggled"'),
        ("7.txt", b"good too"),
    ]
    path = write(tar_bytes(members), tmp_path)
    corpus = build(
        path, tmp_path / "out", text_field="txt", keep_field=["json.x"], max_document_bytes=50, on_bad_record="skip"
    )
    assert texts_of(corpus) == ["good", "good too"]
    assert corpus.sources()[0].left_out == {
        "invalid UTF-8": 1,
        "malformed": 2,
        "missing text": 1,
        "over max-document-bytes": 1,
    }
    assert [corpus.provenance(index).record for index in range(2)] == [1, 7]


def test_links_among_samples_are_counted_behind_the_sample_that_they_stand_in(tmp_path):
    content = archive_of(
        member("0.lnk", tarfile.SYMTYPE, linkname="x"),
        member("1.txt", size=3),
        member("1.lnk", tarfile.SYMTYPE),
        member("1.jpg", size=9),
    )
    corpus = build(write(content, tmp_path), tmp_path / "out", text_field="txt")
    assert texts_of(corpus) == ["xxx", TEXT.decode()]
    (source,) = corpus.sources()
    assert (source.records_read, source.left_out) == (4, {"archive member that is a link": 2})
    assert [corpus.provenance(index).record for index in range(2)] == [2, 4]


# shards


@pytest.mark.slow
@pytest.mark.parametrize("text_field", ["text", pytest.param("txt", marks=pytest.mark.soak)])
def test_several_workers_share_one_archive_and_give_the_corpus_of_one_process(text_field, tmp_path):
    members = [(f"{number:05d}.txt", f"document {number} {'x' * 2_000}".encode()) for number in range(1_500)]
    path = write(tar_bytes(members), tmp_path)
    alone = build(path, tmp_path / "alone", task_bytes=1 << 20, max_documents=1_400, text_field=text_field)
    shared = build(path, tmp_path / "shared", workers=3, task_bytes=1 << 20, max_documents=1_400, text_field=text_field)
    assert texts_of(alone) == [content.decode() for _, content in members[:1_400]]
    assert len({shard.name[:24] for shard in alone.shards}) >= 3
    assert shared.manifest == alone.manifest


def test_a_limit_ends_before_members_that_are_left_out(tmp_path, monkeypatch):
    patch_chunk_bytes(monkeypatch, 512)
    members = [(f"{number}.{suffix}", b"text") for number in range(9) for suffix in ("jpg", "txt")]
    corpus = build(write(tar_bytes(members), tmp_path), tmp_path / "out", task_bytes=1_024, max_documents=4)
    (source,) = corpus.sources()
    assert (source.records_read, source.documents, source.left_out) == (8, 4, {"archive member of another format": 4})
