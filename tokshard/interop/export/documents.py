"""The documents of a corpus as an export writes them: in slices of bounded size, with or without delimiters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.format.arrays import number_array
from tokshard.format.corpus import Corpus
from tokshard.format.whole_corpus import checked_batches

SLICE_TOKENS = 1 << 20
"""Tokens that are converted at once, unless one document is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Some consecutive documents.

    Args:
        tokens: uint16 or uint32 [tokens], one document after another.
        ends: int64 [documents], where each ends in `tokens`.
        columns: kept columns, one value per document.
        loss: float32 [tokens], the weight of each token in the loss; None if spans are not exported.
    """

    tokens: NDArray[Any]
    ends: NDArray[np.int64]
    columns: Mapping[str, pa.Array] = field(default_factory=dict)
    loss: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each document starts in `tokens`: int64 [documents]."""
        return np.concatenate([np.zeros(1, np.int64), self.ends])[:-1]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document: int64 [documents]."""
        return np.diff(self.ends, prepend=0)

    def part(self, start: int, stop: int) -> Documents:
        """The documents ``[start, stop)``; nothing is copied."""
        first = int(self.ends[start - 1]) if start else 0
        last = int(self.ends[stop - 1]) if stop else 0
        return Documents(
            tokens=self.tokens[first:last],
            ends=self.ends[start:stop] - first,
            columns={name: column.slice(start, stop - start) for name, column in self.columns.items()},
            loss=None if self.loss is None else self.loss[first:last],
        )


def read_documents(corpus: Corpus, *, columns: Collection[str], with_loss: bool) -> Iterator[Documents]:
    """All documents in order, at most `SLICE_TOKENS` or one document at a time: views of the shards.

    Args:
        columns: the kept columns to read.
        with_loss: whether to read the weights in the loss.

    Raises:
        DamagedCorpusError: a shard is missing, or does not match the manifest and its hashes.
    """
    for index in range(len(corpus.shards)):
        for shard, batch in checked_batches(corpus, index):
            offsets, tokens = shard.batch(batch)
            kept = {name: column for name, column in shard.columns(batch).items() if name in columns} if columns else {}
            whole = Documents(tokens=tokens, ends=offsets[1:], columns=kept)
            targets = shard.targets(batch) if with_loss else None
            start = 0
            while start < len(whole):
                fit = int(np.searchsorted(offsets, offsets[start] + SLICE_TOKENS, "right")) - 1
                stop = max(start + 1, fit)
                part = whole.part(start, stop)
                if targets is not None:
                    part = replace(part, loss=targets.of_tokens(int(offsets[start]), int(offsets[stop])))
                yield part
                start = stop


def without_delimiters(documents: Documents, *, eos: bool, bos: bool) -> Documents:
    """The same documents without their last token, their first one, or both; some may then be empty.

    Args:
        eos: take out the last token of each.
        bos: take out the first token of each. If `eos` is true, too, each document needs at least two tokens.
    """
    kept = np.ones(len(documents.tokens), np.bool_)
    if eos:
        kept[documents.ends - 1] = False
    if bos:
        kept[documents.starts] = False
    taken = (eos + bos) * np.arange(1, len(documents) + 1)
    loss = None if documents.loss is None else documents.loss[kept]
    return replace(documents, tokens=documents.tokens[kept], ends=documents.ends - taken, loss=loss)


def without_empty(documents: Documents) -> Documents:
    """The documents that have tokens."""
    is_kept = documents.lengths > 0
    if is_kept.all():
        return documents
    kept = number_array(np.flatnonzero(is_kept))
    columns = {name: column.take(kept) for name, column in documents.columns.items()}
    return replace(documents, ends=documents.ends[is_kept], columns=columns)
