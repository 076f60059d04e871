"""What MDS and litdata have in common: a file of samples that starts with the place of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.interop.export.documents import Documents
from tokshard.interop.export.files import WrittenFile
from tokshard.store import Store, written

MAX_BYTES = (1 << 32) - 1
"""Places in a file are uint32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLayout:
    """The layout of a file: number of samples, place of each and of the end, all as uint32; a text; the samples.

    Args:
        dtype: of the ids.
        text: follows the places.
        head: from the length of a document and the size of an id to the bytes that precede its ids; None: no bytes.
    """

    dtype: np.dtype[Any]
    text: bytes = b""
    head: Callable[[int, int], bytes] | None = None


class SampleFile:
    """One file, held in memory until it is closed, because the places come first."""

    def __init__(self, store: Store, name: str, layout: SampleLayout) -> None:
        self._store, self._name, self._layout = store, name, layout
        self._lengths: list[NDArray[np.int64]] = []
        self._tokens: list[NDArray[Any]] = []

    def write(self, documents: Documents) -> None:
        self._lengths.append(documents.lengths)
        self._tokens.append(documents.tokens.astype(self._layout.dtype))  # a copy: what it was may be unmapped

    def close(self) -> WrittenFile:
        lengths = np.concatenate(self._lengths)
        of_documents = [self._heads_and_ids(*each) for each in zip(self._lengths, self._tokens, strict=True)]
        sizes = np.concatenate([sizes for sizes, _ in of_documents])
        first = 4 * (len(lengths) + 2) + len(self._layout.text)
        places = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]) + first
        with written(self._store, self._name) as file:
            file.write(np.uint32(len(lengths)).tobytes() + places.astype(np.uint32).tobytes() + self._layout.text)
            for _, parts in of_documents:
                file.writelines(parts)
        return WrittenFile(
            name=self._name,
            num_documents=len(lengths),
            num_tokens=int(lengths.sum()),
            num_bytes=int(places[-1]),
        )

    def discard(self) -> None:
        """Forget the samples."""
        self._tokens.clear()

    def _heads_and_ids(self, lengths: NDArray[np.int64], tokens: NDArray[Any]) -> tuple[NDArray[np.int64], list[Any]]:
        """The size of each sample in bytes, and the bytes to write."""
        itemsize, head = self._layout.dtype.itemsize, self._layout.head
        if head is None:
            return lengths * itemsize, [tokens.data]
        heads = [head(length, itemsize) for length in lengths.tolist()]
        content, ends = tokens.data.cast("B"), (itemsize * np.cumsum(lengths)).tolist()
        ids = [content[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
        head_bytes = np.fromiter(map(len, heads), np.int64, len(heads))
        return head_bytes + lengths * itemsize, list(itertools.chain.from_iterable(zip(heads, ids, strict=True)))
