"""Arrow files of fms-fsdp: each record batch is one document, in a column of ids, and a table of counts."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from tokshard.format.arrays import number_array
from tokshard.interop.export.documents import Documents
from tokshard.interop.export.files import CorpusFacts, OpenFile, WrittenFile
from tokshard.store import Store

COLUMN = "tokens"
COUNTS = "meta/combined_counts.csv"
_BATCH_BYTES = 256
"""What Arrow writes around a document: its message, its entry in the footer, and what fills it up to 8 bytes."""


@dataclass(frozen=True, slots=True)
class FmsFormat:
    """``DATASET/part-NNNNN.arrow`` and ``meta/combined_counts.csv``, where fms-fsdp expects it."""

    dataset: str
    metadata: dict[str, str]
    dtype: ClassVar[str] = "uint32"
    file_bytes: ClassVar[int | None] = 1 << 30
    max_file_bytes: ClassVar[int | None] = None
    max_document_tokens: ClassVar[int] = (1 << 31) - 1
    is_marked: ClassVar[bool] = False

    @classmethod
    def of(cls, facts: CorpusFacts) -> FmsFormat:
        """The format for one corpus."""
        return cls(facts.name, facts.metadata)

    def sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return 4 * lengths + _BATCH_BYTES

    def open(self, store: Store, number: int) -> OpenFile:
        schema = pa.schema([pa.field(COLUMN, pa.uint32())], metadata=self.metadata)
        return _ArrowFile(store, f"{self.dataset}/part-{number:05d}.arrow", schema)

    def finish(self, store: Store, files: list[WrittenFile]) -> None:
        lines = [f"/{file.name},{file.num_documents},{file.num_tokens}\n" for file in files]
        store.put(COUNTS, ("dataset/filename,documents,tokens\n" + "".join(lines)).encode())

    def reading(self, location: str) -> str:
        return f"--data_path={location} --datasets={self.dataset} --file_type=arrow"


class _ArrowFile:
    def __init__(self, store: Store, name: str, schema: pa.Schema) -> None:
        self._name, self._schema = name, schema
        self._spool = store.spool(name)
        self._writer = ipc.new_file(self._spool.file, schema)
        self._num_documents = self._num_tokens = 0

    def write(self, documents: Documents) -> None:
        ids = number_array(documents.tokens.astype(np.uint32, copy=False))
        for start, length in zip(documents.starts.tolist(), documents.lengths.tolist(), strict=True):
            self._writer.write_batch(pa.record_batch([ids.slice(start, length)], schema=self._schema))
        self._num_documents += len(documents)
        self._num_tokens += len(documents.tokens)

    def close(self) -> WrittenFile:
        self._writer.close()
        num_bytes = self._spool.file.tell()
        self._spool.put()
        return WrittenFile(
            name=self._name,
            num_documents=self._num_documents,
            num_tokens=self._num_tokens,
            num_bytes=num_bytes,
        )

    def discard(self) -> None:
        with contextlib.suppress(Exception):
            self._writer.close()
        self._spool.discard()
