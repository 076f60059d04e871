"""A build into a bucket gives the bytes of a build on this machine, whatever stops it on the way."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.store import faulty_proxy as faults
from tokshard import open_corpus
from tokshard.store import files_below, open_store

pytestmark = [pytest.mark.remote, pytest.mark.timeout(240)]

TOKENIZER = str(Path(__file__).parents[2] / "recipes" / "tokenizer")
CLI = (sys.executable, "-m", "tokshard")
OWN_TO_A_RUN = {"build-report.json"}
"""Times and places of a run."""


BUILD = """
import sys
from tokshard import build_corpus
from tokshard.store import STORES_BY_SCHEME
from tokshard.store.remote import remote_store
from tokshard.store.requests import RemoteOptions
if __name__ == "__main__":
    texts, tokenizer, out, lease_seconds, *options = sys.argv[1:]
    STORES_BY_SCHEME["s3"] = lambda uri: remote_store(uri, RemoteOptions(lease_seconds=float(lease_seconds)))
    try:
        options = dict.fromkeys(options, True)
        build_corpus(texts, tokenizer=tokenizer, out=out, workers=2, task_bytes=1 << 20, **options)
    except Exception as error:
        sys.exit(str(error))
"""
SHARDS = r"PUT .*shard-0[01]-000000[1-7]"
"""Most of them, as requests name them."""


@pytest.fixture
def texts(tmp_path) -> Path:
    return write_texts(tmp_path / "texts", "note")


def write_texts(folder: Path, word: str) -> Path:
    folder.mkdir()
    for number in range(8):
        lines = (json.dumps({"text": f"{word} {number} of {line} " * 100}) for line in range(600))
        (folder / f"{number:02}.jsonl").write_text("\n".join(lines))
    return folder


def command(texts: Path, out: str, *options: str, lease_seconds: float = 60) -> list[str]:
    script = texts.parent / "build.py"
    script.write_text(BUILD)
    return [sys.executable, str(script), str(texts), TOKENIZER, out, str(lease_seconds), *options]


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(*words: str) -> str:
    """What a command says that has to fail."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own, which is killed unless it has ended."""
    process = subprocess.Popen(words, start_new_session=True, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def content(location: str) -> dict[str, bytes]:
    store = open_store(location)
    return {name: store.get(name) for name in files_below(store, "") if name not in OWN_TO_A_RUN}


@pytest.fixture
def expected(texts, tmp_path) -> dict[str, bytes]:
    run(*command(texts, str(tmp_path / "local")))
    return content(str(tmp_path / "local"))


def wait_for_receipts(store, number: int) -> None:
    deadline = time.monotonic() + 60
    while sum("receipts/" in name for name in files_below(store, "")) < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_build_into_a_bucket_gives_the_same_bytes_and_leaves_nothing_else(texts, s3, expected):
    run(*command(texts, f"{s3}/out"))
    assert content(f"{s3}/out") == expected
    assert "complete" in run(*CLI, "status", f"{s3}/out")
    assert "4,800" in run(*CLI, "inspect", f"{s3}/out")


def test_a_build_over_a_bad_network_gives_the_same_bytes(texts, s3, s3_proxy, expected):
    kinds = itertools.cycle([faults.status(503), faults.reset, faults.lost_answer, faults.short])
    turn = itertools.count()

    def every_fourth(proxy, request, client) -> None:
        if next(turn) % 4 == 0:
            next(kinds)(proxy, request, client)
        else:
            client.sendall(proxy.forward(request))

    s3_proxy.fail(for_ever=every_fourth)
    run(*command(texts, f"{s3}/out"))
    s3_proxy.fail()
    assert content(f"{s3}/out") == expected


def test_a_build_that_is_killed_is_continued_by_the_same_command(texts, s3, s3_proxy, expected):
    s3_proxy.fail(matches=SHARDS, for_ever=faults.stall(20))
    store = open_store(f"{s3}/out")
    with running(*command(texts, f"{s3}/out")):
        wait_for_receipts(store, 1)
    finished = [name for name in files_below(store, "") if "receipts/" in name]
    s3_proxy.fail()
    run(*command(texts, f"{s3}/out"))
    assert content(f"{s3}/out") == expected
    again = [name for name in finished if any(line.startswith("PUT") and name in line for line in s3_proxy.requests)]
    assert again == []


def test_of_two_builds_into_one_place_one_is_refused_and_told_who_writes(texts, s3, s3_proxy, expected):
    s3_proxy.fail(matches=SHARDS, for_ever=faults.stall(20))
    with running(*command(texts, f"{s3}/out")) as first:
        wait_for_receipts(open_store(f"{s3}/out"), 1)
        message = refused(*command(texts, f"{s3}/out"))
        assert f"another build is writing to {s3}/out: process {first.pid} on " in message
        assert "has held it since 2" in message
        assert f"process {first.pid} on" in run(*CLI, "status", f"{s3}/out")
        s3_proxy.fail()
        assert first.wait(120) == 0
    assert content(f"{s3}/out") == expected


def test_force_does_not_remove_a_build_that_runs(texts, s3, s3_proxy, expected, tmp_path):
    s3_proxy.fail(matches=SHARDS, for_ever=faults.stall(20))
    others = write_texts(tmp_path / "others", "letter")
    with running(*command(texts, f"{s3}/out")) as first:
        wait_for_receipts(open_store(f"{s3}/out"), 1)
        assert f"another build is writing to {s3}/out" in refused(*command(others, f"{s3}/out", "force"))
        s3_proxy.fail()
        assert first.wait(120) == 0
    assert content(f"{s3}/out") == expected


def test_of_two_appends_at_once_one_is_refused_and_none_is_lost(texts, s3, s3_proxy, tmp_path):
    run(*command(texts, f"{s3}/out"))
    letters, poems = (write_texts(tmp_path / word, word) for word in ("letter", "poem"))
    s3_proxy.fail(matches=SHARDS, for_ever=faults.stall(20))
    with running(*command(letters, f"{s3}/out", "append")) as first:
        wait_for_receipts(open_store(f"{s3}/out"), 1)
        assert f"another build is writing to {s3}/out" in refused(*command(poems, f"{s3}/out", "append"))
        s3_proxy.fail()
        assert first.wait(120) == 0
    run(*command(poems, f"{s3}/out", "append"))
    with open_corpus(f"{s3}/out") as corpus:
        assert (corpus.num_generations, corpus.num_documents) == (3, 3 * 4_800)
    run(*CLI, "verify", f"{s3}/out")


def test_a_build_that_cannot_renew_its_lease_ends_and_is_continued_by_the_same_command(texts, s3, s3_proxy, expected):
    def broken(proxy, request, client) -> None:
        if "lock" in request.line:
            faults.status(503)(proxy, request, client)
        else:
            faults.stall(20)(proxy, request, client)

    s3_proxy.fail(matches=SHARDS, for_ever=faults.stall(30))
    with running(*command(texts, f"{s3}/out", lease_seconds=4)) as first:
        wait_for_receipts(open_store(f"{s3}/out"), 1)
        s3_proxy.fail(matches=rf"{SHARDS}|PUT .*lock", for_ever=broken)
        lost = time.monotonic()
        assert first.wait(60) == 1
        assert time.monotonic() - lost < 4 + 8
        assert "lock was not renewed for 4 s: another process may take it now" in first.stderr.read()
    s3_proxy.fail()
    run(*command(texts, f"{s3}/out"))
    assert content(f"{s3}/out") == expected


def test_a_place_whose_files_another_client_removed_is_empty(s3, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}))
    open_store(s3).put("out/generation-01/deep/shard", b"x")
    bucket, _, key = s3.removeprefix("s3://").partition("/")
    boto3.client("s3").delete_object(Bucket=bucket, Key=f"{key}/out/generation-01/deep/shard")
    run(*CLI, "build", str(tmp_path / "a.jsonl"), "--tokenizer", TOKENIZER, "--quiet", "--out", f"{s3}/out")
    run(*CLI, "verify", f"{s3}/out")


def test_a_link_of_somebody_else_in_the_temporary_directory_stops_no_build(texts, moto, tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "data").write_text("theirs")
    place = hashlib.sha256(f"{moto}/out/.tokshard-build/partial".encode()).hexdigest()[:16]
    with tempfile.TemporaryDirectory() as scratch:  # paths of sockets may not be long
        for ending in ("", "-", "-0123456789abcdef"):
            Path(scratch, f"tokshard-{os.getuid()}-{place}{ending}").symlink_to(tmp_path / "theirs")
        monkeypatch.setenv("TMPDIR", scratch)
        run(*command(texts, f"{moto}/out"))
        assert len(os.listdir(scratch)) == 3
    run(*CLI, "verify", f"{moto}/out")
    assert (tmp_path / "theirs" / "data").read_text() == "theirs"


# stores without conditional writes


@pytest.mark.parametrize("what", ["build", "force", "append", "job", "copy", "import"])
def test_nothing_is_built_into_a_store_that_ignores_conditions(what, moto, moto_proxy, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "b"}))
    parquet.write_table(pa.table({"input_ids": [[1, 2, 3]]}), tmp_path / "tokens.parquet")
    build = (*CLI, "build", "--tokenizer", TOKENIZER, "--quiet")
    run(*build, str(tmp_path / "a.jsonl"), "--out", f"{moto}/corpus")
    before = content(moto)
    moto_proxy.fail(for_ever=faults.without("if-none-match", "if-match"))
    commands = {
        "build": (*build, str(tmp_path / "b.jsonl"), "--out", f"{moto}/new"),
        "force": (*build, str(tmp_path / "b.jsonl"), "--out", f"{moto}/corpus", "--force"),
        "append": (*build, str(tmp_path / "b.jsonl"), "--out", f"{moto}/corpus", "--append"),
        "job": (*build, str(tmp_path / "b.jsonl"), "--out", f"{moto}/new", "--job-index", "0", "--num-jobs", "2"),
        "copy": (*CLI, "copy", f"{moto}/corpus", "--out", f"{moto}/new"),
        "import": (*CLI, "import", str(tmp_path / "tokens.parquet"), "--tokenizer", TOKENIZER, "--out", f"{moto}/new"),
    }
    message = refused(*commands[what])
    assert "s3://bucket cannot be built into: its store ignores If-None-Match, so that two builds could" in message
    assert "build into a directory, and copy its files there" in message
    assert content(moto) == before


@pytest.mark.parametrize("options", [(), ("--append",)])
def test_a_store_without_if_match_is_found_at_the_start_and_not_after_a_kill(options, moto, moto_proxy, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "b"}))
    build = (*CLI, "build", "--tokenizer", TOKENIZER, "--quiet", "--out", f"{moto}/corpus")
    if options:
        run(*build, str(tmp_path / "a.jsonl"))
    before = content(moto)
    moto_proxy.fail(for_ever=faults.refusing("if-match"))
    message = refused(*build, str(tmp_path / "b.jsonl"), *options)
    assert "the store cannot do what was asked: 501 Not Implemented" in message
    assert "build into a directory, and copy its files there" in message
    assert content(moto) == before


def test_a_job_joins_no_build_in_a_store_that_ignores_conditions(moto, moto_proxy, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}))
    job = (*CLI, "build", str(tmp_path / "a.jsonl"), "--tokenizer", TOKENIZER, "--quiet", "--out", f"{moto}/new")
    run(*job, "--job-index", "0", "--num-jobs", "2")
    before = content(moto)
    moto_proxy.fail(for_ever=faults.without("if-none-match", "if-match"))
    assert "cannot be built into" in refused(*job, "--job-index", "1", "--num-jobs", "2")
    assert content(moto) == before
