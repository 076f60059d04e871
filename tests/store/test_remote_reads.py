"""What is read from a web server or a bucket is what was asked for, or an error: whatever happens on the way."""

from __future__ import annotations

import os
import pickle
import random
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.examples import some
from tests.store import faulty_proxy as faults
from tests.store.faulty_proxy import FaultyProxy
from tests.store.servers import file_server
from tokshard.errors import StoreError
from tokshard.store import bucket, open_store, requests
from tokshard.store.bucket import REQUEST_BYTES
from tokshard.store.remote import RemoteStore, remote_store
from tokshard.store.requests import RemoteOptions

OPTIONS = RemoteOptions(patience=30, first_patience=1.0)
CONTENT = bytes(range(256)) * 1_000


@pytest.fixture(autouse=True)
def _tries_follow_each_other_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_FIRST_DELAY", 0.02)


@pytest.fixture
def store(http_proxy: FaultyProxy, files: Path) -> RemoteStore:
    """A web server with one file, behind a proxy."""
    (files / "a.bin").write_bytes(CONTENT)
    return remote_store(f"http://127.0.0.1:{http_proxy.port}", OPTIONS)


def test_a_full_temporary_directory_is_named_and_not_the_store(store, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "small"))
    (tmp_path / "small").mkdir()
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        spool = store.spool("b.bin")
        with pytest.raises(StoreError, match=r"the temporary directory .*small cannot be written"):
            spool.file.write(b"x" * 100_000)
        spool.discard()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not os.listdir(tmp_path / "small")


# what a web server has


def test_a_file_of_a_web_server_is_read_whole_in_ranges_and_as_a_file(http, files):
    (files / "deep").mkdir()
    (files / "deep" / "a b%20é.bin").write_bytes(CONTENT)
    store = open_store(f"{http}/deep/")
    name = "a%20b%2520%C3%A9.bin"
    assert store.stat(name).size == len(CONTENT)
    assert store.get(name) == CONTENT
    assert store.read(name, [(1, 3), (len(CONTENT) - 1, 1)]) == [CONTENT[1:4], CONTENT[-1:]]
    with store.open(name) as file:
        file.seek(-5, os.SEEK_END)
        assert file.read() == CONTENT[-5:]
        assert file.read(1) == b""
        file.seek(100_000)
        assert file.read(200) == CONTENT[100_000:100_200]
    with pytest.raises(FileNotFoundError):
        store.get("other")
    with pytest.raises(OSError, match="do not list"):
        store.names()


def test_a_large_file_is_read_by_requests_that_become_longer_and_a_small_one_by_one(store, http_proxy, files):
    content = os.urandom(3 * REQUEST_BYTES + 17)
    for name, held in (("large", content), ("small", b"x"), ("empty", b"")):
        (files / name).write_bytes(held)
    with store.open("large") as file:
        assert file.read(70_000) + file.read() == content
    assert len(http_proxy.requests) < 16
    assert store.get("large") == content
    http_proxy.fail()
    assert (store.get("small"), store.get("empty")) == (b"x", b"")
    assert len(http_proxy.requests) == 2


def test_no_more_than_eight_long_ranges_are_on_their_way_at_a_time(store, http_proxy, monkeypatch):
    monkeypatch.setattr(bucket, "REQUEST_BYTES", 1 << 13)
    running, most = [], []

    def count(proxy: FaultyProxy, request: faults.Request, client: socket.socket) -> None:
        running.append(request)
        most.append(len(running))
        time.sleep(0.05)
        answer = proxy.forward(request)
        running.remove(request)  # before the client can know, and ask for the next range
        client.sendall(answer)

    http_proxy.fail(for_ever=count)
    assert store.read("a.bin", [(0, len(CONTENT))]) == [CONTENT]
    assert 4 <= max(most) <= 8


# faults: those that last are in test_refusals.py


@some(
    "fault",
    [faults.status(503), faults.reset, faults.short, faults.shorter_length, faults.status(500), faults.status(429)],
    default=4,
)
def test_a_passing_fault_is_not_noticed(store, http_proxy, fault):
    version, state = store.stat("a.bin").version, random.getstate()
    http_proxy.fail(fault, fault, matches="GET")
    assert store.read("a.bin", [(10, 100_000)], version=version) == [CONTENT[10:100_010]]
    assert random.getstate() == state, "which belongs to the program that reads"
    http_proxy.fail(fault, fault, matches="GET")
    with store.open("a.bin") as file:
        assert file.read() == CONTENT


@pytest.mark.remote  # half of the time of this file
def test_a_stall_is_noticed_within_seconds(store, http_proxy):
    version = store.stat("a.bin").version
    http_proxy.fail(faults.stall(60), matches="GET")
    began = time.monotonic()
    assert store.read("a.bin", [(0, 1_000)], version=version) == [CONTENT[:1_000]]
    assert 4 < time.monotonic() - began < 10


def test_slow_bytes_are_waited_for(store, http_proxy):
    version = store.stat("a.bin").version
    http_proxy.fail(faults.trickle(20_000), matches="GET")
    assert store.read("a.bin", [(0, 20_000)], version=version) == [CONTENT[:20_000]]
    assert len(http_proxy.requests) == 1


@pytest.mark.parametrize(
    ("name", "fault", "error"),
    [
        ("a.bin", faults.status(403, "Forbidden"), StoreError),
        ("a.bin", faults.status(401, "Unauthorized"), StoreError),
        ("other", None, FileNotFoundError),
    ],
)
def test_what_no_second_try_would_change_is_asked_once(store, http_proxy, name, fault, error):
    store.stat("a.bin")
    http_proxy.fail(for_ever=fault)
    with pytest.raises(error):
        store.stat(name)
    assert len(http_proxy.requests) == 1


@pytest.mark.parametrize("has_tags", [True, False])  # without, versions are told by time and size
def test_a_file_that_is_replaced_while_it_is_read_is_an_error_and_not_a_mixture(files, has_tags):
    (files / "a.bin").write_bytes(CONTENT)
    with file_server(files, has_tags=has_tags) as port:
        store = open_store(f"http://127.0.0.1:{port}")
        version = store.stat("a.bin").version
        assert store.read("a.bin", [(0, 3)], version=version) == [CONTENT[:3]]
        with store.open("a.bin") as file:
            file.read(10)
            (files / "a.bin").write_bytes(CONTENT[::-1] + b"longer")
            with pytest.raises(OSError, match="replaced"):
                file.read()
        with pytest.raises(OSError, match="replaced"):
            store.read("a.bin", [(0, 4), (9, 4)], version=version)


def test_a_file_that_is_replaced_between_the_requests_of_one_read_is_an_error(store, http_proxy, files):
    (files / "large").write_bytes(bytes(2 * REQUEST_BYTES))

    def replace_then_answer(*request: Any) -> None:
        (files / "large").write_bytes(b"\1" * 2 * REQUEST_BYTES)
        faults.passed_on(*request)

    http_proxy.fail(faults.passed_on, replace_then_answer, matches="GET")
    with pytest.raises(OSError, match="replaced"):
        store.get("large")


def test_answers_that_stay_truncated_are_no_damage_inside_of_arrow(store, http_proxy, files):
    pq.write_table(pa.table({"text": [str(number) * 50 for number in range(20_000)]}), files / "a.parquet")
    http_proxy.fail(matches="GET", for_ever=faults.short)
    store = remote_store(store.location, RemoteOptions(patience=0.5))
    with pytest.raises(StoreError, match="the store failed"), store.open("a.parquet") as file:
        pq.read_table(file)


def test_waiting_for_a_store_can_be_interrupted(store, http_proxy):
    store = remote_store(store.location, RemoteOptions(patience=60))
    store.stat("a.bin")
    http_proxy.fail(for_ever=faults.status(503))
    abandoned = threading.Event()
    threading.Timer(0.5, abandoned.set).start()
    began = time.monotonic()
    with pytest.raises(StoreError):
        store.bucket.range("a.bin", 0, 10, abandoned=abandoned)
    assert time.monotonic() - began < 30


# processes

_FORK = """
import os, sys
from tokshard.errors import StoreError
from tokshard.store import open_store
store = open_store(sys.argv[1])
is_used = sys.argv[2] == "used"
if is_used:
    store.get("a.bin")
child = os.fork()
if child == 0:
    for again in (store, open_store(sys.argv[1])):
        try:
            print(len(again.get("a.bin")), flush=True)
        except StoreError as error:
            print(error.problem, "|", error.hint, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent", len(store.get("a.bin")) if is_used else "", flush=True)
"""
_ABANDONED = """
import sys, threading, time
from tokshard.store.remote import remote_store
from tokshard.store.requests import RemoteOptions
store = remote_store("http://127.0.0.1:1", RemoteOptions(first_patience=300))
threading.Thread(target=store.read, args=("a", [(0, 1), (10, 1)]), daemon=True).start()
time.sleep(1)
"""


def run(program: str, *words: str) -> list[str]:
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout.splitlines()


def test_a_process_that_was_forked_after_a_store_was_used_gets_an_error_and_neither_hangs(http, files):
    (files / "a.bin").write_bytes(CONTENT)
    first, second, parent = run(_FORK, http, "used")
    for line in (first, second):  # a new store would hang too
        assert "it was forked from process" in line
        assert "forkserver" in line
    assert parent == f"parent {len(CONTENT)}"
    assert run(_FORK, http, "unused")[:2] == [str(len(CONTENT))] * 2


def test_a_process_ends_although_a_store_that_does_not_answer_is_still_asked():
    assert run(_ABANDONED) == []


def test_a_store_pickles_without_secrets_and_opens_again(http, files, monkeypatch):
    (files / "a.bin").write_bytes(CONTENT)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = remote_store(http, OPTIONS)
    store.get("a.bin")
    again = pickle.loads(pickle.dumps(store))
    assert again.get("a.bin") == CONTENT
    assert again.location == store.location
    bucket = remote_store("s3://bucket/a", OPTIONS)
    with pytest.raises(StoreError):
        bucket.get("x")
    assert b"the-secret" not in pickle.dumps(bucket)


def test_an_attempt_leaves_what_others_have_in_the_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "data").write_text("theirs")
    store = remote_store("s3://bucket/a", OPTIONS)
    earlier = store.attempt("work", "one")
    earlier.take_over()
    earlier.store.spool("b").file.close()
    links = [Path(earlier.scratch.removesuffix("-one") + ending) for ending in ("", "-", "-0123456789abcdef")]
    for link in links:
        link.symlink_to("theirs")
    attempt = store.attempt("work", "two")
    attempt.take_over()
    assert {*tmp_path.iterdir()} == {*links, tmp_path / "theirs", Path(attempt.scratch)}
    attempt.end()
    assert not os.path.exists(attempt.scratch)
    assert (tmp_path / "theirs" / "data").read_text() == "theirs"
