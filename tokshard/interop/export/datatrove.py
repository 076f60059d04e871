"""Files of datatrove and nanotron: ids, the end of every document, a byte for each id that is trained, and a note."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tokshard.interop.export.files import CorpusFacts, OpenFile, WrittenFile
from tokshard.interop.export.flat_file import FlatFile
from tokshard.store import Store


@dataclass(frozen=True, slots=True)
class DatatroveFormat:
    """``part_NNNNN.ds`` with ``.index`` and ``.metadata``, and ``.loss`` of a corpus with spans."""

    dtype: str
    has_loss: bool
    tokenizer: str
    file_bytes: ClassVar[int | None] = 1 << 30
    max_file_bytes: ClassVar[int | None] = None
    max_document_tokens: ClassVar[int] = (1 << 63) - 1
    is_marked: ClassVar[bool] = False

    @classmethod
    def of(cls, facts: CorpusFacts) -> DatatroveFormat:
        """The format for one corpus."""
        return cls(facts.dtype.name, facts.loss is not None, facts.metadata["tokshard.tokenizer"])

    def sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths * (np.dtype(self.dtype).itemsize + self.has_loss) + 8

    def open(self, store: Store, number: int) -> OpenFile:
        name = f"part_{number:05d}.ds"
        return FlatFile(store, name, mask=f"{name}.loss" if self.has_loss else None, index=f"{name}.index")

    def finish(self, store: Store, files: list[WrittenFile]) -> None:
        """Write what datatrove says of each file: tokenizer, bytes of an id, and tokens."""
        width = np.dtype(self.dtype).itemsize
        for file in files:
            text = f"{self.tokenizer}|{width}\n{file.num_tokens}\n{file.num_tokens / 1e9:.2f} GT"
            store.put(f"{file.name}.metadata", text.encode())

    def reading(self, location: str) -> str:
        width = np.dtype(self.dtype).itemsize
        return f'DatatroveFolderDataset("{location}", seq_len=..., filename_pattern="*.ds", token_size={width})'
