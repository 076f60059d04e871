"""Inputs that are made to hurt: each ends in a clear outcome, in bounded memory and time, as a process of its own."""

from __future__ import annotations

import functools
import gzip
import json
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pyarrow as pa
import pytest
import tokenizers

from tests.pipeline.inputs import TOKENIZER, parquet_bytes, table, tar_bytes
from tokshard import open_corpus
from tokshard.cli.main import run

MIB = 1 << 20
BASE_BYTES = 256 * MIB
"""What a build in one process may hold whatever it reads: libraries, tokenizer, chunks, a batch of tokens."""
FACTOR = 56 if tokenizers.__version__.startswith("1.") else 224
"""Bytes that each byte of a document may cost, on top of that. Text costs 12, one letter again and again 50.

With 0.2x text costs 140, and what has no space up to 210.
"""


class Outcome(NamedTuple):
    exit_code: int
    problem: str
    peak_bytes: int
    out: Path

    def left_out(self) -> dict[str, int]:
        counts: dict[str, int] = open_corpus(self.out).manifest.records.left_out
        return counts


Run = Callable[..., Outcome]


@pytest.fixture
def build(tmp_path) -> Run:
    """``tokshard build`` as a process with one worker, and the most memory that it held at once."""

    def run(path: Path, *options: str) -> Outcome:
        command = [sys.executable, "-m", "tokshard", "build", str(path), "--tokenizer", str(TOKENIZER)]
        fixed = ["--out", str(tmp_path / "out"), "--workers", "1", "--quiet"]
        with subprocess.Popen(
            [*command, *fixed, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            watched, peak = psutil.Process(process.pid), 0
            while process.poll() is None:
                try:
                    peak = max(peak, watched.memory_info().rss)
                except psutil.Error:
                    break
                try:
                    process.wait(0.02)
                except subprocess.TimeoutExpired:
                    continue
            _, err = process.communicate(timeout=60)
        return Outcome(process.returncode, err.decode(), peak, tmp_path / "out")

    return run


LONG = 16 * MIB


def without_a_space() -> str:
    rng = random.Random(1)
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789+/", k=LONG))


DOCUMENTS: dict[str, Callable[[], str]] = {
    "16 MiB without a space": without_a_space,
    "16 MiB of one letter": lambda: "a" * LONG,
    "16 MiB of spaces": lambda: " " * LONG,
    "16 MiB of newlines": lambda: "\n" * LONG,
    "16 MiB of one emoji": lambda: "\U0001f642" * (LONG // 4),
    "16 MiB of combining accents": lambda: "e" + "\u0301" * (LONG // 2 - 1),
    "16 MiB of quotes": lambda: '"' * LONG,
    "16 MiB of zeros": lambda: "\0" * LONG,
}


@pytest.mark.soak  # test_a_line_that_a_bomb_unpacks_to_is_one_bad_record_and_never_held bounds memory, too
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
@pytest.mark.parametrize("what", DOCUMENTS)
def test_a_document_of_the_largest_size_is_encoded_in_bounded_memory(what, kind, build, tmp_path):
    text = DOCUMENTS[what]()
    path = tmp_path / f"a.{kind}"
    path.write_text(text if kind == "txt" else json.dumps({"text": text}), encoding="utf-8")
    outcome = build(path)
    assert outcome.exit_code == 0, outcome.problem
    assert open_corpus(outcome.out).num_documents == 1
    assert open_corpus(outcome.out).manifest.text_bytes == LONG - (what.endswith("accents"))
    assert outcome.peak_bytes < BASE_BYTES + FACTOR * LONG


@pytest.mark.soak
def test_a_million_empty_lines_are_a_million_empty_records(build, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" * 1_000_000 + b'{"text": "last"}\n')
    outcome = build(path)
    assert outcome.exit_code == 0, outcome.problem
    assert outcome.left_out() == {"empty": 1_000_000}
    assert open_corpus(outcome.out).provenance(0).record == 1_000_001
    assert outcome.peak_bytes < BASE_BYTES


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["line", "paragraph"])
def test_a_million_empty_lines_of_text_are_no_documents(mode, build, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n" * 1_000_000 + b"last\n")
    outcome = build(path, "--text-unit", mode)
    assert outcome.exit_code == 0, outcome.problem
    assert outcome.left_out() == ({"empty": 1_000_000} if mode == "line" else {})
    assert outcome.peak_bytes < BASE_BYTES


@pytest.mark.soak
def test_very_many_bad_lines_are_counted_and_listed_in_bounded_memory(build, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{\n" * 200_000 + b'{"text": "last"}\n')
    outcome = build(path, "--on-bad-record", "skip")
    assert outcome.exit_code == 0, outcome.problem
    assert outcome.left_out() == {"malformed": 200_000}
    assert outcome.peak_bytes < BASE_BYTES + 64 * MIB


@pytest.mark.slow
def test_random_unicode_is_encoded(build, tmp_path):
    rng = random.Random(2)
    with (tmp_path / "a.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(100):
            codes = (rng.randrange(0x110000) for _ in range(3_000))
            text = "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
            file.write(json.dumps({"text": text}, ensure_ascii=rng.random() < 0.5) + "\n")
    outcome = build(tmp_path / "a.jsonl")
    assert outcome.exit_code == 0, outcome.problem
    assert open_corpus(outcome.out).num_documents == 100
    assert outcome.peak_bytes < BASE_BYTES


NESTED = b"[" * 1_000_000 + b"]" * 1_000_000
OBJECTS = b'{"a":' * 10_000 + b"1" + b"}" * 10_000


VALUES = {"arrays": NESTED, "objects": OBJECTS, "open arrays": b"[" * 1_000_000, "open objects": b'{"text":' * 100_000}
OPTIONS = {"not read": (), "kept": ("--keep-field", "deep"), "the text": ("--text-field", "deep.a.a")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["the text", *(pytest.param(how, marks=pytest.mark.soak) for how in ("not read", "kept"))]
)
def test_json_that_is_nested_deeply_is_a_bad_record_or_passed_over(how, build, tmp_path, capsys):
    options = OPTIONS[how]
    good = b'{"text": "good", "deep": {"a": {"a": "good"}}}\n'
    lines = {what: b'{"text": "x", "deep": %s}\n' % value for what, value in VALUES.items()}
    path = tmp_path / "a.jsonl"
    path.write_bytes(good + b"".join(lines.values()))
    outcome = build(path, *options, "--on-bad-record", "skip")
    assert outcome.exit_code == 0, outcome.problem
    read = open_corpus(outcome.out).manifest.records
    assert read.read == 1 + len(VALUES) == read.written + sum(read.left_out.values())
    assert outcome.peak_bytes < BASE_BYTES
    failed = 0
    for what, line in lines.items():
        path = tmp_path / f"{what}.jsonl"
        path.write_bytes(good + line)
        fixed = ["--tokenizer", str(TOKENIZER), "--out", str(tmp_path / what), "--workers", "1", "--quiet"]
        exit_code = run(["build", str(path), *fixed, *options])
        problem = capsys.readouterr().err
        assert exit_code == ("error: " in problem)
        failed += exit_code
        if exit_code:
            assert f"error: {path}, line 2: " in problem
            assert len(problem) < 1_000
    assert failed == sum(read.left_out.values())


@pytest.mark.slow
def test_members_of_json_that_are_nested_deeply_are_bad_records(build, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(
        tar_bytes([("a.txt", b"good"), ("a.json", b'{"x": 1, "text": "a"}'), ("b.txt", b"x"), ("b.json", NESTED)])
    )
    for field, kept in (("text", "x"), ("txt", "json.x")):
        outcome = build(path, "--text-field", field, "--keep-field", kept, "--on-bad-record", "skip", "--force")
        assert outcome.exit_code == 0, outcome.problem
        assert outcome.left_out() == {"malformed": 1}


@functools.cache
def letters() -> bytes:
    """A member of a gzip that unpacks to 64 MiB of one letter, in the memory of one MiB of it."""
    compressor = zlib.compressobj(9, wbits=31)
    return b"".join(compressor.compress(b"a" * MIB) for _ in range(64)) + compressor.flush()


def bomb(num_bytes: int, before: bytes = b"", after: bytes = b"") -> bytes:
    """A gzip of so many letters; of members, because one of 1 GiB takes longer to make than all that reads it."""
    return gzip.compress(before) + letters() * (num_bytes // (64 * MIB)) + gzip.compress(after)


LINES = {
    "a.jsonl.gz": (b'{"text": "good"}\n{"text": "', b'"}\n{"text": "good"}\n'),
    "a.csv.gz": (b"text\ngood\n", b"\ngood\n"),
    "a.txt.gz": (b"good\n", b"\ngood\n"),
}


@pytest.mark.parametrize(
    ("name", "limit_mib", "num_mib"),
    [
        pytest.param("a.jsonl.gz", 1, 384, marks=pytest.mark.slow),
        *(
            pytest.param(name, limit, 512, marks=pytest.mark.soak)
            for name, limit in (("a.jsonl.gz", 4), ("a.csv.gz", 1), ("a.txt.gz", 1))
        ),
        *(pytest.param(name, 16, 1_024, marks=pytest.mark.soak) for name in LINES),  # the limit that is the default
    ],
)
def test_a_line_that_a_bomb_unpacks_to_is_one_bad_record_and_never_held(name, limit_mib, num_mib, build, tmp_path):
    path = tmp_path / name
    path.write_bytes(bomb(num_mib * MIB, *LINES[name]))
    assert path.stat().st_size < 2 * MIB
    options = ["--text-unit", "line", "--on-bad-record", "skip"]
    outcome = build(path, *options, "--max-document-bytes", f"{limit_mib}MiB")
    assert outcome.exit_code == 0, outcome.problem
    assert outcome.left_out() == {"over max-document-bytes": 1}
    assert open_corpus(outcome.out).num_documents == 2
    # the most that may be held of a line: eight times --max-document-bytes, for JSON that escapes each character
    most = BASE_BYTES + (4 * (8 * limit_mib + 1) * MIB if limit_mib > 1 else 0)
    assert most < num_mib * MIB, "too little text to mean anything"
    assert outcome.peak_bytes < most


@pytest.mark.soak
def test_a_text_file_that_a_bomb_unpacks_to_is_one_bad_record_and_never_held(build, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"good")
    (tmp_path / "in" / "b.txt.gz").write_bytes(bomb(384 * MIB))
    outcome = build(tmp_path / "in", "--on-bad-record", "skip")
    assert outcome.exit_code == 0, outcome.problem
    assert outcome.left_out() == {"over max-document-bytes": 1}
    assert outcome.peak_bytes < BASE_BYTES + 4 * 16 * MIB


@pytest.mark.soak
def test_an_archive_that_a_bomb_unpacks_to_is_read_in_pieces(build, tmp_path):
    archive = tar_bytes([("a.txt", b"good"), ("b.txt", b""), ("c.jpg", b"")])
    huge = bytearray(archive)
    for start in (1_024, 1_536):  # the headers of b and c: 384 MiB each
        huge[start + 124 : start + 136] = b"%011o\0" % (384 * MIB)
        huge[start + 148 : start + 156] = b" " * 8
        huge[start + 148 : start + 156] = b"%06o\0 " % sum(huge[start : start + 512])
    path = tmp_path / "a.tar.gz"
    path.write_bytes(bomb(384 * MIB, huge[:1_536]) + bomb(384 * MIB, huge[1_536:2_048], huge[2_048:]))
    outcome = build(path, "--on-bad-record", "skip")
    assert outcome.exit_code == 0, outcome.problem
    assert outcome.left_out() == {"archive member of another format": 1, "over max-document-bytes": 1}
    assert outcome.peak_bytes < BASE_BYTES + 4 * 16 * MIB


@pytest.mark.soak
def test_rows_of_a_table_that_are_too_long_are_bad_records(build, tmp_path):
    path = tmp_path / "a.parquet"
    found: Any = table([{"text": "good"}, {"text": "a" * (64 * MIB)}, {"text": "good"}])
    path.write_bytes(parquet_bytes(found))
    assert path.stat().st_size < 8 * MIB
    outcome = build(path, "--on-bad-record", "skip")
    assert outcome.exit_code == 0, outcome.problem
    assert outcome.left_out() == {"over max-document-bytes": 1}
    # a table is held by the batch, as whoever wrote it made it: here 64 MiB
    assert outcome.peak_bytes < BASE_BYTES + 6 * 64 * MIB


@pytest.mark.slow
def test_a_compressed_file_of_nothing_but_members_ends(build, tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"") * 200_000 + gzip.compress(b'{"text": "good"}\n'))
    outcome = build(path)
    assert outcome.exit_code == 0, outcome.problem
    assert outcome.peak_bytes < BASE_BYTES


@pytest.mark.soak
@pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 18, reason="pyarrow 17 cannot write views of one value")
def test_views_that_share_one_long_value_are_taken_a_few_at_a_time(build, tmp_path):
    # 800 views of 2.5 MiB each, all of the same bytes: 13 kB of views stand for 2 GiB of text
    value = b"a" * (5 * MIB // 2)
    views = b"".join(struct.pack("<i4sii", len(value), value[:4], 0, 0) for _ in range(800))
    views += struct.pack("<i12s", 5, b"hello")
    array = pa.Array.from_buffers(pa.string_view(), 801, [None, pa.py_buffer(views), pa.py_buffer(value)])
    path = tmp_path / "a.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, pa.schema([("text", pa.string_view())])) as writer:
        writer.write_batch(pa.record_batch([array], ["text"]))
    assert path.stat().st_size < 3 * MIB
    outcome = build(path, "--max-document-bytes", "1MB", "--on-bad-record", "skip")
    assert outcome.exit_code == 0, outcome.problem
    assert outcome.left_out() == {"over max-document-bytes": 800}
    assert outcome.peak_bytes < BASE_BYTES + 16 * MIB
