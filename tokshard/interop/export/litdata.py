"""litdata's chunks for its ``TokensLoader``: the ids of documents one after another, and ``index.json``.

The loader cuts each chunk into blocks of its `block_size` and skips the rest at the end of the chunk.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tokshard.interop.export.files import CorpusFacts, OpenFile, WrittenFile
from tokshard.interop.export.samples import MAX_BYTES, SampleFile, SampleLayout
from tokshard.store import Store

TENSOR_CODES = {"uint16": 20, "int32": 16, "int64": 18}
"""litdata's numbers of torch's dtypes."""

_ONE_LEAF = '[1, {"type": null, "context": null, "children_spec": []}]'
"""A sample is one tensor, as torch writes the structure of a tree down."""


@dataclass(frozen=True, slots=True)
class LitdataFormat:
    """Chunks as ``optimize(fn, ..., item_loader=TokensLoader())`` writes them for tensors of one dimension."""

    dtype: str
    chunk_bytes: int
    default_bytes: ClassVar[int] = 64 << 20
    file_bytes: ClassVar[int | None] = default_bytes
    max_file_bytes: ClassVar[int | None] = MAX_BYTES
    is_marked: ClassVar[bool] = True

    @classmethod
    def of(cls, facts: CorpusFacts, *, chunk_bytes: int) -> LitdataFormat:
        """The format for one corpus."""
        if facts.dtype == np.uint16:
            return cls("uint16", chunk_bytes)
        return cls("int32" if facts.vocab_size <= 1 << 31 else "int64", chunk_bytes)

    @property
    def max_document_tokens(self) -> int:
        return (MAX_BYTES - 4096) // np.dtype(self.dtype).itemsize

    def sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths * np.dtype(self.dtype).itemsize + 4

    def open(self, store: Store, number: int) -> OpenFile:
        return SampleFile(store, f"chunk-0-{number}.bin", SampleLayout(dtype=np.dtype(self.dtype)))

    def finish(self, store: Store, files: list[WrittenFile]) -> None:
        chunks = [
            {
                "chunk_bytes": file.num_bytes,
                "chunk_size": file.num_documents,
                "dim": file.num_tokens,
                "filename": file.name,
            }
            for file in files
        ]
        # its readers name their cached copies by the time, so another export into the same place needs another one
        index = {"chunks": chunks, "config": self._config(), "updated_at": str(time.time())}
        store.put("index.json", json.dumps(index, sort_keys=True).encode())

    def reading(self, location: str) -> str:
        return f'StreamingDataset("{location}", item_loader=TokensLoader(block_size=...))'

    def _config(self) -> dict[str, Any]:
        return {
            "chunk_bytes": self.chunk_bytes,
            "chunk_size": None,
            "compression": None,
            "data_format": [f"no_header_tensor:{TENSOR_CODES[self.dtype]}"],
            "data_spec": _ONE_LEAF,
            "encryption": None,
            "item_loader": "TokensLoader",
        }
