"""What a bucket has that a directory has not: requests whose answers are lost, leases that expire, credentials."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import urllib.request

import boto3
import pytest

from tests.store import faulty_proxy as faults
from tokshard.errors import StoreError, TokshardError, UsageError
from tokshard.store import files_below, open_store, written
from tokshard.store.remote import remote_store
from tokshard.store.requests import RemoteOptions

pytestmark = pytest.mark.remote

OPTIONS = RemoteOptions(patience=6, first_patience=3, lease_seconds=1.5)
LARGE = 40 << 20


# puts


def test_a_large_file_is_put_in_parts_and_is_there_whole_or_not_at_all(s3, s3_proxy):
    store = remote_store(s3, OPTIONS)
    content = os.urandom(LARGE)
    with written(store, "large") as file:
        file.write(content)
    assert sum("partNumber" in line for line in s3_proxy.requests) == 3
    assert store.get("large") == content


@pytest.mark.parametrize("fault", [faults.status(503), faults.reset, faults.lost_answer], ids=["503", "reset", "lost"])
@pytest.mark.parametrize("size", [100, LARGE])
def test_a_put_survives_passing_faults(s3, s3_proxy, fault, size):
    store = remote_store(s3, OPTIONS)
    content = os.urandom(size)
    s3_proxy.fail(fault, fault, matches="PUT|POST")
    with written(store, "a") as file:
        file.write(content)
    assert store.get("a") == content


def test_the_lost_answer_to_the_last_request_of_an_upload_is_survived(s3, s3_proxy):
    store = remote_store(s3, OPTIONS)
    content = os.urandom(LARGE)
    s3_proxy.fail(faults.lost_answer, matches="POST .*uploadId")
    with written(store, "a") as file:
        file.write(content)
    assert store.get("a") == content


def test_an_upload_over_a_slow_line_is_no_stall(s3, s3_proxy):
    s3_proxy.seconds_per_read = 0.5
    store = remote_store(s3, OPTIONS)
    content = os.urandom(17 << 20)
    began = time.monotonic()
    store.put("a", content)
    assert time.monotonic() - began > 6
    s3_proxy.seconds_per_read = 0
    assert store.get("a") == content
    assert sum("PUT" in line for line in s3_proxy.requests) == 2


def test_a_put_that_fails_for_good_is_an_error_and_leaves_nothing(s3, s3_proxy):
    store = remote_store(s3, RemoteOptions(patience=1, first_patience=1))
    spool = store.spool("a")
    s3_proxy.fail(matches="PUT", for_ever=faults.status(503))
    with pytest.raises(StoreError, match=r"s3://.*/folder/a: the store failed .* 503"):
        spool.put()
    assert not os.path.exists(spool.path)
    s3_proxy.fail()
    assert list(store.list()) == []


def test_a_process_that_is_killed_while_it_puts_leaves_no_file(s3, s3_proxy):
    s3_proxy.fail(matches="partNumber=3", for_ever=faults.stall(30))
    code = "import sys; from tokshard.store import open_store; open_store(sys.argv[1]).put('a', bytes(40 << 20))"
    process = subprocess.Popen([sys.executable, "-c", code, s3])
    deadline = time.monotonic() + 30
    while not any("partNumber=3" in line for line in s3_proxy.requests) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    s3_proxy.fail()
    assert list(open_store(s3).list()) == []


def test_thousands_of_files_are_listed_and_deleted(s3):
    store = remote_store(s3, OPTIONS)
    bucket = store.bucket
    list(bucket.pool.map(lambda number: store.put(f"many/{number:05}", b""), range(1_100)))
    store.put("other", b"")
    assert len(list(store.list("many"))) == 1_100
    store.delete("many/")
    assert list(files_below(store, "")) == ["other"]


def test_the_objects_by_which_other_tools_mark_folders_are_no_files(s3, s3_port):
    bucket = s3.removeprefix("s3://")
    for name in ("", "deep/", "deep/a"):
        request = urllib.request.Request(f"http://127.0.0.1:{s3_port}/{bucket}/{name}", method="PUT", data=b"")
        urllib.request.urlopen(request).close()
    store = open_store(s3)
    assert [entry.name for entry in store.list()] == ["deep/"]
    assert [entry.name for entry in store.list("deep")] == ["deep/a"]


def test_a_folder_whose_files_another_client_removed_is_empty(s3):
    store = open_store(s3)
    for name in ("out/a", "out/generation-01/deep/a"):
        store.put(name, b"x")
    bucket, _, key = s3.removeprefix("s3://").partition("/")
    boto3.client("s3").delete_object(Bucket=bucket, Key=f"{key}/out/generation-01/deep/a")
    assert list(store.names("out")) == ["a"]
    boto3.client("s3").delete_object(Bucket=bucket, Key=f"{key}/out/a")
    assert list(store.names("out")) == list(store.list("out")) == list(store.list()) == []


def test_a_folder_may_have_any_name(s3):
    store = open_store(f"{s3}/a b#?%20ü")
    store.put("c d%.é", b"x")
    assert [entry.name for entry in store.list()] == ["c d%.é"]
    assert store.get("c d%.é") == b"x"


# errors


def test_a_server_that_answers_no_ranges_is_told_at_once(s3, s3_proxy):
    store = open_store(s3)
    store.put("a", bytes(100))
    s3_proxy.fail(for_ever=faults.as_whole)
    with pytest.raises(StoreError, match=r"s3://.*/folder/a: the server does not answer requests for ranges"):
        store.read("a", [(10, 20)])
    assert len(s3_proxy.requests) == 1


def test_a_bucket_that_does_not_exist_is_named(s3):
    with pytest.raises(UsageError, match="s3://no-such-bucket does not exist: there is no such bucket"):
        open_store("s3://no-such-bucket/a").get("b")


def test_missing_credentials_are_told_with_where_they_come_from(s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://169.254.169.254:1")
    with pytest.raises(TokshardError) as error:
        remote_store(s3, RemoteOptions(first_patience=0.5)).get("a")
    assert "AWS_PROFILE" in error.value.hint


def test_public_files_are_read_without_credentials(s3, s3_port, monkeypatch):
    uri = f"http://127.0.0.1:{s3_port}/{s3.removeprefix('s3://')}/a"
    headers = {"x-amz-acl": "public-read", "Content-Type": "text/plain"}
    request = urllib.request.Request(uri, method="PUT", data=b"x", headers=headers)
    urllib.request.urlopen(request).close()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert open_store(s3).get("a") == b"x"


def test_a_profile_of_the_aws_tools_is_used_with_its_endpoint(s3, s3_port, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text("[work]\naws_access_key_id = test\naws_secret_access_key = the-secret\n")
    (tmp_path / "config").write_text(
        f"[profile work]\nregion = eu-central-1\nendpoint_url = http://127.0.0.1:{s3_port}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    store = open_store(s3)
    store.put("a", b"x")
    assert store.get("a") == b"x"
    assert b"the-secret" not in pickle.dumps(store)
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(StoreError, match=r"profile.*other"):
        open_store(s3).get("a")
