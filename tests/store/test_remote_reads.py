"""What is read from a web server or a bucket is what was asked for, or an error: whatever happens on the way."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.examples import some
from tests.store import faulty_proxy as faults
from tests.store.servers import file_server
from tokshard.errors import StoreError, UsageError
from tokshard.store import open_store, requests
from tokshard.store.bucket import REQUEST_BYTES
from tokshard.store.remote import RemoteStore, remote_store
from tokshard.store.requests import RemoteOptions

IMPATIENT = RemoteOptions(patience=1.5, first_patience=1.0)


@pytest.fixture(autouse=True)
def _tries_follow_each_other_quickly(monkeypatch) -> None:
    monkeypatch.setattr(requests, "_FIRST_DELAY", 0.02)


@pytest.fixture
def content() -> bytes:
    return bytes(range(256)) * 1_000


@pytest.fixture
def store(http_proxy, files, content) -> RemoteStore:
    (files / "a.bin").write_bytes(content)
    return remote_store(f"http://127.0.0.1:{http_proxy.port}", IMPATIENT)


# what a web server has


def test_a_file_of_a_web_server_is_read_whole_in_ranges_and_as_a_file(http, files, content):
    (files / "deep").mkdir()
    (files / "deep" / "a b%20é.bin").write_bytes(content)
    store = open_store(f"{http}/deep/")
    name = "a%20b%2520%C3%A9.bin"
    assert store.stat(name).size == len(content)
    assert store.get(name) == content
    assert store.read(name, [(1, 3), (len(content) - 1, 1)]) == [content[1:4], content[-1:]]
    with store.open(name) as file:
        file.seek(-5, os.SEEK_END)
        assert file.read() == content[-5:]
        assert file.read(1) == b""
        file.seek(100_000)
        assert file.read(200) == content[100_000:100_200]
    with pytest.raises(FileNotFoundError):
        store.get("other")


def test_a_file_is_read_from_start_to_end_by_requests_that_become_longer(store, http_proxy, files):
    content = os.urandom(3 * REQUEST_BYTES + 17)
    (files / "large").write_bytes(content)
    with store.open("large") as file:
        assert file.read(70_000) + file.read() == content
    assert len(http_proxy.requests) < 16
    assert store.get("large") == content


def test_a_web_server_without_entity_tags_tells_versions_by_time_and_size(files):
    (files / "a").write_bytes(b"one")
    with file_server(files, has_tags=False) as port:
        store = open_store(f"http://127.0.0.1:{port}")
        version = store.stat("a").version
        assert store.read("a", [(0, 3)], version=version) == [b"one"]
        (files / "a").write_bytes(b"longer")
        with pytest.raises(OSError, match="replaced"):
            store.read("a", [(0, 3)], version=version)


def test_a_web_server_can_only_be_read(http):
    store = open_store(http)
    with pytest.raises(StoreError, match="can only be read"):
        store.put("a", b"")
    with pytest.raises(StoreError, match="can only be read"):
        store.delete("a")
    with pytest.raises(OSError, match="do not list"):
        store.names()


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("https://server/a?signature=1", "comes with a query"),
        ("https://user:word@server/a", "user name or password"),
        ("s3:///a", "names no bucket"),
        ("az://", "names no container"),
    ],
)
def test_a_uri_that_cannot_be_kept_as_it_is_is_refused_without_showing_secrets(uri, problem):
    with pytest.raises(UsageError, match=problem) as refused:
        open_store(uri)
    assert "signature" not in str(refused.value)
    assert "word@" not in str(refused.value)


# faults


@some(
    "fault",
    [faults.status(503), faults.reset, faults.short, faults.shorter_length, faults.status(500), faults.status(429)],
    default=4,
)
def test_a_passing_fault_is_not_noticed(store, http_proxy, content, fault):
    version = store.stat("a.bin").version
    http_proxy.fail(fault, fault, matches="GET")
    assert store.read("a.bin", [(10, 100_000)], version=version) == [content[10:100_010]]
    http_proxy.fail(fault, fault, matches="GET")
    with store.open("a.bin") as file:
        assert file.read() == content


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (faults.status(503), "503 Service Unavailable, SlowDown"),
        (faults.reset, "the connection was closed"),
        (faults.short, ""),
        (faults.shorter_length, "an answer of 99997 bytes, expected 100000"),
    ],
    ids=["503", "reset", "short", "shorter-length"],
)
def test_a_lasting_fault_ends_in_an_error_after_the_stated_time(store, http_proxy, fault, cause):
    store = remote_store(store.location, RemoteOptions(patience=0.5))
    version = store.stat("a.bin").version
    http_proxy.fail(matches="GET", for_ever=fault)
    began = time.monotonic()
    with pytest.raises(
        StoreError, match=rf"/a\.bin: the store failed \d+ times? in .* s, last with: .*{cause}"
    ) as error:
        store.read("a.bin", [(10, 100_000)], version=version)
    assert "\n" not in error.value.problem
    assert "check the network" in error.value.hint
    assert time.monotonic() - began < 12


@pytest.mark.remote  # half of the time of this file
def test_a_stall_is_noticed_within_seconds(store, http_proxy, content):
    version = store.stat("a.bin").version
    http_proxy.fail(faults.stall(60), matches="GET")
    began = time.monotonic()
    assert store.read("a.bin", [(0, 1_000)], version=version) == [content[:1_000]]
    assert 4 < time.monotonic() - began < 10


def test_slow_bytes_are_waited_for(store, http_proxy, content):
    version = store.stat("a.bin").version
    http_proxy.fail(faults.trickle(20_000), matches="GET")
    assert store.read("a.bin", [(0, 20_000)], version=version) == [content[:20_000]]
    assert len(http_proxy.requests) == 1


def test_a_server_that_does_not_answer_at_all_is_given_up_soon():
    store = remote_store("http://127.0.0.1:1", IMPATIENT)
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"http://127\.0\.0\.1:1/a: the store failed .*Connection refused"):
        store.get("a")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(("code", "problem"), [(403, "access denied: 403"), (401, "access denied: 401")])
def test_a_refused_permission_is_told_at_once_and_not_tried_again(store, http_proxy, code, problem):
    http_proxy.fail(for_ever=faults.status(code, "Forbidden"))
    with pytest.raises(StoreError, match=rf"/a\.bin: {problem}") as error:
        store.stat("a.bin")
    assert len(http_proxy.requests) == 1
    assert error.value.hint


def test_a_missing_file_is_not_tried_again(store, http_proxy):
    store.stat("a.bin")
    http_proxy.fail()
    with pytest.raises(FileNotFoundError):
        store.stat("other")
    assert len(http_proxy.requests) == 1


def test_a_file_that_is_replaced_while_it_is_read_is_an_error_and_not_a_mixture(store, files, content):
    version = store.stat("a.bin").version
    with store.open("a.bin") as file:
        file.read(10)
        (files / "a.bin").write_bytes(content[::-1])
        with pytest.raises(OSError, match="replaced"):
            file.read()
    with pytest.raises(OSError, match="replaced"):
        store.read("a.bin", [(0, 4), (9, 4)], version=version)


def test_a_file_that_is_replaced_between_the_requests_of_one_read_is_an_error(store, http_proxy, files):
    (files / "large").write_bytes(bytes(2 * REQUEST_BYTES))

    def answer(proxy, request, client):
        client.sendall(proxy.forward(request))

    def replace_then_answer(proxy, request, client):
        (files / "large").write_bytes(b"\1" * 2 * REQUEST_BYTES)
        answer(proxy, request, client)

    http_proxy.fail(answer, replace_then_answer, matches="GET")
    with pytest.raises(OSError, match="replaced"):
        store.get("large")


def test_a_small_file_is_read_by_one_request(store, http_proxy, files):
    (files / "small").write_bytes(b"x")
    (files / "empty").write_bytes(b"")
    http_proxy.fail()
    assert (store.get("small"), store.get("empty")) == (b"x", b"")
    assert len(http_proxy.requests) == 2


def test_a_truncated_answer_inside_of_arrow_is_tried_again_and_is_no_damage(store, http_proxy, files):
    table = pa.table({"text": [str(number) * 50 for number in range(20_000)]})
    pq.write_table(table, files / "a.parquet")
    http_proxy.fail(*[faults.short, faults.reset] * 3, matches="GET")
    with store.open("a.parquet") as file:
        assert pq.read_table(file).equals(table)
    http_proxy.fail(matches="GET", for_ever=faults.short)
    store = remote_store(store.location, RemoteOptions(patience=0.5))
    with pytest.raises(StoreError, match="the store failed"), store.open("a.parquet") as file:
        pq.read_table(file)


def test_one_failed_range_ends_the_others(store, http_proxy):
    version = store.stat("a.bin").version
    http_proxy.fail(matches="GET", for_ever=faults.status(403, "Forbidden"))
    with pytest.raises(StoreError, match="access denied"):
        store.read("a.bin", [(start, 1) for start in range(200)], version=version)
    assert len(http_proxy.requests) < 200


def test_many_threads_read_from_one_store(store, content):
    def read(start: int) -> bool:
        return store.read("a.bin", [(start, 1_000), (0, 2)]) == [content[start : start + 1_000], content[:2]]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(read, range(0, 100_000, 1_000)))


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


def forked(uri: str, use: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _FORK, uri, use], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def test_a_process_that_was_forked_after_a_store_was_used_gets_an_error_and_neither_hangs(http, files, content):
    (files / "a.bin").write_bytes(content)
    first, second, parent = forked(http, "used")
    for line in (first, second):  # a new store would hang too
        assert "it was forked from process" in line
        assert "forkserver" in line
    assert parent == f"parent {len(content)}"


def test_a_store_that_was_not_used_survives_a_fork(http, files, content):
    (files / "a.bin").write_bytes(content)
    assert forked(http, "unused")[:2] == [str(len(content))] * 2


def test_a_store_pickles_without_secrets_and_opens_again(http, files, content, monkeypatch):
    (files / "a.bin").write_bytes(content)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = remote_store(http, IMPATIENT)
    store.get("a.bin")
    again = pickle.loads(pickle.dumps(store))
    assert again.get("a.bin") == content
    assert again.location == store.location
    bucket = remote_store("s3://bucket/a", IMPATIENT)
    with pytest.raises(StoreError):
        bucket.get("x")
    assert b"the-secret" not in pickle.dumps(bucket)


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


ABANDONED = """
import threading, time
from tokshard.store.remote import remote_store
from tokshard.store.requests import RemoteOptions
store = remote_store("http://127.0.0.1:1", RemoteOptions(first_patience=300))
threading.Thread(target=store.read, args=("a", [(0, 1), (10, 1)]), daemon=True).start()
time.sleep(1)
"""


def test_a_process_ends_although_a_store_that_does_not_answer_is_still_asked():
    subprocess.run([sys.executable, "-c", ABANDONED], timeout=60, check=True, capture_output=True)
