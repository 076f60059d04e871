"""From pieces of documents to rows, and from rows to a batch.

    pieces ──corpus_rows──▶ labels ──lay_out──▶ Layout ──pack──▶ Packed ──widen──▶ the batch of a training loop

Laying out is arithmetic on arrays of pieces, for many batches at once: for a few rows alone the calls would cost more
than the copying. Packing reads the tokens of a batch. `Packed` is narrow, so that worker processes send little: token
ids in the dtype of the corpus, and what cannot be derived from them. `widen` derives the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.bytes.source import TokenSource
from tokshard.runtime.order.pieces import Pieces
from tokshard.runtime.rows.ragged import Ragged
from tokshard.runtime.rows.recycling import Recycler

IGNORED = -100
"""The label that cross-entropy leaves out, as in torch and transformers."""

PADDING_INDEX = -1
"""sample_index and corpus_index of a row that is padding."""

READ_TOKENS = 1 << 21
"""Corpora in memory are read about so many tokens at a time, because every call costs. Changes speed only."""

_MIN_CU_SEQLENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRows:
    """The pieces of one corpus in a layout, in the order of the rows that they belong to.

    Args:
        source: the corpus.
        rows: int64 [pieces], the row of each.
        starts: int64 [pieces], where in the corpus each starts.
        inputs: int64 [pieces], tokens of each that are inputs, at least 1.
        tokens: int64 [pieces], tokens of each that are read: inputs, and the one after them if it is their label.
        is_cut: bool [pieces], whether the label of its last input is a token that is not in the row.
        is_masked: bool [pieces], whether it is out of the loss; None without masks.
    """

    source: TokenSource
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    inputs: NDArray[np.int64]
    tokens: NDArray[np.int64]
    is_cut: NDArray[np.bool_]
    is_masked: NDArray[np.bool_] | None = None


def corpus_rows(
    source: TokenSource,
    rows: NDArray[np.int64],
    counts: NDArray[np.int64],
    pieces: Pieces,
    *,
    seq_len: int,
    is_masked: NDArray[np.bool_] | None = None,
) -> CorpusRows:
    """The pieces of one corpus, with the source of their labels.

    A label is the next token of the document. Within a piece that is the next token of the row, and a piece that the
    row cuts is read one token further. Only where a block ends inside a document, the label comes from another block.

    Args:
        rows: int64 [n], the rows that read this corpus.
        counts: int64 [n], pieces of each.
        pieces: of all of them.
        is_masked: as of `CorpusRows`.
    """
    last = np.cumsum(counts) - 1
    full = last[np.add.reduceat(pieces.lengths, last - counts + 1) == seq_len]
    extended = full[~pieces.ends_document[full]]
    tokens, is_cut = pieces.lengths.copy(), ~pieces.ends_document
    tokens[extended] += 1
    is_cut[extended] = False
    return CorpusRows(
        source=source,
        rows=np.repeat(rows, counts),
        starts=pieces.starts,
        inputs=pieces.lengths,
        tokens=tokens,
        is_cut=is_cut,
        is_masked=is_masked,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadRows:
    """The tokens of the rows ``[start, stop)`` of a layout, one after another, and labels that are not among them."""

    start: int
    stop: int
    tokens: NDArray[Any]
    cut_labels: NDArray[Any]


@dataclass(slots=True, kw_only=True)
class Layout:
    """Rows of one or many batches, piece by piece, ready to be read.

    A row has seq_len + 1 tokens: the last one is only the label of the one before it. Places of tokens and numbers of
    pieces are counted over all rows.

    Args:
        row_tokens: seq_len + 1.
        dtype: of the tokens.
        sources: of the pieces.
        samples: int64 [rows], global samples, `PADDING_INDEX` for rows that are padding.
        corpora: int64 [rows], corpus of each in plan order, or `PADDING_INDEX`.
        num_tokens: int32 [rows], inputs of each row that are not padding.
        missing: int64 [rows], tokens at the end of each row that no piece covers.
        reads: int64 [4, pieces]: number of the source, position and tokens of each piece, and its place.
        lengths: int32, inputs of each piece, and the padding of a row as a piece of its own.
        followed: int64 [2, n]: pieces whose last label is the next token of the row, ascending; place of that token.
        cuts: int64 [3, n]: pieces whose last label is not in the row, ascending; number of the source and position of
            that token. The last input of all other pieces has no label.
        is_masked: bool [pieces], whether each of `lengths` is out of the loss; None without masks.
    """

    row_tokens: int
    dtype: np.dtype[Any]
    sources: Sequence[TokenSource]
    samples: NDArray[np.int64]
    corpora: NDArray[np.int64]
    num_tokens: NDArray[np.int32]
    missing: NDArray[np.int64]
    reads: Ragged
    lengths: Ragged
    followed: Ragged
    cuts: Ragged
    is_masked: NDArray[np.bool_] | None = None
    _ahead: _ReadRows | None = field(init=False, default=None, repr=False)
    _buffer: NDArray[Any] | None = field(init=False, default=None, repr=False)

    @property
    def num_pieces(self) -> int:
        """Pieces of all rows."""
        return len(self.lengths.values)

    def pack(self, start: int, stop: int) -> Packed:
        """Read the rows ``[start, stop)`` together. The next call may overwrite their tokens."""
        read = self._rows(start, stop)
        first_piece, stop_piece = self.lengths.first[start], self.lengths.first[stop]
        next_tokens = np.full(stop_piece - first_piece, IGNORED, np.int64)
        pieces, places = self.followed.of(start, stop)
        next_tokens[pieces - first_piece] = read.tokens[places - read.start * self.row_tokens]
        pieces = self.cuts.of(start, stop)[0]
        num_read = (stop - start) * self.row_tokens - int(self.missing[start:stop].sum()) + len(pieces)
        if len(pieces):
            first_cut = self.cuts.first[start] - self.cuts.first[read.start]
            next_tokens[pieces - first_piece] = read.cut_labels[first_cut : first_cut + len(pieces)]
        is_masked = None if self.is_masked is None else self.is_masked[first_piece:stop_piece]
        low, high = ((row - read.start) * self.row_tokens for row in (start, stop))
        return Packed(
            tokens=read.tokens[low:high].reshape(stop - start, self.row_tokens),
            piece_lengths=self.lengths.values[first_piece:stop_piece],
            next_tokens=next_tokens,
            num_tokens_in_row=self.num_tokens[start:stop],
            corpus_index=self.corpora[start:stop],
            sample_index=self.samples[start:stop],
            is_masked=is_masked,
            num_read_tokens=num_read,
        )

    def _rows(self, start: int, stop: int) -> _ReadRows:
        """These rows; if all corpora are in memory, some later ones too, which are kept for the next calls."""
        ahead = self._ahead
        if ahead is not None and ahead.start <= start and stop <= ahead.stop:
            return ahead
        count = min(self._rows_ahead, len(self.samples) - start)
        if count < 2 * (stop - start):
            return self._read(start, stop, None)
        if self._buffer is None:
            self._buffer = np.empty(self._rows_ahead * self.row_tokens + len(self.cuts.values[0]), self.dtype)
        self._ahead = self._read(start, start + count, self._buffer)
        return self._ahead

    @property
    def _rows_ahead(self) -> int:
        """Rows that are read together if all corpora are in memory."""
        if not all(source.is_in_memory for source in self.sources):
            return 0
        return READ_TOKENS // self.row_tokens

    def _read(self, start: int, stop: int, buffer: NDArray[Any] | None) -> _ReadRows:
        size = (stop - start) * self.row_tokens
        numbers, positions, lengths, places = self.reads.of(start, stop)
        places = places - start * self.row_tokens
        _, cut_numbers, cut_positions = self.cuts.of(start, stop)
        count = size + len(cut_numbers)
        out = np.empty(count, self.dtype) if buffer is None else buffer[:count]
        if len(cut_numbers):  # single tokens, which go after all rows
            numbers = np.concatenate([numbers, cut_numbers])
            positions = np.concatenate([positions, cut_positions])
            lengths = np.concatenate([lengths, np.ones_like(cut_positions)])
            places = np.concatenate([places, np.arange(size, len(out))])
        if len(self.sources) == 1 and len(numbers):
            self.sources[0].read(positions, lengths, out, places)
        else:
            order = np.argsort(numbers, kind="stable")
            numbers, positions, lengths, places = numbers[order], positions[order], lengths[order], places[order]
            bounds = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1)).tolist()
            for low, high in itertools.pairwise(bounds):
                source = self.sources[int(numbers[low])]
                source.read(positions[low:high], lengths[low:high], out, places[low:high])
        for row in np.flatnonzero(self.missing[start:stop]).tolist():
            stop_of_row = (row + 1) * self.row_tokens
            out[stop_of_row - int(self.missing[start + row]) : stop_of_row] = 0
        return _ReadRows(start=start, stop=stop, tokens=out[:size], cut_labels=out[size:])


def lay_out(
    parts: Sequence[CorpusRows],
    *,
    samples: NDArray[np.int64],
    corpora: NDArray[np.int64],
    seq_len: int,
    dtype: np.dtype[Any],
    has_masks: bool = False,
) -> Layout:
    """The pieces of all corpora in the order of the rows.

    Args:
        samples, corpora: int64 [rows], `PADDING_INDEX` for rows that are padding.
        has_masks: whether the parts say what is masked.
    """
    num_rows = len(samples)
    rows, starts, inputs, tokens = (
        _joined([getattr(part, name) for part in parts]) for name in ("rows", "starts", "inputs", "tokens")
    )
    is_cut = _joined([part.is_cut for part in parts], np.bool_)
    sources = list({id(part.source): part.source for part in parts}.values())
    known = {id(source): number for number, source in enumerate(sources)}
    numbers = np.repeat([known[id(part.source)] for part in parts], [len(part.rows) for part in parts])
    masks = _joined([part.is_masked for part in parts if part.is_masked is not None], np.bool_)
    if len(parts) > 1 or bool((np.diff(rows) < 0).any()):
        order = np.argsort(rows, kind="stable")
        rows, starts, inputs, tokens = rows[order], starts[order], inputs[order], tokens[order]
        is_cut, numbers, masks = is_cut[order], numbers[order], masks[order] if has_masks else masks
    inputs_in_row = np.bincount(rows, inputs, num_rows).astype(np.int64)
    missing = seq_len + 1 - np.bincount(rows, tokens, num_rows).astype(np.int64)
    padding = seq_len - inputs_in_row
    places = np.cumsum(tokens) - tokens + (np.cumsum(missing) - missing)[rows]
    is_padded = padding > 0
    pieces = np.arange(len(rows)) + (np.cumsum(is_padded) - is_padded)[rows]  # their numbers, padding included
    is_followed = tokens > inputs
    followed = np.stack([pieces[is_followed], (places + inputs)[is_followed]])
    cuts = np.stack([pieces[is_cut], numbers[is_cut], (starts + inputs)[is_cut]])
    lengths, is_masked = _piece_lengths(rows, inputs, padding), None
    if has_masks:
        is_masked = np.zeros(len(lengths.values), np.bool_)
        is_masked[pieces] = masks
    return Layout(
        row_tokens=seq_len + 1,
        dtype=dtype,
        sources=sources,
        samples=samples,
        corpora=corpora,
        num_tokens=inputs_in_row.astype(np.int32),
        missing=missing,
        reads=Ragged.by_row(np.stack([numbers, starts, tokens, places]), rows, num_rows),
        lengths=lengths,
        followed=Ragged.by_row(followed, rows[is_followed], num_rows),
        cuts=Ragged.by_row(cuts, rows[is_cut], num_rows),
        is_masked=is_masked,
    )


def _piece_lengths(rows: NDArray[np.int64], inputs: NDArray[np.int64], padding: NDArray[np.int64]) -> Ragged:
    """Inputs of each piece, by row. Padding is the last piece of its row."""
    padded = np.flatnonzero(padding)
    if len(padded):
        after = np.searchsorted(rows, padded, "right")
        rows, inputs = np.insert(rows, after, padded), np.insert(inputs, after, padding[padded])
    return Ragged.by_row(inputs.astype(np.int32), rows, len(padding))


def _joined(arrays: Sequence[NDArray[Any]], dtype: type[Any] = np.int64) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The rows of a batch, narrow: what is read, and the labels that do not follow from it.

    Args:
        tokens: uint16 or uint32 [rows, seq_len + 1]; a row's last token is only the label of the one before it. 0 where
            a row is padding.
        piece_lengths: int32 [pieces], the inputs only, in order; they add up to rows * seq_len, padding included.
        next_tokens: int64 [pieces], the label of the last input of each, -100 for none. All other labels are the next
            token of the row, but for padding, which has none.
        num_tokens_in_row: int32 [rows], inputs of each row that are not padding.
        corpus_index: int64 [rows], corpus in plan order, or `PADDING_INDEX`.
        sample_index: int64 [rows], global sample, or `PADDING_INDEX`.
        is_masked: bool [pieces], whether no token of a piece has a label; None without masks.
        num_read_tokens: read for these rows, labels that are no input included.
    """

    tokens: NDArray[Any]
    piece_lengths: NDArray[np.int32]
    next_tokens: NDArray[np.int64]
    num_tokens_in_row: NDArray[np.int32]
    corpus_index: NDArray[np.int64]
    sample_index: NDArray[np.int64]
    is_masked: NDArray[np.bool_] | None = None
    num_read_tokens: int = 0

    @property
    def num_masked_tokens(self) -> int:
        """Inputs of masked documents."""
        return 0 if self.is_masked is None else int(self.piece_lengths[self.is_masked].sum())


def widen(packed: Packed, recycler: Recycler | None = None) -> dict[str, NDArray[Any]]:
    """The batch that a training loop gets.

    Args:
        recycler: provides the memory; default: new memory.

    Returns:
        input_ids, labels, position_ids: int64 [rows, seq_len]. corpus_index, sample_index: int64 [rows].
        cu_seqlens: int32, the boundaries of all pieces in the flattened batch, its end repeated up to a power of two of
        entries, at least 64. max_seqlen: int64 [], the longest piece.
    """
    recycler = recycler or Recycler(0)
    rows, seq_len = len(packed.tokens), packed.tokens.shape[1] - 1
    input_ids, labels, position_ids = recycler.empty((3, rows, seq_len))
    np.copyto(input_ids, packed.tokens[:, :-1])
    np.copyto(labels, packed.tokens[:, 1:])
    lengths = packed.piece_lengths
    ends = np.cumsum(lengths)
    labels.reshape(-1)[ends - 1] = packed.next_tokens
    if packed.num_tokens_in_row.min() < seq_len:
        for row in np.flatnonzero(packed.num_tokens_in_row < seq_len).tolist():
            labels[row, packed.num_tokens_in_row[row] :] = IGNORED
    if packed.is_masked is not None and packed.is_masked.any():
        labels.reshape(-1)[np.repeat(packed.is_masked, lengths)] = IGNORED
    np.subtract(recycler.numbers(rows * seq_len), np.repeat(ends - lengths, lengths), out=position_ids.reshape(-1))
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "corpus_index": packed.corpus_index.copy(),  # a view would keep an array of many batches alive
        "sample_index": packed.sample_index.copy(),
        "cu_seqlens": boundaries(ends),
        "max_seqlen": np.array(lengths.max(), np.int64),
    }


def boundaries(ends: NDArray[np.signedinteger[Any]]) -> NDArray[np.int32]:
    """The ends of pieces as cu_seqlens: int32, from 0 on, the last one repeated."""
    # few lengths, so that a compiled model sees few shapes
    found = np.empty(max(_MIN_CU_SEQLENS, 1 << len(ends).bit_length()), np.int32)
    found[0] = 0
    found[1 : len(ends) + 1] = ends
    found[len(ends) + 1 :] = ends[-1]
    return found


def first_row(batch: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The only row of a batch, as a sample: its arrays lose their first dimension."""
    return {key: value[0] if value.ndim == 2 else value for key, value in batch.items()}
