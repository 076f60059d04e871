"""A view as a token source: it finds places in its base, and reads there.

A stretch of a view is a stretch of its base, so a place is found by one bisection in a mapped table. Reading costs that
bisection more than reading the base.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.forking import cached_property
from tokshard.format import names
from tokshard.format.schema import HASH_STRIDE
from tokshard.format.view import View
from tokshard.runtime.bytes.copying import spread
from tokshard.runtime.bytes.source import DocumentSpan, KeptDocuments, ReadCounts, SpansIn, TokenSource

_JOINED_DOCUMENTS = 50
"""Stretches of a base in memory that are at most about so many documents apart are looked up in one call: a call costs
as much as so many ends of documents."""

_SORTED_FROM = 1 << 20
"""Stretches from which places are looked up in order: a table that does not fit in the cache is then read once through,
at 0.2 to 0.8 us a place. In any order it is 2 us."""

_SAMPLED = 1 << 16
"""Stretches from which `ViewSource.read_factor` is computed."""


class ViewedCorpus:
    """Some documents of a corpus, which another source reads.

    Attributes:
        corpus: the open view.
        base: reads the base of the view.
    """

    corpus: View
    base: TokenSource
    is_in_memory: bool

    def _begin(self) -> None:
        self.is_in_memory, self.tokens_at_once = self.base.is_in_memory, self.base.tokens_at_once

    @property
    def kept(self) -> KeptDocuments:
        """The documents of the base that the view has."""
        manifest = self.corpus.manifest
        assert manifest.base is not None, "it is a view"
        return KeptDocuments(
            base=self.corpus.base.content_fingerprints[0],
            documents=self.corpus.kept,
            cell=repr(manifest.base.cell or ""),
            division=manifest.fingerprints.recipe,
        )

    def _shifts(self, stretch: NDArray[np.int64]) -> NDArray[np.int64]:
        """The distances of the tokens of stretches from their places in the base."""
        return self.corpus.kept.positions[stretch] - self.corpus.kept.tokens[stretch]

    def _shifts_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The distances of the tokens at positions of the view from their places in the base."""
        kept = self.corpus.kept
        if len(kept) < _SORTED_FROM:
            return self._shifts(kept.stretch_of_token(positions))
        order, found = np.argsort(positions), np.empty_like(positions)
        found[order] = self._shifts(kept.stretch_of_token(positions[order]))
        return found

    def _touched(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The stretches that parts of the view touch: number of the part, and of the stretch.

        Raises:
            DamagedCorpusError: they are not in order, or do not cover the parts.
        """
        kept = self.corpus.kept
        first, last = kept.stretch_of_token(starts), kept.stretch_of_token(stops - 1)
        # each stretch has a token at least, so damage cannot ask for more of them than tokens
        is_wrong = (first < 0) | (last < first) | (last >= len(kept)) | (last - first >= stops - starts)
        if is_wrong.any():
            raise self._damage()
        owners, stretches = spread(first, last - first + 1)
        rows, after = kept.tokens[stretches], kept.tokens[stretches + 1]
        documents = kept.numbers[stretches + 1] - kept.numbers[stretches]
        ends = kept.positions[stretches] + after - rows
        is_wrong = (documents < 1) | (after - rows < documents) | (ends > kept.positions[stretches + 1])
        is_wrong |= (after <= starts[owners]) | (rows >= stops[owners]) | (ends > self.base.num_tokens)
        if is_wrong.any() or bool((kept.tokens[first] > starts).any() or (kept.tokens[last + 1] < stops).any()):
            raise self._damage()
        return owners, stretches

    def _damage(self) -> DamagedCorpusError:
        return DamagedCorpusError(
            f"{self.corpus.store.where(names.KEPT)}: its stretches are not in order: the table was changed",
            hint=RESTORE,
        )

    def _parts(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts and stops in the base of parts of the view, each cut at the ends of stretches."""
        kept = self.corpus.kept
        owners, stretches = self._touched(starts, stops)
        shifts = self._shifts(stretches)
        begins = np.maximum(starts[owners], kept.tokens[stretches])
        return begins + shifts, np.minimum(stops[owners], kept.tokens[stretches + 1]) + shifts

    def read(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]
    ) -> None:
        """Copy the tokens of pieces, as `TokenSource.read` does."""
        places = starts + self._shifts_at(starts)
        if ((places < 0) | (places + lengths > self.base.num_tokens)).any():
            raise self._damage()
        self.base.read(places, lengths, out, at)

    def ends(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ends of documents in stretches of the view, as in `TokenSource.ends`."""
        kept = self.corpus.kept
        owners, stretches = self._touched(starts, stops)
        limits = kept.tokens[stretches + 1]
        begins, ends = np.maximum(starts[owners], kept.tokens[stretches]), np.minimum(stops[owners], limits)
        is_whole = ends == limits
        ends -= is_whole  # the table has the end of a stretch; the base is asked for the ends inside of it
        has_several = kept.numbers[stretches + 1] - kept.numbers[stretches] > 1
        asked = np.flatnonzero(has_several & (begins < ends))
        counts = np.zeros(len(stretches), np.int64)
        counts[asked], inside = self._ends_inside(owners[asked], stretches[asked], begins[asked], ends[asked])
        found = np.insert(inside, np.cumsum(counts)[is_whole], limits[is_whole])
        totals = np.bincount(owners, counts + is_whole, len(starts)).astype(np.int64)
        return np.concatenate([[0], np.cumsum(totals)]), found

    def _ends_inside(
        self,
        owners: NDArray[np.int64],
        stretches: NDArray[np.int64],
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ends of documents in parts of the view, each within one stretch.

        Args:
            owners: int64 [parts], ascending. Parts of one owner ascend.

        Returns:
            int64 [parts], the number of ends in each, and all of them: int64.
        """
        if not len(owners):
            return owners, owners
        shifts = self._shifts(stretches)
        lows, highs = begins + shifts, ends + shifts
        is_first = np.ones(len(owners), np.bool_)
        is_first[1:] = (owners[1:] != owners[:-1]) | (lows[1:] - highs[:-1] >= self._joined_tokens)
        first = np.flatnonzero(is_first)
        last = np.append(first[1:], len(owners)) - 1
        offsets, values = self.base.ends(lows[first], highs[last])
        if len(first) == len(owners):
            return np.diff(offsets), values - np.repeat(shifts, np.diff(offsets))
        # of the ends that were asked for together, only those inside of a part; moved so that parts follow each other
        lengths = highs[last] - lows[first]
        moves = np.cumsum(lengths) - lengths - lows[first]
        bounds = np.stack([lows, highs]) + moves[np.cumsum(is_first) - 1]
        begins, ends = (values + np.repeat(moves, np.diff(offsets))).searchsorted(bounds, "right")
        parts, places = spread(begins, ends - begins)
        return ends - begins, values[places] - shifts[parts]

    @cached_property
    def _joined_tokens(self) -> int:
        if not self.is_in_memory:
            return 0
        manifest = self.corpus.base.manifest
        return _JOINED_DOCUMENTS * manifest.num_tokens // max(1, manifest.num_documents)

    def targets(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> SpansIn:
        """The loss spans in stretches of the view, each of which lies within one document."""
        shifts = self._shifts_at(starts)
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
        shift = int(self._shifts_at(np.array([position]))[0])
        found = self.base.document_at(position + shift)
        number = int(self.corpus.kept.of_base(np.array([found.document]))[0])
        return DocumentSpan(found.shard, number, found.start - shift, found.stop - shift)

    def will_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Have the base fetch the stretches of blocks ahead of need."""
        if len(starts):
            self.base.will_read(*self._parts(starts, stops))

    def has_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Have the base forget blocks."""
        if len(starts):
            with contextlib.suppress(DamagedCorpusError):  # who reads them is told
                self.base.has_read(*self._parts(starts, stops))

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
        found = self.base.kept_bytes(num_blocks, block_tokens)
        return int(found * self.read_factor) if found else 0

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
