"""The inputs of a build: files in a fixed order, and what each was when the build began."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from tokshard.errors import BadSourceError, SourceError, TokshardError, UsageError

JSONL, PARQUET, ARROW, TXT, CSV, TSV, TAR = INPUT_FORMATS = ("jsonl", "parquet", "arrow", "txt", "csv", "tsv", "tar")
"""Values of ``--input-format``. Whether an Arrow file is a stream is read off its first bytes."""

ARROW_STREAM = "arrow-stream"

RECORDS = "records"
"""Format of the records that a Python object gives."""

STDIN = "-"
"""The argument and location of standard input."""

PINNED = -1
"""Modification time of an input whose revision says what it holds."""

READ_ONCE = -2
"""Modification time of an input that can be read once only: standard input, and records of a Python object."""


@dataclass(slots=True, kw_only=True, eq=False)
class RecordSource:
    """Records that a Python object gives, once, in the process that was given it.

    Args:
        name: what it is called in messages and in the corpus.
        records: mappings, or strings.
        failure: what its iterator raised, as the error of the build.
    """

    name: str
    records: Iterable[Any]
    failure: SourceError | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One file to read.

    Args:
        index: its place in the order of the build.
        argument: index of the argument it came from.
        path: relative to that argument, with ``/``; empty where the argument is the file.
        location: where it is.
        num_bytes, mtime_ns: what it was when the build began.
        format: one of the formats above.
        compression: None, ``gzip``, ``zstd``, ``bz2`` or ``xz``.
        records: what gives the records, if that is no file; only in the process that was given it.
    """

    index: int
    argument: int
    path: str
    location: str
    num_bytes: int
    mtime_ns: int
    format: str
    compression: str | None
    records: RecordSource | None = field(default=None, compare=False, repr=False)

    @property
    def is_read_once(self) -> bool:
        """Whether it can be read once only, from its start, by the process that plans."""
        return self.mtime_ns == READ_ONCE


class Inputs(Sequence[Input]):
    """The inputs of a build, in order. One costs 29 bytes and its path; an `Input` is made when it is asked for.

    Args:
        roots: what the paths of each argument are relative to; the file itself where the path is empty.
    """

    def __init__(self, roots: Sequence[str] = ()) -> None:
        self.roots = list(roots)
        self._arguments, self._kinds = array("i"), array("b")
        self._sizes, self._times, self._ends = array("q"), array("q"), array("q")
        self._paths = bytearray()
        self._known_kinds: list[tuple[str, str | None]] = []
        self._records: dict[int, RecordSource] = {}
        self.read_once: list[str] = []
        """Roots of the inputs that can be read once only."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_records": {}}  # an iterator stays in its process

    def append_records(self, argument: int, records: RecordSource) -> None:
        """Add the records of a Python object at the end."""
        if any(other.records is records.records for other in self._records.values()):
            raise UsageError(
                f"{records.name} is given twice, and it can be read once only", hint="give every source once"
            )
        self._records[argument] = records
        self.append(argument, "", (RECORDS, None), 0, READ_ONCE)

    def original(self, error: TokshardError) -> TokshardError:
        """The error with the exception that caused it, which it loses on its way through another process."""
        failures = (records.failure for records in self._records.values())
        return next((failure for failure in failures if failure and failure.problem == error.problem), error)

    def append(self, argument: int, path: str, kind: tuple[str, str | None], num_bytes: int, mtime_ns: int) -> None:
        """Add one at the end; `kind` is its format and compression."""
        if kind not in self._known_kinds:
            self._known_kinds.append(kind)
        self._arguments.append(argument)
        self._kinds.append(self._known_kinds.index(kind))
        self._sizes.append(num_bytes)
        self._times.append(mtime_ns)
        self._paths += path.encode()
        self._ends.append(len(self._paths))
        if mtime_ns == READ_ONCE:
            self.read_once.append(self.roots[argument])

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Input: ...

    @overload
    def __getitem__(self, index: slice) -> list[Input]: ...

    def __getitem__(self, index: int | slice) -> Input | list[Input]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        path = self._paths[self._ends[number - 1] if number else 0 : self._ends[number]].decode()
        form, compression = self._known_kinds[self._kinds[number]]
        argument = self._arguments[number]
        return Input(
            index=number,
            argument=argument,
            path=path,
            location=location_of(self.roots[argument], path),
            num_bytes=self._sizes[number],
            mtime_ns=self._times[number],
            format=form,
            compression=compression,
            records=self._records.get(argument),
        )

    def is_read_once(self, index: int) -> bool:
        """Whether an input can be read once only."""
        return self._times[index] == READ_ONCE

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each."""
        return self._sizes

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return sum(self._sizes)


def read_once_name(root: str) -> str:
    """How messages call an input that can be read once only."""
    return "standard input" if root == STDIN else root


def read_once_note(root: str) -> str:
    """What a user should know before such an input is read."""
    return f"{read_once_name(root)} can be read once only: a build that stops has to start over"


def display_path(argument: str, path: str) -> str:
    """How an input is called in messages and tables: the label of its argument and the path below it."""
    return f"{argument}/{path}" if path else argument


def check_unchanged(input_: Input) -> None:
    """Refuse an input that is not what it was when the build began.

    Raises:
        SourceError: it is gone, or its size or modification time differs.
    """
    if input_.is_read_once:
        return
    try:
        stat = os.stat(input_.location)
    except OSError as error:
        raise vanished(input_, error) from error
    for what, found, expected in (
        ("bytes", stat.st_size, input_.num_bytes),
        ("modification time (ns)", stat.st_mtime_ns, input_.mtime_ns),
    ):
        if expected not in (found, PINNED):
            raise SourceError(
                f"{input_.location} changed during the build: {what} {found}, at the start {expected}",
                hint="put the file back, or start over with --force",
            )


def vanished(input_: Input, error: OSError) -> BadSourceError:
    """The error for an input that cannot be opened."""
    return BadSourceError(
        f"{input_.location} cannot be read: {error.strerror or error}",
        hint="put the file back and run the same command again; finished tasks are kept",
    )


def damaged(input_: Input, reason: str) -> BadSourceError:
    """The error for an input whose container is broken."""
    return BadSourceError(
        f"{input_.location} is damaged: {reason}",
        hint="fetch the file again and start over with --force, or leave it out with --on-bad-source skip",
    )


def location_of(root: str, path: str) -> str:
    return os.path.join(root, path) if path else root
