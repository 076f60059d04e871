"""A store in a bucket (S3, GCS, Azure) or on a web server, which is read only. Needs the extra ``remote``."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import unquote

from tokshard.store import remote_lease
from tokshard.store.addresses import canonical_uri, parse_address
from tokshard.store.base import Attempt, Entry, Spool
from tokshard.store.bucket import REQUEST_BYTES, Bucket
from tokshard.store.requests import RemoteOptions
from tokshard.store.temporary import TemporaryFile


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

    def local_path(self, name: str) -> str | None:  # noqa: ARG002 -- no file is on this machine
        return None

    def spool(self, name: str) -> Spool:
        """A file on this machine, until it is uploaded."""
        if self.scratch is not None:
            os.makedirs(self.scratch, mode=0o700, exist_ok=True)
        descriptor, path = tempfile.mkstemp(suffix=".partial", prefix="tokshard-", dir=self.scratch)
        file = io.BufferedWriter(TemporaryFile(descriptor, "wb"))
        return Spool(file=file, path=path, publish=partial(_upload, file, path, self.bucket, self._key(name)))

    def attempt(self, folder: str, token: str) -> Attempt:
        """Its unfinished files lie in the temporary directory of this machine; nobody can foresee the folder's name.

        Those on other machines stay until these are restarted. A process of an earlier attempt may put a file late.
        """
        place = hashlib.sha256(self.where(folder).encode()).hexdigest()[:16]
        scratches = os.path.join(tempfile.gettempdir(), f"tokshard-{os.getuid()}-{place}-")
        store, clear = replace(self, scratch=scratches + token), partial(_clear_attempts, scratches)
        return Attempt(store=store, scratch=scratches + token, mode=0o700, clear=clear)

    def hold(self, name: str, holder: str) -> AbstractContextManager[bool]:
        return remote_lease.hold(self.bucket, self._key(name), holder)

    def holder(self, name: str) -> str | None:
        return remote_lease.holder_of(self.bucket, self._key(name))

    def _key(self, name: str) -> str:
        if self.bucket.address.is_server:
            name = unquote(name)
        return f"{self.path}/{name}" if self.path and name else self.path or name


def _upload(file: IO[bytes], path: str, bucket: Bucket, key: str) -> None:
    """Upload a file, in parts if it is large, and remove it here."""
    file.close()
    bucket.put(key, Path(path))
    with contextlib.suppress(OSError):
        os.unlink(path)


def _clear_attempts(scratches: str) -> None:
    """Remove the folders on this machine whose paths begin like this."""
    for earlier in glob.glob(f"{glob.escape(scratches)}*"):
        shutil.rmtree(earlier, ignore_errors=True)  # it leaves links, and what belongs to others


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


_FIRST_WINDOW = 64 << 10
_BUFFER = 64 << 10


def open_remote(bucket: Bucket, key: str) -> IO[bytes]:
    """An object as a seekable, buffered file, of its current version.

    For sequential reads it fetches ever longer ranges, the next one ahead of time; for random reads, little more than
    requested. It takes at most twice 4 MiB of memory.

    Raises:
        FileNotFoundError: there is no such object.
    """
    found = bucket.entry(key)
    return io.BufferedReader(_RemoteFile(bucket, key, found.size, found.version), _BUFFER)


class _RemoteFile(io.RawIOBase):
    def __init__(self, bucket: Bucket, key: str, size: int, version: str) -> None:
        self._bucket, self._key, self._size, self._version = bucket, key, size, version
        self.name = bucket.where(key)
        self._position = 0
        self._window, self._window_start = b"", 0
        self._ahead: tuple[int, Future[tuple[bytes, str]]] | None = None
        self._abandoned = threading.Event()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill a buffer, or a part of it."""
        wanted = min(len(buffer), self._size - self._position)
        if wanted <= 0:
            return 0
        at = self._position - self._window_start
        if not 0 <= at < len(self._window):
            self._fetch(wanted)
            at = 0
        part = memoryview(self._window)[at : at + wanted]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def close(self) -> None:
        """Drop the bytes fetched ahead."""
        self._abandoned.set()
        self._ahead, self._window = None, b""
        super().close()

    def _fetch(self, wanted: int) -> None:
        """Make the window begin at the position."""
        start = self._position
        is_next = bool(self._window) and start == self._window_start + len(self._window)
        length = max(wanted, 2 * len(self._window) if is_next else _FIRST_WINDOW)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == start:
            content, _ = ahead[1].result()
        else:
            length = min(length, REQUEST_BYTES, self._size - start)
            content, _ = self._bucket.range(self._key, start, length, version=self._version, abandoned=self._abandoned)
        self._window, self._window_start = content, start
        following = start + len(content)
        if is_next and following < self._size:
            length = min(max(2 * len(content), _FIRST_WINDOW), REQUEST_BYTES, self._size - following)
            task = self._bucket.pool.submit(
                self._bucket.range, self._key, following, length, version=self._version, abandoned=self._abandoned
            )
            self._ahead = (following, task)
