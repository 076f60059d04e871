"""The parallel files of OLMo-core: flat ids, and beside them a byte for each that says whether it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tokshard.interop.export.files import CorpusFacts, OpenFile, WrittenFile
from tokshard.interop.export.flat_file import FlatFile
from tokshard.store import Store

IDS, MASK = "token_ids", "labels_mask"


@dataclass(frozen=True, slots=True)
class OlmoFormat:
    """``token_ids_part_NNNN.npy``, which has no header, and ``labels_mask_part_NNNN.npy`` of a corpus with spans."""

    dtype: str
    has_loss: bool
    file_bytes: ClassVar[int | None] = 1 << 30
    max_file_bytes: ClassVar[int | None] = None
    max_document_tokens: ClassVar[int] = (1 << 63) - 1
    is_marked: ClassVar[bool] = False

    @classmethod
    def of(cls, facts: CorpusFacts) -> OlmoFormat:
        """The format for one corpus."""
        return cls(facts.dtype.name, facts.loss is not None)

    def sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths * (np.dtype(self.dtype).itemsize + self.has_loss)

    def open(self, store: Store, number: int) -> OpenFile:
        end = f"_part_{number:04d}.npy"
        return FlatFile(store, IDS + end, mask=MASK + end if self.has_loss else None)

    def finish(self, store: Store, files: list[WrittenFile]) -> None:
        """Do nothing: the files have no index."""

    def reading(self, location: str) -> str:
        masks = f', label_mask_paths=["{location}/{MASK}_part_*.npy"]' if self.has_loss else ""
        return f'paths=["{location}/{IDS}_part_*.npy"]{masks}, as {self.dtype}'
