"""Where a build puts its files: the corpora, and the folder of an unfinished build. Names; the store has the files."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from enum import StrEnum

from tokshard.errors import UsageError
from tokshard.format import names
from tokshard.store import Attempt, Store, open_store, without_secrets

LOCK = f"{names.WORK}/lock"
"""The file that a running build holds."""

SETTINGS = f"{names.WORK}/settings.json"
"""What was asked for. A folder without it is not a build's own, so it is written first and removed last."""

INPUTS = f"{names.WORK}/inputs.arrow"
"""The table of the inputs, which workers map."""

COMMAND = f"{names.WORK}/command.json"
"""The command that continues the build, and how much it has to do."""

TASKS = f"{names.WORK}/tasks.arrow"
"""The planned tasks."""

RESOLVED = f"{names.WORK}/resolved.json"
"""What was asked for and found, so that another process need not look again. The last file that prepares a build."""

DROPS = f"{names.WORK}/drops.arrow"
"""Where the duplicates of each task are found, for jobs that write."""

JOBS = f"{names.WORK}/jobs"
"""Folder of what the jobs of an array say of themselves."""

BAD_INPUTS = f"{names.WORK}/bad-inputs.json"
"""Inputs that are left out whole, and why."""

TOKENIZER = f"{names.WORK}/tokenizer.json"
"""The tokenizer as workers load it."""

ASSEMBLED = f"{names.WORK}/assembled.json"
"""The files next to shards that the build wrote, or is about to write."""

REMOVING = f"{names.WORK}/removing.json"
"""The files that starting over removes; while the list exists, some of them may be gone."""

_PARTIAL = f"{names.WORK}/partial"


class Stage(StrEnum):
    """What the tasks of a build do; the value is the folder of their receipts."""

    ENCODING = ""
    HASHING = "hashing"
    DUPLICATES = "duplicates"
    DEALING = "dealing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A corpus that a build writes.

    Args:
        split: ``train`` or ``validation``; empty if the build writes one corpus.
        generation: that the build writes: 0, or that of an append.
        corpus: the store of the corpus with all its generations.
        store: of this generation.
    """

    split: str
    generation: int
    corpus: Store
    store: Store

    @property
    def name(self) -> str:
        """Its folder in the store of the whole build; empty if it lies there itself."""
        return names.in_folder(self.split, names.generation_folder(self.generation)).strip("/")

    @property
    def location(self) -> str:
        """Where the corpus is, as a path or URI."""
        return self.store.location

    def name_of(self, file: str) -> str:
        """A file of the corpus, as the store of the whole build names it."""
        return names.in_folder(self.name, file)

    def shard_sizes(self) -> dict[str, int]:
        """The shards that are there, with their sizes."""
        return {entry.name: entry.size for entry in self.store.list() if names.is_shard_name(entry.name)}


@dataclass(frozen=True, slots=True)
class Workspace:
    """The names of a build.

    Args:
        store: of the location that the build was given: a corpus, or the place of two with a validation split.
        stage: whose receipts, rejects and hashes are meant.
        attempt: this run of the build; None if the workspace was opened to look at.
    """

    store: Store
    stage: Stage = Stage.ENCODING
    attempt: Attempt | None = None

    @property
    def out(self) -> str:
        """The location as it was given, for messages and for the result."""
        return self.store.location

    @property
    def receipts(self) -> str:
        """Folder of one file per finished task."""
        return self._of_stage("receipts")

    @property
    def rejects(self) -> str:
        """Folder of one JSON lines file per finished task that left out bad records."""
        return self._of_stage("rejects")

    @property
    def hashes(self) -> str:
        """Folder of the sorted hashes, or of the places of duplicates, of a stage before encoding: a file per task."""
        return self._of_stage("hashes")

    @property
    def dealt(self) -> str:
        """Folder of the documents of a shuffled copy, dealt to buckets: a file per task."""
        return self._of_stage("dealt")

    @property
    def dealing(self) -> Workspace:
        """The workspace of the stage that deals documents, for the shuffle of a copy."""
        return replace(self, stage=Stage.DEALING)

    @property
    def hashing(self) -> Workspace:
        """The workspace of the stage that hashes texts, for ``--dedup exact``."""
        return replace(self, stage=Stage.HASHING)

    @property
    def duplicates(self) -> Workspace:
        """The workspace of the stage that finds duplicates among the hashes."""
        return replace(self, stage=Stage.DUPLICATES)

    def outputs(self, *, is_split: bool, generation: int = 0) -> tuple[Output, ...]:
        """The corpora that the build writes, or one of their generations."""
        folder = names.generation_folder(generation)
        outputs = []
        for split in (names.TRAIN, names.VALIDATION) if is_split else ("",):
            corpus = self.store.below(split) if split else self.store
            store = corpus.below(folder) if folder else corpus
            outputs.append(Output(split=split, generation=generation, corpus=corpus, store=store))
        return tuple(outputs)

    def _of_stage(self, folder: str) -> str:
        return "/".join(part for part in (names.WORK, self.stage.value, folder) if part)

    def take_over(self) -> None:
        """Remove what attempts before this one left unfinished, and let this one write."""
        assert self.attempt is not None, "the workspace was opened to look at"
        self.attempt.take_over()

    def join(self) -> None:
        """Let this attempt write next to others that are under way."""
        assert self.attempt is not None, "the workspace was opened to look at"
        self.attempt.join()

    def clear_partial(self) -> None:
        """Remove what workers of this attempt left unfinished."""
        assert self.attempt is not None, "the workspace was opened to look at"
        self.attempt.discard_spooled()

    def clear(self) -> None:
        """Remove every file but the lock, the settings, and the list of what starting over removes."""
        self._delete_all_but(LOCK, SETTINGS, INPUTS, REMOVING)

    def remove(self) -> None:
        """Remove the folder. The lock is last, so that no other build begins in it; before it the settings."""
        with contextlib.suppress(OSError):
            if self.attempt is not None:
                self.attempt.end()
            self._delete_all_but(LOCK, SETTINGS, INPUTS)
            self.store.delete(SETTINGS)
            self.store.delete(INPUTS)
            self.store.delete(LOCK)

    def _delete_all_but(self, *kept: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            found = {f"{names.WORK}/{name}" for name in self.store.names(names.WORK)}
            self.store.delete(*(found - set(kept)))


def open_workspace(location: str | os.PathLike[str], *, attempt: str = "") -> Workspace:
    """The places of a build.

    Args:
        attempt: a name that no other run of the build has; empty to look only.

    Raises:
        UsageError: the location is a URI that no store is known for, or no build can ever write there.
    """
    _check_place(os.fspath(location))
    store = open_store(location)
    if not attempt:
        return Workspace(store)
    run = store.attempt(_PARTIAL, attempt)
    return Workspace(run.store, attempt=run)


def _check_place(location: str) -> None:
    hint = "give a directory, or a URI such as s3://bucket/folder"
    if not location:
        raise UsageError("the name of the corpus is empty", hint=hint)
    if location.startswith(("http://", "https://")):
        raise UsageError(f"{without_secrets(location)} is on a web server, and a build cannot write there", hint=hint)
    try:
        location.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{os.fsencode(location)!r}: the path of the corpus is not UTF-8", hint=hint) from None
