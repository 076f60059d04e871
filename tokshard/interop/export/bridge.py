"""Packs of Megatron-Bridge: parquet files in which each row holds several documents, and the mask of their loss.

A row has the ids, where each document starts in them, and a mask that is shifted: the value of a token lies one place
before it, and the last of each document is 0. Rows hold consecutive documents, as many as fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.arrays import number_array
from tokshard.interop.export.batch_file import BatchFile, open_parquet
from tokshard.interop.export.documents import Documents, joined
from tokshard.interop.export.files import CorpusFacts, OpenFile, WrittenFile
from tokshard.store import Store

COLUMN, PACKED, STARTS = "input_ids", "loss_mask", "seq_start_id"
_SCHEMA = pa.schema(
    [
        (name, pa.list_(pa.field("element", kind)))
        for name, kind in {COLUMN: pa.int32(), PACKED: pa.int8(), STARTS: pa.int32()}.items()
    ]
)


@dataclass(frozen=True, slots=True)
class BridgeFormat:
    """``part-NNNNN.idx.parquet``. Of a corpus without loss spans, every token but the first of a document is trained.

    Args:
        max_document_tokens: the length of a row, which no document may exceed.
    """

    max_document_tokens: int
    schema: pa.Schema
    dtype: ClassVar[str] = "int32"
    file_bytes: ClassVar[int | None] = 512 << 20
    max_file_bytes: ClassVar[int | None] = None
    is_marked: ClassVar[bool] = False

    @classmethod
    def of(cls, facts: CorpusFacts, *, pack_tokens: int | None) -> BridgeFormat:
        """The format for one corpus.

        Raises:
            UsageError: nothing says how long a row is, or ids do not fit into an int32.
        """
        if pack_tokens is None or not 0 < pack_tokens < 1 << 31:
            raise UsageError(
                "bridge: a row needs a length" if pack_tokens is None else f"a row cannot have {pack_tokens:,} tokens",
                hint="give the sequence length of the training with --pack-tokens",
            )
        if facts.vocab_size > 1 << 31:
            raise UsageError(
                f"the vocabulary has {facts.vocab_size:,} ids; Megatron-Bridge stores int32",
                hint="choose another --format",
            )
        return cls(pack_tokens, _SCHEMA.with_metadata(facts.metadata))

    def sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return 5 * lengths + 4

    def open(self, store: Store, number: int) -> OpenFile:
        name = f"part-{number:05d}.idx.parquet"
        file = BatchFile(store, name, self.schema, open_writer=open_parquet, batches=self._batches)
        return _PackFile(file, self.rows)

    def finish(self, store: Store, files: list[WrittenFile]) -> None:
        """Do nothing: packs have no index."""

    def reading(self, location: str) -> str:
        return f'packed_train_data_path="{location}/*.idx.parquet", packed_sequence_size={self.max_document_tokens}'

    def rows(self, documents: Documents) -> NDArray[np.int64]:
        """The first document of each row, and the number of documents: int64 [rows + 1]."""
        return np.fromiter(self._firsts(documents.ends), np.int64)

    def _firsts(self, ends: NDArray[np.int64]) -> Iterator[int]:
        first = filled = 0
        while first < len(ends):
            yield first
            first = int(np.searchsorted(ends, filled + self.max_document_tokens, "right"))
            filled = int(ends[first - 1])
        yield len(ends)

    def _batches(self, documents: Documents) -> Iterator[list[pa.Array]]:
        """One record batch: the rows of whole packs."""
        starts, rows = documents.starts, self.rows(documents)
        bounds = np.append(starts, len(documents.tokens))[rows]
        lengths = np.diff(rows)
        mask = np.ones(len(documents.tokens), np.int8)
        if documents.loss is not None:
            mask[:-1] = documents.loss[1:] > 0
        mask[documents.ends - 1] = 0
        values = (
            (documents.tokens.astype(np.int32), bounds),
            (mask, bounds),
            ((starts - np.repeat(bounds[:-1], lengths)).astype(np.int32), rows),
        )
        yield [
            pa.ListArray.from_arrays(number_array(places.astype(np.int32)), number_array(value), type=kind)
            for (value, places), kind in zip(values, self.schema.types, strict=True)
        ]


class _PackFile:
    """A file that keeps the documents of its last row until it is full."""

    def __init__(self, file: BatchFile, rows: Callable[[Documents], NDArray[np.int64]]) -> None:
        self._file, self._rows = file, rows
        self._held: Documents | None = None

    def write(self, documents: Documents) -> None:
        found = documents if self._held is None else joined(self._held, documents)
        last = int(self._rows(found)[-2])
        if last:
            self._file.write(found.part(0, last))
        rest = found.part(last, len(found))
        self._held = replace(rest, tokens=rest.tokens.copy())  # what it was may be unmapped

    def close(self) -> WrittenFile:
        if self._held is not None:
            self._file.write(self._held)
        return self._file.close()

    def discard(self) -> None:
        self._file.discard()
