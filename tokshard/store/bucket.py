"""Operations on the objects of one bucket or web server; every answer is checked before use."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from obstore.exceptions import AlreadyExistsError, PreconditionError

from tokshard.errors import StoreError
from tokshard.store.addresses import Address
from tokshard.store.base import Entry
from tokshard.store.failures import FAILURES, status_of, verdict
from tokshard.store.requests import RemoteOptions, Requests, TryAgainError, now

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ObjectStore

Tag = Mapping[str, str]
"""Names the content that a conditional put replaces."""

REQUEST_BYTES = 4 << 20
"""Longer ranges are read by several requests."""

_PART_BYTES = 16 << 20
_PARTS_AT_ONCE = 4
_LARGE_BYTES = 256 << 10
"""Longer content is uploaded without a watch for stalls: sending it over a slow line would look like one."""
_CONNECTIONS = 32
"""Requests in flight at once."""
_PAGE = 1_000
"""Keys that a store lists by one request."""
_BULK_REQUESTS = 8
"""Long ranges in flight at once: at 4 MiB each, a line of 5 Mbit/s is enough for all to end within a minute."""


class Bucket:
    """A bucket, container or web server. Opens when the first request is made. Thread-safe.

    Pickles as its address and options, without credentials.

    Args:
        address: its path is not used, because names are keys of the whole bucket.
    """

    def __init__(self, address: Address, options: RemoteOptions) -> None:
        self.address, self.options = address, options
        self.requests = Requests(address, options)
        # for concurrent requests; nothing that runs in it may wait for another. Threads start with the first request
        self.pool = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="tokshard-store")

    def __reduce__(self) -> tuple[Any, ...]:
        return (Bucket, (self.address, self.options))

    def where(self, key: str) -> str:
        """A key as messages name it."""
        return self.requests.where(key)

    def entry(self, key: str) -> Entry:
        """Size and version of one object, under its key."""
        return _entry(self.requests.make(lambda store: store.head(key), key=key))

    def whole(self, key: str) -> bytes:
        """A whole object, of one version throughout; a small one by one request."""

        def request(store: ObjectStore) -> tuple[Entry, bytes | None]:
            answer = store.get(key)
            found = _entry(answer.meta)
            if found.size > REQUEST_BYTES:
                return found, None
            content = bytes(answer.bytes())
            if len(content) != found.size:
                raise TryAgainError(errno.EIO, f"an answer of {len(content)} bytes, expected {found.size}")
            return found, content

        found, content = self.requests.make(request, key=key)
        return self.read(key, [(0, found.size)], version=found.version)[0] if content is None else content

    def read(self, key: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None) -> list[bytes]:
        """Parts of one object, of one version throughout.

        Raises:
            OSError: the object ends before a range does, or was replaced.
        """
        pieces = [piece for start, length in ranges for piece in _pieces(start, length)]
        answers = self._side_by_side(key, pieces, version)
        if version is None and len({found for _, found in answers}) > 1:
            raise _replaced(self.where(key))
        parts = iter(answers)
        return [b"".join(next(parts)[0] for _ in _pieces(start, length)) for start, length in ranges]

    def range(
        self, key: str, start: int, length: int, *, version: str | None = None, abandoned: threading.Event | None = None
    ) -> tuple[bytes, str]:
        """One part of an object by one request, and the version of the object.

        Args:
            abandoned: set when the answer is no longer needed.
        """

        def request(store: ObjectStore) -> tuple[bytes, str]:
            options: GetOptions = {"range": (start, start + length)}
            if version is not None and _is_strong(version):
                options["if_match"] = f'"{version}"'
            try:
                answer = store.get(key, options=options)
            except PreconditionError:
                raise _replaced(self.where(key)) from None
            found = _entry(answer.meta)
            if version is not None and found.version != version:  # a server that knows no conditions
                raise _replaced(self.where(key))
            if start + length > found.size:
                raise _ends(self.where(key), found.size, start + length)
            content = bytes(answer.bytes())
            if len(content) != length:
                raise TryAgainError(errno.EIO, f"an answer of {len(content)} bytes, expected {length}")
            return content, found.version

        try:
            return self.requests.make(request, key=key, abandoned=abandoned)
        except StoreError as error:
            if isinstance(error.__cause__, Exception) and status_of(error.__cause__) == 416:
                raise _ends(self.where(key), self.entry(key).size, start + length) from None
            raise

    def folder(self, prefix: str) -> tuple[list[Entry], list[str]]:
        """The objects in one folder, under their keys, and the keys of the folders in it."""
        found = self.requests.make(lambda store: store.list_with_delimiter(prefix or None), key=prefix)
        # other tools mark a folder by an object with the key of the folder and a slash
        files = [_entry(meta) for meta in found["objects"] if meta["path"] != prefix]
        folders = list(found["common_prefixes"])
        if folders and len(files) < _PAGE:  # some servers keep folders whose files have gone
            keys = self.keys_below(prefix, pages=1)
            if len(keys) < _PAGE:
                folders = [folder for folder in folders if any(key.startswith(f"{folder}/") for key in keys)]
        return files, folders

    def keys_below(self, prefix: str, *, pages: int | None = None) -> list[str]:
        """The keys of all objects below a folder, at any depth, or only the first pages."""

        def request(store: ObjectStore) -> list[str]:
            found = itertools.islice(store.list(prefix, chunk_size=_PAGE), pages)
            return [meta["path"] for page in found for meta in page]

        return self.requests.make(request, key=prefix)

    def put(self, key: str, content: bytes | Path) -> None:
        """Put an object, whole or not at all; in parts, if it is large."""
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        self.requests.make(
            lambda store: store.put(key, content, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE),
            key=key,
            is_write=True,
            is_large=size > _LARGE_BYTES,
        )

    def put_if(
        self, key: str, content: bytes, tag: Tag | None, *, abandoned: threading.Event | None = None
    ) -> tuple[Tag, float]:
        """Put an object that must be new, or replace exactly one content of it.

        Args:
            content: unique to this call, so that it is recognised if the answer is lost.
            tag: from `put_if` or `tagged`, of the content to be replaced; None if the object must be new.

        Returns:
            The tag of the new content, and a time by `now` before which it was not there.

        Raises:
            FileExistsError: there is another one.
            FileNotFoundError: there is none to be replaced.
        """
        mode: Any = "create" if tag is None else dict(tag)
        began = now()

        def request(store: ObjectStore) -> tuple[Tag, float]:
            sent = now()
            try:
                return _tag(store.put(key, content, mode=mode)), sent
            except FAILURES as error:
                is_refused = isinstance(error, AlreadyExistsError | PreconditionError)
                if not is_refused and verdict(error, where=self.where(key), scheme=self.address.scheme) is not None:
                    raise
                try:
                    answer = store.get(key)
                    found, known = bytes(answer.bytes()), _tag(answer.meta)
                except FileNotFoundError:
                    if isinstance(error, PreconditionError):
                        raise
                    if is_refused:  # it was removed meanwhile, or two puts met
                        raise TryAgainError(errno.EAGAIN, "a put that neither won nor lost") from error
                    raise error from None
                if found == content:  # ours: only the answer was lost
                    return known, began
                if is_refused:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.where(key)) from None
                raise

        return self.requests.make(request, key=key, is_write=True, abandoned=abandoned)

    def refuses(self, key: str, content: bytes, tag: Tag | None) -> bool:
        """Whether the store refuses a conditional put; it should.

        Args:
            content: the current content, so that a store without conditional writes changes nothing.
            tag: of other content; None to create the object once more.
        """
        mode: Any = "create" if tag is None else dict(tag)

        def request(store: ObjectStore) -> bool:
            try:
                store.put(key, content, mode=mode)
            except (AlreadyExistsError, PreconditionError):
                return True
            return False

        return self.requests.make(request, key=key, is_write=True)

    def tagged(self, key: str) -> tuple[bytes, Tag, float]:
        """A small object, the tag of its content, and its age in seconds by the clock of this machine."""

        def request(store: ObjectStore) -> tuple[bytes, Tag, float]:
            answer = store.get(key)
            content = bytes(answer.bytes())
            return content, _tag(answer.meta), time.time() - answer.meta["last_modified"].timestamp()

        return self.requests.make(request, key=key)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; one that is not there is not an error."""
        if not keys:
            return
        if self.address.scheme == "s3":  # up to a thousand by one request
            self.requests.make(lambda store: store.delete(list(keys)), key=keys[0], is_write=True)
        else:
            list(self.pool.map(partial(_delete_one, self.requests), keys))

    def _side_by_side(
        self, key: str, pieces: Sequence[tuple[int, int]], version: str | None
    ) -> list[tuple[bytes, str]]:
        if len(pieces) < 2:
            return [self.range(key, start, length, version=version) for start, length in pieces]
        abandoned = threading.Event()
        at_once = _BULK_REQUESTS if max(length for _, length in pieces) == REQUEST_BYTES else len(pieces)
        running: list[Future[tuple[bytes, str]]] = []
        answers: list[tuple[bytes, str]] = []
        try:
            for start, length in pieces:
                if len(running) - len(answers) >= at_once:
                    answers.append(running[len(answers)].result())
                task = self.pool.submit(self.range, key, start, length, version=version, abandoned=abandoned)
                running.append(task)
            answers.extend(task.result() for task in running[len(answers) :])
        except BaseException:
            abandoned.set()
            for task in running:
                task.cancel()
            raise
        return answers


def _delete_one(requests: Requests, key: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        requests.make(lambda store: store.delete(key), key=key, is_write=True)


def _pieces(start: int, length: int) -> list[tuple[int, int]]:
    return [(at, min(REQUEST_BYTES, start + length - at)) for at in range(start, start + length, REQUEST_BYTES)]


def _entry(meta: ObjectMeta) -> Entry:
    return Entry(meta["path"], meta["size"], _version(meta), meta["path"])


def _version(meta: ObjectMeta) -> str:
    """The entity tag without its quotes, which some lists leave out; else the time."""
    tag = meta["e_tag"]
    return tag.strip('"') if tag else f"modified {meta['last_modified'].isoformat()} {meta['size']}"


def _is_strong(version: str) -> bool:
    """Whether a server compares it: never for weak tags, nor for versions that are not tags."""
    return not version.startswith(("W/", "modified "))


def _tag(found: Mapping[str, Any]) -> Tag:
    return {name: found[name] for name in ("e_tag", "version") if found.get(name) is not None}


def _replaced(where: str) -> OSError:
    return OSError(errno.ESTALE, "the file was replaced", where)


def _ends(where: str, size: int, expected: int) -> OSError:
    return OSError(errno.ENODATA, f"the file ends at byte {size}, before {expected}", where)
