"""Where a build puts its files: the corpora, and the folder of an unfinished build. Names; the store has the files."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from tokshard.format import names
from tokshard.store import Store, open_store

LOCK = f"{names.WORK}/lock"
"""The file that a running build holds."""

SETTINGS = f"{names.WORK}/settings.json"
"""What was asked for. A folder without it is not ours, so it is the first file to come and the last to go."""

INPUTS = f"{names.WORK}/inputs.arrow"
"""The table of the inputs, which workers map."""

COMMAND = f"{names.WORK}/command.json"
"""The command that continues the build, and how much it has to do."""

BAD_INPUTS = f"{names.WORK}/bad-inputs.json"
"""Inputs that are left out whole, and why."""

TOKENIZER = f"{names.WORK}/tokenizer.json"
"""The tokenizer as workers load it."""

ASSEMBLED = f"{names.WORK}/assembled.json"
"""The files next to shards that the build wrote, or is about to write."""

REMOVING = f"{names.WORK}/removing.json"
"""The files that starting over removes; while it is there, they may be gone in part."""

_PARTIAL = f"{names.WORK}/partial"


class Stage(StrEnum):
    """What the tasks of a build do; the value is the folder of their receipts."""

    ENCODING = ""
    HASHING = "hashing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A corpus that a build writes.

    Args:
        name: ``train`` or ``validation``; empty if the build writes one corpus.
        store: of the corpus.
    """

    name: str
    store: Store

    @property
    def directory(self) -> Path:
        """The local directory of the corpus."""
        return Path(self.store.location)

    def name_of(self, file: str) -> str:
        """A file of the corpus, as the store of the whole build names it."""
        return f"{self.name}/{file}" if self.name else file


@dataclass(frozen=True, slots=True)
class Workspace:
    """The names of a build.

    Args:
        store: of the location that the build was given: a corpus, or the place of two with a validation split.
        stage: whose receipts, rejects and hashes are meant.
    """

    store: Store
    stage: Stage = Stage.ENCODING

    @property
    def out(self) -> Path:
        """The location as it was given, for messages and for the result."""
        return Path(self.store.location)

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
        """Folder of what a hashing stage leaves: a file per task, and the places of duplicates."""
        return self._of_stage("hashes")

    @property
    def hashing(self) -> Workspace:
        """Of the stage that hashes texts, for ``--dedup exact``."""
        return replace(self, stage=Stage.HASHING)

    @property
    def outputs_of_split(self) -> tuple[Output, ...]:
        """The two corpora of a build with a validation split."""
        return tuple(Output(name=name, store=self.store.below(name)) for name in (names.TRAIN, names.VALIDATION))

    def outputs(self, *, is_split: bool) -> tuple[Output, ...]:
        """The corpora that the build writes."""
        return self.outputs_of_split if is_split else (Output(name="", store=self.store),)

    def _of_stage(self, folder: str) -> str:
        return "/".join(part for part in (names.WORK, self.stage.value, folder) if part)

    def take_over(self) -> None:
        """Remove what attempts before this one left unfinished, and let this one write."""
        self.store.take_over()

    def clear_partial(self) -> None:
        """Remove what workers of this attempt left unfinished."""
        self.store.discard_spooled()

    def clear(self) -> None:
        """Remove every file but the lock, the settings, and the list of what starting over removes."""
        self.store.delete_below(names.WORK, keep=frozenset({LOCK, SETTINGS, INPUTS, REMOVING}))

    def remove(self) -> None:
        """Remove the folder. The lock is last, so that no other build begins in it; before it the settings."""
        with contextlib.suppress(OSError):
            self.store.end_attempt()
            self.store.delete_below(names.WORK, keep=frozenset({LOCK, SETTINGS, INPUTS}))
            self.store.delete(SETTINGS)
            self.store.delete(INPUTS)
            self.store.delete(LOCK)


def open_workspace(location: str | os.PathLike[str], *, attempt: str = "") -> Workspace:
    """The places of a build.

    Args:
        attempt: a name that no other run of the build has; empty for those who only look.

    Raises:
        UsageError: the location is a URI, which this version cannot write.
    """
    store = open_store(location)
    return Workspace(store.attempt(_PARTIAL, attempt) if attempt else store)
