"""Where files lie: a directory now, object stores later. The rooms above know names and bytes only."""

from __future__ import annotations

import os
from pathlib import PurePath

from tokshard.errors import UsageError
from tokshard.store.base import Entry, Spool, Store, local_file, present, written
from tokshard.store.posix import PosixStore

__all__ = ["Entry", "Spool", "Store", "local_file", "open_store", "present", "written"]


def open_store(location: str | os.PathLike[str]) -> Store:
    """The store at a location. Touches nothing: the location may not exist yet.

    Raises:
        UsageError: the location is a URI, which this version cannot read.
    """
    text = os.fspath(location)
    if "://" in text:
        raise UsageError(
            f"{text} is a URI; this version of tokshard reads and writes local directories only",
            hint="copy or mount it, and give the local path",
        )
    return PosixStore(str(PurePath(text)))
