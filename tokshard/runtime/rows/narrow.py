"""From pieces of documents to rows, and from rows to narrow batches.

    pieces of each corpus ──lay_out──▶ Layout ──read──▶ NarrowBatch ──expand──▶ the batch of a training loop

Laying out is arithmetic on arrays of pieces, for many batches at once: for a few rows, the calls would cost more than
the copying. Inside, batches are always narrow: token ids in the dtype of the corpus, and the data that does not follow
from them. `tokshard.runtime.rows.expand` turns them into batches for a loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.bytes.source import TokenSource
from tokshard.runtime.order.pieces import Pieces
from tokshard.runtime.rows.masks import MaskedTokens

IGNORED = -100
"""The label that cross-entropy ignores, as in torch and transformers."""

PADDING_INDEX = -1
"""sample_index and corpus_index of a padding row."""

READ_TOKENS = 1 << 21
"""Corpora in memory are read about so many tokens at a time, because every call has a cost. Changes only speed."""


class LabelSpans(NamedTuple):
    """The labels that count, by their place in the flattened rows.

    Args:
        bounds: int64 [2 n + 1]: 0, start, stop, start, stop, ..., ascending. A label counts if it lies in a ``[start,
            stop)``, and is not `IGNORED` for another reason.
        weights: float32 [n], the weight of each stretch.
    """

    bounds: NDArray[np.int64]
    weights: NDArray[np.float32]

    def of_labels(self, count: int) -> NDArray[np.float32]:
        """The weight of each label, 0 for one that does not count: float32 [count]."""
        weights = np.zeros(len(self.bounds), np.float32)
        weights[1::2] = self.weights
        return np.repeat(weights, np.diff(self.bounds, append=count))

    @classmethod
    def of_weights(cls, weights: NDArray[np.float32]) -> LabelSpans:
        """The inverse of `of_labels`."""
        starts = np.flatnonzero(np.diff(weights, prepend=np.float32(0)) != 0)
        stops = np.append(starts[1:], len(weights))
        counts = weights[starts] != 0
        bounds = np.stack([starts[counts], stops[counts]], axis=1).reshape(-1)
        return cls(np.concatenate([np.zeros(1, np.int64), bounds]), weights[starts[counts]])


class StepTargets(NamedTuple):
    """The labels of a whole step that are not `IGNORED`, over all ranks: their number, and the sum of their weights."""

    targets: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowBatch:
    """The rows of a batch: their tokens, and the labels that do not follow from them.

    Args:
        tokens: uint16 or uint32 [rows, seq_len], 0 where a row is padding.
        piece_lengths: int32 [pieces], in order; they add up to rows * seq_len. Padding of a row is a piece of its own.
        next_tokens: int64 [pieces], the label of the last token of each, -100 for none. All other labels are the next
            token of the row; padding has none.
        num_tokens: int32 [rows], tokens of each row that are not padding.
        corpus_index: int64 [rows], corpus in plan order, or `PADDING_INDEX`.
        sample_index: int64 [rows], global sample, or `PADDING_INDEX`.
        is_masked: bool [pieces], whether each is out of the loss; None without masks.
        loss: the labels that count, if a corpus of the plan has loss spans.
        num_read_tokens: tokens read for these rows, including labels that are not among them.
        step: the targets of the step of these rows; None if they are not known.
    """

    tokens: NDArray[Any]
    piece_lengths: NDArray[np.int32]
    next_tokens: NDArray[np.int64]
    num_tokens: NDArray[np.int32]
    corpus_index: NDArray[np.int64]
    sample_index: NDArray[np.int64]
    is_masked: NDArray[np.bool_] | None = None
    loss: LabelSpans | None = None
    num_read_tokens: int = 0
    step: StepTargets | None = None

    @property
    def num_masked_tokens(self) -> int:
        """Tokens of masked documents."""
        return 0 if self.is_masked is None else int(self.piece_lengths[self.is_masked].sum())


@dataclass(slots=True, kw_only=True)
class Layout:
    """Rows of one or many batches, piece by piece, ready to be read.

    A label is the next token of the document. Within a piece it is the next token of the row, and a piece at the end of
    its row is read with one more token. Only at a block's end inside a document, the label is read from elsewhere.

    Args:
        sources: the corpora, in plan order.
        samples, corpora: int64 [rows], as in `NarrowBatch`.
        num_tokens: int32 [rows], as in `NarrowBatch`.
        seq_len: tokens of a row.
        first_pieces: the first piece of each row: rows + 1 entries.
        read_before: tokens read for the rows before each row: rows + 1 entries.
        numbers: int64 [pieces], the corpus of each; `PADDING_INDEX` for padding.
        starts: int64 [pieces], start of each in its corpus.
        lengths: int32 [pieces], tokens of each.
        labels_in_row: bool [pieces], whether the last label is the token that is read after the piece.
        labels_elsewhere: bool [pieces], whether the last label is a token that is read alone.
        is_masked: bool [pieces], as in `NarrowBatch`.
    """

    sources: Sequence[TokenSource]
    samples: NDArray[np.int64]
    corpora: NDArray[np.int64]
    num_tokens: NDArray[np.int32]
    seq_len: int
    first_pieces: list[int]
    read_before: list[int]
    numbers: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    labels_in_row: NDArray[np.bool_]
    labels_elsewhere: NDArray[np.bool_]
    is_masked: NDArray[np.bool_] | None
    _start: int = field(init=False, default=0, repr=False)
    _stop: int = field(init=False, default=0, repr=False)
    _tokens: NDArray[Any] = field(init=False, repr=False)
    _next_tokens: NDArray[np.int64] = field(init=False, repr=False)
    _loss: LabelSpans | None = field(init=False, default=None, repr=False)

    def read(self, start: int, stop: int) -> NarrowBatch:
        """Read the rows ``[start, stop)``. The next call may overwrite their tokens."""
        if start < self._start or stop > self._stop:
            self._read_rows(start, stop)
        first, last = self.first_pieces[start], self.first_pieces[stop]
        before = self.first_pieces[self._start]
        return NarrowBatch(
            tokens=self._tokens[start - self._start : stop - self._start, : self.seq_len],
            piece_lengths=self.lengths[first:last],
            next_tokens=self._next_tokens[first - before : last - before],
            num_tokens=self.num_tokens[start:stop],
            corpus_index=self.corpora[start:stop],
            sample_index=self.samples[start:stop],
            is_masked=None if self.is_masked is None else self.is_masked[first:last],
            loss=None
            if self._loss is None
            else _cut(self._loss, *((r - self._start) * self.seq_len for r in (start, stop))),
            num_read_tokens=self.read_before[stop] - self.read_before[start],
        )

    def of_rows(self, rows: NDArray[np.int64]) -> Layout:
        """Some of the rows, in the order of their numbers."""
        firsts, num_read = np.array(self.first_pieces), np.diff(self.read_before)[rows]
        counts = np.diff(firsts)[rows]
        after = np.cumsum(counts)
        pieces = np.arange(counts.sum()) + np.repeat(firsts[rows] - after + counts, counts)
        return replace(
            self,
            samples=self.samples[rows],
            corpora=self.corpora[rows],
            num_tokens=self.num_tokens[rows],
            first_pieces=[0, *after.tolist()],
            read_before=[0, *np.cumsum(num_read).tolist()],
            numbers=self.numbers[pieces],
            starts=self.starts[pieces],
            lengths=self.lengths[pieces],
            labels_in_row=self.labels_in_row[pieces],
            labels_elsewhere=self.labels_elsewhere[pieces],
            is_masked=None if self.is_masked is None else self.is_masked[pieces],
        )

    def costs(self) -> NDArray[np.int64]:
        """The cost of attention in each row: the sum of the squares of its pieces. All else costs every row the same.

        A piece of padding counts: it is computed, too.
        """
        squares = self.lengths.astype(np.int64) ** 2
        return np.add.reduceat(squares, self.first_pieces[:-1])

    def _read_rows(self, start: int, stop: int) -> None:
        """Read rows. Where no corpus makes them wait, read some later rows too, and keep them for the next calls."""
        row_tokens = self.seq_len + 1  # the last one is only a label
        sources = [self.sources[number] for number in np.unique(self.corpora).tolist() if number >= 0]
        at_once = min((READ_TOKENS if one.is_in_memory else one.tokens_at_once for one in sources), default=0)
        stop = max(stop, min(len(self.samples), start + at_once // row_tokens))
        pieces = slice(self.first_pieces[start], self.first_pieces[stop])
        numbers, positions, lengths = self.numbers[pieces], self.starts[pieces], self.lengths[pieces].astype(np.int64)
        in_row = np.flatnonzero(self.labels_in_row[pieces])
        elsewhere = np.flatnonzero(self.labels_elsewhere[pieces])
        size = (stop - start) * row_tokens
        out = np.empty(size + len(elsewhere), self.sources[0].dtype)
        begins = np.cumsum(lengths) - lengths
        places = begins + begins // self.seq_len  # a row has room for one token more, its last label
        next_tokens = np.full(len(lengths), IGNORED, np.int64)
        label_places = (places + lengths)[in_row]
        for piece in np.flatnonzero(numbers == PADDING_INDEX).tolist():
            out[places[piece] : places[piece] + lengths[piece]] = 0
        labels = positions[elsewhere] + lengths[elsewhere]
        lengths = lengths + self.labels_in_row[pieces]
        if len(elsewhere):  # single tokens, which go after all rows
            numbers = np.concatenate([numbers, numbers[elsewhere]])
            positions = np.concatenate([positions, labels])
            lengths = np.concatenate([lengths, np.ones_like(labels)])
            places = np.concatenate([places, np.arange(size, len(out))])
        self._read_pieces(numbers, positions, lengths, out, places)
        next_tokens[in_row], next_tokens[elsewhere] = out[label_places], out[size:]
        self._tokens, self._next_tokens = out[:size].reshape(stop - start, row_tokens), next_tokens
        if any(source.has_spans for source in self.sources):
            self._loss = self._label_spans(pieces, begins)
        self._start, self._stop = start, stop

    def sums_of_steps(self, num_steps: int) -> list[StepTargets]:
        """The sums of each of some steps, which have these rows together. Reads loss spans, but no tokens."""
        counts = self.lengths - ~(self.labels_in_row | self.labels_elsewhere)  # labels of each piece
        weights = counts.astype(np.float64)
        for number in np.unique(self.corpora).tolist():
            if number != PADDING_INDEX and self.sources[number].has_spans:
                mine = np.flatnonzero((self.numbers == number) & (counts > 0))
                firsts = self.starts[mine] + 1
                spans = self.sources[number].targets(firsts, firsts + counts[mine])
                sizes = (spans.stops - spans.starts) * (spans.weights != 0)
                counts[mine] = np.bincount(spans.stretches, sizes, len(mine))
                weights[mine] = np.bincount(spans.stretches, sizes * spans.weights.astype(np.float64), len(mine))
        is_left_out = self.numbers == PADDING_INDEX
        if self.is_masked is not None:
            is_left_out |= self.is_masked
        counts[is_left_out] = weights[is_left_out] = 0
        bounds = self.first_pieces[: -1 : len(self.samples) // num_steps]
        sums = (np.add.reduceat(of, bounds, dtype=of.dtype) for of in (counts.astype(np.int64), weights))
        return [StepTargets(*of_step) for of_step in zip(*(of.tolist() for of in sums), strict=True)]

    def _label_spans(self, pieces: slice, begins: NDArray[np.int64]) -> LabelSpans:
        """The labels of pieces that count: in corpora with loss spans only the targets, otherwise all.

        Args:
            begins: int64 [pieces], start of each in the flattened rows.
        """
        numbers, firsts = self.numbers[pieces], self.starts[pieces] + 1  # a label is the token after
        has_last_label = (self.labels_in_row | self.labels_elsewhere)[pieces]
        lasts = firsts + self.lengths[pieces] - 1 + has_last_label
        found = []
        for number in np.unique(numbers[numbers != PADDING_INDEX]).tolist():
            mine, source = np.flatnonzero((numbers == number) & (firsts < lasts)), self.sources[number]
            if source.has_spans:
                spans = source.targets(firsts[mine], lasts[mine])
                mine, starts, stops, weights = mine[spans.stretches], spans.starts, spans.stops, spans.weights
            else:
                starts, stops, weights = firsts[mine], lasts[mine], np.ones(len(mine), np.float32)
            shift = begins[mine] - firsts[mine]
            found.append((starts + shift, stops + shift, weights))
        if not found:
            return LabelSpans(np.zeros(1, np.int64), np.empty(0, np.float32))
        starts, stops, weights = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.argsort(starts, kind="stable")
        bounds = np.stack([starts[order], stops[order]], axis=1).reshape(-1)
        return LabelSpans(np.concatenate([np.zeros(1, np.int64), bounds]), weights[order])

    def _read_pieces(
        self,
        numbers: NDArray[np.int64],
        positions: NDArray[np.int64],
        lengths: NDArray[np.int64],
        out: NDArray[Any],
        places: NDArray[np.int64],
    ) -> None:
        """Read each piece from its corpus, corpus by corpus."""
        if (numbers != numbers[0]).any():
            order = np.argsort(numbers, kind="stable")
            numbers, positions, lengths, places = numbers[order], positions[order], lengths[order], places[order]
        bounds = np.flatnonzero(np.diff(numbers, prepend=PADDING_INDEX)).tolist()
        for low, high in itertools.pairwise([*bounds, len(numbers)]):
            self.sources[int(numbers[low])].read(positions[low:high], lengths[low:high], out, places[low:high])


def _cut(loss: LabelSpans, start: int, stop: int) -> LabelSpans:
    """The label spans of the flattened labels ``[start, stop)``, which begin and end at rows."""
    starts = loss.bounds[1::2]
    first, last = starts.searchsorted([start, stop]).tolist()
    bounds = np.concatenate([np.zeros(1, np.int64), loss.bounds[1 + 2 * first : 1 + 2 * last] - start])
    return LabelSpans(bounds, loss.weights[first:last])


def lay_out(
    parts: Sequence[tuple[int, NDArray[np.int64], Pieces]],
    sources: Sequence[TokenSource],
    *,
    samples: NDArray[np.int64],
    corpora: NDArray[np.int64],
    seq_len: int,
    masked: MaskedTokens | None = None,
) -> Layout:
    """The pieces of all corpora in the order of the rows.

    Args:
        parts: for each corpus its number, the row of each of its pieces (int64 [pieces]), and these pieces.
        sources: the corpora, in plan order.
        samples, corpora: int64 [rows], `PADDING_INDEX` for padding rows.
        masked: documents that are out of the loss.
    """
    num_rows = len(samples)
    num_tokens = np.zeros(num_rows, np.int64)
    for _, rows, pieces in parts:
        num_tokens += np.bincount(rows, pieces.lengths, num_rows).astype(np.int64)
    padded = np.flatnonzero(num_tokens < seq_len)
    rows = np.concatenate([*(rows for _, rows, _ in parts), padded])
    numbers = np.repeat(
        [*(number for number, _, _ in parts), PADDING_INDEX], [*(len(part[1]) for part in parts), len(padded)]
    )
    starts = np.concatenate([*(pieces.starts for _, _, pieces in parts), np.zeros_like(padded)])
    lengths = np.concatenate([*(pieces.lengths for _, _, pieces in parts), seq_len - num_tokens[padded]])
    ends_document = np.concatenate([*(pieces.ends_document for _, _, pieces in parts), np.ones(len(padded), np.bool_)])
    if len(parts) > 1 or len(padded) or bool((np.diff(rows) < 0).any()):
        order = np.argsort(rows, kind="stable")  # padding comes after the pieces of its row
        rows, numbers, starts, lengths = rows[order], numbers[order], starts[order], lengths[order]
        ends_document = ends_document[order]
    is_last = np.diff(rows, append=num_rows) > 0
    num_read = num_tokens + np.bincount(rows[~ends_document], minlength=num_rows)  # each of these pieces has a label
    return Layout(
        sources=sources,
        samples=samples,
        corpora=corpora,
        num_tokens=num_tokens.astype(np.int32),
        seq_len=seq_len,
        first_pieces=np.searchsorted(rows, np.arange(num_rows + 1)).tolist(),
        read_before=[0, *np.cumsum(num_read).tolist()],
        numbers=numbers,
        starts=starts,
        lengths=lengths.astype(np.int32),
        labels_in_row=is_last & ~ends_document,
        labels_elsewhere=~(is_last | ends_document),
        is_masked=None if masked is None else masked.covers(numbers, starts, samples[rows]),
    )
