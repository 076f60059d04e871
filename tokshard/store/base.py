"""The interface of all stores.

A store holds files under names such as ``train/shards.arrow``: parts joined by slashes, relative to its location. A
*folder* is the set of names that begin with ``folder/``; a store need not know empty ones. A file is put whole or
not at all, and is never changed in place.

All methods raise `OSError` and its subclasses as files do: `FileNotFoundError` for a missing name, `PermissionError`,
and so on.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, Protocol, TypeVar

from tokshard.errors import StoreError
from tokshard.store.temporary import named_temporary_file

_COPY_BYTES = 1 << 20

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of the system for a disk that is full."""


class NotRegularFileError(OSError):
    """The name belongs to a pipe, a socket or a device."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder in a store.

    Args:
        name: relative to the location of the store; ends in a slash for a folder, which has no other facts.
        size: in bytes.
        version: changes whenever the content is replaced. Opaque: compare it, show it, never take it apart. Empty if
            the store could not read the facts of a file while it listed a folder; `Store.stat` then says why.
        identity: equal for two names of one file, such as hard links.
        is_link: the name is a link to a file that may lie outside of the store.
    """

    name: str
    size: int = 0
    version: str = ""
    identity: Hashable = None
    is_link: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spool:
    """A file that is written on this machine first, and then put whole or discarded.

    Its content may be larger than memory.

    Args:
        file: open for writing, buffered.
        path: of the file on this machine until it is put; flushed bytes can be read there.
        publish: closes the file and puts it under its name, durable; nothing is at `path` afterwards.
        tidy: removes the folder that was made for the file, if one was. Never fails.
    """

    file: IO[bytes]
    path: str
    publish: Callable[[], None]
    tidy: Callable[[], None] | None = None

    def put(self) -> None:
        """Close the file and put it under its name, durable. On an error nothing appears, and the file is gone."""
        try:
            self.publish()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove the file unless it was put. Never fails."""
        with contextlib.suppress(OSError, StoreError):
            self.file.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        if self.tidy is not None:
            self.tidy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run of a program that writes into a store, apart from the runs before it. It pickles.

    Args:
        store: the store for this attempt: its spools never meet the spools of another attempt.
        scratch: the folder on this machine of the files that it spooled and did not put.
        mode: of that folder.
        clear: removes what earlier attempts spooled and did not put.
    """

    store: Store
    scratch: str
    mode: int
    clear: Callable[[], None]

    def take_over(self) -> None:
        """Begin this attempt: remove files that earlier ones spooled and did not put.

        Where the store can prevent it, a process of an earlier attempt that is still alive puts nothing from now on.
        Elsewhere it may put a file late; so a writer must give a file of one name the same bytes in all attempts.
        """
        self.clear()
        self.join()

    def join(self) -> None:
        """Begin this attempt next to others in progress, and leave their spooled files.

        The next attempt that takes over ends this one too.
        """
        os.makedirs(self.scratch, self.mode, exist_ok=True)

    def discard_spooled(self) -> None:
        """Remove files that processes of this attempt spooled and did not put. They must have ended."""
        for name in os.listdir(self.scratch):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.scratch, name))

    def end(self) -> None:
        """End this attempt: remove all files that it spooled and did not put. It can put nothing more."""
        shutil.rmtree(self.scratch, ignore_errors=True)


class Store(Protocol):
    """Files under one location.

    A store pickles as its location, so that another process opens it for itself. Threads may share it.
    """

    @property
    def location(self) -> str:
        """The location as given, for messages."""

    def where(self, name: str) -> str:
        """A file as messages name it, and as `locate` finds it."""

    def below(self, folder: str) -> Store:
        """The store of a folder of this one. Creates nothing."""

    def list(self, folder: str = "") -> Iterator[Entry]:
        """The contents of one folder, in bytewise order of the names; nothing if there is no such folder.

        A link to a folder counts as that folder, unless the link lies inside it.

        Raises:
            NotADirectoryError: the name belongs to a file.
        """

    def names(self, folder: str = "") -> Sequence[str]:
        """The names in one folder, in any order, without reading facts of files. Names of folders end in a slash.

        A link counts as a file.

        Raises:
            FileNotFoundError: there is no such folder; stores without empty folders may return no names instead.
            NotADirectoryError: the name belongs to a file.
        """

    def stat(self, name: str) -> Entry:
        """The facts of one file.

        Raises:
            IsADirectoryError: it is a folder; stores without empty folders may raise FileNotFoundError instead.
            NotRegularFileError: it is neither a file nor a folder.
        """

    def open(self, name: str) -> IO[bytes]:
        """A file for reading: seekable and buffered."""

    def read(self, name: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None) -> Sequence[bytes]:
        """Parts of a file, each given as first byte and length; concurrent if requests are slow.

        Args:
            version: of the file, from `stat`.

        Raises:
            OSError: the file ends before a range does, or has another version.
        """

    def get(self, name: str) -> bytes:
        """A whole file."""

    def put(self, name: str, content: bytes) -> None:
        """Put a file, whole or not at all, durable, in place of an existing one."""

    def delete(self, *names: str) -> None:
        """Remove files and folders, durably when it returns; a missing name is not an error.

        A name that ends in a slash means a folder with all its files; no link is followed.
        """

    def local_path(self, name: str) -> str | None:
        """The path of a file on this machine, for a memory map; None if it is elsewhere."""

    def spool(self, name: str) -> Spool:
        """Begin a file that is too large for memory, to be put under a name.

        Spools of two processes never meet, on whichever machines.
        """

    def attempt(self, folder: str, token: str) -> Attempt:
        """An attempt at writing into this store; `folder` is for its unfinished files, if they lie in the store.

        Args:
            token: a name that no other attempt has.
        """

    def hold(self, name: str, holder: str) -> AbstractContextManager[bool]:
        """Hold a name alone, until the context ends or the process does.

        Args:
            holder: the description that `holder` returns meanwhile.

        Yields:
            False where the store cannot keep a second holder out.

        Raises:
            BlockingIOError: another process holds it.
        """

    def holder(self, name: str) -> str | None:
        """Who holds a name; None if it is free, or the store cannot tell."""


@contextlib.contextmanager
def written(store: Store, name: str) -> Iterator[IO[bytes]]:
    """Write a file that appears under `name` when the context ends, whole and durable; on an error it never does."""
    spool = store.spool(name)
    try:
        yield spool.file
        spool.put()
    except BaseException:
        spool.discard()
        raise


@contextlib.contextmanager
def local_file(store: Store, name: str) -> Iterator[str]:
    """The path of a file on this machine, for libraries that need one; a copy if the store is elsewhere.

    The copy may be larger than memory.
    """
    path = store.local_path(name)
    if path is not None:
        yield path
        return
    with named_temporary_file() as copy:
        with store.open(name) as file:
            shutil.copyfileobj(file, copy, _COPY_BYTES)
        copy.flush()
        yield copy.name


def present(store: Store, folder: str = "") -> frozenset[str]:
    """The names in a folder, without the slash of folders.

    Empty if there is no such folder, or on a web server, which lists nothing.
    """
    try:
        return frozenset(name.rstrip("/") for name in store.names(folder))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return frozenset()


def files_below(store: Store, folder: str) -> Iterator[str]:
    """The names of all files in a folder, at any depth and in any order; links are files."""
    try:
        found = store.names(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in found:
        below = f"{folder}/{name}" if folder else name
        if below.endswith("/"):
            yield from files_below(store, below[:-1])
        else:
            yield below


Item = TypeVar("Item")
Answer = TypeVar("Answer")

_AT_ONCE = 32
_BUNDLE = 4
"""Items that a thread gets at once if there are many: handing them over costs as much as a small file."""


def side_by_side(
    store: Store, ask: Callable[[Item], Answer], items: Iterable[Item], *, are_slow: bool = False
) -> Iterator[Answer]:
    """The results of a function that queries a store, for each item, in order.

    Up to 32 calls run at a time, in threads; for a store on this machine, where a query costs microseconds, only one.
    Up to 256 answers wait.

    Args:
        are_slow: use threads on this machine, too, as for calls that flush files to disk.
    """
    items = iter(items)
    first = list(itertools.islice(items, 2 * _AT_ONCE))
    if (store.local_path("") is not None and not are_slow) or len(first) < 2:
        return map(ask, itertools.chain(first, items))
    return _in_threads(ask, first, items)


def _in_threads(ask: Callable[[Item], Answer], first: Sequence[Item], items: Iterator[Item]) -> Iterator[Answer]:
    with ThreadPoolExecutor(min(_AT_ONCE, len(first)), thread_name_prefix="tokshard-requests") as pool:
        bundles = itertools.chain([[item] for item in first], iter(lambda: list(itertools.islice(items, _BUNDLE)), []))
        calls = (pool.submit(lambda some: [ask(item) for item in some], bundle) for bundle in bundles)
        running = deque(itertools.islice(calls, len(first)))
        try:
            while running:
                yield from running.popleft().result()
                running.extend(itertools.islice(calls, 1))
        finally:
            for future in running:
                future.cancel()


def joined_ranges(places: Sequence[tuple[int, int]], gap_bytes: int) -> list[tuple[int, int]]:
    """Ranges of a file joined where the gap between two is short: first byte and length of each, ascending."""
    found: list[tuple[int, int]] = []
    for position, length in sorted(places):
        if found and position <= sum(found[-1]) + gap_bytes:
            start, known = found[-1]
            found[-1] = start, max(known, position + length - start)
        else:
            found.append((position, length))
    return found
