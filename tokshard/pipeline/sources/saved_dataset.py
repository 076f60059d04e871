"""Directories that ``Dataset.save_to_disk`` of Hugging Face `datasets` wrote: which of their files are data."""

from __future__ import annotations

import json
import os
from typing import Any

from tokshard.errors import SourceError, UsageError
from tokshard.store import Store

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def data_files(store: Store, folder: str) -> frozenset[str] | None:
    """What to read of a folder: of a saved data set the names of its data files, of any other one everything (None).

    A saved data set with one split has a folder in place of files; its name ends in a slash.

    Raises:
        UsageError: it holds several splits, or rows that are chosen by an index.
        SourceError: a data file is gone, or the description is damaged.
    """
    place = f"{folder}/" if folder else ""
    if _is_file(store, place + _SPLITS):
        return frozenset({f"{_only_split(store, place)}/"})
    if not (_is_file(store, place + _STATE) and _is_file(store, place + _INFO)):
        return None
    directory = store.where(folder)
    state = _read(store, place + _STATE)
    files = _names(state, "_data_files")
    if _names(state, "_indices_data_files"):
        raise UsageError(
            f"{directory} was saved with an index of its chosen rows, which tokshard does not read",
            hint="save it again after dataset.flatten_indices()",
        )
    missing = sorted(files.difference(store.names(folder)))
    if missing:
        raise SourceError(
            f"{directory} was saved by datasets with {missing[0]}, which is gone",
            hint="fetch the directory again",
        )
    return files


def _is_file(store: Store, name: str) -> bool:
    try:
        store.stat(name)
    except OSError:
        return False
    return True


def _only_split(store: Store, place: str) -> str:
    splits = _read(store, place + _SPLITS).get("splits")
    if not isinstance(splits, list) or not splits or not all(isinstance(split, str) for split in splits):
        raise SourceError(f"{store.where(place + _SPLITS)} names no splits", hint="fetch the directory again")
    if len(splits) > 1:
        raise UsageError(
            f"{store.where(place).rstrip('/')} holds {len(splits)} splits: {', '.join(splits)}",
            hint=f"give the ones that you want, such as {store.where(place + splits[0])}",
        )
    return str(splits[0])


def _names(state: dict[str, Any], key: str) -> frozenset[str]:
    return frozenset(os.path.basename(str(entry.get("filename"))) for entry in state.get(key) or [])


def _read(store: Store, name: str) -> dict[str, Any]:
    try:
        parsed = json.loads(store.get(name))
        if not isinstance(parsed, dict):
            raise TypeError(f"it holds a {type(parsed).__name__}, expected an object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise SourceError(f"{store.where(name)} is damaged: {error}", hint="fetch the directory again") from error
    return parsed
