"""A plan: what a job reads and in which order, as a pure function of corpora, seed and sizes.

    global sample g ──mixture──▶ corpus i, its sample k ──windows──▶ pieces of documents ──packing──▶ a row of tokens

Every arrow is arithmetic, so any sample can be had alone, by any process, at the same cost. README.md in this
folder follows one sample
by hand; a cursor says where in the plan a job is, and a loader gives the rows of a plan to a training loop.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError
from tokshard.runtime.cursor import Cursor, PlanIdentity
from tokshard.runtime.mixture import Mixture, Segment
from tokshard.runtime.packing import IGNORED, PADDING_INDEX, Packed, first_row, widen
from tokshard.runtime.seeds import ORDER_VERSION, derive_key
from tokshard.runtime.windows import CorpusStream, Pieces, Shape, TokenSource

MIN_BLOCK_TOKENS = 65_536
WINDOW_TOKENS = 64 << 20
MIN_WINDOW_BLOCKS = 64

Weights = Mapping[str, float]
CorpusLike = str | os.PathLike[str] | TokenSource


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document in a sample.

    Args:
        corpus: its name in the plan.
        shard: file name.
        document: number in the corpus.
        start, stop: tokens of the document.
    """

    corpus: str
    shard: str
    document: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Which samples make up the rows of a batch.

    Args:
        samples: int64 [n], global samples, ascending.
        corpora: int64 [n], the corpus of each.
        ordinals: int64 [n], which sample of that corpus.
        num_rows: rows of the batch; those beyond n are padding.
    """

    samples: NDArray[np.int64]
    corpora: NDArray[np.int64]
    ordinals: NDArray[np.int64]
    num_rows: int


class StreamPlan:
    """What a job reads and in which order.

    Costs the opening of the corpora to make. Pickles by the paths of its corpora.

    Args:
        corpora: name to corpus directory, or one directory. A corpus is known by its content: it may be moved or
        renamed. weights: name to weight; default: the corpora's token counts. 0 is allowed.
        seq_len: tokens of a sample.
        seed: of everything that is shuffled.
        epochs: for a finite pass over one corpus; None: endless.
        block_tokens: consecutive tokens that stay together until they are cut at documents; default: 16 samples, at
            least 65,536.
        window_blocks: blocks whose documents are shuffled together; default: about 64M tokens, at least 64 blocks.
        schedule: (global sample, weights) for changes that are known now; `weights` count from 0.
        start_epoch: name to the epoch that counts as its first: for a new plan over corpora that were read before.
        loss_across_documents: a delimiter's label is the first token of the next piece instead of -100.
        allow_small_blocks: accept blocks under four samples, which shuffle long documents badly.

    Raises:
        PlanError: the arguments make no plan.
        CorpusError: a corpus cannot be opened.
    """

    def __init__(
        self,
        corpora: CorpusLike | Mapping[str, CorpusLike],
        *,
        seq_len: int,
        seed: int = 0,
        weights: Weights | None = None,
        epochs: int | None = None,
        block_tokens: int | None = None,
        window_blocks: int | None = None,
        schedule: Sequence[tuple[int, Weights]] = (),
        start_epoch: Mapping[str, int] | None = None,
        loss_across_documents: bool = False,
        allow_small_blocks: bool = False,
    ) -> None:
        named = _named(corpora)
        self._arguments: dict[str, Any] = {
            "seq_len": seq_len,
            "seed": seed,
            "weights": weights,
            "epochs": epochs,
            "block_tokens": block_tokens,
            "window_blocks": window_blocks,
            "schedule": schedule,
            "start_epoch": start_epoch,
            "loss_across_documents": loss_across_documents,
            "allow_small_blocks": allow_small_blocks,
        }
        self.names = tuple(named)
        self.sources = tuple(_open(corpus) for corpus in named.values())
        _check_sources(self.names, self.sources)
        self.shape = _shape(seq_len, block_tokens, window_blocks, allow_small_blocks=allow_small_blocks)
        if not 0 <= seed < 1 << 64:
            raise PlanError(f"seed is {seed}, expected 0 to 2**64 - 1", hint="give another seed")
        self.seed, self.epochs, self.loss_across_documents = seed, epochs, loss_across_documents
        if epochs is not None and (epochs < 1 or len(self.names) > 1):
            raise PlanError(
                f"epochs is {epochs} for {len(self.names)} corpora; a finite pass is at least 1 epoch of one corpus",
                hint="make one plan per corpus, or leave epochs out",
            )
        default = {name: float(source.num_tokens) for name, source in zip(self.names, self.sources, strict=True)}
        self._segments = self._schedule([(0, default if weights is None else weights), *schedule])
        self._mixture_offset = int(derive_key(seed, "mixture")[0])
        self._kept_mixture: Mixture | None = None
        first_epochs = self._first_epochs(start_epoch or {})
        ordinals = _ordinals([source.fingerprint for source in self.sources])
        self._streams = tuple(
            CorpusStream(source, self.shape, seed=seed, ordinal=ordinal, start_epoch=first)
            for source, ordinal, first in zip(self.sources, ordinals, first_epochs, strict=True)
        )
        self.identity = _identity(self.shape, seed, first_epochs, self.sources)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (dict(zip(self.names, self.sources, strict=True)), self._arguments))

    def __repr__(self) -> str:
        return f"<StreamPlan of {', '.join(self.names)}: {self.fingerprint[:12]}>"

    @property
    def fingerprint(self) -> str:
        """Equal exactly when two plans read the same tokens in the same order, given the same weights."""
        return self.identity.fingerprint

    @property
    def num_samples(self) -> int | None:
        """Samples of a finite pass, the last one perhaps short; None when endless."""
        stop = self._stream_stop
        return None if stop is None else -(-stop // self.shape.seq_len)

    @property
    def seq_len(self) -> int:
        """Tokens of a sample."""
        return self.shape.seq_len

    def cursor(self) -> Cursor:
        """The start of the plan."""
        return Cursor(sample=0, segments=self._segments, counts=(0,) * len(self.names))

    def mixture(self, cursor: Cursor) -> Mixture:
        """The corpora of the samples under a cursor's weights."""
        kept = self._kept_mixture
        # cursors of one run share their weights: what these cost to count is paid once
        if kept is None or kept.segments is not cursor.segments or kept.counts is not cursor.counts:
            kept = self._kept_mixture = cursor.mixture(self._mixture_offset)
        return kept

    def compacted(self, cursor: Cursor) -> Cursor:
        """A cursor with the same future and a short past."""
        return cursor.compacted(self._mixture_offset)

    def checked_weights(self, weights: Weights) -> tuple[float, ...]:
        """Weights in plan order.

        Raises:
            PlanError: a name is unknown or missing, or a weight is negative, infinite, or all are 0.
        """
        if set(weights) != set(self.names):
            raise PlanError(
                f"weights are for {', '.join(map(str, weights))}; the plan has {', '.join(self.names)}",
                hint="give one weight per corpus; 0 leaves a corpus out",
            )
        ordered = tuple(float(weights[name]) for name in self.names)
        if not all(math.isfinite(weight) and weight >= 0 for weight in ordered) or not any(ordered):
            raise PlanError(
                f"weights are {dict(weights)}; expected finite numbers of at least 0, not all 0",
                hint="0 leaves a corpus out",
            )
        return ordered

    def sample(self, sample: int, cursor: Cursor | None = None) -> dict[str, NDArray[Any]]:
        """One global sample, alone: the reference that every loader equals.

        Args:
            sample: global index, from 0.
            cursor: whose weights to go by; default: those of the plan.

        Returns:
            The keys of a batch. input_ids, labels, position_ids: int64 [seq_len]; corpus_index, sample_index: int64
            [1]; cu_seqlens: int32; max_seqlen: int64 [].

        Raises:
            IndexError: the plan has no such sample.
        """
        self._check_sample(sample)
        rows = self.rows(self.mixture(cursor or self.cursor()), sample, sample + 1, num_rows=1)
        return first_row(widen(self.pack(rows)))

    def trace(self, sample: int, cursor: Cursor | None = None) -> list[Piece]:
        """Where the tokens of one global sample come from, in order.

        Raises:
            IndexError: the plan has no such sample.
        """
        self._check_sample(sample)
        rows = self.rows(self.mixture(cursor or self.cursor()), sample, sample + 1, num_rows=1)
        number = int(rows.corpora[0])
        _, pieces = self._streams[number].pieces_of(rows.ordinals, self._stream_stop)
        source, found = self.sources[number], []
        for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True):
            place = source.document_at(start)
            begin = start - place.start
            found.append(Piece(self.names[number], place.shard, place.document, begin, begin + length))
        return found

    def rows(self, mixture: Mixture, start: int, stop: int, *, num_rows: int) -> Rows:
        """The rows of a batch: global samples ``[start, stop)``, then padding up to `num_rows`."""
        corpora, ordinals = mixture.rows(start, stop)
        return Rows(np.arange(start, stop, dtype=np.int64), corpora, ordinals, num_rows)

    def pack(self, rows: Rows) -> Packed:
        """Read the rows of a batch: one concatenation of slices of the corpora.

        Raises:
            CorpusError: a shard is missing or not what its manifest says.
        """
        seq_len = self.shape.seq_len
        parts = [self._read(number, rows) for number in np.unique(rows.corpora).tolist()]
        tokens_in_row = np.zeros(rows.num_rows, np.int64)
        for part in parts:
            np.add.at(tokens_in_row, part.rows, part.lengths)
        short = np.flatnonzero(tokens_in_row < seq_len)
        piece_rows = np.concatenate([*(part.rows for part in parts), short])
        order = np.argsort(piece_rows, kind="stable")
        lengths = np.concatenate([*(part.lengths for part in parts), seq_len - tokens_in_row[short]])[order]
        labels = np.concatenate([*(part.labels for part in parts), np.full(len(short), IGNORED)])[order]
        dtype = self.sources[0].dtype
        zeros = np.zeros(seq_len if len(short) else 0, dtype)
        views = [view for part in parts for view in part.views] + [
            zeros[tokens_in_row[row] :] for row in short.tolist()
        ]
        tokens = np.empty(rows.num_rows * seq_len, dtype)
        np.concatenate([views[index] for index in order.tolist()], out=tokens)
        places = np.cumsum(lengths) - 1
        explicit = labels != _NEXT_TOKEN
        return Packed(
            seq_len=seq_len,
            tokens=tokens,
            piece_lengths=lengths.astype(np.int32),
            label_places=places[explicit],
            labels=labels[explicit],
            num_tokens_in_row=tokens_in_row.astype(np.int32),
            corpus_index=_padded(rows.corpora, rows.num_rows),
            sample_index=_padded(rows.samples, rows.num_rows),
        )

    def _read(self, number: int, rows: Rows) -> _CorpusRows:
        """The rows of a batch that read one corpus."""
        source, mine = self.sources[number], np.flatnonzero(rows.corpora == number)
        counts, pieces = self._streams[number].pieces_of(
            rows.ordinals[mine], self._stream_stop, extra_tokens=int(self.loss_across_documents)
        )
        row_of_piece = np.repeat(mine, counts)
        labels = np.full(len(pieces.starts), IGNORED, np.int64)
        if self.loss_across_documents:
            pieces, row_of_piece, labels = self._labels_across(source, counts, pieces, row_of_piece)
        else:
            # where a piece was cut, the label is the token of the same document that follows
            cut = np.flatnonzero(~pieces.ends_document)
            labels[cut] = _single_tokens(source, pieces.starts[cut] + pieces.lengths[cut])
        return _CorpusRows(row_of_piece, pieces.lengths, labels, source.views(pieces.starts, pieces.lengths))

    def _labels_across(
        self, source: TokenSource, counts: NDArray[np.int64], pieces: Pieces, rows: NDArray[np.int64]
    ) -> tuple[Pieces, NDArray[np.int64], NDArray[np.int64]]:
        """Take the one token that was read beyond each row off again, and make it the label of the row's last."""
        last = np.cumsum(counts) - 1
        row_tokens = np.add.reduceat(pieces.lengths, last - counts + 1)
        beyond = last[row_tokens > self.shape.seq_len]  # the end of a finite pass has nothing beyond
        next_tokens = _single_tokens(source, (pieces.starts + pieces.lengths - 1)[beyond])
        lengths = pieces.lengths.copy()
        lengths[beyond] -= 1
        ends = pieces.ends_document.copy()
        ends[beyond] &= lengths[beyond] == 0
        kept = np.flatnonzero(lengths)
        labels = np.full(len(lengths), _NEXT_TOKEN, np.int64)
        cut = np.flatnonzero(~ends & (lengths > 0))
        labels[cut] = _single_tokens(source, pieces.starts[cut] + lengths[cut])
        end_of_pass = last[row_tokens <= self.shape.seq_len]
        labels[end_of_pass[ends[end_of_pass]]] = IGNORED
        # a delimiter that ends a row gets the token beyond; any other last token has its follower already
        last_left = np.where(lengths[beyond] == 0, beyond - 1, beyond)
        is_delimiter = ends[last_left]
        labels[last_left[is_delimiter]] = next_tokens[is_delimiter]
        pieces = Pieces(starts=pieces.starts[kept], lengths=lengths[kept], ends_document=ends[kept])
        return pieces, rows[kept], labels[kept]

    @property
    def _stream_stop(self) -> int | None:
        return None if self.epochs is None else self.epochs * self.sources[0].num_tokens

    def _check_sample(self, sample: int) -> None:
        if sample < 0 or (self.num_samples is not None and sample >= self.num_samples):
            raise IndexError(f"sample {sample} of a plan of {self.num_samples or 'endless'} samples")

    def _schedule(self, changes: Sequence[tuple[int, Weights]]) -> tuple[Segment, ...]:
        starts = [start for start, _ in changes]
        if starts != sorted(set(starts)):
            raise PlanError(
                f"the schedule changes weights at samples {starts[1:]}, expected ascending from 1 on",
                hint="order the schedule, and give the first weights as weights=",
            )
        return tuple(Segment(start=start, weights=self.checked_weights(weights)) for start, weights in changes)

    def _first_epochs(self, start_epoch: Mapping[str, int]) -> list[int]:
        unknown = set(start_epoch) - set(self.names)
        if unknown or any(epoch < 0 for epoch in start_epoch.values()):
            raise PlanError(
                f"start_epoch is {dict(start_epoch)}; the plan has {', '.join(self.names)}",
                hint="give names of the plan, and epochs from 0",
            )
        return [start_epoch.get(name, 0) for name in self.names]


@dataclass(frozen=True, slots=True)
class _CorpusRows:
    """The pieces of one corpus in a batch; `rows` says to which row each belongs."""

    rows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]
    views: list[NDArray[Any]]


_NEXT_TOKEN = -1
"""A label that is the next token of the row."""


def _single_tokens(source: TokenSource, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    if not len(positions):
        return np.empty(0, np.int64)
    return np.concatenate(source.views(positions, np.ones_like(positions))).astype(np.int64)


def _padded(values: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    result = np.full(length, PADDING_INDEX, np.int64)
    result[: len(values)] = values
    return result


def _rebuild(corpora: Mapping[str, TokenSource], arguments: Mapping[str, Any]) -> StreamPlan:
    return StreamPlan(corpora, **arguments)


def _named(corpora: CorpusLike | Mapping[str, CorpusLike]) -> dict[str, CorpusLike]:
    if isinstance(corpora, Mapping):
        named = dict(corpora)
    elif isinstance(corpora, str | os.PathLike):
        named = {os.path.basename(os.path.normpath(corpora)): corpora}
    else:
        named = {"corpus": corpora}
    if not named:
        raise PlanError("the plan has no corpus", hint="give {name: directory, ...}, or one directory")
    return named


def _open(corpus: CorpusLike) -> TokenSource:
    if isinstance(corpus, str | os.PathLike):
        from tokshard.runtime.reader import CorpusSource  # brings pyarrow, which an order does not need

        return CorpusSource(corpus)
    return corpus


def _check_sources(names: Sequence[str], sources: Sequence[TokenSource]) -> None:
    for name, source in zip(names, sources, strict=True):
        if source.num_tokens < 1:
            raise PlanError(f"corpus {name!r} holds no tokens", hint="leave it out of the plan")
        if source.tokenizer != sources[0].tokenizer or source.dtype != sources[0].dtype:
            raise PlanError(
                f"corpora {names[0]!r} and {name!r} have different tokenizers "
                f"({sources[0].tokenizer[:12]}..., {source.tokenizer[:12]}...): their ids mean different things",
                hint="build them with the same tokenizer.json",
            )


def _shape(seq_len: int, block_tokens: int | None, window_blocks: int | None, *, allow_small_blocks: bool) -> Shape:
    for name, value in (("seq_len", seq_len), ("block_tokens", block_tokens), ("window_blocks", window_blocks)):
        if value is not None and value < 1:
            raise PlanError(f"{name} is {value}, expected at least 1", hint=f"give {name} of 1 or more")
    block = block_tokens or max(MIN_BLOCK_TOKENS, 16 * seq_len)
    if block < 4 * seq_len and not allow_small_blocks:
        raise PlanError(
            f"block_tokens is {block}, less than 4 samples of {seq_len}: a long document would be read in one go",
            hint=f"give at least {4 * seq_len}, or allow_small_blocks=True",
        )
    window = window_blocks or max(MIN_WINDOW_BLOCKS, WINDOW_TOKENS // block)
    if (window + 1) * block >= 1 << 32:
        raise PlanError(
            f"a window of {window} blocks of {block} tokens has 2**32 tokens or more",
            hint="give a smaller window_blocks or block_tokens",
        )
    return Shape(seq_len=seq_len, block_tokens=block, window_blocks=window)


def _ordinals(fingerprints: Sequence[str]) -> list[int]:
    """How often each content is listed before it."""
    return [fingerprints[:index].count(fingerprint) for index, fingerprint in enumerate(fingerprints)]


def _identity(shape: Shape, seed: int, first_epochs: Sequence[int], sources: Sequence[TokenSource]) -> PlanIdentity:
    fields: dict[str, int | list[int]] = {
        "order_version": ORDER_VERSION,
        "seed": seed,
        "seq_len": shape.seq_len,
        "block_tokens": shape.block_tokens,
        "window_blocks": shape.window_blocks,
        "start_epoch": list(first_epochs),
    }
    corpora = tuple(source.fingerprint for source in sources)
    content = json.dumps([fields, corpora], sort_keys=True, separators=(",", ":"))
    fingerprint = hashlib.sha256(b"tokshard plan 1\n" + content.encode()).hexdigest()
    return PlanIdentity(fields=fields, corpora=corpora, fingerprint=fingerprint)
