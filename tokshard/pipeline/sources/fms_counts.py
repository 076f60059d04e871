"""The counts that fms-fsdp keeps beside its Arrow files: ``meta/*counts*.csv``, with a line for each file."""

from __future__ import annotations

import csv
import functools
import io
import os
from collections.abc import Mapping, Sequence

from tokshard.interop.tokens.batches import damaged
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.opening import store_of
from tokshard.store import open_store, present

_COLUMNS = ["dataset/filename", "documents", "tokens"]


def check_counts(input_: Input, num_documents: int, num_tokens: int | None) -> None:
    """Refuse a file that holds something else than its line in the table of counts says, if there is one.

    Args:
        num_tokens: None if they were not all read here.

    Raises:
        BadSourceError: with both numbers.
    """
    folder = os.path.dirname(input_.location)
    for root in (folder, os.path.dirname(folder)):
        said = _counts(os.path.join(root, "meta")).get(input_.location.removeprefix(root).lstrip("/"))
        if said is None:
            continue
        found = (num_documents, said[1] if num_tokens is None else num_tokens)
        if found != said:
            store, name = store_of(input_.location)
            raise damaged(
                store,
                name,
                f"it holds {found[0]:,} documents and {found[1]:,} tokens; "
                f"{root}/meta says {said[0]:,} and {said[1]:,}",
            )
        return


def _counts(folder: str) -> Mapping[str, tuple[int, int]]:
    """File to its documents and tokens, from all tables of a folder; tables of other columns are passed over."""
    store = open_store(folder)
    tables = (name for name in sorted(present(store)) if "counts" in name and name.endswith(".csv"))
    return _read(folder, tuple((name, store.stat(name).version) for name in tables))


@functools.lru_cache(maxsize=4)
def _read(folder: str, tables: Sequence[tuple[str, str]]) -> Mapping[str, tuple[int, int]]:
    """What the tables of a folder say, each with its version: a later import may find others there."""
    store = open_store(folder)
    found = {}
    for name, _ in tables:
        rows = csv.reader(io.StringIO(store.get(name).decode("utf-8", "replace")))
        if next(rows, None) != _COLUMNS:
            continue
        try:
            found.update({row[0].lstrip("/"): (int(row[1]), int(row[2])) for row in rows if row})
        except (ValueError, IndexError) as error:
            raise damaged(store, name, f"a line is not a file and two numbers: {error}") from error
    return found
