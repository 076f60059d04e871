"""URIs of object stores and web servers, taken apart. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from tokshard.errors import UsageError

BUCKETS = {"s3": "bucket", "gs": "bucket", "az": "container"}
"""Schemes of object stores, and what each calls the first part of a URI."""

SERVERS = ("https", "http")


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
        """Whether this is a web server: its files can be read and nothing else."""
        return self.scheme in SERVERS


def parse_address(uri: str) -> Address:
    """Take a URI apart.

    Raises:
        UsageError: the bucket is missing, or the URI holds what would be lost or made public.
    """
    scheme, _, rest = uri.partition("://")
    host, _, path = rest.partition("/")
    if not host:
        place = BUCKETS.get(scheme, "server")
        raise UsageError(f"{uri} names no {place}", hint=f"write {scheme}://{place.upper()}/path")
    if "@" in host:
        raise UsageError(
            f"{scheme}://{host.rpartition('@')[2]}/... holds a user name or password, which corpora would record",
            hint="take it out of the address; credentials come from the environment",
        )
    if scheme in SERVERS:
        parts = urlsplit(uri)
        if parts.query or parts.fragment:
            raise UsageError(
                f"{scheme}://{host}{parts.path} comes with a query (after '?') or a fragment (after '#'), "
                "which tokshard does not send",
                hint="give an address without one, or download the file",
            )
        path = unquote(path)
    return Address(scheme=scheme, host=host, path=path.strip("/"))
