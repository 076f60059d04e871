"""What a user sees of bad input, under each policy, on the command line."""

from __future__ import annotations

import base64
import bz2
import gzip
import importlib.metadata
import json
import lzma
import os
import random
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pq_encryption
import pytest

from tests.contract.small import stopped_before_the_corpus
from tests.examples import crossed
from tests.pipeline import inputs
from tests.pipeline.inputs import jsonl, patch_chunk_bytes, special_token, texts_of, write_byte_tokenizer, zstd
from tokshard import open_corpus
from tokshard.cli.main import run
from tokshard.errors import SourceError
from tokshard.format import names
from tokshard.pipeline.tasks import running
from tokshard.store import open_store

GOOD = jsonl([{"text": "good"}])
REPAIR = "hint: repair the record, or leave out such records with --on-bad-record skip"
ALLOW = "hint: allow longer documents with --max-document-bytes, or leave out such records with --on-bad-record skip"
CHECK_FIELD = "hint: check --text-field, or leave out such records with --on-bad-record skip"
FETCH = "hint: fetch the file again and start over with --force, or leave it out with --on-bad-source skip"


@dataclass(frozen=True)
class Seen:
    """What a command left: its exit code, its two streams, and the directory it was told to write."""

    exit_code: int
    out: str
    err: Sequence[str]
    directory: Path

    @property
    def rejects(self) -> list[dict[str, Any]]:
        path = self.directory / names.REJECTS
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def texts(self) -> list[str]:
        return texts_of(open_corpus(self.directory))

    @property
    def left_out(self) -> list[Mapping[str, int]]:
        """Per source; and for each, what was read is what was written or left out."""
        sources = open_corpus(self.directory).sources()
        assert all(s.records_read == s.documents + sum(s.left_out.values()) for s in sources)
        return [source.left_out for source in sources]

    def assert_failed(self, problem: str, hint: str, exit_code: int = 1) -> None:
        """One problem line, one hint line, nothing on stdout, and no corpus."""
        assert [*self.err] == [f"error: {problem}", hint]
        assert (self.exit_code, self.out) == (exit_code, "")
        assert not (self.directory / names.MANIFEST).exists()


Tokshard = Callable[..., Seen]


@pytest.fixture
def tokshard_build(tmp_path, monkeypatch, capfd) -> Tokshard:
    """Runs ``tokshard build SOURCES... --out out OPTIONS...`` in an empty working directory."""
    write_byte_tokenizer(tmp_path / ".tokenizer")
    monkeypatch.chdir(tmp_path)

    def build(*arguments: str, tokenizer: str = ".tokenizer", workers: int = 1) -> Seen:
        capfd.readouterr()
        fixed = ["--tokenizer", tokenizer, "--out", "out", "--workers", str(workers), "--quiet"]
        exit_code = run(["build", *fixed, *arguments])
        out, err = capfd.readouterr()
        return Seen(exit_code, out, err.splitlines(), Path("out"))

    return build


def write(path: str, content: bytes) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content)
    return path


# bad records: a damaged one between two good ones


@dataclass(frozen=True)
class BadRecord:
    """A file whose second record is bad, and what is said of it."""

    file: str
    content: bytes
    reason: str
    detail: str
    options: tuple[str, ...] = ()
    hint: str = REPAIR

    @property
    def place(self) -> str:
        return f"{self.file}, {'line' if '.jsonl' in self.file else 'record'} 2"


def between_good_lines(line: bytes) -> bytes:
    return GOOD + line + b"\n" + GOOD


def table_of(values: Sequence[bytes | None], **columns: Any) -> pa.Table:
    """A column of strings that need not be UTF-8."""
    return pa.table({"text": pa.array(values, pa.binary()).view(pa.string()), **columns})


BAD_BYTE = "'utf-8' codec can't decode byte 0xff in position 1: invalid start byte"
TRUNCATED = """Input data was truncated: '{"text": "open'"""
ARRAY = "; expected JSON lines, one object per line: jq -c '.[]' converts an array"
LONG = ("--max-document-bytes", "50")
GOOD_TABLE = [b"good", None, b"good"]

BAD_RECORDS = {
    "malformed JSON": BadRecord("a.jsonl", between_good_lines(b'{"text": "open'), "malformed", TRUNCATED),
    "malformed JSON in gzip": BadRecord(
        "a.jsonl.gz", gzip.compress(between_good_lines(b'{"text": "open')), "malformed", TRUNCATED
    ),
    "malformed JSON in zstd": BadRecord(
        "a.jsonl.zst", zstd(between_good_lines(b'{"text": "open')), "malformed", TRUNCATED
    ),
    "JSON that is not an object": BadRecord(
        "a.jsonl",
        between_good_lines(b'["good"]'),
        "malformed",
        f"""Expected `object`, got `array`: '["good"]'{ARRAY}""",
    ),
    "no text field": BadRecord(
        "a.jsonl",
        between_good_lines(b'{"body": "x"}'),
        "missing text",
        "no field 'text'; it has: body",
        hint=CHECK_FIELD,
    ),
    "a null": BadRecord(
        "a.jsonl", between_good_lines(b'{"text": null}'), "missing text", "field 'text' is null", hint=CHECK_FIELD
    ),
    "no nested text field": BadRecord(
        "a.jsonl",
        b'{"a": {"b": "good"}}\n{"a": {}}\n{"a": {"b": "good"}}\n',
        "missing text",
        "no field 'a.b'; it has: a",
        ("--text-field", "a.b"),
        CHECK_FIELD,
    ),
    "a number": BadRecord("a.jsonl", between_good_lines(b'{"text": 17}'), "text is not a string", "field 'text' is 17"),
    "bytes that are no UTF-8": BadRecord(
        "a.jsonl", between_good_lines(b'{"text": "a\xff"}'), "invalid UTF-8", BAD_BYTE
    ),
    "a lone surrogate": BadRecord(
        "a.jsonl",
        between_good_lines(rb'{"text": "\ud83d"}'),
        "invalid UTF-8",
        "the JSON escapes a lone surrogate, which UTF-8 text cannot hold",
    ),
    "a long text": BadRecord(
        "a.jsonl",
        between_good_lines(b'{"text": "%s"}' % (b"x" * 51)),
        "over max-document-bytes",
        "text has 51 bytes, at most 50 are allowed",
        LONG,
    ),
    "a line that is too long to be held": BadRecord(
        "a.jsonl",
        between_good_lines(b'{"text": "%s"}' % (b"x" * 2_500_000)),
        "over max-document-bytes",
        "line has 2,500,013 bytes, at most 1,048,976 are allowed",
        LONG,
    ),
    "a kept field of another type": BadRecord(
        "a.jsonl",
        b'{"text": "good", "n": 1}\n{"text": "x", "n": "1"}\n{"text": "good"}\n',
        "kept field of another type",
        """field 'n' is "1", not int64""",
        ("--keep-field", "n:int64"),
    ),
    "a csv row with too few fields": BadRecord(
        "a.csv", b"text,n\ngood,1\nshort\ngood,3\n", "malformed", "line 3: 1 fields, the header has 2"
    ),
    "a csv row with too many fields": BadRecord(
        "a.csv", b'n,text\n1,good\n2,"two\nlines",3\n3,good\n', "malformed", "line 4: 3 fields, the header has 2"
    ),
    "a csv row with a stray quote": BadRecord(
        "a.csv", b'text\ngood\n"a" b\ngood\n', "malformed", "line 3: ',' expected after '\"'"
    ),
    "a tsv row with too few fields": BadRecord(
        "a.tsv", b"text\tn\ngood\t1\nshort, with a comma\ngood\t3\n", "malformed", "line 3: 1 fields, the header has 2"
    ),
    "malformed JSON in bz2": BadRecord(
        "a.jsonl.bz2", bz2.compress(between_good_lines(b'{"text": "open')), "malformed", TRUNCATED
    ),
    "malformed JSON in xz": BadRecord(
        "a.jsonl.xz", lzma.compress(between_good_lines(b'{"text": "open')), "malformed", TRUNCATED
    ),
    "a member of an archive that is no UTF-8": BadRecord(
        "a.tar",
        inputs.tar_bytes([("1.txt", b"good"), ("2.txt", b"a\xff"), ("3.txt", b"good")]),
        "invalid UTF-8",
        BAD_BYTE,
    ),
    "csv that is no UTF-8": BadRecord("a.csv", b"text\ngood\na\xff\ngood\n", "invalid UTF-8", BAD_BYTE),
    "a long csv field": BadRecord(
        "a.csv",
        b"text\ngood\n" + b"x" * 51 + b"\ngood\n",
        "over max-document-bytes",
        "text has 51 bytes, at most 50 are allowed",
        LONG,
    ),
    "a kept csv field of another type": BadRecord(
        "a.csv",
        b"text,n\ngood,1\nx,one\ngood,\n",
        "kept field of another type",
        "field 'n' is 'one', not int64",
        ("--keep-field", "n:int64"),
    ),
    **{
        f"{what} in {file}": BadRecord(file, encode(found), reason, detail, options, hint)
        for file, encode in {
            "a.parquet": inputs.parquet_bytes,
            "a.arrow": inputs.arrow_bytes,
            "a.feather-stream.arrow": inputs.arrow_stream_bytes,
        }.items()
        for what, found, reason, detail, options, hint in [
            ("a null", table_of(GOOD_TABLE), "missing text", "no value in field 'text'", (), CHECK_FIELD),
            ("bytes that are no UTF-8", table_of([b"good", b"a\xff", b"good"]), "invalid UTF-8", BAD_BYTE, (), REPAIR),
            (
                "a long text",
                table_of([b"good", b"x" * 51, b"good"]),
                "over max-document-bytes",
                "text has 51 bytes, at most 50 are allowed",
                LONG,
                REPAIR,
            ),
            (
                "a kept field of another type",
                table_of([b"good", b"x", b"good"], n=pa.array(["1", "one", None])),
                "kept field of another type",
                "field 'n' is 'one', not int64",
                ("--keep-field", "n:int64"),
                REPAIR,
            ),
        ]
    },
}


@pytest.mark.parametrize("what", BAD_RECORDS)
def test_under_fail_a_bad_record_stops_the_build_with_its_place_and_reason(what, tokshard_build):
    bad = BAD_RECORDS[what]
    seen = tokshard_build(write(bad.file, bad.content), *bad.options)
    seen.assert_failed(f"{bad.place}: {bad.reason}: {bad.detail}", ALLOW if bad.options == LONG else bad.hint)
    assert not list(seen.directory.glob("shard-*"))


@pytest.mark.slow
@pytest.mark.parametrize("what", BAD_RECORDS)
def test_under_skip_a_bad_record_is_left_out_counted_and_listed(what, tokshard_build):
    bad = BAD_RECORDS[what]
    seen = tokshard_build(write(bad.file, bad.content), *bad.options, "--on-bad-record", "skip")
    assert (seen.exit_code, seen.err) == (0, [])
    assert seen.texts == ["good", "good"]
    assert seen.left_out == [{bad.reason: 1}]
    assert seen.rejects == [{"source": bad.file, "record": 2, "reason": bad.reason, "detail": bad.detail}]
    with open_corpus(seen.directory) as corpus:
        assert [corpus.provenance(index).record for index in (0, 1)] == [1, 3]
        assert corpus.manifest.records.left_out == {bad.reason: 1}
    assert f"3 read = 2 written + 1 left out (1 {bad.reason})" in " ".join(seen.out.split())


@pytest.mark.parametrize(
    ("content", "reason", "detail", "options"),
    [
        (b"a\xff", "invalid UTF-8", BAD_BYTE, ()),
        (b"x" * 51, "over max-document-bytes", "the file holds more than 50 bytes of text", LONG),
    ],
    ids=["no UTF-8", "too long"],
)
def test_a_bad_text_file_is_a_bad_record(content, reason, detail, options, tokshard_build):
    for name, text in (("d/1.txt", b"good"), ("d/2.txt", content), ("d/3.txt", b"good")):
        write(name, text)
    tokshard_build("d", *options).assert_failed(f"d/2.txt, record 1: {reason}: {detail}", ALLOW if options else REPAIR)
    seen = tokshard_build("d", *options, "--on-bad-record", "skip")
    assert seen.texts == ["good", "good"]
    assert seen.left_out == [{}, {reason: 1}, {}]
    assert seen.rejects == [{"source": "d/2.txt", "record": 1, "reason": reason, "detail": detail}]


EMPTIES = {
    "a.jsonl": b'\n{"text": ""}\n{"text": "good"}\n  \n',
    "a.csv": b'n,text\n1,\n2,""\n3,good\n\n',
    "a.parquet": inputs.parquet_bytes(table_of([b"", b"", b"good", b""])),
    "a.arrow": inputs.arrow_bytes(table_of([b"", b"", b"good", b""])),
}


@pytest.mark.parametrize("policy", ["fail", "skip"])
@pytest.mark.parametrize("file", EMPTIES)
def test_empty_documents_are_left_out_and_counted_under_both_policies(file, policy, tokshard_build):
    seen = tokshard_build(write(file, EMPTIES[file]), "--on-bad-record", policy)
    assert (seen.exit_code, seen.texts) == (0, ["good"])
    assert seen.left_out == [{"empty": 3}]
    assert seen.rejects == []
    assert "4 read = 1 written + 3 left out (3 empty)" in " ".join(seen.out.split())


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_an_empty_text_file_is_an_empty_document(policy, tokshard_build):
    write("d/1.txt", b"")
    write("d/2.txt", b"good")
    seen = tokshard_build("d", "--on-bad-record", policy)
    assert (seen.texts, seen.left_out) == (["good"], [{"empty": 1}, {}])


def test_a_document_of_white_space_is_no_empty_document(tokshard_build):
    write("a.jsonl", jsonl([{"text": " \n"}]))
    assert tokshard_build("a.jsonl").texts == [" \n"]


def test_after_fail_the_same_command_with_skip_goes_on(tokshard_build):
    write("a.jsonl", GOOD)
    write("b.jsonl", between_good_lines(b"{"))
    assert tokshard_build("a.jsonl", "b.jsonl").exit_code == 1
    seen = tokshard_build("a.jsonl", "b.jsonl", "--on-bad-record", "skip")
    assert seen.texts == ["good"] * 3


def test_after_skip_the_same_command_with_fail_is_refused(tokshard_build):
    write("a.jsonl", between_good_lines(b"{"))
    with stopped_before_the_corpus(KeyboardInterrupt()):
        assert tokshard_build("a.jsonl", "--on-bad-record", "skip").exit_code == 130
    seen = tokshard_build("a.jsonl", "--on-bad-record", "fail")
    seen.assert_failed(
        "out belongs to another build: --on-bad-record was skip, now fail",
        "hint: give the settings of that build, another --out, or --force to start over",
        exit_code=2,
    )


def test_a_wrong_setting_that_stopped_the_first_task_can_be_mended(tokshard_build):
    write("a.jsonl", jsonl([{"body": "good"}]))
    assert "--text-field" in tokshard_build("a.jsonl").err[1]
    assert tokshard_build("a.jsonl", "--text-field", "body").texts == ["good"]


def test_a_missing_field_of_a_table_names_the_fields_there_are(tokshard_build):
    write("a.parquet", inputs.parquet_bytes(pa.table({"body": ["good"], "url": ["u"]})))
    tokshard_build("a.parquet").assert_failed(
        "a.parquet has no field 'text'; it has body, url",
        "hint: give the field that holds the text with --text-field",
        exit_code=2,
    )
    assert tokshard_build("a.parquet", "--text-field", "body").texts == ["good"]


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_a_build_that_writes_no_document_fails(policy, tokshard_build):
    write("a.jsonl", b'\n{"text": ""}\n')
    tokshard_build("a.jsonl", "--on-bad-record", policy).assert_failed(
        "no document was written: 2 records read, 2 empty",
        "hint: check the sources and --text-field, and start over with --force",
    )


def test_a_build_that_left_everything_out_fails_with_the_reasons(tokshard_build):
    write("a.jsonl", b'{"body": "x"}\n{"body": "y"}\n{\n')
    tokshard_build("a.jsonl", "--on-bad-record", "skip").assert_failed(
        "no document was written: 3 records read, 1 malformed, 2 missing text",
        "hint: check the sources and --text-field, and start over with --force",
    )


# special tokens in text


def word_tokenizer(directory: Path, *, unknown: str = "[UNK]") -> str:
    """A vocabulary of words that spells its special tokens as ordinary entries."""
    vocabulary = {"[UNK]": 0, "<s>": 1, "</s>": 2, "good": 3, "text": 4, "a": 5, "b": 6}
    content = {
        "version": "1.0",
        "added_tokens": [special_token(1, "<s>"), special_token(2, "</s>")],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": unknown},
    }
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return str(directory)


SPECIAL = "the tokenizer gives this text the id of a special token, which would be read as control"


def test_a_text_that_encodes_to_a_special_token_is_a_bad_record(tokshard_build, tmp_path):
    tokenizer = word_tokenizer(tmp_path / ".words")
    texts = ["good text", "good </s> text", "<s>", "[UNK] good", "good"]
    write("a.jsonl", jsonl([{"text": text} for text in texts]))
    options = ("a.jsonl", "--eos", "</s>", "--bos", "<s>")
    tokshard_build(*options, tokenizer=tokenizer).assert_failed(
        f"a.jsonl, line 2: special token in text: {SPECIAL}", REPAIR
    )
    seen = tokshard_build(*options, "--on-bad-record", "skip", tokenizer=tokenizer)
    assert seen.left_out == [{"special token in text": 2}]
    assert [(reject["record"], reject["reason"]) for reject in seen.rejects] == [
        (2, "special token in text"),
        (3, "special token in text"),
    ]
    documents = [document.tolist() for document in open_corpus(seen.directory).documents()]
    assert documents == [[1, 3, 4, 2], [1, 0, 3, 2], [1, 3, 2]]


def test_special_and_other_bad_records_are_listed_in_the_order_of_lines(tokshard_build, tmp_path):
    tokenizer = word_tokenizer(tmp_path / ".words")
    write("a.jsonl", b'{"text": "good"}\n{"text": "</s>"}\n{\n{"text": "<s>"}\n\n{"text": "text"}\n')
    seen = tokshard_build("a.jsonl", "--eos", "</s>", "--on-bad-record", "skip", tokenizer=tokenizer)
    assert [(reject["record"], reject["reason"]) for reject in seen.rejects] == [
        (2, "special token in text"),
        (3, "malformed"),
        (4, "special token in text"),
    ]
    assert seen.left_out == [{"empty": 1, "malformed": 1, "special token in text": 2}]
    with open_corpus(seen.directory) as corpus:
        assert [corpus.provenance(index).record for index in (0, 1)] == [1, 6]


def test_a_text_on_which_the_tokenizer_fails_is_a_bad_record(tokshard_build, tmp_path):
    tokenizer = word_tokenizer(tmp_path / ".words", unknown="a token that it lacks")
    write("a.jsonl", jsonl([{"text": text} for text in ("good text", "unheard of", "good")]))
    fails = f"tokenizers {importlib.metadata.version('tokenizers')} fails on the text: WordLevel error: Missing [UNK]"
    seen = tokshard_build("a.jsonl", "--eos", "</s>", tokenizer=tokenizer)
    problem, hint = seen.err
    assert problem.startswith(f"error: a.jsonl, line 2: tokenizer fails on the text: {fails}")
    assert (seen.exit_code, hint) == (1, REPAIR)
    seen = tokshard_build("a.jsonl", "--eos", "</s>", "--on-bad-record", "skip", tokenizer=tokenizer)
    assert seen.left_out == [{"tokenizer fails on the text": 1}]
    assert [(reject["record"], reject["reason"]) for reject in seen.rejects] == [(2, "tokenizer fails on the text")]
    assert [document.tolist() for document in open_corpus(seen.directory).documents()] == [[3, 4, 2], [3, 2]]


# damaged inputs


LINES = jsonl([{"text": f"line {number} {random.Random(number).random()}"} for number in range(200)])
TABLE = pa.Table.from_pylist([json.loads(line) for line in LINES.splitlines()])
PARQUET = inputs.parquet_bytes(TABLE, 50)
ARROW = inputs.arrow_bytes(TABLE, 50)
STREAM = inputs.arrow_stream_bytes(TABLE, 50)
FEATHER = inputs.feather_bytes(TABLE, 50)
TAR = inputs.tar_bytes([("a.txt", b"a" * 512), ("b.jsonl", LINES), ("c.txt", b"c")], form=tarfile.USTAR_FORMAT)


def flipped(data: bytes, position: int, count: int = 40) -> bytes:
    return data[:position] + bytes(byte ^ 0x55 for byte in data[position : position + count]) + data[position + count :]


def before_the_last_batch(stream: bytes) -> bytes:
    """The stream up to the start of its last batch: whole messages, no end."""
    return stream[: stream.rindex(b"\xff\xff\xff\xff", 0, len(stream) - 8)]


DAMAGED = {
    "a truncated gzip": ("a.jsonl.gz", gzip.compress(LINES)[:-100]),
    "a gzip without its last byte": ("a.jsonl.gz", gzip.compress(LINES)[:-1]),
    "a corrupt gzip": ("a.jsonl.gz", flipped(gzip.compress(LINES), 500)),
    "a gzip with something after it": ("a.jsonl.gz", gzip.compress(LINES) + b"more"),
    "an empty gzip": ("a.jsonl.gz", b""),
    "text under the name of gzip": ("a.jsonl.gz", LINES),
    "a truncated zstd": ("a.jsonl.zst", zstd(LINES)[:-100]),
    "a corrupt zstd": ("a.jsonl.zst", flipped(zstd(LINES, checksum=True), 500)),
    "a truncated wide zstd": ("a.jsonl.zst", zstd(LINES, window_log=28)[:-100]),
    "a second frame that is truncated": ("a.jsonl.zst", zstd(LINES) + zstd(LINES)[:-3]),
    "an empty zstd": ("a.jsonl.zst", b""),
    "a truncated csv.gz": ("a.csv.gz", gzip.compress(b"text\n" + b"line\n" * 9_000)[:-9]),
    "a truncated bz2": ("a.jsonl.bz2", bz2.compress(LINES)[:-100]),
    "a bz2 without its last byte": ("a.jsonl.bz2", bz2.compress(LINES)[:-1]),
    "a corrupt bz2": ("a.json.bz2", flipped(bz2.compress(LINES), 500)),
    "an empty bz2": ("a.txt.bz2", b""),
    "a truncated xz": ("a.jsonl.xz", lzma.compress(LINES)[:-100]),
    "an xz without its last byte": ("a.jsonl.xz", lzma.compress(LINES)[:-1]),
    "a corrupt xz": ("a.jsonl.xz", flipped(lzma.compress(LINES), 500)),
    "an xz with something after it": ("a.csv.xz", lzma.compress(LINES) + b"more"),
    "an empty csv": ("a.csv", b""),
    "an empty tsv": ("a.tsv", b""),
    "a truncated tsv.xz": ("a.tsv.xz", lzma.compress(b"text\n" + b"line\n" * 9_000)[:-9]),
    "a truncated txt.zst": ("a.txt.zst", zstd(LINES)[:-1]),
    "a truncated parquet": ("a.parquet", PARQUET[:-50]),
    "half a parquet": ("a.parquet", PARQUET[: len(PARQUET) // 2]),
    "a parquet with a corrupt page": ("a.parquet", flipped(PARQUET, 4, 100)),
    "a parquet with a corrupt footer": ("a.parquet", flipped(PARQUET, len(PARQUET) - 60)),
    "an empty parquet": ("a.parquet", b""),
    "text under the name of parquet": ("a.parquet", LINES),
    "a truncated Arrow file": ("a.arrow", ARROW[:-50]),
    "half an Arrow file": ("a.arrow", ARROW[: len(ARROW) // 2]),
    "an Arrow file with a corrupt batch": ("a.arrow", flipped(ARROW, ARROW.index(b"line 0") - 150, 100)),
    "an empty Arrow file": ("a.arrow", b""),
    "a stream without its end": ("a.arrow", STREAM[:-8]),
    "a stream cut between two batches": ("a.arrow", before_the_last_batch(STREAM)),
    "a stream cut inside a batch": ("a.arrow", STREAM[:-500]),
    "a stream with corrupt offsets": ("a.arrow", flipped(STREAM, STREAM.index(b"line 0") - 150, 100)),
    "text under the name of Arrow": ("a.arrow", LINES),
    "a truncated Feather file": ("a.feather", FEATHER[:-50]),
    "a Feather file with a corrupt batch": ("a.feather", flipped(FEATHER, len(FEATHER) // 2, 400)),
    "text under the name of Feather": ("a.feather", LINES),
    "a truncated tar": ("a.tar", TAR[:5_000]),
    "a tar cut between two members": ("a.tar", TAR[: 512 * 4]),
    "a tar with a corrupt header": ("a.tar", flipped(TAR, 512 * 2)),
    "an empty tar": ("a.tar", b""),
    "a truncated tar.gz": ("a.tgz", gzip.compress(TAR)[:-9]),
    "a tar.zst whose tar is truncated": ("a.tar.zst", zstd(TAR[:5_000])),
    "text under the name of tar": ("a.tar", LINES),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fail", "skip"])
@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_input_stops_the_build_under_both_policies_and_is_named(what, policy, tokshard_build):
    file, content = DAMAGED[what]
    seen = tokshard_build(write(file, content), "--on-bad-record", policy)
    assert seen.exit_code == 1, seen
    problem, hint = seen.err
    assert problem.startswith(f"error: {file} is damaged: ")
    assert len(problem) > len(f"error: {file} is damaged: ")
    assert hint == FETCH
    assert not (seen.directory / names.MANIFEST).exists()


class PlainKeys(pq_encryption.KmsClient):
    """Keys that are kept in the file itself."""

    def __init__(self, _: Any) -> None:
        super().__init__()

    def wrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64decode(key)


@pytest.mark.parametrize("has_plain_footer", [False, True])
def test_an_encrypted_parquet_file_is_called_so(has_plain_footer, tokshard_build):
    keys = {"footer_key": "k", "column_keys": {"k": ["text"]}, "plaintext_footer": has_plain_footer}
    factory = pq_encryption.CryptoFactory(PlainKeys)
    config = pq_encryption.EncryptionConfiguration(**keys)
    properties = factory.file_encryption_properties(pq_encryption.KmsConnectionConfig(), config)
    with pq.ParquetWriter("a.parquet", TABLE.schema, encryption_properties=properties) as writer:
        writer.write_table(TABLE)
    problem, hint = tokshard_build("a.parquet").err
    assert problem.startswith("error: a.parquet is encrypted, which is not read: ")
    assert hint == "hint: write it without encryption, or leave it out with --on-bad-source skip"
    seen = tokshard_build("a.parquet", write("b.jsonl", GOOD), "--on-bad-source", "skip", "--force")
    assert (seen.texts, seen.left_out) == (["good"], [{"damaged input": 1}, {}])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (json.dumps([{"text": "word " * 400}] * 1_000).encode(), "jq -c '.[]' converts an array"),
        (bytes(2_000_000), "these are NUL bytes"),
        (b"PAR1" + b"x" * 2_000_000, "this looks like parquet; give the file a name that ends in .parquet"),
        (json.dumps({"text": "word " * 400_000}).encode(), None),
    ],
    ids=["an array", "zeros", "parquet", "a record"],
)
def test_a_line_above_the_limit_that_no_limit_makes_a_record_is_called_what_it_is(line, said, tokshard_build):
    file = write("a.jsonl", GOOD + line)
    problem, hint = tokshard_build(file, "--max-document-bytes", "100kB").err
    long = f"line has {len(line):,} bytes, at most 1,848,576 are allowed"
    if said is None:
        assert (problem, hint) == (f"error: a.jsonl, line 2: over max-document-bytes: {long}", ALLOW)
    else:
        assert problem.startswith(f"error: a.jsonl, line 2: malformed: {long}; ")
        assert (said in problem, hint) == (True, REPAIR)


@pytest.mark.slow
@pytest.mark.parametrize("task_bytes", [64, 1 << 24])  # in tasks of its own, or in one task with others
@pytest.mark.parametrize(
    "what",
    # they stop a build by one error, whatever it says: test_a_damaged_input_stops_the_build_... has them all
    [pytest.param(what, marks=pytest.mark.soak if number % 6 else ()) for number, what in enumerate(DAMAGED)],
)
def test_a_damaged_input_is_left_out_whole_if_that_is_asked_for(what, task_bytes, tokshard_build, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    file, content = DAMAGED[what]
    sources = [write("1.jsonl", GOOD), write(file, content), write("3.jsonl", GOOD)]
    if "truncated csv" in what or "truncated tsv" in what:
        task_bytes = max(task_bytes, 4096)  # these unpack to much: a thousand tasks say no more than some dozen
    options = ["--on-bad-source", "skip", "--on-bad-record", "skip", "--task-bytes", str(task_bytes)]
    seen = tokshard_build(*sources, *options)
    assert seen.exit_code == 0, seen
    assert seen.texts == ["good", "good"]
    assert seen.left_out == [{}, {"damaged input": 1}, {}]
    (reject,) = seen.rejects
    assert (reject["source"], reject["record"], reject["reason"]) == (file, None, "damaged input")
    assert not reject["detail"].startswith(file)  # where it lay is not part of a corpus


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("a.parquet", PARQUET),
        ("a.arrow", ARROW),
        ("b.arrow", STREAM),
        ("a.feather", FEATHER),
        ("a.jsonl.zst", zstd(LINES, checksum=True)),
        ("a.jsonl.bz2", bz2.compress(LINES)),
        ("a.jsonl.xz", lzma.compress(LINES)),
    ],
    ids=["parquet", "Arrow file", "Arrow stream", "Feather", "zstd", "bz2", "xz"],
)
def test_an_input_with_any_flipped_bytes_is_read_or_refused_but_never_crashes(file, content, tmp_path):
    from tokshard.errors import TokshardError
    from tokshard.pipeline.sources.discover import discover
    from tokshard.pipeline.sources.division import Span
    from tokshard.pipeline.sources.formats import read_span
    from tokshard.pipeline.sources.records import RecordSpec

    spec = RecordSpec(text_field="text", columns={}, max_document_bytes=1_000)
    path = tmp_path / file
    refused = 0
    for seed in range(100):
        rng = random.Random(seed)
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 1, 2, 8])):
            damaged[rng.randrange(len(damaged))] = rng.choice([0, 255, rng.randrange(256)])
        path.write_bytes(damaged)
        try:
            (source,) = discover([str(path)], input_format=None).inputs
            for _ in read_span(source, Span(), spec):
                pass
        except TokshardError:
            refused += 1
    assert refused > 10


def test_damage_behind_the_limit_is_not_seen(tokshard_build, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    write("a.jsonl.gz", gzip.compress(LINES)[:-1])
    seen = tokshard_build("a.jsonl.gz", "--max-documents", "5")
    assert seen.exit_code == 0
    assert len(seen.texts) == 5


# inputs that go or change


def test_a_source_that_vanishes_is_named_and_the_build_goes_on_when_it_is_back(tokshard_build, monkeypatch):
    write("a.jsonl", GOOD)
    write("b.jsonl", GOOD)
    original = running.read_span

    def read_span(*arguments: Any) -> Any:
        Path("b.jsonl").rename("away")
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(running, "read_span", read_span)
        tokshard_build("a.jsonl", "b.jsonl").assert_failed(
            "b.jsonl cannot be read: No such file or directory",
            "hint: put the file back and run the same command again; finished tasks are kept",
        )
    Path("away").rename("b.jsonl")
    assert tokshard_build("a.jsonl", "b.jsonl").texts == ["good", "good"]


def version(path: str) -> str:
    return open_store(".").stat(path).version


def test_a_source_that_changes_while_it_is_read_is_named(tokshard_build, monkeypatch):
    write("a.jsonl", GOOD)
    original = running.read_span

    def read_span(source: Any, *arguments: Any) -> Any:
        yield from original(source, *arguments)
        with open("a.jsonl", "ab") as file:
            file.write(GOOD)

    monkeypatch.setattr(running, "read_span", read_span)
    before = version("a.jsonl")
    tokshard_build("a.jsonl").assert_failed(
        f"a.jsonl was modified since the build began: its version was {before}, now it is {version('a.jsonl')}",
        "hint: put the file back, or start over with --force",
    )


def test_a_stream_that_changes_while_it_is_read_is_named(tokshard_build, monkeypatch):
    inputs.patch_chunk_bytes(monkeypatch, 16)
    content = gzip.compress(GOOD)
    write("a.jsonl.gz", content)
    original = running.read_stream

    def read_stream(*arguments: Any, **options: Any) -> Any:
        yield from original(*arguments, **options)
        Path("a.jsonl.gz").write_bytes(2 * content)

    monkeypatch.setattr(running, "read_stream", read_stream)
    before = version("a.jsonl.gz")
    tokshard_build("a.jsonl.gz", "--task-bytes", "16").assert_failed(
        f"a.jsonl.gz was modified since the build began: its version was {before}, now it is {version('a.jsonl.gz')}",
        "hint: put the file back, or start over with --force",
    )


@pytest.mark.parametrize("encode", [inputs.arrow_bytes, inputs.arrow_stream_bytes], ids=["Arrow file", "Arrow stream"])
def test_an_arrow_input_that_is_cut_while_it_is_read_is_a_damaged_source(encode, tokshard_build, monkeypatch):
    content = encode(inputs.table([{"text": "a" * 50_000}] * 3), 1)
    original = running.read_span

    def read_span(source: Any, *arguments: Any) -> Any:
        for chunk in original(source, *arguments):
            yield chunk
            if source.location == "b.arrow":
                os.truncate("b.arrow", len(content) // 2)  # a map of the file would end the process here

    monkeypatch.setattr(running, "read_span", read_span)
    write("b.arrow", content)
    seen = tokshard_build(write("a.jsonl", GOOD), "b.arrow")
    problem, hint = seen.err
    assert problem.startswith("error: b.arrow is damaged: ")
    assert (seen.exit_code, hint) == (1, FETCH)
    write("b.arrow", content)
    seen = tokshard_build("a.jsonl", "b.arrow", "--on-bad-source", "skip", "--force")
    assert seen.exit_code == 0, seen.err
    assert (seen.texts, seen.left_out) == (["good"], [{}, {"damaged input": 1}])


def test_a_source_that_changed_since_the_last_run_is_refused(tokshard_build, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)  # a task of its own for each file
    write("a.jsonl", GOOD * 10)
    write("b.jsonl", GOOD * 10 + b"{")
    assert tokshard_build("a.jsonl", "b.jsonl", "--task-bytes", "64").exit_code == 1
    path = Path(write("a.jsonl", GOOD * 11)).absolute()
    tokshard_build("a.jsonl", "b.jsonl", "--task-bytes", "64").assert_failed(
        f"out belongs to another build: source {path} had {10 * len(GOOD)} bytes, now {11 * len(GOOD)}",
        "hint: give the settings of that build, another --out, or --force to start over",
        exit_code=2,
    )


# the order of errors


def numbered(count: int, bad: Mapping[int, bytes]) -> bytes:
    """Lines of JSON, counted from 1, of which some are replaced."""
    return b"".join(bad.get(n, b'{"text": "line %d"}' % n) + b"\n" for n in range(1, count + 1))


def test_the_first_bad_record_in_input_order_decides(tokshard_build, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    write("d/a.jsonl", numbered(30, {}))
    write("d/b.jsonl", numbered(30, {23: b'{"text": 5}', 29: b"{"}))
    write("d/c.jsonl", numbered(30, {1: b"{"}))
    write("d/d.jsonl.gz", gzip.compress(LINES)[:-1])
    tokshard_build("d", "--task-bytes", "128").assert_failed(
        "d/b.jsonl, line 23: text is not a string: field 'text' is 5", REPAIR
    )


@pytest.mark.parametrize(
    ("suffix", "data"),
    [
        ("gz", gzip.compress(GOOD) + b"\0"),
        ("gz", gzip.compress(GOOD) + bytes(100_001)),
        ("gz", gzip.compress(GOOD[:7]) + bytes(9) + gzip.compress(GOOD[7:])),
        ("xz", lzma.compress(GOOD) + bytes(512)),
    ],
)
def test_zeros_after_compressed_data_are_padding(suffix, data, tokshard_build):
    write("plain.jsonl", GOOD)
    write(f"a.jsonl.{suffix}", data)
    assert tokshard_build(f"a.jsonl.{suffix}").texts == tokshard_build("plain.jsonl", "--force").texts != []


@pytest.mark.parametrize(
    ("file", "data"),
    [("a.jsonl.gz", gzip.compress(LINES)), ("a.jsonl.bz2", bz2.compress(LINES)), ("a.jsonl.xz", lzma.compress(LINES))],
)
def test_what_follows_compressed_data_and_is_none_is_said_to_do_so(file, data, tokshard_build):
    kind = {"gz": "gzip"}.get(file.rpartition(".")[2], file.rpartition(".")[2])
    write(file, data + data + b"more of something else")
    said = f"error: {file} is damaged: after 2 whole {kind} stream(s) follows what is none"
    assert tokshard_build(file).err[0] == said


COMPRESS: dict[str, Any] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstd,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@crossed("line, suffix", [1, 2, 17, 40, 77, 80], COMPRESS)
def test_line_numbers_count_from_the_start_of_the_file_in_every_task(line, suffix, tokshard_build, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    file = f"a.jsonl{suffix}"
    write(file, COMPRESS[suffix](numbered(80, {line: b"{", 5: b"", 6: b""})))
    tokshard_build(file, "--task-bytes", "128").assert_failed(
        f"{file}, line {line}: malformed: Input data was truncated: '{{'", REPAIR
    )
    seen = tokshard_build(file, "--task-bytes", "128", "--on-bad-record", "skip")
    assert seen.rejects == [
        {"source": file, "record": line, "reason": "malformed", "detail": "Input data was truncated: '{'"}
    ]
    kept = [n for n in range(1, 81) if n not in (5, 6, line)]
    assert seen.texts == [f"line {n}" for n in kept]
    with open_corpus(seen.directory) as corpus:
        assert [corpus.provenance(index).record for index in range(len(corpus))] == kept


@pytest.mark.parametrize("file", ["a.parquet", "a.arrow", "b.arrow", "a.csv"])
def test_record_numbers_count_from_the_start_of_the_file_in_every_task(file, tokshard_build, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    values: list[str | None] = [f"row {n}" for n in range(1, 81)]
    if file == "a.csv":
        write(file, b"text\n" + b"".join(b"a,b\n" if n in (61, 77) else b"row %d\n" % n for n in range(1, 81)))
    else:
        values[60] = values[76] = None
        encode = {
            "a.parquet": inputs.parquet_bytes,
            "a.arrow": inputs.arrow_bytes,
            "b.arrow": inputs.arrow_stream_bytes,
        }
        write(file, encode[file](pa.table({"text": values}), 9))
    failed = tokshard_build(file, "--task-bytes", "128")
    assert failed.err[0].startswith(f"error: {file}, record 61: ")
    seen = tokshard_build(file, "--task-bytes", "128", "--on-bad-record", "skip")
    assert [(reject["source"], reject["record"]) for reject in seen.rejects] == [(file, 61), (file, 77)]
    with open_corpus(seen.directory) as corpus:
        numbers = [corpus.provenance(index).record for index in range(len(corpus))]
        assert numbers == [n for n in range(1, 81) if n not in (61, 77)]


def padded(count: int, bad: Mapping[int, bytes]) -> bytes:
    """`numbered` with lines of 1.4 kB that hardly compress."""

    def line(number: int) -> bytes:
        pad = base64.b85encode(random.Random(number).randbytes(1_120))
        return b'{"text": "line %d", "pad": "%s"}' % (number, pad)

    return b"".join(bad.get(number, line(number)) + b"\n" for number in range(1, count + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "compress"),
    [
        ("b.jsonl", bytes),
        pytest.param("b.jsonl.zst", zstd, marks=pytest.mark.soak),
        pytest.param("b.jsonl.gz", lambda data: gzip.compress(data, 1), marks=pytest.mark.slow),
    ],
    ids=["plain", "zst", "gz"],
)
def test_with_several_workers_the_first_bad_record_in_input_order_decides(file, compress, tokshard_build):
    write("d/a.jsonl", padded(1_000, {}))
    write(f"d/{file}", compress(padded(4_000, {2_900: b'{"text": 5}', 3_800: b"{"})))
    write("d/c.jsonl", b"{\n" * 3)
    for workers in (3, 2):
        tokshard_build("d", "--task-bytes", "1MiB", "--force", workers=workers).assert_failed(
            f"d/{file}, line 2900: text is not a string: field 'text' is 5", REPAIR
        )


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["gz", pytest.param("zst", marks=pytest.mark.soak)])
def test_with_several_workers_a_bad_record_before_damage_decides_as_in_one_process(suffix, tokshard_build):
    lines = padded(4_000, {2_500: b"{"})  # in the fourth MiB of six, in the segment of the end but not in its chunk
    content = gzip.compress(lines, 1)[:-1] if suffix == "gz" else zstd(lines) + b"x"
    file = write(f"a.jsonl.{suffix}", content)
    for workers in (1, 2):
        tokshard_build(file, "--task-bytes", "3MiB", "--force", workers=workers).assert_failed(
            f"{file}, line 2500: malformed: Input data was truncated: '{{'", REPAIR
        )
    for workers in (1, 2):  # then the damage itself decides, whatever is skipped
        seen = tokshard_build(file, "--task-bytes", "3MiB", "--force", "--on-bad-record", "skip", workers=workers)
        assert seen.err[0].startswith(f"error: {file} is damaged: ")


def test_with_several_workers_a_bad_record_behind_the_limit_is_not_seen(tokshard_build):
    write("d/a.jsonl", padded(900, {}))
    write("d/b.jsonl", padded(900, {400: b"{"}))
    alone = tokshard_build("d", "--task-bytes", "1MiB", "--max-documents", "1200")
    shared = tokshard_build("d", "--task-bytes", "1MiB", "--max-documents", "1200", "--force", workers=2)
    assert (alone.exit_code, shared.exit_code) == (0, 0)
    assert len(shared.texts) == 1_200
    assert [source.records_read for source in open_corpus(shared.directory).sources()] == [900, 300]
    seen = tokshard_build("d", "--task-bytes", "1MiB", "--max-documents", "1300", "--force", workers=2)
    seen.assert_failed("d/b.jsonl, line 400: malformed: Input data was truncated: '{'", REPAIR)


def test_the_rejects_of_all_tasks_are_in_input_order(tokshard_build, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    write("d/a.jsonl", numbered(40, {7: b"{", 33: b'{"text": null}'}))
    write("d/b.txt", b"\xff")
    write("d/c.jsonl.zst", zstd(numbered(40, {1: b"[]", 40: b'{"text": "\xff"}'})))
    write("e.csv", b"text\nok\na,b\n")
    seen = tokshard_build("d", "e.csv", "--task-bytes", "128", "--on-bad-record", "skip")
    assert [(reject["source"], reject["record"], reject["reason"]) for reject in seen.rejects] == [
        ("d/a.jsonl", 7, "malformed"),
        ("d/a.jsonl", 33, "missing text"),
        ("d/b.txt", 1, "invalid UTF-8"),
        ("d/c.jsonl.zst", 1, "malformed"),
        ("d/c.jsonl.zst", 40, "invalid UTF-8"),
        ("e.csv", 2, "malformed"),
    ]
    assert seen.left_out == [
        {"malformed": 1, "missing text": 1},
        {"invalid UTF-8": 1},
        {"invalid UTF-8": 1, "malformed": 1},
        {"malformed": 1},
    ]


# wrong calls


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["none.jsonl"], "none.jsonl does not exist"),
        (["a.jsonl", "a.jsonl"], "a.jsonl is an input twice: a.jsonl is the same file"),
        (["a.md"], "a.md: the name does not tell the format"),
        (
            ["a.jsonl", "--keep-field", "url:text"],
            "url: unknown type 'text', expected one of string, int64, float64, bool",
        ),
        (
            ["a.jsonl", "--keep-field", "tokens"],
            "a kept column cannot be called 'tokens': that is the column of token ids",
        ),
        (["a.jsonl", "--format", "json"], "format is 'json'"),
    ],
)
def test_a_wrong_call_exits_2_and_leaves_nothing(arguments, problem, tokshard_build):
    write("a.jsonl", GOOD)
    write("a.md", GOOD)
    seen = tokshard_build(*arguments)
    assert seen.err[0] == f"error: {problem}"
    assert seen.err[1].startswith("hint: ")
    assert (seen.exit_code, seen.directory.exists()) == (2, False)


def test_errors_cross_processes_whole():
    import pickle

    error = SourceError("a.jsonl is damaged: truncated", hint="fetch it again")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.problem, again.hint, again.exit_code) == (SourceError, error.problem, error.hint, 1)
