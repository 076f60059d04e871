"""What stores refuse, and what they say when a server fails for good."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.refusals import Refusal, Said, check, refused, tokshard
from tests.store import faulty_proxy as faults
from tests.store.servers import file_server
from tokshard.errors import StoreError, UsageError
from tokshard.store import Store, open_store
from tokshard.store.record_cache import RecordCache
from tokshard.store.remote import remote_store
from tokshard.store.requests import RemoteOptions


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


def cached_in(name: str) -> Callable[[Path], Any]:
    def call(directory: Path) -> Any:
        (directory / "file").touch()
        return RecordCache(str(directory / name), 1 << 30)

    return call


def cached_where_nothing_may_be_written(directory: Path) -> Any:
    with mock.patch("os.access", return_value=False):  # the superuser may write everywhere
        return RecordCache(str(directory), 1 << 30)


SCHEMES = "expected one of s3://, gs://, az://, https://, http://"
UNKNOWN = f"a URI of a scheme that tokshard does not know, {SCHEMES}"
QUERY = "comes with a query (after '?') or a fragment (after '#'), which tokshard does not send"
NO_QUERY = "give an address without one, or download the file"
PASSWORD = "comes with a user name or password, which corpora would record"
NO_PASSWORD = "take it out of the address; credentials come from the environment"
ELSEWHERE = "copy it to one of these, or to this machine"
URIS = [
    ("a location without a name", "", "a location is empty", "give a path or a URI; . is the working directory"),
    ("a URI of a scheme that is not known", "ftp://b/a", f"ftp://b/a is {UNKNOWN}", ELSEWHERE),
    ("a URI without a bucket", "s3:///a", "s3:///a names no bucket", "write s3://BUCKET/path"),
    ("a URI without a container", "az://", "az:// names no container", "write az://CONTAINER/path"),
    ("an address with a signed query", "https://host/a/b?token=SECRET", f"https://host/a/b {QUERY}", NO_QUERY),
    ("an address with a fragment", "https://host/a#SECRET", f"https://host/a {QUERY}", NO_QUERY),
    ("an address with a password", "https://user:SECRET@host/a", f"https://host/a {PASSWORD}", NO_PASSWORD),
    ("a URI of a bucket with a password", "s3://user:SECRET@bucket/a?b", f"s3://bucket/a?b {PASSWORD}", NO_PASSWORD),
]

A_URL = "expected a URL such as https://s3.example.com"
NO_SECRET = f"{A_URL} without a user name and password"
A_SCHEME = "give it with its scheme, or unset it to reach Amazon's S3"
ENDPOINTS = [
    ("empty", "", f"'', {A_URL}"),
    ("a host and a port", "127.0.0.1:9000", f"'127.0.0.1:9000', {A_URL}"),
    ("a scheme alone", "https://", f"'https://', {A_URL}"),
    ("a host with a password", "user:SECRET@host", f"'host', {NO_SECRET}"),
    ("a URL with a password", "https://user:SECRET@host", f"'host', {NO_SECRET}"),
    ("a URL with a name", "http://SECRET@host:9", f"'host:9', {NO_SECRET}"),
]

SERVER = "http://127.0.0.1:*"
FAILED = "the store failed * in * s, last with:"
BUSY = "503 Service Unavailable, SlowDown"
CLOSED = "the connection was closed before the answer had come"
TOO_SHORT = "[Errno 5] an answer of 897 bytes, expected 900"
NO_RANGES = "the server does not answer requests for ranges: *"
NETWORK = "check the network and the address of the store, and run the same command again"
LOGIN = "the server asks for a login: download the file"
A_SERVER = "download the file, or take a server that answers them"
SERVERS = [
    ("a server that does not answer", unreachable, f"{FAILED} Connection refused", NETWORK),
    ("a server that is busy for too long", failing(faults.status(503)), f"{FAILED} {BUSY}", NETWORK),
    ("a connection that keeps breaking", failing(faults.reset), f"{FAILED} {CLOSED}", NETWORK),
    ("answers that keep being too short", failing(faults.shorter_length), f"{FAILED} {TOO_SHORT}", NETWORK),
    (
        "a server that asks for credentials",
        failing(faults.status(401, "Forbidden")),
        "access denied: 401 Unauthorized, Forbidden",
        LOGIN,
    ),
    ("a server that denies access", many_ranges, "access denied: 403 Forbidden, Forbidden", LOGIN),
    ("a server that does not answer requests for ranges", failing(faults.as_whole), NO_RANGES, A_SERVER),
]

READ_ONLY = f"{SERVER}/a cannot be written: files of web servers can only be read"
WRITABLE = "give a directory, or s3://, gs:// or az://"
PROFILE = f"endpoint_url of the AWS profile is '127.0.0.1:9000', {A_URL}"
A_DIRECTORY = "give a directory that can be written"

REFUSALS = [
    *(Refusal(what, opened(uri), UsageError, problem, hint) for what, uri, problem, hint in URIS),
    Refusal(
        "a bucket without the package that reads buckets",
        without_the_extra,
        2,
        "s3://bucket/corpus is a URI, and obstore is not installed",
        "pip install 'tokshard[remote]', or give a local path",
    ),
    Refusal("a profile of the AWS tools without a scheme", with_a_profile, UsageError, PROFILE, A_SCHEME),
    *(
        Refusal(
            f"{name} that is {what}", opened("s3://b/a", **{name: value}), UsageError, f"{name} is {said}", A_SCHEME
        )
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
        for what, value, said in ENDPOINTS
    ),
    *(
        Refusal(f"a file that is {what} a web server", on_a_web_server(use), StoreError, READ_ONLY, WRITABLE)
        for what, use in (
            ("put on", lambda store: store.put("a", b"")),
            ("deleted from", lambda store: store.delete("a")),
        )
    ),
    *(Refusal(what, call, StoreError, f"{SERVER}/a.bin: {said}", hint) for what, call, said, hint in SERVERS),
    *(
        Refusal(f"a cache {where}", cached_in(name), UsageError, f"DIR/{name} cannot be a cache: {said}", A_DIRECTORY)
        for where, name, said in (
            ("whose folder is a file", "file", "File exists"),
            ("in a folder that is a file", "file/cache", "Not a directory"),
        )
    ),
    Refusal(
        "a cache in a directory that may not be written",
        cached_where_nothing_may_be_written,
        UsageError,
        "DIR cannot be written",
        "give another directory for the cache",
    ),
]


@refused(REFUSALS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)
