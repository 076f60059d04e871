"""Directories that ``Dataset.save_to_disk`` of Hugging Face `datasets` wrote: which of their files are data."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from tokshard.errors import SourceError, UsageError

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def only_data(directory: str, listed: Sequence[bytes]) -> Sequence[bytes]:
    """What to read of a directory: of a saved data set its data files, of any other one everything.

    Args:
        listed: what the directory holds, in order; directories end in ``/``.

    Raises:
        UsageError: it holds several splits, or rows that are chosen by an index.
        SourceError: a data file is gone, or the description is damaged.
    """
    if _SPLITS.encode() in listed:
        return [f"{_only_split(directory)}/".encode()]
    if _STATE.encode() not in listed or _INFO.encode() not in listed:
        return listed
    state = _read(directory, _STATE)
    files = _names(state, "_data_files")
    if _names(state, "_indices_data_files"):
        raise UsageError(
            f"{directory} was saved with an index of the rows that are meant, which tokshard does not read",
            hint="save it again after dataset.flatten_indices()",
        )
    missing = sorted(files - set(listed))
    if missing:
        raise SourceError(
            f"{directory} was saved by datasets with {os.fsdecode(missing[0])}, which is gone",
            hint="fetch the directory again",
        )
    return [name for name in listed if name in files]


def _only_split(directory: str) -> str:
    splits = _read(directory, _SPLITS).get("splits")
    if not isinstance(splits, list) or not splits or not all(isinstance(split, str) for split in splits):
        raise SourceError(f"{os.path.join(directory, _SPLITS)} names no splits", hint="fetch the directory again")
    if len(splits) > 1:
        raise UsageError(
            f"{directory} holds {len(splits)} splits: {', '.join(splits)}",
            hint=f"give the ones that you want, such as {os.path.join(directory, splits[0])}",
        )
    return str(splits[0])


def _names(state: dict[str, Any], key: str) -> set[bytes]:
    return {os.fsencode(os.path.basename(str(entry.get("filename")))) for entry in state.get(key) or []}


def _read(directory: str, name: str) -> dict[str, Any]:
    path = os.path.join(directory, name)
    try:
        with open(path, "rb") as file:
            parsed = json.load(file)
        if not isinstance(parsed, dict):
            raise TypeError(f"it holds a {type(parsed).__name__}, expected an object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise SourceError(f"{path} is damaged: {error}", hint="fetch the directory again") from error
    return parsed
