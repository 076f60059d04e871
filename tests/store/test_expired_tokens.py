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

from tests.corpora import TOKENIZER, Source, documents_of, write_corpus
from tests.store.token_server import TokenServer, token_server
from tokshard import build_corpus, open_corpus
from tokshard.errors import StoreError
from tokshard.runtime import Cache, NumpyLoader, StreamPlan
from tokshard.store import files_below, open_store, providers

Give = Callable[[str], None]

SIZES = {"seq_len": 32, "block_tokens": 256, "window_blocks": 2, "allow_small_blocks": True}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TokenServer]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with token_server() as one:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{one.server_port}")
        yield one


def environment(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Give:
    del folder

    def give(key: str) -> None:
        for name, value in (("ACCESS_KEY_ID", key), ("SECRET_ACCESS_KEY", "s"), ("SESSION_TOKEN", "t")):
            monkeypatch.setenv(f"AWS_{name}", value)

    return give


def file(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Give:
    del monkeypatch

    def give(key: str) -> None:
        text = f"[default]\naws_access_key_id={key}\naws_secret_access_key=s\naws_session_token=t\n"
        (folder / "new").write_text(text)
        (folder / "new").replace(folder / "credentials")

    return give


def process(monkeypatch: pytest.MonkeyPatch, folder: Path, **more: str) -> Give:
    """A helper of the AWS tools that prints what a file holds."""
    del monkeypatch
    (folder / "config").write_text(f"[default]\ncredential_process = {sys.executable} {folder}/helper.py\n")
    (folder / "helper.py").write_text(f"print(open({str(folder / 'answer')!r}).read())")

    def give(key: str) -> None:
        answer = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": "s", "SessionToken": "t"} | more
        (folder / "answer").write_text(json.dumps(answer))

    return give


SOURCES = {"environment": environment, "file": file, "process": process}


@pytest.fixture(params=SOURCES)
def give(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Give:
    """Puts an access key where the store finds it: three places."""
    return SOURCES[request.param](monkeypatch, tmp_path)


def test_a_loader_goes_on_with_the_token_that_is_there_when_the_old_one_expires(server, give, tmp_path):
    local = write_corpus(tmp_path / "a", sources=[Source(documents=documents_of([50] * 400))], shard_tokens=3_000)
    for name in files_below(open_store(local), ""):
        server.objects[f"bucket/a/{name}"] = (local / name).read_bytes()
    server.keys = {"old"}
    give("old")
    plan = StreamPlan("s3://bucket/a", **SIZES, cache=Cache(memory_bytes=1 << 18))
    with (
        NumpyLoader(StreamPlan(local, **SIZES), global_batch_size=4) as here,
        NumpyLoader(plan, global_batch_size=4, prefetch_factor=1) as there,
    ):
        for count, (expected, batch) in enumerate(zip(here, there, strict=False)):
            assert batch["input_ids"].tolist() == expected["input_ids"].tolist()
            if count == 10:
                give("new")
                server.keys = {"new"}
            if count == 60:
                break
    assert server.let_in["new"] > 3
    assert 1 <= server.refused.total() <= 32, "no more than were in flight"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_build_outlives_any_number_of_tokens(server, monkeypatch, tmp_path, workers):
    lines = "\n".join(json.dumps({"text": f"note {number} " * 50}) for number in range(2_000))
    (tmp_path / "texts.jsonl").write_text(lines)
    server.objects["bucket/texts.jsonl"] = lines.encode()
    give, options = file(monkeypatch, tmp_path), {"tokenizer": str(TOKENIZER.parent), "task_bytes": 1 << 16}
    tokens = ["token0"]

    def replace() -> None:
        """After 10 requests. A token is good until the next one is replaced, so nobody reads one that just expires."""
        if server.let_in.total() >= 10 * len(tokens):
            tokens.append(f"token{len(tokens)}")
            give(tokens[-1])
            server.keys = set(tokens[-2:])

    give("token0")
    server.keys, server.on_request = {"token0"}, replace
    build_corpus("s3://bucket/texts.jsonl", out="s3://bucket/out", workers=workers, **options)
    server.keys, server.on_request = None, lambda: None
    build_corpus(tmp_path / "texts.jsonl", out=tmp_path / "out", workers=1, **options)
    built = open_corpus("s3://bucket/out").manifest.fingerprints.content
    assert built == open_corpus(tmp_path / "out").manifest.fingerprints.content
    assert len(tokens) > 3
    assert server.refused


@pytest.mark.parametrize(
    ("status", "refusal"),
    [
        (400, TokenServer.refusal),
        (400, ""),  # all that HEAD gives
        (401, ""),
        (403, "<Error><Code>AccessDenied</Code><Message>no</Message></Error>"),
    ],
)
def test_a_store_that_refuses_the_new_token_too_is_asked_no_third_time(server, monkeypatch, tmp_path, status, refusal):
    server.objects["bucket/a"] = b"x"
    server.keys, server.status, server.refusal = {"old"}, status, refusal
    give = environment(monkeypatch, tmp_path)
    give("old")
    store = open_store("s3://bucket")
    assert store.get("a") == b"x"
    give("other")
    server.keys = {"none"}
    with pytest.raises(StoreError, match=rf"{status} .*also with credentials that were read anew") as caught:
        store.get("a")
    assert server.refused == {"old": 1, "other": 1}
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint


def test_a_store_that_never_let_this_process_in_is_asked_once(server, monkeypatch, tmp_path):
    server.keys = {"none"}
    environment(monkeypatch, tmp_path)("old")
    with pytest.raises(StoreError, match=r"ExpiredToken: The provided token has expired\.\nhint"):
        open_store("s3://bucket").get("a")
    assert server.refused == {"old": 1}


def test_many_requests_in_flight_read_the_credentials_anew_once_each_time(server, monkeypatch, tmp_path):
    opened = []
    give = environment(monkeypatch, tmp_path)
    open_provider = providers.open_provider
    monkeypatch.setattr(
        "tokshard.store.requests.open_provider", lambda *one, **more: opened.append(1) or open_provider(*one, **more)
    )
    server.objects["bucket/a"] = b"x"
    server.keys = {"key0"}
    give("key0")
    store = open_store("s3://bucket")
    assert store.get("a") == b"x"
    with ThreadPoolExecutor(16) as pool:
        for number in (1, 2):
            give(f"key{number}")
            server.keys = {f"key{number}"}
            assert set(pool.map(lambda _: store.get("a"), range(100))) == {b"x"}
            assert len(opened) == number + 1
    assert server.let_in == {"key0": 1, "key1": 100, "key2": 100}


def test_credentials_of_a_profile_are_renewed_before_they_expire(server, monkeypatch, tmp_path):
    monkeypatch.setattr(providers, "_ASK_AGAIN", dt.timedelta(minutes=5, seconds=1))
    expires = (dt.datetime.now(dt.UTC) + dt.timedelta(minutes=12)).isoformat()
    give = process(monkeypatch, tmp_path, Expiration=expires)
    server.objects["bucket/a"] = b"x"
    give("old")
    store = open_store("s3://bucket")
    store.get("a")
    give("new")
    deadline = time.monotonic() + 30
    while not server.let_in["new"] and time.monotonic() < deadline:
        store.get("a")
        time.sleep(0.1)
    assert server.let_in["new"]
    assert not server.refused
