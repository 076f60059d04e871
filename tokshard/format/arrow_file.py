"""Arrow IPC files, read without copies: no byte of a file can make the reader allocate memory.

The Arrow libraries allocate as much as a compressed buffer claims to hold, so a file of 41 kB can make them allocate
1.2 GB. They do not tell in advance whether a buffer is compressed, so this module reads the few fields that do.

References:
    Arrow columnar format, "IPC File Format" and "Encapsulated message format"; File.fbs, Message.fbs; the layout of
    tables and vectors in "FlatBuffers internals".
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import ipc

from tokshard.forking import cached_property
from tokshard.store import Entry, Store, joined_ranges

TAIL = struct.Struct("<i6s")  # length of the footer, magic
_BLOCK = struct.Struct("<qi4xq")  # position, bytes of the message, bytes of its body (which the message says itself)
_BUFFER = struct.Struct("<qq")  # position in the body, bytes
_NODE = struct.Struct("<qq")  # values of a column, nulls among them
_MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_PREFIX_BYTES = 8
_RECORD_BATCH = 3


Pairs = list[tuple[int, int]]


class ArrowFile:
    """An Arrow IPC file without compression and dictionaries.

    Args:
        content: the file. Only its footer and the record batches to read need their bytes.

    Attributes:
        form: the footer without the places of the record batches. Files of the same form have the same schema.

    Raises:
        ValueError: it is not an Arrow IPC file.
    """

    def __init__(self, content: pa.Buffer) -> None:
        self._buffer, self._content = content, memoryview(content).cast("B")
        end = len(self._content) - TAIL.size
        try:
            length, magic = TAIL.unpack_from(self._content, end) if end >= 0 else (0, b"")
            if magic != _MAGIC or not 0 <= length <= end:
                raise ValueError(f"it ends with a footer of {length} bytes and {magic!r}, expected {_MAGIC!r}")
            footer = self._content[end - length : end]
            root = _Record.root(footer)
            if root.structs(2, _BLOCK)[1]:
                raise ValueError("the file has dictionaries, expected none")
            start, blocks = root.structs(3, _BLOCK)
        except struct.error as error:
            raise ValueError(f"its footer is damaged: {error}") from error
        self._blocks: list[tuple[int, int, int]] = blocks
        self.num_batches = len(blocks)
        self.form = bytes(footer[:start]) + bytes(footer[start + len(blocks) * _BLOCK.size :])

    @cached_property
    def _reader(self) -> ipc.RecordBatchFileReader:
        return ipc.open_file(self._buffer)

    @property
    def schema(self) -> pa.Schema:
        """Columns and metadata.

        Raises:
            pa.ArrowException, OSError: the footer is damaged.
        """
        found: pa.Schema = self._reader.schema
        return found

    def batch(self, index: int) -> pa.RecordBatch:
        """One record batch whose buffers are views of the file, with its structure validated.

        Raises:
            pa.ArrowException, OSError, ValueError: it is compressed, reaches beyond the file, or is not valid.
        """
        batch = self.view(index)
        batch.validate()
        return batch

    def view(self, index: int) -> pa.RecordBatch:
        """One record batch whose buffers are views of the file; only its description needs its bytes.

        Raises:
            pa.ArrowException, OSError, ValueError: it is compressed, or reaches beyond the file.
        """
        self.description(index)
        return self._reader.get_batch(index)

    def descriptions(self) -> list[tuple[int, int]]:
        """The first byte and the length of each record batch's description, from the footer."""
        return [(position, num_bytes) for position, num_bytes, _ in self._blocks]

    def description(self, index: int) -> tuple[int, Pairs, Pairs]:
        """The rows of a record batch, and what its columns hold, within the file.

        Returns:
            The number of rows; values and nulls of each column, and of the values of a column of lists, after it;
            first byte in the file and length of the buffers of each of these, in their order.

        Raises:
            ValueError: it is compressed, or reaches beyond the file.
        """
        try:
            return self._description(index)
        except struct.error as error:
            raise ValueError(f"its description is damaged: {error}") from error

    def _description(self, index: int) -> tuple[int, Pairs, Pairs]:
        position, message_bytes, _ = self._blocks[index]
        body = position + message_bytes
        if not 0 <= position < body <= len(self._content):
            raise ValueError(f"it is at byte {position} of a file of {len(self._content)} bytes")
        message = self._content[position:body]
        if message[:4] != _CONTINUATION:
            raise ValueError(f"it does not begin with {_CONTINUATION!r}")
        root = _Record.root(message[_PREFIX_BYTES:])
        header = root.record(2)
        if root.number(1, "<B") != _RECORD_BATCH or header is None:
            raise ValueError("it is not a record batch")
        if header.has(3) or root.has(4):  # before Arrow 1.0 metadata of the message said so
            raise ValueError("it is compressed, expected uncompressed buffers")
        body_bytes = root.number(3, "<q")
        if not 0 <= body_bytes <= len(self._content) - body:
            raise ValueError(f"it has {body_bytes} bytes at byte {body} of a file of {len(self._content)}")
        buffers = header.structs(2, _BUFFER)[1]
        for start, length in buffers:
            if start < 0 or length < 0 or start + length > body_bytes:
                raise ValueError(f"a buffer has {length} bytes at {start} of {body_bytes}")
        nodes = header.structs(1, _NODE)[1]
        return header.number(0, "<q"), nodes, [(body + start, length) for start, length in buffers]


class _Record:
    """A table of a FlatBuffer. Reading beyond its end is a `struct.error`."""

    def __init__(self, content: memoryview, position: int) -> None:
        self._content, self._position = content, position
        start = position - _number("<i", content, position)
        if start < 0:  # which would count from the end
            raise struct.error(f"position {start}")
        # two sizes, then the place of each field in the record, or 0
        self._fields: tuple[int, ...] = struct.unpack_from(f"<{_number('<H', content, start) // 2}H", content, start)[
            2:
        ]

    @classmethod
    def root(cls, content: memoryview) -> _Record:
        return cls(content, _number("<I", content, 0))

    def has(self, field: int) -> bool:
        return field < len(self._fields) and self._fields[field] != 0

    def number(self, field: int, kind: str) -> int:
        """A number; absent ones are 0."""
        return _number(kind, self._content, self._position + self._fields[field]) if self.has(field) else 0

    def record(self, field: int) -> _Record | None:
        return _Record(self._content, self._follow(field)) if self.has(field) else None

    def structs(self, field: int, kind: struct.Struct) -> tuple[int, list[Any]]:
        """The start of the entries of a vector of structs, and the entries; none if it is absent."""
        if not self.has(field):
            return 0, []
        vector = self._follow(field)
        count = _number("<I", self._content, vector)
        start, stop = vector + 4, vector + 4 + count * kind.size
        if stop > len(self._content):
            raise struct.error(f"a list of {count} entries at {vector} of {len(self._content)} bytes")
        return start, list(kind.iter_unpack(self._content[start:stop]))

    def _follow(self, field: int) -> int:
        position = self._position + self._fields[field]
        return position + _number("<I", self._content, position)


def _number(kind: str, content: memoryview, position: int) -> int:
    number: int = struct.unpack_from(kind, content, position)[0]
    return number


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
            pa.ArrowException, OSError, ValueError: it is not an Arrow IPC file, or the file is another version.
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
            OSError: the file is another version.
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
        ranges = joined_ranges(places, _GAP_BYTES)
        parts = self._store.read(self._name, ranges, version=self._entry.version)
        for (start, length), content in zip(ranges, parts, strict=True):
            self._memory[start : start + length] = content
