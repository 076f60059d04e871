"""A token that expires in the middle of a run is replaced by the one that is there by then."""

from __future__ import annotations

import datetime as dt
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.store.small_s3 import Object, SmallS3, small_s3_server
from tokshard.errors import StoreError
from tokshard.store import Store, open_store, providers

Give = Callable[[str], None]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SmallS3]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with small_s3_server() as one:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{one.server_port}")
        yield one


def environment(monkeypatch: pytest.MonkeyPatch, _: Path) -> Give:
    def give(key: str) -> None:
        for name, value in (("ACCESS_KEY_ID", key), ("SECRET_ACCESS_KEY", "s"), ("SESSION_TOKEN", "t")):
            monkeypatch.setenv(f"AWS_{name}", value)

    return give


def file(_: pytest.MonkeyPatch, folder: Path) -> Give:
    def give(key: str) -> None:
        text = f"[default]\naws_access_key_id={key}\naws_secret_access_key=s\naws_session_token=t\n"
        (folder / "new").write_text(text)
        (folder / "new").replace(folder / "credentials")

    return give


def process(_: pytest.MonkeyPatch, folder: Path, **more: str) -> Give:
    """A helper of the AWS tools that prints what a file holds."""
    (folder / "config").write_text(f"[default]\ncredential_process = {sys.executable} {folder}/helper.py\n")
    (folder / "helper.py").write_text(f"print(open({str(folder / 'answer')!r}).read())")

    def give(key: str) -> None:
        answer = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": "s", "SessionToken": "t"} | more
        (folder / "answer").write_text(json.dumps(answer))

    return give


@pytest.fixture
def store(server: SmallS3) -> Store:
    """A bucket with a file."""
    server.objects["a"] = Object(b"x", time.time())
    return open_store("s3://bucket")


@pytest.mark.parametrize("source", [environment, file, process])
def test_every_request_goes_on_with_the_token_that_is_there_when_the_old_one_expires(
    server, store, monkeypatch, tmp_path, source
):
    give = source(monkeypatch, tmp_path)
    for number, (request, answer) in enumerate(
        [
            (lambda: store.get("a"), b"x"),
            (lambda: store.put("b", b"two"), None),
            (lambda: store.put("large", bytes(300_000)), None),
            (lambda: store.read("b", [(1, 2)]), [b"wo"]),
            (lambda: store.open("b").read(), b"two"),
            (lambda: store.stat("b").size, 3),
            (lambda: [entry.name for entry in store.list()], ["a", "b", "large"]),
        ]
    ):
        give(f"key{number}")
        server.keys = {f"key{number}"}
        assert request() == answer
        assert server.let_in[f"key{number}"] >= 1


@pytest.mark.parametrize(
    ("code", "refusal"),
    [
        (400, SmallS3.refusal),
        (400, ""),  # all that HEAD gives
        (401, ""),
        (403, "<Error><Code>AccessDenied</Code><Message>no</Message></Error>"),
    ],
)
def test_a_store_that_refuses_the_new_token_too_is_asked_no_third_time(
    server, store, monkeypatch, tmp_path, code, refusal
):
    server.keys, server.status, server.refusal = {"old"}, code, refusal
    give = environment(monkeypatch, tmp_path)
    give("old")
    assert store.get("a") == b"x"
    give("other")
    server.keys = {"none"}
    with pytest.raises(StoreError, match=rf"{code} .*also with credentials that were read anew") as caught:
        store.get("a")
    assert server.refused == {"old": 1, "other": 1}
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint


def test_a_key_that_may_not_be_removed_is_said_at_once_and_hides_no_other_error(server, store, monkeypatch, tmp_path):
    environment(monkeypatch, tmp_path)("key")
    server.may_delete = False
    with pytest.raises(StoreError, match="a: access denied: Access Denied") as caught:
        store.delete("a", "b")
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint
    with pytest.raises(StoreError, match="lock: access denied"), store.hold("lock", "this one"):
        pass
    with pytest.raises(ValueError, match="a bad record"), store.hold("other-lock", "this one"):
        raise ValueError("a bad record")


def test_a_store_that_never_let_this_process_in_is_asked_once(server, store, monkeypatch, tmp_path):
    server.keys = {"none"}
    environment(monkeypatch, tmp_path)("old")
    with pytest.raises(StoreError, match=r"ExpiredToken: The provided token has expired\.\nhint"):
        store.get("a")
    assert server.refused == {"old": 1}


def test_many_requests_in_flight_read_the_credentials_anew_once_each_time(server, store, monkeypatch, tmp_path):
    opened = []
    open_provider = providers.open_provider
    monkeypatch.setattr(
        "tokshard.store.requests.open_provider", lambda *one, **more: opened.append(1) or open_provider(*one, **more)
    )
    give = environment(monkeypatch, tmp_path)
    with ThreadPoolExecutor(16) as pool:
        for number in range(3):
            give(f"key{number}")
            server.keys = {f"key{number}"}
            assert set(pool.map(lambda _: store.get("a"), range(100))) == {b"x"}
            assert len(opened) == number + 1
    assert server.let_in == {"key0": 100, "key1": 100, "key2": 100}


def test_credentials_of_a_profile_are_renewed_before_they_expire(server, store, monkeypatch, tmp_path):
    monkeypatch.setattr(providers, "_ASK_AGAIN", dt.timedelta(minutes=5, seconds=1))
    give = process(monkeypatch, tmp_path, Expiration=(dt.datetime.now(dt.UTC) + dt.timedelta(minutes=12)).isoformat())
    give("old")
    assert store.get("a") == b"x"
    give("new")
    deadline = time.monotonic() + 30
    while not server.let_in["new"] and time.monotonic() < deadline:
        store.get("a")
        time.sleep(0.1)
    assert server.let_in["new"]
    assert not server.refused
