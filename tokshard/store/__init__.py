"""Places of files: a directory, a bucket, or a web server. The rooms above know only names and bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import PurePath
from urllib.parse import quote

from tokshard.errors import UsageError
from tokshard.store.addresses import SERVERS, canonical_uri, without_secrets
from tokshard.store.base import (
    NO_ROOM,
    Attempt,
    Entry,
    NotRegularFileError,
    Spool,
    Store,
    files_below,
    joined_ranges,
    local_file,
    present,
    side_by_side,
    written,
)
from tokshard.store.posix import PosixStore, obstacle
from tokshard.store.temporary import named_temporary_file, no_temporary_file, temporary_file

__all__ = [
    "NO_ROOM",
    "STORES_BY_SCHEME",
    "Attempt",
    "Entry",
    "NotRegularFileError",
    "Spool",
    "Store",
    "absolute_location",
    "files_below",
    "is_uri",
    "joined_location",
    "joined_ranges",
    "local_file",
    "locate",
    "look_at",
    "named_temporary_file",
    "no_temporary_file",
    "obstacle",
    "open_store",
    "present",
    "real_location",
    "side_by_side",
    "temporary_file",
    "without_secrets",
    "working_directory",
    "written",
]


def _open_remote(uri: str) -> Store:
    try:
        from tokshard.store.remote import remote_store
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{uri} is a URI, and {(error.name or 'obstore').partition('.')[0]} is not installed",
            hint="pip install 'tokshard[remote]', or give a local path",
        ) from error
    return remote_store(uri)


STORES_BY_SCHEME: dict[str, Callable[[str], Store]] = dict.fromkeys(("s3", "gs", "az", "https", "http"), _open_remote)
"""Opens the URIs of a scheme."""


def open_store(location: str | os.PathLike[str]) -> Store:
    """The store at a location. Touches nothing: the location may not exist yet.

    Raises:
        UsageError: the location is empty, a URI of an unknown scheme, or needs the extra ``remote``, which is not
            installed.
    """
    text = os.fsdecode(location)
    if not text:  # most often from a variable of the shell that is not set
        raise UsageError("a location is empty", hint="give a path or a URI; . is the working directory")
    if not is_uri(text):
        return PosixStore(str(PurePath(text)), root="" if os.path.isabs(text) else _working_directory())
    uri = canonical_uri(text)
    return _opener(uri)(uri)


def _working_directory() -> str:
    with contextlib.suppress(UsageError):
        return working_directory()
    return ""


def working_directory() -> str:
    """The working directory of the process.

    Raises:
        UsageError: it was removed.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current directory does not exist any more", hint="change to one that does") from None


def _opener(uri: str) -> Callable[[str], Store]:
    opener = STORES_BY_SCHEME.get(uri.partition("://")[0])
    if opener is None:
        raise UsageError(
            f"{without_secrets(uri)} is a URI of a scheme that tokshard does not know, expected one of "
            + ", ".join(f"{scheme}://" for scheme in STORES_BY_SCHEME),
            hint="give its path alone" if uri.startswith("file:") else "copy it to one of these, or to this machine",
        )
    return opener


def locate(location: str | os.PathLike[str]) -> tuple[Store, str]:
    """The store that holds one file or folder, and its name there; the name of a root is empty.

    Raises:
        UsageError: as `open_store`.
    """
    text = os.fspath(location)
    if is_uri(text):
        uri = canonical_uri(text)
        scheme, _, path = uri.partition("://")
        folder, _, name = path.rpartition("/")
        return (_opener(uri)(f"{scheme}://{folder}"), name) if folder else (_opener(uri)(uri), "")
    folder, name = os.path.split(text)
    if name in {"", os.curdir, os.pardir}:
        folder, name = os.path.split(os.path.abspath(text))
    return open_store(folder or os.curdir), name


def is_uri(location: str) -> bool:
    """Whether a location is a URI, and not a path on this machine.

    Raises:
        UsageError: it is what `pathlib.Path` makes of a URI, which would be a directory of this machine, or begins
            with a ``~``, as in ``--out=~/a``, which shells leave.
    """
    if location.partition("/")[0] == "~":
        raise UsageError(f"{location} begins with a ~ that no shell has replaced", hint="give the whole path")
    scheme, mark, _ = location.partition(":/")
    if mark and scheme in STORES_BY_SCHEME and "://" not in location:
        raise UsageError(
            f"{location} is a URI that lost a slash, as in a pathlib.Path",
            hint=f"give it as text, with {scheme}://, or an absolute path for a directory of that name",
        )
    return "://" in location


def absolute_location(location: str | os.PathLike[str]) -> str:
    """A location that means the same in a process with another working directory."""
    text = os.fspath(location)
    return canonical_uri(text) if is_uri(text) else os.path.abspath(text)


def look_at(location: str | os.PathLike[str]) -> Entry | None:
    """The entry at a location: the facts of a file, or the name of a folder with a slash; None if there is nothing."""
    try:
        store, name = locate(location)
        if name:
            return store.stat(name)
    except IsADirectoryError:
        return Entry(f"{name}/")
    except NotRegularFileError:
        return Entry(name)
    except (OSError, ValueError):  # a path may have characters that no name can have
        pass
    with contextlib.suppress(OSError, ValueError):
        if any(True for _ in open_store(location).list()):
            return Entry(f"{name}/")
    return None


def joined_location(folder: str, path: str) -> str:
    """The location of a path that is relative to a folder, which may be a URI.

    It is as short as it can be: ``..`` in a link is the folder above its target.
    """
    if not is_uri(folder):
        short, real = os.path.normpath(joined := os.path.join(folder, path)), os.path.realpath(joined)
        return short if os.path.realpath(short) == real else real
    scheme, _, place = folder.partition("://")
    host, _, inside = place.partition("/")
    path = quote(path) if scheme in SERVERS else path
    # '..' at the root stays there, as RFC 3986 says: the next name would be another bucket or server
    return f"{scheme}://{host}{os.path.normpath(os.path.join('/', inside, path))}".rstrip("/")


def real_location(location: str | os.PathLike[str]) -> str:
    """An absolute location without links, for comparing two locations."""
    text = os.fspath(location)
    return canonical_uri(text) if is_uri(text) else os.path.realpath(text)
