"""The places of a build's files: the corpora, and the folder of an unfinished build. Only names."""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass

from tokshard.errors import StoreError, UsageError
from tokshard.format import names
from tokshard.store import Attempt, Store, open_store, present, without_secrets

LOCK = f"{names.WORK}/lock"
"""The file that a running build holds."""

REQUEST = f"{names.WORK}/build.json"
"""The request. A folder without it does not belong to a build, so it is written first and removed last."""

INPUTS = f"{names.WORK}/inputs.arrow"
"""The table of the inputs, which workers map."""

TASKS = f"{names.WORK}/tasks.msgpack"
"""The planned tasks. The last file that prepares a build."""

JOBS = f"{names.WORK}/jobs"
"""Folder with a lock for each job of an array that runs."""

TOKENIZER = f"{names.WORK}/tokenizer.json"
"""The tokenizer as it was given."""

SPOOL = f"{names.WORK}/spool"
"""Folder of the spooled sources; see `tokshard.pipeline.spool`."""

_PARTIAL = f"{names.WORK}/partial"

HASH, FIND, DEAL, WRITE = "hash", "find", "deal", "write"
"""The stages of a build. Each has a folder of its own; later levels of one are numbered: ``deal-1``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A corpus that a build writes.

    Args:
        split: ``train`` or ``validation``; empty if the build writes one corpus.
        generation: the generation that the build writes: 0 for a new corpus, else the number of an append.
        corpus: the store of the corpus with all its generations.
        store: the store of this generation.
        folder: its place in the store of the whole build; empty for the root.
    """

    split: str
    generation: int
    corpus: Store
    store: Store
    folder: str

    def shard_sizes(self) -> dict[str, int]:
        """The existing shards, with their sizes in bytes."""
        return {entry.name: entry.size for entry in self.store.list() if names.SHARD_NAME.fullmatch(entry.name)}


@dataclass(frozen=True, slots=True)
class Workspace:
    """The place of a build.

    Args:
        store: the store of the output location: a corpus, or the folder of two with a validation split.
        run: this run of the build, for the store; a run that only reads never begins it.
    """

    store: Store
    run: Attempt

    @property
    def out(self) -> str:
        """The location as given, for messages and for the result."""
        return self.store.location

    def outputs(self, *, is_split: bool, generation: int = 0) -> tuple[Output, ...]:
        """The corpora that the build writes, or one of their generations."""
        folder = names.generation_folder(generation)
        outputs = []
        for split in (names.TRAIN, names.VALIDATION) if is_split else ("",):
            corpus = self.store.below(split) if split else self.store
            store = corpus.below(folder) if folder else corpus
            place = "/".join(filter(None, (split, folder)))
            outputs.append(Output(split=split, generation=generation, corpus=corpus, store=store, folder=place))
        return tuple(outputs)

    def clear(self, *kept: str) -> None:
        """Remove every file except the lock, the mark that the folder belongs to a build, and some folders."""
        with contextlib.suppress(FileNotFoundError):
            found = {f"{names.WORK}/{name}" for name in self.store.names(names.WORK)}
            self.store.delete(*(found - {LOCK, REQUEST, INPUTS, *(f"{folder}/" for folder in kept)}))

    def remove(self) -> None:
        """Remove the folder: the request near the end, and the lock last, so that no other build begins in it."""
        with contextlib.suppress(OSError, StoreError):  # what was built is complete
            self.run.end()
            self.clear()
            for name in (REQUEST, INPUTS, LOCK):
                self.store.delete(name)


def has_request(store: Store) -> bool:
    """Whether a build has begun in this store and is not complete."""
    return REQUEST.removeprefix(f"{names.WORK}/") in present(store, names.WORK)


def open_workspace(location: str | os.PathLike[str]) -> Workspace:
    """The place of a build, for a run that has begun nothing yet.

    Raises:
        UsageError: the location is a URI without a known store, or no build can ever write there.
    """
    _check_place(os.fspath(location))
    run = open_store(location).attempt(_PARTIAL, secrets.token_hex(8))
    return Workspace(run.store, run)


def _check_place(location: str) -> None:
    hint = "give a directory, or a URI such as s3://bucket/folder"
    if not location:
        raise UsageError("the name of the corpus is empty", hint=hint)
    if location.startswith(("http://", "https://")):
        raise UsageError(f"{without_secrets(location)} is on a web server, and a build cannot write there", hint=hint)
    if "\0" in location:
        raise UsageError(f"{location!r}: the path of the corpus has a zero byte", hint=hint)
    try:
        location.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{os.fsencode(location)!r}: the path of the corpus is not UTF-8", hint=hint) from None
