"""What stores refuse, and what they say when a server fails for good."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.refusals import Call, Refusal, Said, check, refused, said_in, tokshard
from tests.store import faulty_proxy as faults
from tests.store.servers import file_server
from tokshard.store import Store, open_store
from tokshard.store.record_cache import RecordCache
from tokshard.store.remote import remote_store
from tokshard.store.requests import RemoteOptions

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


def opened(uri: str, **variables: str) -> Callable[[Path], Store]:
    """Open a store; the variables of the environment are set for AWS."""

    def call(_: Path) -> Store:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with mock.patch.dict(os.environ, inherited | variables, clear=True):
            store = open_store(uri)
            if variables:
                store.get("a")
            return store

    return call


def with_a_profile(directory: Path) -> Store:
    """Of the AWS tools, whose endpoint has no scheme."""
    (directory / "config").write_text("[default]\nendpoint_url = 127.0.0.1:9000\n")
    (directory / "keys").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    files = {"AWS_CONFIG_FILE": str(directory / "config"), "AWS_SHARED_CREDENTIALS_FILE": str(directory / "keys")}
    return opened("s3://bucket/a", **files)(directory)


def leased(_: Path) -> Any:
    with mock.patch.dict(os.environ, KEYS | {"AWS_CONDITIONAL_PUT": "disabled"}):
        return remote_store("s3://b/a").hold("lock", "a test").__enter__()


def without_the_extra(_: Path) -> Said:
    known = {name for name in sys.modules if name.startswith(("obstore", "tokshard.store."))}
    kept = {"tokshard.store.addresses", "tokshard.store.base", "tokshard.store.posix"}
    with mock.patch.dict(sys.modules):
        for name in known - kept:
            del sys.modules[name]
        sys.modules["obstore"] = None  # type: ignore[assignment]
        return tokshard("inspect", "s3://bucket/corpus")


def on_a_web_server(use: Callable[[Store], Any]) -> Callable[[Path], Any]:
    """A use of a store for the files of a directory."""

    def call(directory: Path) -> Any:
        with file_server(directory) as port:
            return use(open_store(f"http://127.0.0.1:{port}"))

    return call


def failing(fault: faults.Fault) -> Callable[[Path], Any]:
    """A file is read from a web server that fails for good."""

    def call(directory: Path) -> Any:
        (directory / "a.bin").write_bytes(bytes(1_000))
        with file_server(directory) as port, faults.FaultyProxy(("127.0.0.1", port)).running() as proxy:
            store = remote_store(f"http://127.0.0.1:{proxy.port}", RemoteOptions(patience=0.3))
            version = store.stat("a.bin").version
            proxy.fail(matches="GET", for_ever=fault)
            return store.read("a.bin", [(10, 900)], version=version)

    return call


def many_ranges(directory: Path) -> Any:
    """All ranges of a read end with the first that is refused."""
    (directory / "a.bin").write_bytes(bytes(1_000))
    with file_server(directory) as port, faults.FaultyProxy(("127.0.0.1", port)).running() as proxy:
        store = open_store(f"http://127.0.0.1:{proxy.port}")
        version = store.stat("a.bin").version
        proxy.fail(matches="GET", for_ever=faults.status(403, "Forbidden"))
        try:
            return store.read("a.bin", [(start, 1) for start in range(0, 900, 5)], version=version)
        finally:
            assert len(proxy.requests) < 180


def unreachable(_: Path) -> Any:
    return remote_store("http://127.0.0.1:1", RemoteOptions(first_patience=0.3)).get("a.bin")


def without_tls(directory: Path) -> Any:
    with file_server(directory) as port:
        return remote_store(f"https://127.0.0.1:{port}", RemoteOptions(first_patience=0.3)).get("a.bin")


def cached_in(name: str) -> Callable[[Path], Any]:
    def call(directory: Path) -> Any:
        (directory / "file").touch()
        return RecordCache(str(directory / name), 1 << 30)

    return call


def cached_where_nothing_may_be_written(directory: Path) -> Any:
    with mock.patch("os.access", return_value=False):  # the superuser may write everywhere
        return RecordCache(str(directory), 1 << 30)


URIS = {
    "a location without a name": "",
    "a URI of a scheme that is not known": "ftp://b/a",
    "a URI in a pathlib.Path": str(Path("s3://bucket/a")),
    "a file as a URI": "file:///a",
    "a home directory that a shell has left": "~/a",
    "a URI without a bucket": "s3:///a",
    "a URI without a container": "az://",
    "a bucket with a space in its name": "s3://my bucket/a",
    "a server with a line feed in its name": "http://host\n/a",
    "an address with a signed query": "https://host/a/b?token=SECRET",
    "an address with a fragment": "https://host/a#SECRET",
    "an address with a password": "https://user:SECRET@host/a",
    "a URI of a bucket with a password": "s3://user:SECRET@bucket/a?b",
}
ENDPOINTS = {
    "empty": "",
    "a host and a port": "127.0.0.1:9000",
    "a scheme alone": "https://",
    "a host with a password": "user:SECRET@host",
    "a URL with a password": "https://user:SECRET@host",
    "a URL with a name": "http://SECRET@host:9",
}
CALLS: dict[str, Call] = {
    **{what: opened(uri) for what, uri in URIS.items()},
    "a bucket without the package that reads buckets": without_the_extra,
    "a profile of the AWS tools without a scheme": with_a_profile,
    **{
        f"{name} that is {what}": opened("s3://b/a", **{name: value})
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
        for what, value in ENDPOINTS.items()
    },
    "a region that ends in a line feed": opened("s3://b/a", AWS_REGION="us-east-1\n", **KEYS),
    "a lease where conditional writes are switched off": leased,
    "a file that is put on a web server": on_a_web_server(lambda store: store.put("a", b"")),
    "a file that is deleted from a web server": on_a_web_server(lambda store: store.delete("a")),
    "a server that does not answer": unreachable,
    "a server that does not speak TLS": without_tls,
    "a server that is busy for too long": failing(faults.status(503)),
    "a connection that keeps breaking": failing(faults.reset),
    "answers that keep being too short": failing(faults.shorter_length),
    "a server that asks for credentials": failing(faults.status(401, "Forbidden")),
    "a server that denies access": many_ranges,
    "a server that does not like a request": failing(faults.status(400, "Bad")),
    "a server that answers with a conflict": failing(faults.status(409, "Archived")),
    "a server that does not know a method": failing(faults.status(405, "Method")),
    "a server that does not answer requests for ranges": failing(faults.as_whole),
    "a cache whose folder is a file": cached_in("file"),
    "a cache in a folder that is a file": cached_in("file/cache"),
    "a cache in a directory that may not be written": cached_where_nothing_may_be_written,
}
REFUSALS = said_in(Path(__file__).with_name("refusals.txt"), CALLS)


@refused(REFUSALS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)
