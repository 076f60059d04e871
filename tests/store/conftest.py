"""Servers that tests of several files use."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.store.faulty_proxy import FaultyProxy
from tests.store.servers import BUCKET, S3_SERVERS, file_server


@pytest.fixture(scope="session")
def s3_ports() -> Iterator[Callable[[str], int]]:
    """Gives the port of a server that speaks S3 by its name. Each is started once, and runs for the whole session."""
    ports: dict[str, int] = {}
    with contextlib.ExitStack() as stack:

        def port_of(name: str) -> int:
            if name not in ports:
                ports[name] = stack.enter_context(S3_SERVERS[name]())
            return ports[name]

        yield port_of


def empty_folder(port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty folder of a bucket, which the environment gives access to."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3://{BUCKET}/{secrets.token_hex(4)}/folder"


@pytest.fixture
def moto(s3_ports: Callable[[str], int], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty folder."""
    return empty_folder(s3_ports("moto"), monkeypatch)


@pytest.fixture
def seaweedfs(s3_ports: Callable[[str], int], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty folder."""
    return empty_folder(s3_ports("seaweedfs"), monkeypatch)


@pytest.fixture(params=S3_SERVERS)
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
    with proxy_to(s3_port, monkeypatch) as proxy:
        yield proxy


@pytest.fixture
def moto_proxy(moto: str, s3_ports: Callable[[str], int], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """The same for moto: it checks no signatures, so that requests may be changed on their way."""
    with proxy_to(s3_ports("moto"), monkeypatch) as proxy:
        yield proxy


@contextlib.contextmanager
def proxy_to(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(("127.0.0.1", port)).running() as proxy:
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
