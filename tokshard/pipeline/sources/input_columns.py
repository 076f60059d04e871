"""The columns of an input table: collected, saved and mapped."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from tokshard.errors import BuildError
from tokshard.format.arrays import number_array
from tokshard.format.files import map_file
from tokshard.store import Store, written

READ_ONCE = "once"
"""Version of an input that can be read only once: standard input, and records of a Python object."""


class InputColumns:
    """The columns of an `InputTable`, held in memory or mapped from the file that they were saved to.

    Args:
        batch: the table; None if it is in the file at `place`, which is mapped when a column is first used.
        digest: the digest that the file must have; None to accept any.
    """

    def __init__(
        self, batch: pa.RecordBatch | None, place: tuple[Store, str] | None = None, digest: str | None = None
    ) -> None:
        self._batch, self._place, self._digest = batch, place, digest

    def __reduce__(self) -> tuple[Any, ...]:
        return (InputColumns, (None, self._place)) if self._place else (InputColumns, (self._table,))

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
            raise self._damaged("it does not list the inputs that the settings name")
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
        """Indices of the inputs that can be read only once, in order."""
        like = np.flatnonzero(self.versions.lengths == len(READ_ONCE)).tolist()
        return {index: None for index in like if self.versions[index] == READ_ONCE}


def _digest_of(table: pa.RecordBatch) -> str:
    hasher = hashlib.sha256(b"%d" % table.num_rows)
    for name in ("argument", "size", "path", "version"):
        for buffer in table.column(name).buffers()[1:]:
            hasher.update(buffer)
    return hasher.hexdigest()


class TextBuilder:
    """Collects texts for an Arrow array."""

    def __init__(self) -> None:
        self._data, self._ends = bytearray(), array("q", [0])

    def append(self, text: str) -> None:
        self._data += text.encode()
        self._ends.append(len(self._data))

    def finish(self) -> pa.Array:
        buffers = [None, pa.py_buffer(self._ends), pa.py_buffer(self._data)]
        return pa.Array.from_buffers(pa.large_string(), len(self._ends) - 1, buffers)


class WordBuilder:
    """Collects words from a small set for an Arrow array."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._indices = array("b")

    def append(self, word: str) -> None:
        self._indices.append(self._known.setdefault(word, len(self._known)))

    def finish(self) -> pa.Array:
        known = TextBuilder()
        for word in self._known:
            known.append(word)
        return pa.DictionaryArray.from_arrays(number_array(np.frombuffer(self._indices, np.int8)), known.finish())


class _Texts(Sequence[str]):
    """Texts of an Arrow array, without a copy of it."""

    def __init__(self, column: pa.Array) -> None:
        _, ends, data = column.buffers()
        self._ends = memoryview(np.frombuffer(ends, np.int64, len(column) + 1).data)
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
        self.words: list[str] = list(_Texts(column.dictionary))

    def __getitem__(self, index: int) -> str:
        return self.words[int(self._indices[index])]


def _numbers(column: pa.Array, dtype: Any) -> NDArray[Any]:
    return np.frombuffer(column.buffers()[1], dtype, len(column))
