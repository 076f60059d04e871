"""The sink of a view: notes the kept documents as stretches, for the whole view and for each cell."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.format.arrays import numbers_of
from tokshard.format.view import Stretches, stretches_of
from tokshard.pipeline.encode.documents import Documents
from tokshard.pipeline.tasks.writing import lengths_of
from tokshard.pipeline.workspace.receipts import CellCounts, Receipt

ALL = "[]"
"""The label of all documents of a view."""


class Cells:
    """A `Sink` that notes the kept documents in the receipt. A cell's label is the JSON of its values, as texts.

    Args:
        by: the columns whose values make the cells.
    """

    def __init__(self, by: Sequence[str]) -> None:
        self._by, self._cells = by, dict[str, CellCounts]()
        self._stretches = dict[str, list[Stretches]]()

    def extend(self, parts: Sequence[Documents], source: int, base: int) -> None:  # noqa: ARG002 - as every sink
        """Note documents of one shard, in order."""
        for part in parts:
            if not len(part):
                continue
            targets = np.zeros(len(part), np.int64) if part.num_targets is None else part.num_targets
            columns = [part.numbers, part.starts, part.lengths, part.sources, targets]
            documents = np.stack([column for column in columns if column is not None])
            self._add(ALL, documents)
            if self._by:
                labels, of_document = _labels([part.columns[name] for name in self._by])
                order = np.argsort(of_document, kind="stable")
                bounds = of_document[order].searchsorted(np.arange(len(labels) + 1)).tolist()
                documents = documents[:, order]
                for number, label in enumerate(labels):
                    self._add(label, documents[:, bounds[number] : bounds[number + 1]])

    def _add(self, label: str, documents: NDArray[np.int64]) -> None:
        """Note documents.

        Args:
            documents: int64 [5, documents]: for each, its number and place in the base, tokens, source, and targets.
        """
        numbers, starts, lengths, sources, targets = documents
        found = CellCounts(
            documents=len(numbers),
            tokens=int(lengths.sum()),
            targets=int(targets.sum()),
            lengths=lengths_of(lengths),
            sources=_by_source(sources, lengths),
        )
        self._cells.setdefault(label, CellCounts()).add(found)
        self._stretches.setdefault(label, []).append(stretches_of(numbers, starts, lengths))

    def finish(self, receipt: Receipt) -> Receipt:
        """List the cells in the receipt."""
        for label, parts in self._stretches.items():
            self._cells[label].stretches = np.concatenate(parts).astype("<i8").tobytes()
        return msgspec.structs.replace(receipt, cells=self._cells)


def _by_source(sources: NDArray[np.int64], lengths: NDArray[np.int64]) -> dict[int, tuple[int, int]]:
    """The number of documents and of tokens from each source."""
    found, of_source = np.unique(sources, return_inverse=True)
    counts, tokens = np.bincount(of_source), np.bincount(of_source, lengths).astype(np.int64)
    return dict(zip(found.tolist(), zip(counts.tolist(), tokens.tolist(), strict=True), strict=True))


def _labels(columns: Sequence[pa.Array]) -> tuple[list[str], NDArray[np.int64]]:
    """The labels of the cells of some documents, and the cell of each document: int64 [documents]."""
    import pyarrow.compute as pc  # takes 50 ms, and most commands need none

    labels, of_document = [list[str | None]()], np.zeros(len(columns[0]), np.int64)
    for column in columns:
        is_float = pa.types.is_floating(column.type)
        told = pc.add(column, 0.0) if is_float else column  # -0.0 equals 0.0
        encoded = told.cast(pa.string()).dictionary_encode()
        known = [*encoded.dictionary.to_pylist(), None]
        # at most documents times documents, so many columns overflow nothing
        codes = of_document * len(known) + numbers_of(pc.fill_null(encoded.indices, len(known) - 1))
        cells, of_document = np.unique(codes, return_inverse=True)
        labels = [[*labels[code // len(known)], known[code % len(known)]] for code in cells.tolist()]
    return [json.dumps(values, ensure_ascii=False) for values in labels], of_document.astype(np.int64)
