"""Servers that tests of several files use."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.faulty_proxy import FaultyProxy
from tests.store.servers import file_server, make_bucket, s3_server


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """A server that speaks S3, for the whole session."""
    with s3_server() as port:
        yield port


@pytest.fixture
def s3(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty folder of a new bucket, which the environment gives access to."""
    bucket = f"bucket-{secrets.token_hex(4)}"
    make_bucket(s3_port, bucket)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3://{bucket}/folder"


@pytest.fixture
def s3_proxy(s3: str, s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy between the S3 server and all stores that are opened from now on."""
    with FaultyProxy(("127.0.0.1", s3_port)).running() as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The directory of `http` and `http_proxy`."""
    directory = tmp_path / "files"
    directory.mkdir()
    return directory


@pytest.fixture
def http(files: Path) -> Iterator[str]:
    """The URI of a web server for `files`."""
    with file_server(files) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def http_proxy(http: str) -> Iterator[FaultyProxy]:
    """A proxy in front of `http`."""
    with FaultyProxy(("127.0.0.1", int(http.rpartition(":")[2]))).running() as proxy:
        yield proxy
