"""Standard input as a source: read once, by the process that was started, and never twice."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.pipeline.inputs import arrow_stream_bytes, csv_bytes, jsonl, table, tar_bytes, texts_of, write_byte_tokenizer
from tokshard import open_corpus
from tokshard.cli.build_text import status_lines
from tokshard.cli.main import run
from tokshard.pipeline.sources.inputs import STDIN, read_once_note
from tokshard.pipeline.status import read_status

RECORDS = [{"text": f"document {number}", "pad": "x" * 1_500} for number in range(3_000)]


class Done(NamedTuple):
    returncode: int
    stdout: bytes
    stderr: bytes


def build(content: bytes, directory: Path, *options: str, source: str = "-", out: bool = True) -> Done:
    """``tokshard build`` with this content in a pipe as its standard input."""
    return in_this_process(content, directory, words(directory, *options, source=source, out=out))


def words(directory: Path, *options: str, source: str = "-", out: bool = True) -> list[str]:
    tokenizer = write_byte_tokenizer(directory / ".tokenizer")
    return ["build", source, "--tokenizer", str(tokenizer), *(("--out", "out") if out else ()), *options]


def in_this_process(content: bytes, directory: Path, arguments: list[str]) -> Done:
    said, complained = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(directory),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(complained),
        standard_input(content),
    ):
        returncode = run(arguments)
    return Done(returncode, said.getvalue().encode(), complained.getvalue().encode())


@contextlib.contextmanager
def standard_input(content: bytes) -> Iterator[None]:
    reading, writing = os.pipe()
    before = os.dup(0)
    os.dup2(reading, 0)
    os.close(reading)
    writer = threading.Thread(target=_write, args=(writing, content))
    writer.start()
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)
        writer.join()


def _write(descriptor: int, content: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, "wb") as pipe:
        pipe.write(content)


FORMATS: dict[str, bytes] = {
    "jsonl": jsonl(RECORDS),
    "csv": csv_bytes(RECORDS),
    "tsv": csv_bytes(RECORDS, delimiter="\t"),
    "tar": tar_bytes([("a.jsonl", jsonl(RECORDS))]),
}


@pytest.mark.parametrize(
    "name", ["jsonl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("csv", "tsv", "tar"))]
)
def test_standard_input_gives_the_corpus_that_a_file_gives_for_any_number_of_workers(name, tmp_path):
    options = ["--workers", "3", "--task-bytes", "1MiB", "--format", name]
    done = build(FORMATS[name], tmp_path, *options, "--json")
    assert done.returncode == 0, done.stderr
    assert f"note: {read_once_note(STDIN)}" in done.stderr.decode()
    with open_corpus(tmp_path / "out") as corpus:
        assert texts_of(corpus) == [record["text"] for record in RECORDS]
        if name == "jsonl":  # csv is cut by its text, of which there is little
            assert len({shard.name[:24] for shard in corpus.shards}) >= 4
        assert (corpus.manifest.arguments, corpus.sources()[0].path) == (["stdin"], "")
        assert corpus.provenance(2_999).record == 3_000
        hashes: Any = [shard.sha256 for shard in corpus.shards]
    alone = build(FORMATS[name], tmp_path, *options, "--workers", "1", "--force", "--quiet")
    assert (alone.returncode, alone.stderr) == (0, b"")
    with open_corpus(tmp_path / "out") as corpus:
        assert [shard.sha256 for shard in corpus.shards] == hashes


@pytest.mark.slow
def test_a_process_reads_its_standard_input(tmp_path):
    command = [sys.executable, "-m", "tokshard", *words(tmp_path, "--format", "jsonl")]
    subprocess.run(command, input=FORMATS["jsonl"], cwd=tmp_path, timeout=60, check=True, capture_output=True)
    assert texts_of(open_corpus(tmp_path / "out")) == [record["text"] for record in RECORDS]


def test_a_limit_on_standard_input_is_exact_for_any_number_of_workers(tmp_path):
    options = ["--workers", "3", "--task-bytes", "1MiB", "--format", "jsonl", "--max-documents", "2900"]
    assert build(FORMATS["jsonl"], tmp_path, *options).returncode == 0
    assert texts_of(open_corpus(tmp_path / "out")) == [record["text"] for record in RECORDS[:2_900]]


def test_standard_input_may_stand_among_files(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": "from a file"}]))
    done = build(b"a line\nanother\n", tmp_path, "-", "--format", "txt", "--text-unit", "line", source="a.jsonl")
    assert done.returncode == 0, done.stderr
    # --format counts for all sources
    assert texts_of(open_corpus(tmp_path / "out")) == ['{"text": "from a file"}', "a line", "another"]


def test_a_finished_corpus_of_standard_input_is_only_replaced_by_force(tmp_path):
    assert build(b"a\n", tmp_path, "--format", "txt").returncode == 0
    again = build(b"b\n", tmp_path, "--format", "txt")
    assert (again.returncode, again.stdout) == (2, b"")
    assert "out belongs to another build: standard input cannot be read again" in again.stderr.decode()
    assert texts_of(open_corpus(tmp_path / "out")) == ["a\n"]
    assert build(b"b\n", tmp_path, "--format", "txt", "--force").returncode == 0
    assert texts_of(open_corpus(tmp_path / "out")) == ["b\n"]


def test_a_build_of_standard_input_that_stopped_has_to_start_over(tmp_path):
    broken = jsonl(RECORDS) + b"{\n"
    options = ["--format", "jsonl", "--task-bytes", "1MiB", "--workers", "1"]
    first = build(broken, tmp_path, *options)
    assert first.returncode == 1
    assert "error: -, line 3001: malformed" in first.stderr.decode()
    again = build(jsonl(RECORDS), tmp_path, *options)
    assert again.returncode == 2
    assert "standard input cannot be read again" in again.stderr.decode()
    assert "--force to start over" in again.stderr.decode()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ([], "-: the name does not tell the format"),
        (["--format", "parquet"], "parquet cannot be read from standard input"),
        (["--format", "arrow"], "arrow cannot be read from standard input"),
        (["-", "--format", "txt"], "- is an input twice"),
    ],
)
def test_what_standard_input_cannot_be_is_refused(options, problem, tmp_path):
    done = build(arrow_stream_bytes(table([{"text": "a"}])), tmp_path, *options)
    assert done.returncode == 2
    assert problem in done.stderr.decode()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [("--dedup", "exact"), ("--dry-run",)])
def test_what_would_read_standard_input_twice_is_refused(option, tmp_path):
    done = build(FORMATS["jsonl"], tmp_path, "--format", "jsonl", *option)
    assert done.returncode == 2
    assert "can be read once only" in done.stderr.decode()
    assert f"hint: write it to a file first, or leave out {option[0]}" in done.stderr.decode()
    assert not (tmp_path / "out").exists()


def test_a_recipe_gives_standard_input_to_one_corpus_only(tmp_path):
    (tmp_path / "two.toml").write_text(
        '[defaults]\nformat = "txt"\ntext_unit = "line"\n'
        '[corpora.a]\nsources = "-"\nout = "a"\n[corpora.b]\nsources = "two.toml"\nout = "b"\n'
    )
    assert build(b"one\ntwo\n", tmp_path, source="two.toml", out=False).returncode == 0
    assert texts_of(open_corpus(tmp_path / "a")) == ["one", "two"]
    again = (tmp_path / "two.toml").read_text().replace('"two.toml"', '["-"]')
    (tmp_path / "two.toml").write_text(again)
    done = build(b"one\n", tmp_path, source="two.toml", out=False)
    assert done.returncode == 2
    assert "corpora.a and corpora.b read standard input, which can be read once only" in done.stderr.decode()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("limit", [(), ("--max-documents", "2")])
def test_a_damaged_standard_input_is_left_out_whole(workers, limit, tmp_path):
    for name in ("a", "z"):
        (tmp_path / f"{name}.tar").write_bytes(tar_bytes([(f"{name}.txt", name.encode())]))
    cut = FORMATS["tar"][: 4 << 20]
    options = ["--format", "tar", "--on-bad-source", "skip", "--task-bytes", "1MiB", *limit]
    done = build(cut, tmp_path, "-", "z.tar", *options, "--workers", str(workers), source="a.tar")
    if limit:  # it falls before the damage
        assert done.returncode == 0, done.stderr
        assert texts_of(open_corpus(tmp_path / "out")) == ["a", "document 0"]
        return
    assert done.returncode == 0, done.stderr
    with open_corpus(tmp_path / "out") as corpus:
        assert texts_of(corpus) == ["a", "z"]
        assert [source.left_out for source in corpus.sources()] == [{}, {"damaged input": 1}, {}]


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_damage_of_standard_input_before_a_limit_counts_and_nothing_is_read_again(policy, tmp_path):
    (tmp_path / "z.tar").write_bytes(tar_bytes([("z.txt", b"z")]))
    options = ["--format", "tar", "--on-bad-source", policy, "--task-bytes", "1MiB", "--max-documents", "5000"]
    done = build(FORMATS["tar"][: 4 << 20], tmp_path, "z.tar", *options)
    if policy == "fail":
        assert done.returncode == 1
        assert "- is damaged: the archive is cut off" in done.stderr.decode()
        return
    assert done.returncode == 0, done.stderr
    with open_corpus(tmp_path / "out") as corpus:
        assert texts_of(corpus) == ["z"]


def test_a_bad_record_of_standard_input_before_a_limit_stops_the_build(tmp_path):
    options = ["--format", "jsonl", "--task-bytes", "1MiB", "--max-documents", "5000"]
    done = build(jsonl(RECORDS[:2_000]) + b"{\n" + jsonl(RECORDS), tmp_path, *options)
    assert done.returncode == 1
    assert "error: -, line 2001: malformed" in done.stderr.decode()


def test_the_status_of_a_stopped_build_of_standard_input_says_that_it_has_to_start_over(tmp_path):
    options = ["--format", "jsonl", "--task-bytes", "1MiB", "--workers", "1"]
    assert build(jsonl(RECORDS) + b"{\n", tmp_path, *options).returncode == 1
    status = str(status_lines(read_status(tmp_path / "out")))
    assert "not possible: standard input can be read once only; start over with --force" in status
    assert "tokshard build" not in status


def test_an_empty_standard_input_writes_no_document(tmp_path):
    done = build(b"", tmp_path, "--format", "jsonl", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"].startswith("no document was written: 0 records read")
