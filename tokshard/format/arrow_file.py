"""Arrow IPC files, read without copies: no byte of a file can make the reader allocate memory.

The Arrow libraries allocate as much as a compressed buffer claims to hold, so a file of 41 kB can make them allocate
1.2 GB. They do not tell in advance whether a buffer is compressed, so this module reads the few fields that tell.

References:
    Arrow columnar format, "IPC File Format" and "Encapsulated message format"; File.fbs, Message.fbs; the layout of
    tables and vectors in "FlatBuffers internals".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa
from pyarrow import ipc

from tokshard.forking import cached_property

TAIL = struct.Struct("<i6s")  # length of the footer, magic
_BLOCK = struct.Struct("<qi4xq")  # position, bytes of the message, bytes of its body (which the message says itself)
_BUFFER = struct.Struct("<qq")  # position in the body, bytes
_CONTINUATION = b"\xff\xff\xff\xff"
_PREFIX_BYTES = 8
_RECORD_BATCH = 3


class ArrowFile:
    """An Arrow IPC file without compression and dictionaries.

    Args:
        content: the file. Only its footer and the record batches to read need their bytes.

    Raises:
        pa.ArrowException, OSError: it is not an Arrow IPC file.
    """

    def __init__(self, content: pa.Buffer) -> None:
        self._content = memoryview(content).cast("B")
        self._reader = ipc.open_file(content)
        self.schema: pa.Schema = self._reader.schema
        self.num_batches: int = self._reader.num_record_batches

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
        try:
            self._check(index)
        except struct.error as error:
            raise ValueError(f"its description is damaged: {error}") from error
        return self._reader.get_batch(index)

    def descriptions(self) -> list[tuple[int, int]]:
        """The first byte and the length of each record batch's description, from the footer.

        Raises:
            ValueError: the footer is damaged.
        """
        try:
            return [(position, num_bytes) for position, num_bytes, _ in self._blocks]
        except struct.error as error:
            raise ValueError(f"its footer is damaged: {error}") from error

    def _check(self, index: int) -> None:
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
        for start, length in header.structs(2, _BUFFER):
            if start < 0 or length < 0 or start + length > body_bytes:
                raise ValueError(f"a buffer has {length} bytes at {start} of {body_bytes}")

    @cached_property
    def _blocks(self) -> list[tuple[int, ...]]:
        """The places of the record batches, from the footer."""
        end = len(self._content) - TAIL.size
        length, _ = TAIL.unpack_from(self._content, end)
        if not 0 <= length <= end:
            raise ValueError(f"the footer has {length} bytes")
        footer = _Record.root(self._content[end - length : end])
        if next(footer.structs(2, _BLOCK), None) is not None:
            raise ValueError("the file has dictionaries, expected none")
        return list(footer.structs(3, _BLOCK))


class _Record:
    """A table of a FlatBuffer. Reading beyond its end is a `struct.error`."""

    def __init__(self, content: memoryview, position: int) -> None:
        self._content, self._position = content, position

    @classmethod
    def root(cls, content: memoryview) -> _Record:
        return cls(content, _unpack("<I", content, 0))

    def has(self, field: int) -> bool:
        return self._at(field) is not None

    def number(self, field: int, kind: str) -> int:
        """A number; absent ones are 0."""
        position = self._at(field)
        return 0 if position is None else _unpack(kind, self._content, position)

    def record(self, field: int) -> _Record | None:
        position = self._at(field)
        return None if position is None else _Record(self._content, self._follow(position))

    def structs(self, field: int, kind: struct.Struct) -> Iterator[tuple[int, ...]]:
        """The entries of a vector of structs; none if it is absent."""
        position = self._at(field)
        if position is None:
            return
        vector = self._follow(position)
        count = _unpack("<I", self._content, vector)
        if vector + 4 + count * kind.size > len(self._content):
            raise struct.error(f"a list of {count} entries at {vector} of {len(self._content)} bytes")
        for index in range(count):
            yield kind.unpack_from(self._content, vector + 4 + index * kind.size)

    def _follow(self, position: int) -> int:
        return position + _unpack("<I", self._content, position)

    def _at(self, field: int) -> int | None:
        table = self._position - _unpack("<i", self._content, self._position)
        slot = 4 + 2 * field
        offset = _unpack("<H", self._content, table + slot) if slot < _unpack("<H", self._content, table) else 0
        return self._position + offset if offset else None


def _unpack(kind: str, content: memoryview, position: int) -> int:
    if position < 0:  # which would count from the end
        raise struct.error(f"position {position}")
    number: int = struct.unpack_from(kind, content, position)[0]
    return number
