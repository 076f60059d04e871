"""Megatron-LM's ``.bin`` and ``.idx``: the ids of all documents, and where each document lies.

The index is a header (magic, version 1, code of the dtype, number of sequences, number of entries of the last list) and
three lists. They hold the length of each sequence (int32), its first byte (int64), and the first sequence of each
document, with the end of the last one (int64). Here a document is one sequence, as in ``preprocess_data.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.interop.export.documents import Documents
from tokshard.interop.export.files import CorpusFacts, Format, OpenFile
from tokshard.store import Store, temporary_file, written

MAGIC = b"MMIDIDX\x00\x00"
DTYPE_CODES = {"int32": 4, "uint16": 8}
_STEM = "documents"
_INDEX_ENTRIES = 1 << 20
"""Entries of the index that are made at once."""


@dataclass(frozen=True)
class MegatronFormat(Format):
    """Pairs of files; one pair unless the user gives a size."""

    is_numbered: bool
    summary: ClassVar[str] = ".bin and .idx of Megatron-LM"

    @classmethod
    def of(cls, facts: CorpusFacts) -> MegatronFormat:
        """The format for one corpus.

        Raises:
            UsageError: its ids do not fit into an int32.
        """
        if facts.vocab_size > 1 << 31:
            raise UsageError(
                f"the vocabulary has {facts.vocab_size:,} ids; Megatron-LM stores int32", hint="choose another --format"
            )
        return cls("uint16" if facts.dtype == np.uint16 else "int32", facts.file_bytes is not None)

    def open(self, store: Store, number: int) -> OpenFile:
        return _Pair(store, f"{_STEM}-{number:05d}" if self.is_numbered else _STEM, self.dtype)

    def reading(self, location: str) -> str:
        numbers = "-00000" if self.is_numbered else ""
        return f"--data-path {location}/{_STEM}{numbers}" + (", and so on" if self.is_numbered else "")


class _Pair:
    def __init__(self, store: Store, stem: str, dtype: str) -> None:
        self._store, self._stem, self._dtype = store, stem, np.dtype(dtype)
        self.name = f"{stem}.bin"
        self._bin = store.spool(self.name)
        # 4 bytes per document, and a large corpus has billions of them
        self._lengths = temporary_file()

    def write(self, documents: Documents) -> None:
        self._bin.file.write(np.ascontiguousarray(documents.tokens, self._dtype).data)
        self._lengths.write(documents.lengths.astype(np.int32).data)

    def close(self) -> int:
        bin_bytes = self._bin.file.tell()
        self._bin.put()
        with self._lengths, written(self._store, f"{self._stem}.idx") as index:
            count = self._lengths.tell() // 4
            index.write(MAGIC + struct.pack("<QBQQ", 1, DTYPE_CODES[self._dtype.name], count, count + 1))
            for lengths in self._chunks():
                index.write(lengths.data)
            position = 0
            for lengths in self._chunks():
                ends = position + np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
                index.write((ends - lengths * np.int64(self._dtype.itemsize)).data)
                position = int(ends[-1])
            for start in range(0, count + 1, _INDEX_ENTRIES):
                index.write(np.arange(start, min(start + _INDEX_ENTRIES, count + 1), dtype=np.int64).data)
            return bin_bytes + index.tell()

    def discard(self) -> None:
        self._bin.discard()
        self._lengths.close()

    def _chunks(self) -> Iterator[NDArray[np.int32]]:
        """The lengths of all documents, some at a time."""
        self._lengths.seek(0)
        while content := self._lengths.read(4 * _INDEX_ENTRIES):
            yield np.frombuffer(content, np.int32)
