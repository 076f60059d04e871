"""A view as a token source: its places are those of its base, moved.

A stretch of a view is a stretch of its base, so a place is found by one bisection in a table that is mapped. Reading
costs what reading the base costs, and that bisection.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.forking import cached_property
from tokshard.format.schema import HASH_STRIDE
from tokshard.format.view import View
from tokshard.runtime.bytes.copying import spread
from tokshard.runtime.bytes.source import DocumentSpan, KeptDocuments, ReadCounts, SpansIn, TokenSource

_DENSE = 16
"""Where a part of a base has at most so many times the tokens of the view, all ends of its documents are looked up: one
call for the part costs less than one for each stretch."""

_SAMPLED = 1 << 16
"""Stretches from which `ViewSource.read_factor` is computed."""


class ViewedCorpus:
    """Some documents of a corpus, which another source reads.

    Attributes:
        corpus: the open view.
        base: reads the corpus that it is of.
    """

    corpus: View
    base: TokenSource
    is_in_memory: bool

    def _begin(self) -> None:
        self.is_in_memory, self.tokens_at_once = self.base.is_in_memory, self.base.tokens_at_once

    @property
    def kept(self) -> KeptDocuments:
        """Which documents of the base these are."""
        manifest = self.corpus.manifest
        assert manifest.base is not None, "it is a view"
        starts, stops = self.corpus.kept.ranges()
        return KeptDocuments(
            base=manifest.base.content,
            starts=starts,
            stops=stops,
            cell=repr(manifest.base.cell or ""),
            division=manifest.fingerprints.recipe,
        )

    def _shifts(self, stretch: NDArray[np.int64]) -> NDArray[np.int64]:
        """How far the tokens of stretches lie from their places in the base."""
        return self.corpus.kept.positions[stretch] - self.corpus.kept.tokens[stretch]

    def _parts(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Parts of the view, cut into those of stretches.

        Returns:
            int64 [parts] each: number of the part of the view, start and stop in the base, and the shift.
        """
        kept = self.corpus.kept
        first = kept.stretch_of_token(starts)
        owners, stretches = spread(first, kept.stretch_of_token(stops - 1) - first + 1)
        shifts = self._shifts(stretches)
        begins = np.maximum(starts[owners], kept.tokens[stretches]) + shifts
        ends = np.minimum(stops[owners], kept.tokens[stretches + 1]) + shifts
        return owners, begins, ends, shifts

    def read(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]
    ) -> None:
        """Copy the tokens of pieces, as `TokenSource.read` does."""
        self.base.read(starts + self._shifts(self.corpus.kept.stretch_of_token(starts)), lengths, out, at)

    def ends(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where documents end in stretches of the view, as `TokenSource.ends` does."""
        kept = self.corpus.kept
        lows, highs = kept.stretch_of_token(starts), kept.stretch_of_token(stops - 1)
        from_, to = starts + self._shifts(lows), stops + self._shifts(highs)
        if self.is_in_memory and int((to - from_).sum()) <= _DENSE * int((stops - starts).sum()):
            offsets, values = self.base.ends(from_, to)
            # the end of a document lies behind its first token
            stretches = np.minimum(kept.positions.searchsorted(values), len(kept)) - 1
            found = values - self._shifts(stretches)
            is_kept = found <= kept.tokens[stretches + 1]
            owners = np.repeat(np.arange(len(starts)), np.diff(offsets))[is_kept]
            counts = np.bincount(owners, minlength=len(starts))
            return np.concatenate([[0], np.cumsum(counts)]), found[is_kept]
        owners, begins, ends, shifts = self._parts(starts, stops)
        offsets, values = self.base.ends(begins, ends)
        counts = np.diff(offsets)
        totals = np.bincount(owners, counts, len(starts)).astype(np.int64)
        return np.concatenate([[0], np.cumsum(totals)]), values - np.repeat(shifts, counts)

    def targets(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> SpansIn:
        """The loss spans in stretches of the view, each of which lies within one document."""
        shifts = self._shifts(self.corpus.kept.stretch_of_token(starts))
        found = self.base.targets(starts + shifts, stops + shifts)
        of_span = shifts[found.stretches]
        return SpansIn(found.stretches, found.starts - of_span, found.stops - of_span, found.weights)

    def place_of(self, document: int) -> DocumentSpan:
        """A document by its number in the view."""
        starts, stops = self.spans_of(np.array([document]))
        shard, _ = self.corpus.shards.find(document)
        return DocumentSpan(self.corpus.shards[shard].name, document, int(starts[0]), int(stops[0]))

    def spans_of(self, documents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts and stops in the view of many documents, ascending: int64 [n] each."""
        for document in documents[[0, -1]].tolist():
            if not 0 <= document < self.corpus.num_documents:
                raise IndexError(f"document {document} of a corpus of {self.corpus.num_documents} documents")
        starts, stops = self.base.spans_of(self.corpus.kept.in_base(documents))
        shifts = self._shifts(self.corpus.kept.stretch_of_document(documents))
        return starts - shifts, stops - shifts

    def document_at(self, position: int) -> DocumentSpan:
        """The document that holds a token."""
        shift = int(self._shifts(self.corpus.kept.stretch_of_token(np.array([position])))[0])
        found = self.base.document_at(position + shift)
        number = int(self.corpus.kept.of_base(np.array([found.document]))[0])
        return DocumentSpan(found.shard, number, found.start - shift, found.stop - shift)

    def will_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Have the base fetch the stretches of blocks ahead of need."""
        if len(starts):
            _, begins, ends, _ = self._parts(starts, stops)
            self.base.will_read(begins, ends)

    def has_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Have the base forget them."""
        if len(starts):
            _, begins, ends, _ = self._parts(starts, stops)
            self.base.has_read(begins, ends)

    @property
    def reading(self) -> str | None:
        """The shard of the base that was read last."""
        return self.base.reading

    @property
    def counts(self) -> ReadCounts | None:
        """Counts of reads through the cache of the base."""
        return self.base.counts

    @property
    def memory_bytes(self) -> int:
        """Bytes that the cache of the base may keep in memory."""
        return self.base.memory_bytes

    def kept_bytes(self, num_blocks: int, block_tokens: int) -> int:
        """Bytes that so many blocks take in that memory."""
        return int(self.base.kept_bytes(num_blocks, block_tokens) * self.read_factor)

    @property
    def read_factor(self) -> float:
        """About how many tokens are read for each that is used, where strides are read whole."""
        return self._read_factor

    @cached_property
    def _read_factor(self) -> float:
        kept = self.corpus.kept
        some = np.arange(len(kept))[:_SAMPLED]
        tokens = kept.tokens[some + 1] - kept.tokens[some]
        first = kept.positions[some] // HASH_STRIDE
        last = (kept.positions[some] + tokens - 1) // HASH_STRIDE
        strides = int((last - np.maximum(first, np.append(-1, last[:-1]) + 1) + 1).sum())
        return max(1.0, strides * HASH_STRIDE / int(tokens.sum()))
