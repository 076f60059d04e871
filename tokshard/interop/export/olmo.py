"""The parallel files of OLMo-core: flat ids, and beside them a byte for each that says whether it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tokshard.interop.export.documents import Documents
from tokshard.interop.export.files import CorpusFacts, Format, OpenFile
from tokshard.store import Store

IDS, MASK = "token_ids", "labels_mask"


@dataclass(frozen=True)
class OlmoFormat(Format):
    """``token_ids_part_NNNN.npy``, which has no header, and ``labels_mask_part_NNNN.npy`` of a corpus with spans."""

    has_loss: bool
    summary: ClassVar[str] = "flat ids and masks of OLMo-core"
    holds_masks: ClassVar[bool] = True
    file_bytes: ClassVar[int | None] = 1 << 30

    @classmethod
    def of(cls, facts: CorpusFacts) -> OlmoFormat:
        """The format for one corpus."""
        return cls(facts.dtype.name, facts.loss is not None)

    @property
    def max_document_tokens(self) -> int:
        return (1 << 63) - 1

    def sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return super().sizes(lengths) + lengths * self.has_loss

    def open(self, store: Store, number: int) -> OpenFile:
        end = f"_part_{number:04d}.npy"
        return _FlatFile(store, IDS + end, mask=MASK + end if self.has_loss else None)

    def reading(self, location: str) -> str:
        masks = f', label_mask_paths=["{location}/{MASK}_part_*.npy"]' if self.has_loss else ""
        return f'paths=["{location}/{IDS}_part_*.npy"]{masks}, as {self.dtype}'


class _FlatFile:
    """A file of ids, and the mask beside it.

    Args:
        mask: name of a file with a byte for each id, 1 where it is trained; None for none.
    """

    def __init__(self, store: Store, name: str, *, mask: str | None) -> None:
        self.name = name
        self._ids, self._mask = store.spool(name), mask and store.spool(mask)

    def write(self, documents: Documents) -> None:
        self._ids.file.write(np.ascontiguousarray(documents.tokens).data)
        if self._mask and documents.loss is not None:
            self._mask.file.write((documents.loss > 0).data)

    def close(self) -> int:
        spools = [spool for spool in (self._ids, self._mask) if spool]
        num_bytes = sum(spool.file.tell() for spool in spools)
        for spool in spools:
            spool.put()
        return num_bytes

    def discard(self) -> None:
        for spool in (self._ids, self._mask):
            if spool:
                spool.discard()
