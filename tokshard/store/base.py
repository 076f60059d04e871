"""What every store can do.

A store holds files under names such as ``train/shards.arrow``: parts joined by slashes, relative to its location. It
has no folders of its own; a *folder* is what the names that begin with ``folder/`` have in common. A file is put whole
or not at all, and is never changed in place.

All methods raise `OSError` and its subclasses as files do: `FileNotFoundError` for a name that is not there,
`PermissionError`, and so on.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a store.

    Args:
        name: relative to the location of the store.
        size: in bytes.
        version: another one whenever the content was replaced; to be compared, never to be taken apart.
    """

    name: str
    size: int
    version: str


class Spool(Protocol):
    """A file that is being written on this machine, and is then put whole or forgotten.

    Its content may be larger than memory.
    """

    @property
    def file(self) -> IO[bytes]:
        """Open for writing, buffered."""

    @property
    def path(self) -> str:
        """Where the file lies on this machine until it is put: what was flushed can be read there."""

    def put(self) -> None:
        """Close the file and put it under its name, durable. On an error nothing appears, and the file is gone."""

    def discard(self) -> None:
        """Forget the file, if it was not put. Never fails."""


class Store(Protocol):
    """Files under one location.

    A store pickles as its location, so that another process opens it for itself. Threads may share it.
    """

    @property
    def location(self) -> str:
        """The location as it was given, for messages."""

    def where(self, name: str) -> str:
        """A file as messages name it."""

    def below(self, folder: str) -> Store:
        """The store of a folder of this one. Nothing is created."""

    def parent(self) -> tuple[Store, str] | None:
        """The store that this one is a folder of, and the name of that folder; None where nothing is above."""

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """All files whose names begin with `prefix`, at any depth, in no order; none if there are none."""

    def names(self, folder: str = "") -> Sequence[str]:
        """The names in one folder, in no order and without looking at the files. Those of folders end in a slash.

        Raises:
            FileNotFoundError: there is no such folder; stores that know no empty folders may give no names instead.
            NotADirectoryError: there is a file of that name.
        """

    def stat(self, name: str) -> Entry:
        """Size and version of one file."""

    def open(self, name: str) -> IO[bytes]:
        """A file for reading: seekable and buffered."""

    def read(self, name: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None) -> Sequence[bytes]:
        """Parts of a file, each given as its first byte and its length; concurrent where requests are slow.

        Args:
            version: of the file that is meant, as `stat` gave it.

        Raises:
            OSError: the file ends before a range does, or has another version.
        """

    def get(self, name: str) -> bytes:
        """A whole file."""

    def put(self, name: str, content: bytes) -> None:
        """Put a file, whole or not at all, durable, in place of one that has the name."""

    def create_exclusive(self, name: str, content: bytes) -> None:
        """Put a file that must be new.

        Raises:
            FileExistsError: there is one of that name.
        """

    def delete(self, *names: str) -> None:
        """Remove files, durably when it returns; a name that is not there is no error."""

    def delete_below(self, folder: str, *, keep: frozenset[str] = frozenset()) -> None:
        """Remove all files of a folder, but for those named in `keep`; no link is followed."""

    def local_path(self, name: str) -> str | None:
        """Where a file lies on this machine, to be mapped into memory; None if it does not."""

    def obstacle(self, name: str) -> str | None:
        """What stands where files named ``name/...`` would go: ``a file`` or ``a link``; None if they can be put."""

    def spool(self, name: str) -> Spool:
        """Begin a file that is too large for memory; to be put under a name.

        Spools of two attempts never meet, whichever processes and machines they belong to.
        """

    def attempt(self, folder: str, token: str) -> Store:
        """This store for one attempt at writing: what it spools here lies in `folder`, apart from other attempts.

        Args:
            token: a name that no other attempt has.
        """

    def take_over(self) -> None:
        """Begin this attempt: remove what earlier ones spooled and did not put.

        Where the store can see to it, a process of an earlier attempt that is still alive puts nothing from now on.
        Elsewhere it may put a file late; so whoever writes must give a file of one name the same bytes in all attempts.
        """

    def discard_spooled(self) -> None:
        """Remove what processes of this attempt spooled and did not put. They must be gone."""

    def end_attempt(self) -> None:
        """End this attempt: remove all that it spooled and did not put. It can put nothing more."""

    def lease(self, name: str, holder: str) -> AbstractContextManager[bool]:
        """Hold a name alone, until the context ends or the process does.

        Args:
            holder: what `lease_holder` says meanwhile.

        Yields:
            False where nothing keeps a second holder out.

        Raises:
            BlockingIOError: another process holds it.
        """

    def lease_holder(self, name: str) -> str | None:
        """Who holds a name; None if nobody does, or the store cannot say."""


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
    """The path of a file on this machine, for libraries that read nothing else; a copy if the store is elsewhere."""
    path = store.local_path(name)
    if path is not None:
        yield path
        return
    with tempfile.NamedTemporaryFile() as copy:
        copy.write(store.get(name))
        copy.flush()
        yield copy.name


def present(store: Store, folder: str = "") -> frozenset[str]:
    """The names in a folder, without the slash of folders; none if there is no such folder."""
    try:
        return frozenset(name.rstrip("/") for name in store.names(folder))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
