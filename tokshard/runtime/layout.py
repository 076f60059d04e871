"""Rows as slices of corpora: which tokens, which labels, which boundaries, before a token is copied.

Everything is arithmetic over whole arrays of pieces, for many batches at once, because a batch of a few rows would cost
more in calls than in copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.copying import GATHER_BELOW, Copier, Gather, Memory, Reads, ReadViews, Slices, address_of
from tokshard.runtime.order.windows import Pieces, TokenSource
from tokshard.runtime.packing import Packed

_NO_LABEL = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Rows of one or many batches, piece by piece, ready to be copied together.

    A row of the layout has seq_len + 1 tokens: its last one is the label of the one before, and no input.

    Args:
        row_tokens: seq_len + 1.
        dtype: of the tokens.
        samples: int64 [rows], global samples, `PADDING_INDEX` for rows that are padding.
        corpora: int64 [rows], corpus of each, or `PADDING_INDEX`.
        num_tokens: int32 [rows], inputs of each row that are no padding.
        copier: the tokens of all pieces, row after row, fillers included.
        first_span: where the pieces of each row start in the copier: rows + 1 entries, as of the lists below.
        lengths: int32 [pieces], inputs of each piece that has any.
        first_piece: where the pieces of each row start there.
        ignored: int64 [k], places in the rows without their last token, whose label is -100; ascending.
        first_ignored: where those of each row start.
        cuts: int64 [m], such places whose label is neither that nor the next token of the row; ascending.
        cut_labels: int64 [m], those labels.
        first_cut: where those of each row start.
    """

    row_tokens: int
    dtype: np.dtype[Any]
    samples: NDArray[np.int64]
    corpora: NDArray[np.int64]
    num_tokens: NDArray[np.int32]
    copier: Copier
    first_span: list[int]
    lengths: NDArray[np.int32]
    first_piece: list[int]
    ignored: NDArray[np.int64]
    first_ignored: list[int]
    cuts: NDArray[np.int64]
    cut_labels: NDArray[np.int64]
    first_cut: list[int]

    def pack(self, start: int, stop: int) -> Packed:
        """Copy the tokens of the rows ``[start, stop)`` together."""
        tokens = np.empty((stop - start, self.row_tokens), self.dtype)
        self.copier.copy(self.first_span[start], self.first_span[stop], tokens.reshape(-1))
        first = start * (self.row_tokens - 1)
        low, high = self.first_cut[start], self.first_cut[stop]
        return Packed(
            tokens=tokens,
            piece_lengths=self.lengths[self.first_piece[start] : self.first_piece[stop]],
            ignored=self.ignored[self.first_ignored[start] : self.first_ignored[stop]] - first,
            label_places=self.cuts[low:high] - first,
            labels=self.cut_labels[low:high],
            num_tokens_in_row=self.num_tokens[start:stop],
            corpus_index=self.corpora[start:stop],
            sample_index=self.samples[start:stop],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRows:
    """The pieces of one corpus in a layout, in the order of the rows that they belong to.

    Args:
        source: the corpus.
        rows: int64 [pieces], the row of each.
        starts: int64 [pieces], where in the corpus each starts.
        inputs: int64 [pieces], tokens of each that are inputs.
        tokens: int64 [pieces], tokens of each that are copied: inputs, and what follows them as a label.
        is_ignored: bool [pieces], whether its last input has no label.
        cut_labels: int64 [pieces], the label of its last input if that is no token of the row, else -1.
    """

    source: TokenSource
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    inputs: NDArray[np.int64]
    tokens: NDArray[np.int64]
    is_ignored: NDArray[np.bool_]
    cut_labels: NDArray[np.int64]


def corpus_rows(
    source: TokenSource,
    rows: NDArray[np.int64],
    counts: NDArray[np.int64],
    pieces: Pieces,
    *,
    seq_len: int,
    loss_across_documents: bool,
) -> CorpusRows:
    """Labels and views of the pieces of one corpus.

    A label is the next token of the document. Within a piece that is the next token of the row, and a piece that the
    row cuts is read one token further. Only where a block cuts a piece, the label comes from elsewhere.

    Args:
        rows: int64 [n], the rows that read this corpus.
        counts: int64 [n], pieces of each.
        pieces: of all of them; with `loss_across_documents` up to one token more than a row has inputs.
    """
    last = np.cumsum(counts) - 1
    tokens_in_row = np.add.reduceat(pieces.lengths, last - counts + 1)
    inputs, tokens = pieces.lengths, pieces.lengths.copy()
    is_followed = np.zeros(len(inputs), np.bool_)  # by its label, in the same copy
    if loss_across_documents:
        beyond = last[tokens_in_row > seq_len]
        inputs = inputs.copy()
        inputs[beyond] -= 1
        is_followed[beyond] = True
        is_ignored = np.zeros(len(inputs), np.bool_)
        end_of_pass = last[tokens_in_row <= seq_len]
        is_ignored[end_of_pass] = pieces.ends_document[end_of_pass]
    else:
        full = last[tokens_in_row == seq_len]
        extended = full[~pieces.ends_document[full]]
        tokens[extended] += 1
        is_followed[extended] = True
        is_ignored = pieces.ends_document
    cut = np.flatnonzero(~(pieces.ends_document | is_followed))
    cut_labels = np.full(len(inputs), _NO_LABEL, np.int64)
    if len(cut):
        positions = pieces.starts[cut] + pieces.lengths[cut]
        cut_labels[cut] = np.concatenate(source.views(positions, np.ones_like(positions)))
    return CorpusRows(
        source=source,
        rows=np.repeat(rows, counts),
        starts=pieces.starts,
        inputs=inputs,
        tokens=tokens,
        is_ignored=is_ignored,
        cut_labels=cut_labels,
    )


def lay_out(
    parts: Sequence[CorpusRows],
    *,
    samples: NDArray[np.int64],
    corpora: NDArray[np.int64],
    seq_len: int,
    dtype: np.dtype[Any],
) -> Layout:
    """Put the pieces of all corpora in the order of the rows, and fill rows up.

    Args:
        samples, corpora: int64 [rows], `PADDING_INDEX` for rows that are padding.
    """
    num_rows = len(samples)
    rows, inputs, tokens = (_joined([getattr(part, name) for part in parts]) for name in ("rows", "inputs", "tokens"))
    is_ignored = _joined([part.is_ignored for part in parts]).astype(np.bool_)
    cut_labels = _joined([part.cut_labels for part in parts])
    inputs_in_row = np.bincount(rows, inputs, num_rows).astype(np.int64)
    missing = seq_len + 1 - np.bincount(rows, tokens, num_rows).astype(np.int64)
    filled = np.flatnonzero(missing)
    order = None
    if len(filled) or len(parts) > 1:
        rows = np.concatenate([rows, filled])
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
        inputs = np.concatenate([inputs, seq_len - inputs_in_row[filled]])[order]
        is_ignored = np.concatenate([is_ignored, np.zeros(len(filled), np.bool_)])[order]
        cut_labels = np.concatenate([cut_labels, np.full(len(filled), _NO_LABEL)])[order]
    copier = _copier(parts, np.concatenate([tokens, missing[filled]]), len(filled), order, dtype)
    ends = np.cumsum(inputs)  # every row has seq_len inputs, padding included
    is_cut = cut_labels != _NO_LABEL
    is_piece = inputs > 0
    ignored, cuts = ends[is_ignored & is_piece] - 1, ends[is_cut] - 1
    row_numbers = np.arange(num_rows + 1)
    row_places = row_numbers * seq_len
    return Layout(
        row_tokens=seq_len + 1,
        dtype=dtype,
        samples=samples,
        corpora=corpora,
        num_tokens=inputs_in_row.astype(np.int32),
        copier=copier,
        first_span=np.searchsorted(rows, row_numbers).tolist(),
        lengths=inputs[is_piece].astype(np.int32),
        first_piece=np.searchsorted(rows[is_piece], row_numbers).tolist(),
        ignored=ignored,
        first_ignored=np.searchsorted(ignored, row_places).tolist(),
        cuts=cuts,
        cut_labels=cut_labels[is_cut],
        first_cut=np.searchsorted(cuts, row_places).tolist(),
    )


def _copier(
    parts: Sequence[CorpusRows],
    tokens: NDArray[np.int64],
    num_fillers: int,
    order: NDArray[np.int64] | None,
    dtype: np.dtype[Any],
) -> Copier:
    """The tokens of all pieces and fillers, in the order of the rows.

    Args:
        tokens: int64 [n], of each, corpus after corpus, fillers last.
        order: int64 [n], or None if they are in order.
    """
    fillers = tokens[len(tokens) - num_fillers :]
    zeros = np.zeros(int(fillers.max(initial=0)), dtype)
    spans = [part.source.spans(part.starts, part.tokens) for part in parts]
    found = [one for one in spans if one is not None]
    if len(found) < len(parts):
        return _reads(parts, tokens, num_fillers, order, zeros)
    if tokens.sum() < GATHER_BELOW * len(tokens):
        addresses = _joined([one.addresses for one in found])
        memories = [one.memory for one in found]
        if num_fillers:
            memories.append(Memory([zeros]))
            addresses = np.concatenate([addresses, np.full(num_fillers, address_of(zeros), np.int64)])
        if order is not None:
            addresses, tokens = addresses[order], tokens[order]
        return Gather(addresses=addresses, lengths=tokens, memories=memories, dtype=dtype)
    views = [view for part in parts for view in part.source.views(part.starts, part.tokens)]
    views += [zeros[:count] for count in fillers.tolist()]
    return Slices(views if order is None else [views[index] for index in order.tolist()])


def _reads(
    parts: Sequence[CorpusRows],
    tokens: NDArray[np.int64],
    num_fillers: int,
    order: NDArray[np.int64] | None,
    zeros: NDArray[Any],
) -> Reads:
    """`_copier` for corpora that do not all lie in memory."""
    reads: list[ReadViews] = [part.source.views for part in parts]
    reads.append(lambda _, lengths: [zeros[:count] for count in lengths.tolist()])
    counts = [*(len(part.starts) for part in parts), num_fillers]
    corpora = np.repeat(np.arange(len(reads)), counts)
    starts = _joined([*(part.starts for part in parts), np.zeros(num_fillers, np.int64)])
    if order is not None:
        corpora, starts, tokens = corpora[order], starts[order], tokens[order]
    return Reads(reads=reads, corpora=corpora, starts=starts, lengths=tokens)


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)
