"""URIs of object stores and web servers, taken apart. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from tokshard.errors import UsageError

BUCKETS = {"s3": "bucket", "gs": "bucket", "az": "container"}
"""Schemes of object stores, each with its word for the first part of a URI."""

SERVERS = ("https", "http")

_IN_NO_HOST = re.compile(r"[\x00-\x20\x7f\"<>\\^`{|}]")
"""Characters that no URI has there: `obstore` panics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a store begins.

    Args:
        scheme: ``s3``, ``gs``, ``az``, ``https`` or ``http``.
        host: the bucket or container, or the server with its port.
        path: of the store within it, without slashes at either end; a key of the bucket, not encoded.
    """

    scheme: str
    host: str
    path: str

    @property
    def root(self) -> str:
        """The URI of the bucket or server as a whole."""
        return f"{self.scheme}://{self.host}"

    @property
    def is_server(self) -> bool:
        """Whether this is a web server, whose files can only be read."""
        return self.scheme in SERVERS


def canonical_uri(uri: str) -> str:
    """The canonical spelling of a URI, applied to every URI from outside: no part of its path is empty.

    Raises:
        UsageError: it has a password or a query, which messages would show and corpora would record.
    """
    scheme, _, rest = uri.partition("://")
    host, *parts = rest.split("/")
    if "@" in host:
        raise UsageError(
            f"{without_secrets(uri)} comes with a user name or password, which corpora would record",
            hint="take it out of the address; credentials come from the environment",
        )
    if scheme in SERVERS and without_secrets(uri) != uri:
        raise UsageError(
            f"{without_secrets(uri)} comes with a query (after '?') or a fragment (after '#'), which tokshard does not "
            "send",
            hint="give an address without one, or download the file",
        )
    return f"{scheme}://" + "/".join([host, *filter(None, parts)])


def without_secrets(uri: str) -> str:
    """A URI as messages may show it: without user, password, query and fragment. Keys of buckets have no query."""
    shown = re.sub(r"://[^/]*@", "://", uri)
    return shown if shown.startswith(tuple(f"{scheme}://" for scheme in BUCKETS)) else re.split(r"[?#]", shown)[0]


def parse_address(uri: str) -> Address:
    """Take a URI apart.

    Raises:
        UsageError: the bucket is missing or can have no such name, or as `canonical_uri`.
    """
    scheme, _, rest = canonical_uri(uri).partition("://")
    host, _, path = rest.partition("/")
    if not host:
        place = BUCKETS.get(scheme, "server")
        raise UsageError(f"{uri} names no {place}", hint=f"write {scheme}://{place.upper()}/path")
    if wrong := _IN_NO_HOST.search(host):
        raise UsageError(
            f"{uri!r} cannot be reached: no {BUCKETS.get(scheme, 'server')} has {wrong[0]!r} in its name",
            hint="check the address; in a shell, quote it as a whole",
        )
    return Address(scheme=scheme, host=host, path=unquote(path) if scheme in SERVERS else path)
