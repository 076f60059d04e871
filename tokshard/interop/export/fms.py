"""Arrow files of fms-fsdp: each record batch is one document, in a column of ids, and a table of counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from tokshard.format.arrays import number_array
from tokshard.interop.export.batch_file import BatchFile
from tokshard.interop.export.documents import Documents
from tokshard.interop.export.files import CorpusFacts, Format, OpenFile, WrittenFile
from tokshard.store import Store

COLUMN = "tokens"
COUNTS = "meta/combined_counts.csv"
_BATCH_BYTES = 256
"""Bytes that Arrow writes around a document: its message, its entry in the footer, and padding to 8 bytes."""


@dataclass(frozen=True)
class FmsFormat(Format):
    """``DATASET/part-NNNNN.arrow`` and ``meta/combined_counts.csv``, where fms-fsdp expects it."""

    dataset: str
    metadata: dict[str, str]
    summary: ClassVar[str] = "Arrow files of fms-fsdp"
    file_bytes: ClassVar[int | None] = 1 << 30

    @classmethod
    def of(cls, facts: CorpusFacts) -> FmsFormat:
        """The format for one corpus."""
        return cls("uint32", facts.name, facts.metadata)

    def sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return super().sizes(lengths) + _BATCH_BYTES

    def open(self, store: Store, number: int) -> OpenFile:
        schema = pa.schema([pa.field(COLUMN, pa.uint32())], metadata=self.metadata)
        name = f"{self.dataset}/part-{number:05d}.arrow"
        return BatchFile(store, name, schema, open_writer=ipc.new_file, batches=_batches)

    def finish(self, store: Store, files: list[WrittenFile]) -> None:
        lines = [f"/{file.name},{file.num_documents},{file.num_tokens}\n" for file in files]
        store.put(COUNTS, ("dataset/filename,documents,tokens\n" + "".join(lines)).encode())

    def reading(self, location: str) -> str:
        return f"--data_path={location} --datasets={self.dataset} --file_type=arrow"


def _batches(documents: Documents) -> Iterator[list[pa.Array]]:
    """A record batch for each document."""
    ids = number_array(documents.tokens.astype(np.uint32, copy=False))
    for start, length in zip(documents.starts.tolist(), documents.lengths.tolist(), strict=True):
        yield [ids.slice(start, length)]
