"""From the tokens of other tools to documents: every boundary gets exactly one delimiter, and no id changes.

A record is the tokens between two boundaries. Boundaries are the ends of the source's own documents, the cuts that a
source names inside them, and all delimiters: in a corpus, EOS is only at the end of a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.format.arrays import lists_array
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS, spans_of
from tokshard.format.manifest import TokenizerInfo
from tokshard.format.schema import COLUMN_TYPES
from tokshard.interop.tokens.batches import TokenBatch
from tokshard.pipeline.encode.documents import ChunkResult, Documents
from tokshard.pipeline.sources.records import TOO_LONG, BadRecord, RecordSpec

OUT_OF_VOCABULARY = "id outside the vocabulary"

DOUBLED = "doubled delimiter"
"""Reason for a record of nothing but its delimiter."""

ADDED, INSIDE = "delimiter added", "end inside a document"
"""Counted changes of written documents: they lacked EOS; they end inside a document of the source."""


@dataclass(frozen=True, slots=True)
class _Records:
    """Records in a batch.

    Args:
        ends: int64 [records]: where each ends in the tokens.
        documents: int64 [records]: which document of the source each is from.
        is_last: bool [records]: it ends where its document of the source does.
    """

    ends: NDArray[np.int64]
    documents: NDArray[np.int64]
    is_last: NDArray[np.bool_]


class TokenPasser:
    """Makes documents of tokens. Costs about 1 ns per token."""

    def __init__(self, info: TokenizerInfo, spec: RecordSpec) -> None:
        assert spec.tokens is not None
        self._eos, self._bos, self._vocab_size = info.eos_id, info.bos_id, info.vocab_size
        self._others = [other for other in spec.tokens.delimiters if other != info.eos_id]
        self._max_bytes, self._has_weights = spec.max_document_bytes, spec.tokens.has_weights

    def __call__(self, batch: TokenBatch) -> ChunkResult:
        """The records of a batch, and the documents that they become."""
        tokens = batch.tokens
        is_delimiter = tokens == self._eos
        for other in self._others:
            is_delimiter |= tokens == other
        cuts = np.flatnonzero(is_delimiter) + 1
        records = _cut(batch.ends, cuts if batch.cuts is None else np.union1d(cuts, batch.cuts))
        ends = records.ends
        lengths = np.diff(ends, prepend=0)
        is_ended = np.zeros(len(ends), np.bool_)
        has_tokens = lengths > 0
        is_ended[has_tokens] = is_delimiter[ends[has_tokens] - 1]
        bad = self._bad(batch, records, lengths)
        is_good = np.ones(len(ends), np.bool_)
        is_good[[record.position for record in bad]] = False
        is_doubled = is_good & is_ended & (lengths == 1)
        is_kept = is_good & has_tokens & ~is_doubled
        positions = np.flatnonzero(is_kept)
        kept = tokens if is_kept.all() else tokens[np.repeat(is_kept, lengths)]
        kept_ends, loss = np.cumsum(lengths[is_kept]), None
        if batch.loss is not None:
            loss = batch.loss[np.repeat(is_kept, lengths)]
            loss[np.concatenate([np.zeros(1, np.int64), kept_ends])[:-1]] = 0  # nothing comes before it
        finished, finished_ends, loss = self._delimited(kept, kept_ends, is_ended[is_kept], loss)
        is_inside = np.zeros(len(ends), np.bool_) if batch.is_stream else ~records.is_last
        return ChunkResult(
            count=len(ends),
            input_bytes=batch.input_bytes,
            documents=Documents(
                tokens=finished,
                ends=finished_ends,
                positions=positions,
                columns=self._spans(loss, finished_ends) | _columns(batch, records, positions),
            ),
            bad=bad,
            left_out={DOUBLED: np.flatnonzero(is_doubled)},
            changes={ADDED: positions[~is_ended[positions]], INSIDE: positions[is_inside[positions]]},
            fields=frozenset(batch.columns),
            padding=None if batch.padding is None else _at_last(batch.padding, records),
        )

    def _bad(self, batch: TokenBatch, records: _Records, lengths: NDArray[np.int64]) -> list[BadRecord]:
        tokens, ends = batch.tokens, records.ends
        found: dict[int, BadRecord] = {}
        for position in np.flatnonzero(np.isin(records.documents, list(batch.problems))).tolist():
            found[position] = BadRecord(position, *batch.problems[int(records.documents[position])])
        limit = self._max_bytes // tokens.itemsize
        for position in np.flatnonzero(lengths > limit).tolist():
            detail = f"{int(lengths[position]):,} ids of {tokens.itemsize} bytes, at most {limit:,} are allowed"
            found[position] = BadRecord(position, TOO_LONG, detail)
        if len(tokens) and (int(tokens.max()) >= self._vocab_size or int(tokens.min()) < 0):
            is_outside = tokens >= self._vocab_size
            if np.issubdtype(tokens.dtype, np.signedinteger):
                is_outside |= tokens < 0
            places = np.flatnonzero(is_outside)
            positions, first = np.unique(np.searchsorted(ends, places, "right"), return_index=True)
            for position, place in zip(positions.tolist(), places[first].tolist(), strict=True):
                at = place - int(ends[position] - lengths[position])
                detail = (
                    f"id {int(tokens[place]):,} at token {at:,}; the vocabulary has ids up to {self._vocab_size - 1:,}"
                )
                found[position] = BadRecord(position, OUT_OF_VOCABULARY, detail)
        return [found[position] for position in sorted(found)]

    def _delimited(
        self,
        tokens: NDArray[Any],
        ends: NDArray[np.int64],
        is_ended: NDArray[np.bool_],
        loss: NDArray[np.float32] | None,
    ) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.float32] | None]:
        """Tokens in which every document ends in EOS, and begins with BOS if there is one; their ends and weights.

        Added delimiters are not targets.
        """
        for other in self._others:
            tokens = np.where(tokens == other, np.uint32(self._eos), tokens.astype(np.uint32))
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends
        has_bos = np.ones(len(ends), np.bool_) if self._bos is None else tokens[starts] == self._bos
        if is_ended.all() and has_bos.all():
            return tokens, ends, loss
        # of two ids at one place, the EOS of a document comes before the BOS of the next
        places = np.concatenate([ends[~is_ended], starts[~has_bos]])
        ids = np.repeat(np.array([self._eos, self._bos or 0], np.uint32), [(~is_ended).sum(), (~has_bos).sum()])
        added = (~is_ended).astype(np.int64) + ~has_bos
        loss = None if loss is None else np.insert(loss, places, 0)
        return np.insert(tokens.astype(np.uint32), places, ids), ends + np.cumsum(added), loss

    def _spans(self, loss: NDArray[np.float32] | None, ends: NDArray[np.int64]) -> dict[str, pa.Array]:
        """The columns of loss spans of documents, from the weight of each token."""
        if loss is None:
            return {}
        offsets, values, weights = spans_of(loss, ends)
        found = {LOSS: lists_array(2 * offsets, values, COLUMN_TYPES[LOSS_COLUMNS[LOSS]])}
        if self._has_weights:
            found[WEIGHTS] = lists_array(offsets, weights, COLUMN_TYPES[LOSS_COLUMNS[WEIGHTS]])
        return found


def _at_last(padding: NDArray[np.int64], records: _Records) -> NDArray[np.int64]:
    """The ids of padding for each record: those of a document of the source count for its last record."""
    found = np.zeros(len(records.ends), np.int64)
    found[records.is_last] = padding
    return found


def _cut(ends: NDArray[np.int64], delimited: NDArray[np.int64]) -> _Records:
    """Cut documents of the source.

    Args:
        ends: where the documents end, ascending.
        delimited: where the delimiters end, and where other documents begin; ascending.
    """
    places = np.searchsorted(ends, delimited)
    is_new = ends[np.minimum(places, len(ends) - 1)] != delimited
    inside, places = delimited[is_new], places[is_new]
    documents = np.arange(len(ends))
    if not len(inside):
        return _Records(ends, documents, np.ones(len(ends), np.bool_))
    return _Records(
        np.insert(ends, places, inside),
        np.insert(documents, places, places),
        np.insert(np.ones(len(ends), np.bool_), places, False),
    )


def _columns(batch: TokenBatch, records: _Records, positions: NDArray[np.int64]) -> dict[str, Sequence[Any]]:
    """The kept values of the documents."""
    chosen = records.documents[positions].tolist()
    return {name: [values[index] for index in chosen] for name, values in batch.columns.items()}
