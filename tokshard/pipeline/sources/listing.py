"""The files of an argument of a build, in order."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import has_magic

from tokshard.errors import SourceError, UsageError
from tokshard.pipeline.sources import hub
from tokshard.pipeline.sources.inputs import READ_ONCE, RECORDS, STDIN, RecordSource, location_of
from tokshard.store import Entry, Store, locate, look_at, open_store

HIDDEN = "hidden"
"""The key of hidden files and directories in counts by suffix."""

_ANY_FOLDERS = "**"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of one argument.

    Args:
        store: the store of the files.
        entries: entries of the files, in order; without facts where only the name is known.
        form: name of the format of its files, if the argument determines it.
        is_read_once: whether it can be read only once.
        is_file: whether the argument is the only file; otherwise names in the store are relative to `root`.
        is_folder: whether it is a folder with all its files listed.
        is_named: whether the user named exactly this file or data set.
        is_pinned: whether a revision determines the content of the files, so their versions do not matter.
    """

    root: str
    label: str
    store: Store
    entries: Iterable[Entry]
    form: str | None = None
    is_read_once: bool = False
    is_file: bool = False
    is_folder: bool = False
    is_named: bool = False
    is_pinned: bool = False

    def location(self, entry: Entry) -> str:
        """The location of a file."""
        return location_of(self.root, "" if self.is_file else entry.name)


def listing_of(argument: str | RecordSource, *, omitted: Sequence[str], ignored: Counter[str]) -> Listing:
    """List the files of an argument, inside a folder or glob in bytewise order of relative paths.

    Takes about 100 bytes for each file of the largest folder.

    Args:
        omitted: suffixes that an argument may lack.
        ignored: counts hidden files and folders, while the entries are taken.

    Raises:
        UsageError: nothing is there.
        SourceError: a folder cannot be listed, or a data set of the hub cannot be fetched.
    """
    if isinstance(argument, RecordSource) or argument == STDIN:
        is_pipe, name = argument == STDIN, str(argument)
        return Listing(
            root=name,
            label="stdin" if is_pipe else name,
            store=open_store("."),
            entries=[Entry(name, version=READ_ONCE, identity=STDIN if is_pipe else id(argument))],
            form=None if is_pipe else RECORDS,
            is_read_once=True,
            is_file=True,
            is_named=True,
        )
    if argument.startswith(hub.SCHEME):
        files = hub.fetch_dataset(argument)
        entries, store = map(Entry, files.paths), open_store(files.root)
        return Listing(root=files.root, label=files.label, store=store, entries=entries, is_named=True, is_pinned=True)
    label, found = os.path.basename(os.path.normpath(argument)) or argument, look_at(argument)
    if found is not None and not found.name.endswith("/"):
        store = locate(argument)[0]
        return Listing(root=argument, label=label, store=store, entries=[found], is_file=True, is_named=True)
    if found is not None:
        store = open_store(argument)
        return Listing(root=argument, label=label, store=store, entries=_walk(store, ignored), is_folder=True)
    for suffix in omitted:
        if look_at(argument + suffix) is not None:
            return listing_of(argument + suffix, omitted=(), ignored=ignored)
    if not is_glob(argument):
        _check_gone(argument)
        is_web = argument.startswith(("https://", "http://"))
        way = "a web server lists no folders: give each file" if is_web else "quote a glob so that the shell leaves it"
        raise UsageError(f"{argument} does not exist", hint=f"check the path; {way}")
    root, parts = split_glob(argument)
    store = open_store(root or ".")
    return Listing(root=root, label=label, store=store, entries=_matching(store, parts, "", _closed(parts, {0})))


def _check_gone(argument: str) -> None:
    """Refuse a path that cannot be checked, such as a file in a folder without permission: it may exist."""
    store, name = locate(argument)
    try:
        store.stat(name)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return
    except OSError as error:
        raise SourceError(
            f"{argument} cannot be read: {error.strerror or error}", hint="check the path and its permissions"
        ) from error


def _walk(store: Store, ignored: Counter[str], folder: str = "") -> Iterator[Entry]:
    """Files below a folder, without hidden files. A directory saved by `datasets` yields only its data files."""
    start = len(folder) + bool(folder)
    with _named_if_unlistable(store, folder):
        chosen = hub.saved_files(store, folder)
        for entry in store.list(folder):
            name = entry.name[start:]
            if name[0] == ".":
                ignored[HIDDEN] += 1
            elif chosen is not None and name not in chosen:
                continue
            elif name[-1] == "/":
                yield from _walk(store, ignored, entry.name[:-1])
            else:
                yield entry


@contextlib.contextmanager
def _named_if_unlistable(store: Store, folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SourceError(
            f"{store.where(folder)} cannot be listed: {error.strerror or error}",
            hint="check the path and its permissions",
        ) from error


# globs: ``**`` stands for any folders; hidden names match only what begins with a dot


def is_glob(argument: str) -> bool:
    """Whether an argument has any of ``*?[``."""
    return has_magic(argument)


def split_glob(pattern: str) -> tuple[str, list[str]]:
    """The folder before the first part with a wildcard, with its last slash, and the parts from there on."""
    parts = pattern.split("/")
    first = next(index for index, part in enumerate(parts) if is_glob(part))
    return "".join(f"{part}/" for part in parts[:first]), [part for part in parts[first:] if part not in {"", "."}]


def _matching(store: Store, parts: Sequence[str], folder: str, places: set[int]) -> Iterator[Entry]:
    """The files of one folder, whose entries may match the parts at `places`."""
    with _named_if_unlistable(store, folder):
        for entry in store.list(folder):
            following = _after(parts, places, os.path.basename(entry.name.rstrip("/")))
            if not entry.name.endswith("/"):
                if len(parts) in following:
                    yield entry
            elif below := _closed(parts, following) - {len(parts)}:
                yield from _matching(store, parts, entry.name[:-1], below)


def _closed(parts: Sequence[str], places: set[int]) -> set[int]:
    """The places, and the places reached from them if ``**`` stands for no folder."""
    found = set(places)
    for place, part in enumerate(parts):
        if place in found and part == _ANY_FOLDERS:
            found.add(place + 1)
    return found


def _after(parts: Sequence[str], places: set[int], name: str) -> set[int]:
    """The places after a name at any of the places."""
    found = set()
    for place in places - {len(parts)}:
        part, is_last = parts[place], place + 1 == len(parts)
        is_hidden = name.startswith(".") and not part.startswith(".")
        if part == _ANY_FOLDERS:
            # as the last part it matches files, too
            found |= set() if is_hidden else {place, place + is_last}
        elif name == part or (not is_hidden and fnmatch.fnmatchcase(name, part)):
            found.add(place + 1)
    return found
