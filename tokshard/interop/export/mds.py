"""MosaicML's MDS: shards of samples, each an array of tokens, and ``index.json``."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tokshard.interop.export.files import CorpusFacts, OpenFile, WrittenFile
from tokshard.interop.export.samples import MAX_BYTES, SampleFile, SampleLayout
from tokshard.store import Store

COLUMN = "tokens"
_SHAPES = ((1 << 8, struct.Struct("<IBB")), (1 << 16, struct.Struct("<IBH")), (1 << 32, struct.Struct("<IBI")))
_HEAD_BYTES = 9
"""Most bytes before the ids of a sample: its size, the kind of its shape, and its shape."""


@dataclass(frozen=True, slots=True)
class MdsFormat:
    """Shards as ``MDSWriter(columns={"tokens": "ndarray:DTYPE"})`` writes them."""

    dtype: str
    size_limit: int
    default_bytes: ClassVar[int] = 64 << 20
    file_bytes: ClassVar[int | None] = default_bytes
    max_file_bytes: ClassVar[int | None] = MAX_BYTES
    is_marked: ClassVar[bool] = True

    @classmethod
    def of(cls, facts: CorpusFacts, *, size_limit: int) -> MdsFormat:
        """The format for one corpus."""
        return cls(facts.dtype.name, size_limit)

    @property
    def max_document_tokens(self) -> int:
        return (MAX_BYTES - 4096) // np.dtype(self.dtype).itemsize

    def sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths * np.dtype(self.dtype).itemsize + _HEAD_BYTES + 4

    def open(self, store: Store, number: int) -> OpenFile:
        text = json.dumps(self._config(), sort_keys=True).encode()
        layout = SampleLayout(dtype=np.dtype(self.dtype), text=text, head=_head)
        return SampleFile(store, f"shard.{number:05d}.mds", layout)

    def finish(self, store: Store, files: list[WrittenFile]) -> None:
        shards = [
            self._config()
            | {
                "raw_data": {"basename": file.name, "bytes": file.num_bytes, "hashes": {}},
                "samples": file.num_documents,
                "zip_data": None,
            }
            for file in files
        ]
        store.put("index.json", json.dumps({"shards": shards, "version": 2}, sort_keys=True).encode())

    def reading(self, location: str) -> str:
        kind = "remote" if "://" in location else "local"
        return f'StreamingDataset({kind}="{location}"), whose samples have the column "{COLUMN}"'

    def _config(self) -> dict[str, Any]:
        return {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": [],
            "size_limit": self.size_limit,
            "column_names": [COLUMN],
            "column_encodings": [f"ndarray:{self.dtype}"],
            "column_sizes": [None],
        }


def _head(num_tokens: int, itemsize: int) -> bytes:
    """What precedes the ids of a sample: the size of the array in bytes, and its shape in the narrowest type."""
    code, head = next((code, head) for code, (end, head) in enumerate(_SHAPES) if num_tokens < end)
    return head.pack(1 + head.size - _SHAPES[0][1].size + 1 + num_tokens * itemsize, 1 << 2 | code, num_tokens)
