"""The inputs of a build: files in a fixed order, with the state of each at the start of the build."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from tokshard.errors import BuildError
from tokshard.forking import cached_property
from tokshard.format.arrays import numbers_of, table_batch, value_array
from tokshard.format.files import map_file
from tokshard.pipeline.workspace.receipts import Spooled, load_spooled
from tokshard.store import Store, absolute_location, written

JSONL, RECORDS = "jsonl", "records"
"""Formats that others have to know: JSON lines, whose fields show when they are read, and records of an iterable, as
they are spooled."""

STDIN = "-"
"""The argument and location of standard input."""

PINNED = "pinned"
"""Version of an input whose content its revision determines."""

READ_ONCE = "once"
"""Version of standard input, and of an iterable of a Python program, before it is spooled."""

_NAMES = ("argument", "path", "size", "version", "kind")
_SCHEMA = pa.schema([(name, pa.string() if name in {"path", "version"} else pa.int64()) for name in _NAMES])
"""A `kind` is an index into a list in the metadata of the schema."""

Needs = tuple[tuple[str, str], ...]
"""The files that reading one requires, as `opening.needed_names` takes them."""

InputRow = tuple[int, str, int, str, tuple[str, str | None, Needs]]
"""Argument, path, size and version of an input, and its format, compression and needs."""

_ROWS_PER_BATCH = 4_096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordSource:
    """An iterable of a Python program.

    Args:
        name: its name in messages and in the corpus.
        records: mappings, or strings.
    """

    name: str
    records: Iterable[Any]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One file to read.

    Args:
        index: its place in the order of the build.
        argument: index of its argument.
        path: path relative to that argument, with ``/``; empty if the argument is the file.
        location: its location; its name if it can be read only once.
        num_bytes: its size when the build began.
        version: a number or text that changes with its content, such as the modification time of a local file in ns.
        format: name of a `Format`.
        compression: None, ``gzip``, ``zstd``, ``bz2`` or ``xz``.
        needs: files that reading it requires, as in `needed_names`.
        place: store and name of its file, if that is not at its location: it is spooled.
        is_cut: whether the file has only the beginning of the input.
    """

    index: int
    argument: int
    path: str
    location: str
    num_bytes: int
    version: str
    format: str
    compression: str | None
    needs: Needs = ()
    place: tuple[Store, str] | None = None
    is_cut: bool = False

    @property
    def is_read_once(self) -> bool:
        """Whether it has to be spooled before tasks can read it, or is spooled already."""
        return self.place is not None or self.version == READ_ONCE


class InputTable:
    """The inputs of a build, in order: one Arrow table, from which each `Input` is made on demand.

    An input costs 50 bytes and its path, once per machine: other processes map the file that `save` wrote.

    Args:
        roots: for each argument, the root of its paths; the file itself if the path is empty.
        table: the inputs; None if they are in a file, which is mapped when it is first used.
        files: store and name of that file, once it exists; inputs that can be read only once are spooled in that store.
        digest: the digest that the file must have; None to accept any.
    """

    def __init__(
        self,
        roots: Sequence[str],
        table: pa.Table | None,
        files: list[tuple[Store, str]] | None = None,
        digest: str | None = None,
    ) -> None:
        self.roots = list(roots)
        self._given, self._files, self._digest = table, [] if files is None else files, digest

    def __reduce__(self) -> tuple[Any, ...]:
        return InputTable, (self.roots, None if self._files else self._table, self._files)

    def save(self, store: Store, name: str) -> None:
        """Write the table for other processes."""
        table = self._table
        metadata = {**table.schema.metadata, b"crc32": b"%08x" % _crc_of_kinds(table)}
        with written(store, name) as file, ipc.new_file(file, table.schema.with_metadata(metadata)) as writer:
            writer.write_table(table.replace_schema_metadata(metadata))
        self._files[:] = [(store, name)]

    def absolute(self) -> InputTable:
        """The same inputs with absolute roots."""
        once = self.read_once
        return self.at([root if root in once else absolute_location(root) for root in self.roots])

    def at(self, roots: Sequence[str]) -> InputTable:
        """The same inputs with other roots, and with the spools that exist by now."""
        return InputTable(roots, self._table, self._files)

    @cached_property
    def _table(self) -> pa.Table:
        if self._given is not None:
            return self._given
        ((store, name),) = self._files
        try:
            table = ipc.open_file(map_file(store, name)).read_all()
            crc = (table.schema.metadata or {}).get(b"crc32")
            if self._digest in (None, _digest_of(table)) and crc == b"%08x" % _crc_of_kinds(table):
                return table
            problem = "it does not list the inputs of the build"
        except (OSError, KeyError, pa.ArrowException) as error:
            problem = str(error)
        raise BuildError(f"{store.where(name)} is damaged: {problem}", hint="start over with --force")

    @cached_property
    def spooled(self) -> Mapping[int, Spooled]:
        """The spools by index: of all inputs that can be read only once, as soon as their tasks are planned."""
        return load_spooled(self._files[0][0], self.once) if self._files and self.once else {}

    @property
    def cuts(self) -> str:
        """Hashes of the inputs that are cut. A task that takes such a beginning for the whole depends on them."""
        return " ".join(facts.sha256 for facts in self.spooled.values() if facts.is_cut)

    @cached_property
    def _columns(self) -> dict[str, Any]:
        """The columns, with the facts of the spools."""
        columns: dict[str, Any] = dict(zip(_NAMES, self._table.columns, strict=True))
        for name in ("size", "version") if self.spooled else ():
            values = columns[name].to_pylist()
            for index, facts in self.spooled.items():
                values[index] = facts.num_bytes if name == "size" else facts.sha256
            columns[name] = pa.chunked_array([value_array(values, columns[name].type)])
        return columns

    @cached_property
    def _kinds(self) -> list[tuple[str, str | None, Needs, bool]]:
        kinds = json.loads((self._table.schema.metadata or {})[b"kinds"])
        return [(form, compression, tuple(map(tuple, needs)), is_once) for form, compression, needs, is_once in kinds]

    def _numbers(self, name: str) -> NDArray[np.int64]:
        numbers: NDArray[np.int64] = numbers_of(self._columns[name])
        return numbers

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __eq__(self, other: object) -> bool:
        """Whether both list the same files in the same versions."""
        if not isinstance(other, InputTable):
            return NotImplemented
        return self.roots == other.roots and self.digest == other.digest

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Input]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Input:
        number = range(len(self))[index]
        argument, path, num_bytes, version, kind = (column[number].as_py() for column in self._columns.values())
        form, compression, needs, _ = self._kinds[kind]
        facts = self.spooled.get(number)
        return Input(
            index=number,
            argument=argument,
            path=path,
            location=location_of(self.roots[argument], path),
            num_bytes=num_bytes,
            version=version,
            format=form,
            compression=compression if facts is None else "zstd",
            needs=needs,
            place=None if facts is None else (self._files[0][0], facts.name),
            is_cut=facts is not None and facts.is_cut,
        )

    def first_of_each_kind(self) -> list[Input]:
        """The first input of each argument, format and compression, in order."""
        kinds = self._numbers("argument") * len(self._kinds) + self._numbers("kind")
        _, first = np.unique(kinds, return_index=True)
        return [self[index] for index in sorted(first.tolist())]

    @cached_property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of everything that must not change for a build to continue: all but the formats."""
        return self._digest or _digest_of(self._table)

    @property
    def versions_sha256(self) -> str:
        """Hexadecimal SHA-256 of only the versions."""
        hasher = hashlib.sha256()
        for number, chunk in enumerate(self._columns["version"].chunks):
            hasher.update("\0".join([""] * bool(number) + chunk.to_pylist()).encode())
        return hasher.hexdigest()

    @cached_property
    def once(self) -> Mapping[int, str]:
        """Index and root of each input that can be read only once, in order."""
        kinds = [number for number, (*_, is_once) in enumerate(self._kinds) if is_once]
        found = np.flatnonzero(np.isin(numbers_of(self._table.column("kind")), kinds)).tolist() if kinds else []
        return {index: self.roots[self._table.column("argument")[index].as_py()] for index in found}

    @property
    def read_once(self) -> list[str]:
        """Roots of the inputs that can be read only once."""
        return list(self.once.values())

    @property
    def formats(self) -> frozenset[str]:
        """The formats of all inputs."""
        return frozenset(form for form, *_ in self._kinds)

    @cached_property
    def sizes(self) -> Sequence[int]:
        """Bytes of each input."""
        return memoryview(self._numbers("size").data)

    @property
    def num_bytes(self) -> int:
        """Bytes of all inputs."""
        return sum(self.sizes)


def _crc_of_kinds(table: pa.Table) -> int:
    """CRC-32 of the formats, which the digest leaves out: a corpus does not record the formats of its sources."""
    kinds = zlib.crc32((table.schema.metadata or {}).get(b"kinds", b""))
    return zlib.crc32(np.ascontiguousarray(numbers_of(table.column("kind"))).data, kinds)


def _digest_of(table: pa.Table) -> str:
    hasher = hashlib.sha256(b"%d" % table.num_rows)
    for name in ("argument", "size", "path", "version"):
        for chunk in table.column(name).chunks:
            for buffer in chunk.buffers()[1:]:
                hasher.update(buffer)
    return hasher.hexdigest()


def input_table(rows: Iterable[InputRow], roots: Sequence[str]) -> InputTable:
    """Make a table of inputs, one after another.

    Args:
        roots: as in `InputTable`; they may grow while the rows are taken.
    """
    left, kinds, batches = iter(rows), dict[Any, int](), []
    while held := list(itertools.islice(left, _ROWS_PER_BATCH)):
        numbered = [
            (argument, path, size, version, kinds.setdefault((*kind, version == READ_ONCE), len(kinds)))
            for argument, path, size, version, kind in held
        ]
        batches.append(table_batch(dict(zip(_NAMES, zip(*numbered, strict=True), strict=True)), _SCHEMA))
    table = pa.Table.from_batches(batches, _SCHEMA)
    return InputTable(roots, table.replace_schema_metadata({"kinds": json.dumps(list(kinds))}))


def read_once_name(root: str) -> str:
    """The name, in messages, of an input that can be read only once."""
    return "standard input" if root == STDIN else root


def read_once_note(root: str) -> str:
    """A note for the user before such an input is read."""
    return (
        f"{read_once_name(root)} is first copied into --out, compressed to about a fifth to a third; "
        "the copy goes when the build is done"
    )


def display_path(argument: str, path: str) -> str:
    """The name of an input in messages and tables: the label of its argument and the path below it."""
    return f"{argument}/{path}" if path else argument


def location_of(root: str, path: str) -> str:
    return os.path.join(root, path) if path else root
