"""The ``index.json`` beside files of samples: MosaicML's MDS lists ``shards`` in it, litdata lists ``chunks``."""

from __future__ import annotations

import functools
import json
from collections import Counter
from typing import Any

from tokshard.errors import BadSourceError
from tokshard.interop.tokens.batches import companion_size, damaged
from tokshard.store import Store, open_store

INDEX = "index.json"

SHARDS, CHUNKS = LISTS = ("shards", "chunks")
"""The fields that list the files, of MDS and of litdata."""

_MAX_INDEX_BYTES = 1 << 28

Json = dict[str, Any]


def index_name(name: str) -> str:
    """The index of a file of samples."""
    folder = name.rpartition("/")[0]
    return f"{folder}/{INDEX}" if folder else INDEX


def read_index(store: Store, name: str) -> Json:
    """The ``index.json`` of a folder.

    Raises:
        BadSourceError: it is missing, or lists no files in either format.
    """
    if companion_size(store, name, "the index") > _MAX_INDEX_BYTES:
        raise damaged(store, name, f"it has more than {_MAX_INDEX_BYTES:,} bytes")
    return _parsed(store.where(name.rpartition("/")[0]), store.stat(name).version)


# a task reads many files of one folder, and an index of 10,000 files takes 0.1 s
@functools.lru_cache(maxsize=1)
def _parsed(folder: str, version: str) -> Json:  # noqa: ARG001 -- of the index: a changed one is read again
    store = open_store(folder)
    try:
        parsed = json.loads(store.get(INDEX))
    except (ValueError, RecursionError) as error:
        raise damaged(store, INDEX, f"it is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise damaged(store, INDEX, f"it holds a {type(parsed).__name__}, expected an object")
    field = next((field for field in LISTS if field in parsed), None)
    if field is None:
        found = ", ".join(map(repr, list(parsed)[:10])) or "no field"
        raise BadSourceError(
            f"{store.where(INDEX)} is not the index of a data set: it has {found}; expected 'shards' (MDS) or 'chunks' "
            "(litdata)",
            hint="give the files of ids instead of their directory, with --format, or fetch the index again",
        )
    listed = parsed[field]
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise damaged(store, INDEX, f"its field {field!r} is not a list of objects")
    names = Counter(name for names in listed_names(parsed) for name in names)
    if names and (most := names.most_common(1)[0])[1] > 1:
        raise damaged(store, INDEX, f"it lists {most[0]} twice")
    return parsed


def lists(store: Store, name: str, field: str) -> bool:
    """Whether an index is there and lists files in this field."""
    try:
        return field in read_index(store, name)
    except (BadSourceError, OSError):
        return False


def listed_names(index: Json) -> list[tuple[str, ...]]:
    """The possible names of each file of an index, in order: for MDS the compressed and the plain one."""
    if SHARDS in index:
        places = [[entry.get("raw_data"), entry.get("zip_data")] for entry in index[SHARDS]]
        return [tuple(str(place.get("basename")) for place in both if isinstance(place, dict)) for both in places]
    return [(str(entry.get("filename")),) for entry in index[CHUNKS]]


def entry_of(store: Store, name: str) -> Json:
    """The entry of a file in the index.

    Raises:
        BadSourceError: it is damaged, or does not list the file.
    """
    index = read_index(store, index_name(name))
    base = name.rpartition("/")[2]
    for number, names in enumerate(listed_names(index)):
        if base in names:
            return dict((index[SHARDS] if SHARDS in index else index[CHUNKS])[number])
    raise damaged(store, index_name(name), f"it does not list {base}")
