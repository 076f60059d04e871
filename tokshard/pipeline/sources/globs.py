"""Globs over the files of a store. ``**`` stands for any folders; hidden names match only what begins with a dot."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections.abc import Iterator, Sequence
from glob import has_magic

from tokshard.store import Entry, Store

_ANY_FOLDERS = "**"


def is_glob(argument: str) -> bool:
    """Whether an argument has any of ``*?[``."""
    return has_magic(argument)


def split_glob(pattern: str) -> tuple[str, list[str]]:
    """The folder before the first part with magic, which keeps its last slash, and the parts from there on."""
    parts = pattern.split("/")
    first = next(index for index, part in enumerate(parts) if has_magic(part))
    return "".join(f"{part}/" for part in parts[:first]), [part for part in parts[first:] if part not in {"", "."}]


def matching_files(store: Store, parts: Sequence[str], folder: str = "") -> Iterator[Entry]:
    """The files that match, in bytewise order of their names. Lists a folder once, and leaves out what it cannot list.

    Args:
        parts: of the pattern, relative to the store.
    """
    return _matching(store, parts, folder, _closed(parts, {0}))


def _matching(store: Store, parts: Sequence[str], folder: str, places: frozenset[int]) -> Iterator[Entry]:
    """The files of one folder, whose entries may match the parts at `places`."""
    with contextlib.suppress(OSError):
        for entry in store.list(folder):
            name = os.path.basename(entry.name.rstrip("/"))
            following = {after for place in places for after in _after(parts, place, name)}
            if not entry.name.endswith("/"):
                if len(parts) in following and entry.version:
                    yield entry
            elif below := _closed(parts, following) - {len(parts)}:
                yield from _matching(store, parts, entry.name[:-1], below)


def matches(parts: Sequence[str], path: Sequence[str]) -> bool:
    """Whether a pattern matches a path; both are given by their parts."""
    places: frozenset[int] = _closed(parts, {0})
    for name in path[:-1]:
        places = _closed(parts, {after for place in places for after in _after(parts, place, name)})
    return any(len(parts) in _after(parts, place, path[-1]) for place in places)


def _closed(parts: Sequence[str], places: set[int]) -> frozenset[int]:
    """The places and those that they lead to where ``**`` stands for no folder at all."""
    found = set(places)
    for place in range(len(parts)):
        if place in found and parts[place] == _ANY_FOLDERS:
            found.add(place + 1)
    return frozenset(found)


def _after(parts: Sequence[str], place: int, name: str) -> tuple[int, ...]:
    """The places after a name that stands at a place."""
    if place == len(parts):
        return ()
    part = parts[place]
    is_hidden = name.startswith(".") and not part.startswith(".")
    if part == _ANY_FOLDERS:
        # as the last part it matches files, too
        return () if is_hidden else (place, place + 1) if place + 1 == len(parts) else (place,)
    is_match = name == part or (not is_hidden and fnmatch.fnmatchcase(name, part))
    return (place + 1,) if is_match else ()
