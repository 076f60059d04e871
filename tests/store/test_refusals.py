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


SERVER = "http://127.0.0.1:*"
NETWORK = "check the network and the address of the store, and run the same command again"

REFUSALS = [
    Refusal(
        "a location without a name",
        opened(""),
        UsageError,
        "a location is empty",
        "give a path or a URI; . is the working directory",
    ),
    Refusal(
        "a URI of a scheme that is not known",
        opened("ftp://bucket/corpus"),
        UsageError,
        "ftp://bucket/corpus is a URI of a scheme that tokshard does not know, "
        "expected one of s3://, gs://, az://, https://, http://",
        "copy it to one of these, or to this machine",
    ),
    *(
        Refusal(what, opened(uri), UsageError, f"{shown} comes with a {found}", hint)
        for found, hint, addresses in [
            (
                "query (after '?') or a fragment (after '#'), which tokshard does not send",
                "give an address without one, or download the file",
                [
                    ("an address with a signed query", "https://host/a/b.jsonl?token=SECRET", "https://host/a/b.jsonl"),
                    ("an address with a fragment", "https://host/a#SECRET", "https://host/a"),
                ],
            ),
            (
                "user name or password, which corpora would record",
                "take it out of the address; credentials come from the environment",
                [
                    ("an address with a password", "https://user:SECRET@host/a", "https://host/a"),
                    ("a URI of a bucket with a password", "s3://user:SECRET@bucket/a?b", "s3://bucket/a?b"),
                ],
            ),
        ]
        for what, uri, shown in addresses
    ),
    Refusal(
        "a URI without a bucket", opened("s3:///a"), UsageError, "s3:///a names no bucket", "write s3://BUCKET/path"
    ),
    Refusal(
        "a URI without a container",
        opened("az://"),
        UsageError,
        "az:// names no container",
        "write az://CONTAINER/path",
    ),
    Refusal(
        "a bucket without the package that reads buckets",
        without_the_extra,
        2,
        "s3://bucket/corpus is a URI, and obstore is not installed",
        "pip install 'tokshard[remote]', or give a local path",
    ),
    Refusal(
        "a profile of the AWS tools whose endpoint is a host and a port",
        with_a_profile,
        UsageError,
        "endpoint_url of the AWS profile is '127.0.0.1:9000', expected a URL such as https://s3.example.com",
        "give it with its scheme, or unset it to reach Amazon's S3",
    ),
    *(
        Refusal(
            f"{name} that is {what}",
            opened("s3://bucket/a", **{name: value}),
            UsageError,
            f"{name} is {shown!r}, expected a URL such as https://s3.example.com{without}",
            "give it with its scheme, or unset it to reach Amazon's S3",
        )
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
        for what, value, shown, without in [
            ("empty", "", "", ""),
            ("a host and a port", "127.0.0.1:9000", "127.0.0.1:9000", ""),
            ("a scheme alone", "https://", "https://", ""),
            ("a host with a password", "user:SECRET@host", "host", " without a user name and password"),
            ("a URL with a password", "https://user:SECRET@host", "host", " without a user name and password"),
            ("a URL with a name", "http://SECRET@host:9", "host:9", " without a user name and password"),
        ]
    ),
    *(
        Refusal(
            f"a file that is {what} a web server",
            on_a_web_server(use),
            StoreError,
            f"{SERVER}/a cannot be written: files of web servers can only be read",
            "give a directory, or s3://, gs:// or az://",
        )
        for what, use in [
            ("put on", lambda store: store.put("a", b"")),
            ("deleted from", lambda store: store.delete("a")),
        ]
    ),
    *(
        Refusal(what, call, StoreError, f"{SERVER}/a.bin: {problem}", hint)
        for hint, rows in {
            NETWORK: [
                (
                    "a server that does not answer",
                    unreachable,
                    "the store failed * in * s, last with: Connection refused",
                ),
                (
                    "a server that is busy for too long",
                    failing(faults.status(503)),
                    "the store failed * in * s, last with: 503 Service Unavailable, SlowDown",
                ),
                (
                    "a connection that keeps breaking",
                    failing(faults.reset),
                    "the store failed * in * s, last with: the connection was closed before the answer had come",
                ),
                (
                    "answers that keep being too short",
                    failing(faults.shorter_length),
                    "the store failed * in * s, last with: [Errno 5] an answer of 897 bytes, expected 900",
                ),
            ],
            "the server asks for a login: download the file": [
                (
                    "a server that asks for credentials",
                    failing(faults.status(401, "Forbidden")),
                    "access denied: 401 Unauthorized, Forbidden",
                ),
                ("a server that denies access", many_ranges, "access denied: 403 Forbidden, Forbidden"),
            ],
            "download the file, or take a server that answers them": [
                (
                    "a server that does not answer requests for ranges",
                    failing(faults.as_whole),
                    "the server does not answer requests for ranges: *",
                )
            ],
        }.items()
        for what, call, problem in rows
    ),
    *(
        Refusal(
            f"a cache {where}",
            cached_in(name),
            UsageError,
            f"DIR/{name} cannot be a cache: {problem}",
            "give a directory that can be written",
        )
        for where, name, problem in [
            ("whose folder is a file", "file", "File exists"),
            ("in a folder that is a file", "file/cache", "Not a directory"),
        ]
    ),
]


@refused(REFUSALS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)
