"""MosaicML's MDS: shards of samples, each an array of tokens, and ``index.json``."""

from __future__ import annotations

import itertools
import json
import struct
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tokshard.interop.export.documents import Documents
from tokshard.interop.export.files import CorpusFacts, Format, OpenFile, WrittenFile
from tokshard.store import Store, written

COLUMN = "tokens"
_MAX_BYTES = (1 << 32) - 4_096
"""Places in a shard are uint32. The rest is for the description before the samples."""
_SHAPES = ((1 << 8, struct.Struct("<IBB")), (1 << 16, struct.Struct("<IBH")), (1 << 32, struct.Struct("<IBI")))
_HEAD_BYTES = 9
"""Most bytes before the ids of a sample: its size, the kind of its shape, and its shape."""


@dataclass(frozen=True)
class MdsFormat(Format):
    """Shards as ``MDSWriter(columns={"tokens": "ndarray:DTYPE"})`` writes them."""

    size_limit: int
    summary: ClassVar[str] = "MosaicML streaming"
    file_bytes: ClassVar[int] = 64 << 20
    max_file_bytes: ClassVar[int | None] = _MAX_BYTES
    is_marked: ClassVar[bool] = True

    @classmethod
    def of(cls, facts: CorpusFacts) -> MdsFormat:
        """The format for one corpus."""
        return cls(facts.dtype.name, facts.file_bytes or cls.file_bytes)

    @property
    def max_document_tokens(self) -> int:
        return _MAX_BYTES // np.dtype(self.dtype).itemsize

    def sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return super().sizes(lengths) + _HEAD_BYTES + 4

    def open(self, store: Store, number: int) -> OpenFile:
        text = json.dumps(self._config(), sort_keys=True).encode()
        return _Shard(store, f"shard.{number:05d}.mds", np.dtype(self.dtype), text)

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


class _Shard:
    """One shard: the number of samples, the place of each and of the end, a description, and the samples.

    It is held in memory until it is closed, because the places come first.
    """

    def __init__(self, store: Store, name: str, dtype: np.dtype[Any], text: bytes) -> None:
        self._store, self.name, self._dtype, self._text = store, name, dtype, text
        self._lengths: list[NDArray[np.int64]] = []
        self._tokens: list[NDArray[Any]] = []

    def write(self, documents: Documents) -> None:
        self._lengths.append(documents.lengths)
        self._tokens.append(documents.tokens.astype(self._dtype))  # a copy: the original may be unmapped

    def close(self) -> int:
        lengths = np.concatenate(self._lengths)
        heads = [_head(length, self._dtype.itemsize) for length in lengths.tolist()]
        sizes = np.fromiter(map(len, heads), np.int64, len(heads)) + lengths * self._dtype.itemsize
        places = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]) + 4 * (len(lengths) + 2) + len(self._text)
        parts = zip(self._tokens, self._lengths, strict=True)
        ids = (one.data for tokens, of in parts for one in np.split(tokens, np.cumsum(of)[:-1]))
        with written(self._store, self.name) as file:
            file.write(np.uint32(len(lengths)).tobytes() + places.astype(np.uint32).tobytes() + self._text)
            file.writelines(itertools.chain.from_iterable(zip(heads, ids, strict=True)))
        return int(places[-1])

    def discard(self) -> None:
        """Forget the samples."""
        self._tokens.clear()


def _head(num_tokens: int, itemsize: int) -> bytes:
    """The bytes before the ids of a sample: the size of the array in bytes, and its shape in the narrowest type."""
    code, head = next((code, head) for code, (end, head) in enumerate(_SHAPES) if num_tokens < end)
    return head.pack(1 + head.size - _SHAPES[0][1].size + 1 + num_tokens * itemsize, 1 << 2 | code, num_tokens)
