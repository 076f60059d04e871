"""What a bucket has that a directory has not: requests whose answers are lost, leases that expire, credentials."""

from __future__ import annotations

import os
import pickle
import time
import urllib.request

import boto3
import pytest

from tests.store import faulty_proxy as faults
from tokshard.errors import StoreError, TokshardError
from tokshard.store import files_below, open_store, written
from tokshard.store.addresses import parse_address
from tokshard.store.providers import open_provider
from tokshard.store.remote import remote_store
from tokshard.store.requests import RemoteOptions

pytestmark = pytest.mark.slow

OPTIONS = RemoteOptions(patience=6, first_patience=3, lease_seconds=1.5)


# puts


@pytest.mark.parametrize(
    ("passing", "matches"),
    [
        ([], ""),
        *(([fault, fault], "PUT|POST") for fault in (faults.status(503), faults.reset, faults.lost_answer)),
        ([faults.lost_answer], "POST .*uploadId"),  # the last request of an upload
    ],
    ids=["no fault", "503", "reset", "lost", "the last one"],
)
@pytest.mark.parametrize(("size", "parts"), [(100, 0), (11 << 20, 3)])
def test_a_put_survives_passing_faults_and_a_large_one_has_parts(
    s3, s3_proxy, monkeypatch, passing, matches, size, parts
):
    monkeypatch.setattr("tokshard.store.bucket._PART_BYTES", 5 << 20)  # the least that S3 takes
    store, content = remote_store(s3, OPTIONS), os.urandom(size)
    s3_proxy.fail(*passing, matches=matches)
    with written(store, "a") as file:
        file.write(content)
    assert passing or sum("partNumber" in line for line in s3_proxy.requests) == parts
    assert store.get("a") == content


@pytest.mark.remote  # half of the time of this file
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


def test_thousands_of_files_are_listed_and_deleted(s3):
    store = remote_store(s3, OPTIONS)
    bucket = store.bucket
    list(bucket.pool.map(lambda number: store.put(f"many/{number:05}", b""), range(1_100)))
    store.put("other", b"")
    assert len(list(store.list("many"))) == 1_100
    store.delete("many/")
    assert list(files_below(store, "")) == ["other"]


def put_by_hand(port: int, path: str, **headers: str) -> None:
    """Put an object as another tool would."""
    head = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", method="PUT", data=b"x", headers=head)
    urllib.request.urlopen(request).close()


def test_the_objects_by_which_other_tools_mark_folders_are_no_files(s3, s3_port):
    for name in ("", "deep/", "deep/a"):
        put_by_hand(s3_port, f"{s3.removeprefix('s3://')}/{name}")
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
    put_by_hand(s3_port, f"{s3.removeprefix('s3://')}/a", x_amz_acl="public-read", Content_Type="text/plain")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert open_store(s3).get("a") == b"x"


def test_a_profile_of_the_aws_tools_is_used_with_its_endpoint(s3, s3_port, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    files = {
        "credentials": "[work]\naws_access_key_id = test\naws_secret_access_key = the-secret\n",
        "config": f"[profile work]\nregion = eu-central-1\nendpoint_url = http://127.0.0.1:{s3_port}\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    store = open_store(s3)
    store.put("a", b"x")
    assert store.get("a") == b"x"
    assert b"the-secret" not in pickle.dumps(store)
    (tmp_path / "config").write_text("[profile work]\nregion = eu-central-1\nendpoint_url = https://127.0.0.1:1\n")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}")  # which wins, as for the AWS tools
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert open_store(s3).get("a") == b"x"
    assert open_provider(parse_address(s3), is_large=False).config["region"] == "us-west-2"
    monkeypatch.setenv("AWS_PROFILE", "other")
    for _ in range(2):
        with pytest.raises(StoreError, match=r"profile.*other"):
            open_store(s3).get("a")
        for name in files:  # a profile is meant, though the files are not there
            (tmp_path / name).unlink(missing_ok=True)
