"""A file of ids without a header, and what may lie beside it: a mask, and where each document ends."""

from __future__ import annotations

import numpy as np

from tokshard.interop.export.documents import Documents
from tokshard.interop.export.files import WrittenFile
from tokshard.store import Store


class FlatFile:
    """Files that are written together.

    Args:
        mask: name of a file with a byte for each id, 1 where it is trained; None for none.
        index: name of a file with the end of each document as uint64; None for none.
    """

    def __init__(self, store: Store, name: str, *, mask: str | None = None, index: str | None = None) -> None:
        self._name = name
        self._ids, self._mask, self._index = (one and store.spool(one) for one in (name, mask, index))
        self._num_documents = self.num_tokens = 0

    def write(self, documents: Documents) -> None:
        assert self._ids
        self._ids.file.write(np.ascontiguousarray(documents.tokens).data)
        if self._mask and documents.loss is not None:
            self._mask.file.write((documents.loss > 0).data)
        if self._index:
            self._index.file.write((documents.ends + self.num_tokens).astype("<u8").data)
        self._num_documents += len(documents)
        self.num_tokens += len(documents.tokens)

    def close(self) -> WrittenFile:
        spools = [spool for spool in (self._ids, self._mask, self._index) if spool]
        num_bytes = sum(spool.file.tell() for spool in spools)
        for spool in spools:
            spool.put()
        return WrittenFile(
            name=self._name, num_documents=self._num_documents, num_tokens=self.num_tokens, num_bytes=num_bytes
        )

    def discard(self) -> None:
        for spool in (self._ids, self._mask, self._index):
            if spool:
                spool.discard()
