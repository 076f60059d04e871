"""Servers that tests of several files use."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.faulty_proxy import FaultyProxy
from tests.store.servers import BUCKET, file_server, seaweedfs_server
from tests.store.small_s3 import small_s3_server


@pytest.fixture(scope="session")
def seaweedfs_port() -> Iterator[int]:
    """The port of a SeaweedFS that runs for the whole session."""
    with seaweedfs_server() as port:
        yield port


def empty_folder(port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty folder of a bucket, which the environment gives access to."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3://{BUCKET}/{secrets.token_hex(4)}/folder"


@pytest.fixture
def small_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of an empty folder. The server checks no signatures, so that requests may be changed on their way."""
    with small_s3_server() as server:
        yield empty_folder(server.server_port, monkeypatch)


@pytest.fixture
def seaweedfs(seaweedfs_port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty folder."""
    return empty_folder(seaweedfs_port, monkeypatch)


@pytest.fixture(params=["small_s3", pytest.param("seaweedfs", marks=pytest.mark.remote)])
def s3(request: pytest.FixtureRequest) -> str:
    """The URI of an empty folder; a test that asks for it runs on each server."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def s3_port(s3: str) -> int:
    """The port of the server that has the folder."""
    return int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])


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
