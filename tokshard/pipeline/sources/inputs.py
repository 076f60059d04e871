"""The inputs of a build: files in a fixed order, and the state of each when the build began."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, overload

import numpy as np
import pyarrow as pa

from tokshard.errors import SourceError, TokshardError, UsageError
from tokshard.format.arrays import number_array
from tokshard.pipeline.sources.input_columns import READ_ONCE, InputColumns, TextBuilder, WordBuilder
from tokshard.store import Store, absolute_location

JSONL, PARQUET, ARROW, TXT, CSV, TSV, TAR = INPUT_FORMATS = ("jsonl", "parquet", "arrow", "txt", "csv", "tsv", "tar")
"""Values of ``--input-format``. Whether an Arrow file is a stream is read off its first bytes."""

ARROW_STREAM = "arrow-stream"

MEGATRON, DATATROVE, MDS, LITDATA, NPY, FLAT = ("megatron", "datatrove", "mds", "litdata", "npy", "flat")

TEXT, TOKENS, DOCUMENTS = READS = ("text", "tokens", "documents")
"""What a build reads: texts, which it encodes; tokens that another tool has made; or documents of corpora."""

TOKEN_FORMATS = (MEGATRON, DATATROVE, MDS, LITDATA, NPY, FLAT, PARQUET, ARROW)
"""Values of ``tokshard import --format``."""

FORMATS_OF_OPTION: Mapping[str, tuple[str, ...]] = {"token_field": (MDS, PARQUET, ARROW), "token_dtype": (MDS, FLAT)}
"""Options of an import that say something of the files, to the formats that do not say it themselves."""

RECORDS = "records"
"""Format of the records that a Python object gives."""

STDIN = "-"
"""The argument and location of standard input."""

PINNED = "pinned"
"""Version of an input whose content its revision determines."""


@dataclass(slots=True, kw_only=True, eq=False)
class RecordSource:
    """Records that a Python object gives, once, and only in the process that received it.

    Args:
        name: what it is called in messages and in the corpus.
        records: mappings, or strings.
        failure: the error of the build, once the iterator has raised one.
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
        argument: index of the argument that it came from.
        path: relative to that argument, with ``/``; empty if the argument is the file.
        location: where it is.
        num_bytes: its size when the build began.
        version: changes with its content, such as the modification time of a local file in ns.
        format: one of the formats above.
        compression: None, ``gzip``, ``zstd``, ``bz2`` or ``xz``.
        records: gives the records if the input is not a file; only in the process that received it.
    """

    index: int
    argument: int
    path: str
    location: str
    num_bytes: int
    version: str
    format: str
    compression: str | None
    records: RecordSource | None = field(default=None, compare=False, repr=False)

    @property
    def is_read_once(self) -> bool:
        """Whether it can be read only once, from its start, by the process that plans."""
        return self.version == READ_ONCE


class InputTable(Sequence[Input]):
    """The inputs of a build, in order: one Arrow table, from which each `Input` is made on demand.

    An input costs 49 bytes and its path, once per machine: other processes map the file that `save` wrote.

    Args:
        roots: for each argument, what its paths are relative to; the file itself if the path is empty.
        columns: the table.
        records: argument to the Python object that gives its records; these objects stay in their process.
    """

    def __init__(
        self, roots: Sequence[str], columns: InputColumns, records: Mapping[int, RecordSource] = MappingProxyType({})
    ) -> None:
        self.roots = list(roots)
        self._columns, self.records = columns, records

    def __reduce__(self) -> tuple[Any, ...]:
        return InputTable, (self.roots, self._columns)

    def save(self, store: Store, name: str) -> None:
        """Write the table for other processes."""
        self._columns.save(store, name)

    def absolute(self) -> InputTable:
        """The same inputs with absolute roots."""
        roots = [root if root in self.read_once else absolute_location(root) for root in self.roots]
        return InputTable(roots, self._columns, self.records)

    def __len__(self) -> int:
        return len(self._columns.sizes)

    def __eq__(self, other: object) -> bool:
        """Whether both list the same files in the same versions."""
        if not isinstance(other, InputTable):
            return NotImplemented
        return self.roots == other.roots and self.digest == other.digest

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, index: int) -> Input: ...

    @overload
    def __getitem__(self, index: slice) -> list[Input]: ...

    def __getitem__(self, index: int | slice) -> Input | list[Input]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        columns = self._columns
        path, argument = columns.paths[number], int(columns.arguments[number])
        return Input(
            index=number,
            argument=argument,
            path=path,
            location=location_of(self.roots[argument], path),
            num_bytes=int(columns.sizes[number]),
            version=columns.versions[number],
            format=columns.formats[number],
            compression=columns.compressions[number] or None,
            records=self.records.get(argument),
        )

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of all that has to be unchanged for a build to continue: everything but the formats."""
        return self._columns.digest

    @property
    def versions_sha256(self) -> str:
        """Hexadecimal SHA-256 of the versions alone."""
        return hashlib.sha256("\0".join(self._columns.versions).encode()).hexdigest()

    @property
    def read_once(self) -> list[str]:
        """Roots of the inputs that can be read only once."""
        return [self.roots[self._columns.arguments[index]] for index in self._columns.read_once]

    def is_read_once(self, index: int) -> bool:
        """Whether an input can be read only once."""
        return index in self._columns.read_once

    @property
    def formats(self) -> frozenset[str]:
        """The formats of all inputs."""
        return frozenset(self._columns.formats.words)

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each input."""
        return memoryview(self._columns.sizes.data)

    @property
    def num_bytes(self) -> int:
        """Bytes of all inputs."""
        return int(self._columns.sizes.sum())


def saved_inputs(roots: Sequence[str], store: Store, name: str, digest: str) -> InputTable:
    """The table that `InputTable.save` wrote. It is read when it is first used."""
    return InputTable(roots, InputColumns(None, (store, name), digest))


def original_error(inputs: InputTable, error: TokshardError) -> TokshardError:
    """The original of an error that lost its cause on the way through another process; other errors unchanged."""
    failures = (records.failure for records in inputs.records.values())
    return next((failure for failure in failures if failure and failure.problem == error.problem), error)


class InputTableBuilder:
    """Makes an `InputTable`, one input after another.

    Args:
        roots: those of the table. An argument's root has to be appended before its inputs are.
    """

    def __init__(self, roots: Sequence[str] = ()) -> None:
        self.roots = list(roots)
        self._arguments, self._sizes = array("i"), array("q")
        self._paths, self._versions = TextBuilder(), TextBuilder()
        self._formats, self._compressions = WordBuilder(), WordBuilder()
        self._records: dict[int, RecordSource] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def append(self, argument: int, path: str, kind: tuple[str, str | None], num_bytes: int, version: str) -> None:
        """Add an input at the end; `kind` is its format and compression."""
        self._arguments.append(argument)
        self._paths.append(path)
        self._sizes.append(num_bytes)
        self._versions.append(version)
        self._formats.append(kind[0])
        self._compressions.append(kind[1] or "")

    def append_records(self, argument: int, records: RecordSource) -> None:
        """Add the records of a Python object at the end."""
        if any(other.records is records.records for other in self._records.values()):
            raise UsageError(
                f"{records.name} is given twice, and it can be read once only", hint="give every source once"
            )
        self._records[argument] = records
        self.append(argument, "", (RECORDS, None), 0, READ_ONCE)

    def finish(self) -> InputTable:
        """Return the table, to which nothing can be added."""
        batch = pa.record_batch(
            [
                number_array(np.frombuffer(self._arguments, np.int32)),
                self._paths.finish(),
                number_array(np.frombuffer(self._sizes, np.int64)),
                self._versions.finish(),
                self._formats.finish(),
                self._compressions.finish(),
            ],
            names=["argument", "path", "size", "version", "format", "compression"],
        )
        return InputTable(self.roots, InputColumns(batch), self._records)


def read_once_name(root: str) -> str:
    """The name, in messages, of an input that can be read only once."""
    return "standard input" if root == STDIN else root


def read_once_note(root: str) -> str:
    """What a user should know before such an input is read."""
    return f"{read_once_name(root)} can be read once only: a build that stops has to start over"


def display_path(argument: str, path: str) -> str:
    """The name of an input in messages and tables: the label of its argument and the path below it."""
    return f"{argument}/{path}" if path else argument


def location_of(root: str, path: str) -> str:
    return os.path.join(root, path) if path else root
