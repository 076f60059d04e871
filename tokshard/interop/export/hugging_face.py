"""A Hugging Face data set: parquet files with ``input_ids``, ``labels`` if there are any, and the kept columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.arrays import number_array
from tokshard.interop.export.batch_file import BatchFile, open_parquet
from tokshard.interop.export.documents import Documents
from tokshard.interop.export.files import LABELS, MASK, CorpusFacts, Format, OpenFile
from tokshard.store import Store

COLUMN = "input_ids"
IGNORED = -100
"""The label of a token that is not trained."""


@dataclass(frozen=True)
class HuggingFaceFormat(Format):
    """``part-NNNNN.parquet``; ids are int32, as `datasets` stores tokenizer ids.

    ``load_dataset`` takes a directory with the name of a split for that split.
    """

    schema: pa.Schema
    summary: ClassVar[str] = "a Hugging Face data set in parquet"
    holds_masks: ClassVar[bool] = True
    holds_weights: ClassVar[bool] = True
    file_bytes: ClassVar[int | None] = 512 << 20

    @classmethod
    def of(cls, facts: CorpusFacts) -> HuggingFaceFormat:
        """The format for one corpus.

        Raises:
            UsageError: a kept column has the name of the ids' column.
        """
        for taken, what in ((COLUMN, "the tokens"), (facts.loss, "what is trained")):
            if any(field.name == taken for field in facts.columns):
                raise UsageError(
                    f"the corpus has a kept column {taken!r}, which is what a Hugging Face data set calls {what}",
                    hint="leave the kept columns out with --no-columns",
                )
        dtype = "int32" if facts.vocab_size <= 1 << 31 else "int64"
        lists = {COLUMN: dtype} | ({facts.loss: "float" if facts.loss == MASK else dtype} if facts.loss else {})
        fields = [pa.field(name, pa.list_(pa.field("element", kind))) for name, kind in lists.items()]
        return cls(dtype, pa.schema([*fields, *facts.columns], metadata=facts.metadata))

    def sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        num_lists = 1 + any(name in self.schema.names for name in (LABELS, MASK))
        return super().sizes(lengths) * num_lists

    def open(self, store: Store, number: int) -> OpenFile:
        name = f"part-{number:05d}.parquet"
        return BatchFile(store, name, self.schema, open_writer=open_parquet, batches=self._batches)

    def reading(self, location: str) -> str:
        return f'datasets.load_dataset("{location}")'

    def _batches(self, documents: Documents) -> Iterator[list[pa.Array]]:
        """One record batch: a row for each document."""
        tokens = documents.tokens.astype(self.dtype)
        values = [tokens]
        if MASK in self.schema.names and documents.loss is not None:
            values.append(documents.loss)
        elif documents.loss is not None:
            values.append(np.where(documents.loss > 0, tokens, tokens.dtype.type(IGNORED)))
        offsets = number_array(np.concatenate([np.zeros(1, np.int32), documents.ends.astype(np.int32)]))
        lists = [
            pa.ListArray.from_arrays(offsets, number_array(one), type=self.schema.types[at])
            for at, one in enumerate(values)
        ]
        yield [*lists, *documents.columns.values()]
