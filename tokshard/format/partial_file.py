"""A large table in another store: columns that every reader needs are read first, lists of single rows on demand."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator, Sequence

import pyarrow as pa

from tokshard.format.arrow_file import TAIL, ArrowFile
from tokshard.store import Entry, Store

_TAIL_BYTES = 64 << 10
_GAP_BYTES = 64 << 10
"""Ranges nearer to each other are asked for as one."""


class PartialFile:
    """An Arrow IPC file in a store, of which only some columns are in memory. Threads may share it.

    The shard table of 100 trillion tokens has 6 GB; a training job needs 260 MB of it.

    Args:
        entry: the version to read; any other is refused.
        by_row: names of columns of lists; at first only the places of their lists are read.

    Attributes:
        content: as long as the file. Pages without data take no memory.
    """

    def __init__(self, store: Store, name: str, entry: Entry, *, by_row: Collection[str]) -> None:
        self._store, self._name, self._entry, self.by_row = store, name, entry, by_row
        self._memory = mmap.mmap(-1, entry.size)
        self.content = pa.py_buffer(self._memory)

    def load(self) -> ArrowFile:
        """Read the footer, then the descriptions of all record batches, then all that is not read by row.

        Raises:
            pa.ArrowException, OSError, ValueError: it is not an Arrow IPC file, or another version lies there.
        """
        size = self._entry.size
        self._fill([(max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES))])
        footer_bytes = TAIL.unpack_from(self._memory, size - TAIL.size)[0] + TAIL.size
        if footer_bytes > _TAIL_BYTES:
            self._fill([(size - footer_bytes, footer_bytes - _TAIL_BYTES)])
        file = ArrowFile(self.content)
        self._fill(file.descriptions())
        self._fill([place for index in range(file.num_batches) for place in self._first_read(file.view(index))])
        return file

    def read(self, array: pa.Array, start: int, stop: int) -> bytes:
        """Some numbers of a column that is read by row; they are not kept.

        Args:
            array: a view of `content`, without nulls.

        Raises:
            OSError: another version lies there.
        """
        size = array.type.bit_width // 8
        values = array.buffers()[1]
        if start == stop:
            return b""
        position = values.address - self.content.address + (array.offset + start) * size
        (content,) = self._store.read(self._name, [(position, (stop - start) * size)], version=self._entry.version)
        return content

    def _first_read(self, batch: pa.RecordBatch) -> Iterator[tuple[int, int]]:
        for field, column in zip(batch.schema, batch.columns, strict=True):
            buffers = column.buffers()
            for buffer in buffers[:2] if field.name in self.by_row else buffers:
                if buffer is not None and buffer.size:
                    yield buffer.address - self.content.address, buffer.size

    def _fill(self, places: Sequence[tuple[int, int]]) -> None:
        for start, length in places:
            if not 0 <= start <= start + length <= self._entry.size:
                raise ValueError(f"it names {length} bytes at {start} of a file of {self._entry.size}")
        ranges = _joined(places)
        parts = self._store.read(self._name, ranges, version=self._entry.version)
        for (start, length), content in zip(ranges, parts, strict=True):
            self._memory[start : start + length] = content


def _joined(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, length in sorted(places):
        if found and start <= sum(found[-1]) + _GAP_BYTES:
            first, known = found[-1]
            found[-1] = first, max(known, start + length - first)
        else:
            found.append((start, length))
    return found
