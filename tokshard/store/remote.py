"""A store in a bucket (S3, GCS, Azure) or on a web server, which is read only. Needs the extra ``remote``."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO
from urllib.parse import unquote

from tokshard.store.addresses import canonical_uri, parse_address
from tokshard.store.base import Entry
from tokshard.store.bucket import Bucket
from tokshard.store.posix import discard_files
from tokshard.store.remote_file import open_remote
from tokshard.store.remote_lease import RemoteLease
from tokshard.store.requests import RemoteOptions


@dataclass(frozen=True, slots=True)
class RemoteStore:
    """Files in a bucket or on a web server. Nothing is sent before the first method is called.

    Credentials are not pickled: the process that unpickles it takes them from its own environment. A process that was
    forked after a store was used refuses to use one.

    Failed requests are tried again for minutes (`RemoteOptions.patience`). If that does not help, or a permission is
    missing, they end in a `StoreError`. It is not an `OSError`, because it says nothing about the file.

    Args:
        location: a URI.
        path: of the location in the bucket.
        bucket: the bucket or server.
        scratch: where unfinished files are on this machine; None: in its temporary directory.
    """

    location: str
    path: str = field(repr=False)
    bucket: Bucket = field(repr=False)
    scratch: str | None = field(default=None, repr=False)

    def where(self, name: str) -> str:
        return f"{self.location}/{name}" if name else self.location

    def below(self, folder: str) -> RemoteStore:
        return replace(self, location=self.where(folder), path=self._key(folder))

    def list(self, folder: str = "") -> Iterator[Entry]:
        files, folders = _listed(self.bucket, self._key(folder))
        found = [replace(entry, name=_inside(folder, entry.name)) for entry in files]
        found += [Entry(f"{_inside(folder, key)}/") for key in folders]
        yield from sorted(found, key=lambda entry: os.fsencode(entry.name))

    def names(self, folder: str = "") -> Sequence[str]:
        return [entry.name.removeprefix(f"{folder}/") for entry in self.list(folder)]

    def stat(self, name: str) -> Entry:
        return replace(self.bucket.entry(_of_file(self._key(name), self.location)), name=name)

    def open(self, name: str) -> IO[bytes]:
        return open_remote(self.bucket, self._key(name))

    def read(self, name: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None) -> Sequence[bytes]:
        return self.bucket.read(self._key(name), ranges, version=version)

    def get(self, name: str) -> bytes:
        return self.bucket.whole(_of_file(self._key(name), self.location))

    def put(self, name: str, content: bytes) -> None:
        self.bucket.put(self._key(name), content)

    def delete(self, *names: str) -> None:
        keys: list[str] = []
        for name in names:
            keys += self.bucket.keys_below(self._key(name[:-1])) if name.endswith("/") else [self._key(name)]
        self.bucket.delete(keys)

    def local_path(self, name: str) -> str | None:  # noqa: ARG002 -- nothing lies on this machine
        return None

    def spool(self, name: str) -> RemoteSpool:
        return RemoteSpool(self.bucket, self._key(name), self.scratch)

    def attempt(self, folder: str, token: str) -> RemoteAttempt:
        place = hashlib.sha256(self.where(folder).encode()).hexdigest()[:16]
        scratches = os.path.join(tempfile.gettempdir(), f"tokshard-{os.getuid()}-{place}-")
        return RemoteAttempt(replace(self, scratch=scratches + token), scratches, scratches + token)

    def lease(self, name: str) -> RemoteLease:
        return RemoteLease(self.bucket, self._key(name))

    def _key(self, name: str) -> str:
        if self.bucket.address.is_server:
            name = unquote(name)
        return f"{self.path}/{name}" if self.path and name else self.path or name


@dataclass(frozen=True, slots=True)
class RemoteAttempt:
    """An attempt whose unfinished files lie on this machine, in a folder of its own in the temporary directory.

    Those on other machines stay until these are restarted. A process of an earlier attempt may put a file late.

    Args:
        scratches: what the paths of all attempts at one place begin with.
        scratch: the folder of this attempt; nobody can foresee its name.
    """

    store: RemoteStore
    scratches: str
    scratch: str

    def take_over(self) -> None:
        for earlier in glob.glob(f"{glob.escape(self.scratches)}*"):
            shutil.rmtree(earlier, ignore_errors=True)  # it leaves links, and what belongs to others
        os.mkdir(self.scratch, mode=0o700)

    def join(self) -> None:
        os.makedirs(self.scratch, mode=0o700, exist_ok=True)

    def discard_spooled(self) -> None:
        discard_files(self.scratch)

    def end(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)


class RemoteSpool:
    """A file on this machine, until it is uploaded."""

    def __init__(self, bucket: Bucket, key: str, scratch: str | None) -> None:
        self._bucket, self._key = bucket, key
        if scratch is not None:
            os.makedirs(scratch, mode=0o700, exist_ok=True)
        descriptor, self.path = tempfile.mkstemp(suffix=".partial", prefix="tokshard-", dir=scratch)
        self.file: IO[bytes] = os.fdopen(descriptor, "wb")

    def put(self) -> None:
        """Upload it, in parts if it is large."""
        try:
            self.file.close()
            self._bucket.put(self._key, Path(self.path))
        finally:
            self.discard()

    def discard(self) -> None:
        """Close and remove the file."""
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def remote_store(location: str, options: RemoteOptions | None = None) -> RemoteStore:
    """The store at a URI.

    Args:
        options: how patient it is.

    Raises:
        UsageError: it is not a URI of a bucket or server.
    """
    address = parse_address(location)
    return RemoteStore(canonical_uri(location), address.path, Bucket(address, options or RemoteOptions()))


def _of_file(key: str, location: str) -> str:
    """The key, unless it names the bucket itself, which holds no bytes."""
    if not key:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), location)
    return key


def _inside(folder: str, key: str) -> str:
    """The name of an object in a folder."""
    name = key.rpartition("/")[2]
    return f"{folder}/{name}" if folder else name


def _listed(bucket: Bucket, key: str) -> tuple[Sequence[Entry], Sequence[str]]:
    """The objects in a folder, under their keys, and the keys of the folders in it."""
    if bucket.address.is_server:
        raise OSError(errno.ENOTSUP, "web servers do not list their files", bucket.where(key))
    files, folders = bucket.folder(key)
    if key and not files and not folders:
        with contextlib.suppress(FileNotFoundError):
            bucket.entry(key)
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), bucket.where(key))
    return files, folders
