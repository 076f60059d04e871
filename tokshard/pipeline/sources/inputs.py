"""The inputs of a build: files in a fixed order, and what each was when the build began."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from tokshard.errors import BadSourceError, BuildError, SourceError, TokshardError, UsageError
from tokshard.format.arrays import number_array
from tokshard.format.files import map_file
from tokshard.store import Store
from tokshard.store.base import written

JSONL, PARQUET, ARROW, TXT, CSV, TSV, TAR = INPUT_FORMATS = ("jsonl", "parquet", "arrow", "txt", "csv", "tsv", "tar")
"""Values of ``--input-format``. Whether an Arrow file is a stream is read off its first bytes."""

ARROW_STREAM = "arrow-stream"

RECORDS = "records"
"""Format of the records that a Python object gives."""

STDIN = "-"
"""The argument and location of standard input."""

PINNED = "pinned"
"""Version of an input whose revision says what it holds."""

READ_ONCE = "once"
"""Version of an input that can be read once only: standard input, and records of a Python object."""


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
        num_bytes: its size when the build began.
        version: what tells its content then from any later one: the modification time of a file in ns.
        format: one of the formats above.
        compression: None, ``gzip``, ``zstd``, ``bz2`` or ``xz``.
        records: what gives the records, if that is no file; only in the process that was given it.
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
        """Whether it can be read once only, from its start, by the process that plans."""
        return self.version == READ_ONCE


class InputTable(Sequence[Input]):
    """The inputs of a build, in order: one Arrow table, from which an `Input` is made when it is asked for.

    An input costs 49 bytes and its path, once: what `save` has written is mapped by the processes that this is sent to.

    Args:
        roots: what the paths of each argument are relative to; the file itself where the path is empty.
        columns: the table.
        records: by argument, the Python objects that give records; they stay in their process.
    """

    def __init__(
        self, roots: Sequence[str], columns: _Columns, records: Mapping[int, RecordSource] = MappingProxyType({})
    ) -> None:
        self.roots = list(roots)
        self._columns, self._records = columns, records

    @classmethod
    def saved(cls, roots: Sequence[str], store: Store, name: str, digest: str) -> InputTable:
        """The table that `save` wrote; nothing is read yet."""
        return cls(roots, _Columns(None, (store, name), digest))

    def __reduce__(self) -> tuple[Any, ...]:
        return InputTable, (self.roots, self._columns)

    def save(self, store: Store, name: str) -> None:
        """Write the table for other processes."""
        self._columns.save(store, name)

    def absolute(self) -> InputTable:
        """The same inputs with absolute roots."""
        roots = [root if root in self.read_once else os.path.abspath(root) for root in self.roots]
        return InputTable(roots, self._columns, self._records)

    def original(self, error: TokshardError) -> TokshardError:
        """The error with the exception that caused it, which it loses on its way through another process."""
        failures = (records.failure for records in self._records.values())
        return next((failure for failure in failures if failure and failure.problem == error.problem), error)

    def __len__(self) -> int:
        return len(self._columns.sizes)

    def __eq__(self, other: object) -> bool:
        """Whether the same files are meant, and none has changed."""
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
            records=self._records.get(argument),
        )

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of what is compared when a build continues: all but formats."""
        return self._columns.digest

    @property
    def versions_sha256(self) -> str:
        """Hexadecimal SHA-256 of the versions alone."""
        return hashlib.sha256("\0".join(self._columns.versions).encode()).hexdigest()

    @property
    def read_once(self) -> list[str]:
        """Roots of the inputs that can be read once only."""
        return [self.roots[self._columns.arguments[index]] for index in self._columns.read_once]

    def is_read_once(self, index: int) -> bool:
        """Whether an input can be read once only."""
        return index in self._columns.read_once

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each."""
        return memoryview(self._columns.sizes.data)

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return int(self._columns.sizes.sum())


class InputTableBuilder:
    """Makes an `InputTable`, one input after another.

    Args:
        roots: as of the table; more may be added until the inputs are.
    """

    def __init__(self, roots: Sequence[str] = ()) -> None:
        self.roots = list(roots)
        self._arguments, self._sizes = array("i"), array("q")
        self._paths, self._versions = _TextBuilder(), _TextBuilder()
        self._formats, self._compressions = _WordBuilder(), _WordBuilder()
        self._records: dict[int, RecordSource] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def append(self, argument: int, path: str, kind: tuple[str, str | None], num_bytes: int, version: str) -> None:
        """Add one at the end; `kind` is its format and compression."""
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
        """The table; nothing can be added any more."""
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
        return InputTable(self.roots, _Columns(batch), self._records)


class _Columns:
    """The columns of an `InputTable`: held in memory, or mapped from the file that was written of them.

    Args:
        batch: the table; None: it is in the file at `place`, which is mapped when a column is asked for.
        digest: what the file has to hold; None: whatever it holds.
    """

    def __init__(
        self, batch: pa.RecordBatch | None, place: tuple[Store, str] | None = None, digest: str | None = None
    ) -> None:
        self._batch, self._place, self._digest = batch, place, digest

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Columns, (None, self._place)) if self._place else (_Columns, (self._table,))

    def save(self, store: Store, name: str) -> None:
        with written(store, name) as file, ipc.new_file(file, self._table.schema) as writer:
            writer.write_batch(self._table)
        self._place = (store, name)

    @cached_property
    def _table(self) -> pa.RecordBatch:
        if self._batch is not None:
            return self._batch
        assert self._place is not None
        try:
            table = ipc.open_file(map_file(*self._place)).get_batch(0)
        except (OSError, pa.ArrowException) as error:
            raise self._damaged(str(error)) from error
        if self._digest not in (None, _digest_of(table)):
            raise self._damaged("it lists other inputs than the settings say")
        return table

    def _damaged(self, problem: str) -> BuildError:
        assert self._place is not None
        store, name = self._place
        return BuildError(f"{store.where(name)} is damaged: {problem}", hint="start over with --force")

    @cached_property
    def digest(self) -> str:
        return self._digest or _digest_of(self._table)

    @cached_property
    def arguments(self) -> NDArray[np.int32]:
        return _numbers(self._table.column("argument"), np.int32)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        return _numbers(self._table.column("size"), np.int64)

    @cached_property
    def paths(self) -> _Texts:
        return _Texts(self._table.column("path"))

    @cached_property
    def versions(self) -> _Texts:
        return _Texts(self._table.column("version"))

    @cached_property
    def formats(self) -> _Words:
        return _Words(self._table.column("format"))

    @cached_property
    def compressions(self) -> _Words:
        return _Words(self._table.column("compression"))

    @cached_property
    def read_once(self) -> dict[int, None]:
        """Indices of the inputs that can be read once only, in order."""
        like = np.flatnonzero(self.versions.lengths == len(READ_ONCE)).tolist()
        return {index: None for index in like if self.versions[index] == READ_ONCE}


def _digest_of(table: pa.RecordBatch) -> str:
    hasher = hashlib.sha256(b"%d" % table.num_rows)
    for name in ("argument", "size", "path", "version"):
        for buffer in table.column(name).buffers()[1:]:
            hasher.update(buffer)
    return hasher.hexdigest()


class _TextBuilder:
    """Collects texts for an Arrow array."""

    def __init__(self) -> None:
        self._data, self._ends = bytearray(), array("q", [0])

    def append(self, text: str) -> None:
        self._data += text.encode()
        self._ends.append(len(self._data))

    def finish(self) -> pa.Array:
        buffers = [None, pa.py_buffer(self._ends), pa.py_buffer(self._data)]
        return pa.Array.from_buffers(pa.large_string(), len(self._ends) - 1, buffers)


class _WordBuilder:
    """Collects words of which there are few for an Arrow array."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._indices = array("b")

    def append(self, word: str) -> None:
        self._indices.append(self._known.setdefault(word, len(self._known)))

    def finish(self) -> pa.Array:
        known = _TextBuilder()
        for word in self._known:
            known.append(word)
        return pa.DictionaryArray.from_arrays(number_array(np.frombuffer(self._indices, np.int8)), known.finish())


class _Texts(Sequence[str]):
    """Texts of an Arrow array, which is not copied."""

    def __init__(self, column: pa.Array) -> None:
        _, ends, data = column.buffers()
        self._ends = memoryview(np.frombuffer(ends, np.int64, len(column) + 1).data)  # faster than numpy one by one
        self._data = memoryview(data) if data else memoryview(b"")

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self._ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]
        return str(self._data[self._ends[number] : self._ends[number + 1]], "utf-8")


class _Words:
    """Words of a dictionary array."""

    def __init__(self, column: pa.Array) -> None:
        self._indices = _numbers(column.indices, np.int8)
        self._words: list[str] = list(_Texts(column.dictionary))

    def __getitem__(self, index: int) -> str:
        return self._words[int(self._indices[index])]


def _numbers(column: pa.Array, dtype: Any) -> NDArray[Any]:
    return np.frombuffer(column.buffers()[1], dtype, len(column))


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
        ("modification time (ns)", str(stat.st_mtime_ns), input_.version),
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
