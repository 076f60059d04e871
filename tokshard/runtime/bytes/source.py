"""The interface between an order and the bytes that it reads.

An order asks a corpus where its documents end, and copies tokens of it. Each call is for many places, so that a source
with slow answers can request all of them at once. Only arrays of integers cross the interface: a source may keep its
tokens in memory maps, files or an object store, or compute them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokshard.format.kept import Kept, Shared

_REQUESTS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class DocumentSpan:
    """A document and its tokens.

    Args:
        shard: file name.
        document: number in the corpus.
        start, stop: its tokens in the corpus.
    """

    shard: str
    document: int
    start: int
    stop: int


@dataclass(slots=True)
class ReadCounts:
    """Reads through a cache by this process, since the cache was made.

    Args:
        hits: parts of documents that were in memory when needed.
        misses: parts of documents that a reader waited for.
        requests: requests to stores.
        fetched_bytes: bytes from stores, hashes included.
        disk_bytes: bytes from the directory of the cache.
        wrong_strides: strides with wrong bytes, which were fetched again.
        wait_seconds: seconds that readers waited.
    """

    hits: int = 0
    misses: int = 0
    requests: int = 0
    fetched_bytes: int = 0
    disk_bytes: int = 0
    wrong_strides: int = 0
    wait_seconds: float = 0.0


class SpansIn(NamedTuple):
    """The loss spans in some stretches of a corpus.

    Args:
        stretches: int64 [spans], the stretch of each, ascending.
        starts, stops: int64 [spans], positions in the corpus, ascending in each stretch.
        weights: float32 [spans].
    """

    stretches: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    weights: NDArray[np.float32]


class KeptDocuments(NamedTuple):
    """The documents of a base corpus that a source has.

    Args:
        base: content fingerprint of the first generation of the base: later ones only add documents.
        documents: the table of a view.
        cell: its cell, which shares no document with another one of the same division; empty if it is no cell.
        division: identifies the division, equal for all of its cells.
    """

    base: str
    documents: Kept
    cell: str = ""
    division: str = ""


class TokenSource(ABC):
    """The tokens of a corpus, shard after shard, as one sequence. Positions count its tokens from 0.

    A plan reads any subclass: set the first four attributes, and define the four abstract methods. All others have
    defaults: hints are ignored, nothing is kept in memory, and there are no loss spans. Several threads may call all of
    them at once. `tokshard.testing.assert_token_source` checks a source.

    Attributes:
        num_tokens: tokens in the corpus.
        fingerprint: content fingerprint, 64 hexadecimal digits.
        dtype: dtype of a token id, uint16 or uint32.
        tokenizer: hash of the tokenizer; all corpora of a plan share it.
        is_in_memory: whether a read never waits for longer than a page fault. Changes only speed. If all sources of a
            plan are in memory, several batches are read at once, which takes fewer calls. Otherwise each batch is read
            by itself, so none waits for the reads of later ones.
        tokens_at_once: tokens of later batches that are read along with a batch although the source is not in memory;
            for sources whose `ends` keeps what it reads. Changes only speed.
        earlier_fingerprints: content fingerprints of the corpus before each time that it grew.
        has_spans: whether loss spans say which tokens are targets; if not, all but each document's first are.
    """

    num_tokens: int
    fingerprint: str
    dtype: np.dtype[Any]
    tokenizer: str
    is_in_memory: bool = False
    tokens_at_once: int = 0
    earlier_fingerprints: Sequence[str] = ()
    has_spans: bool = False

    @abstractmethod
    def document_at(self, position: int) -> DocumentSpan:
        """The document that holds a token. Several threads call it at once, unless the source `is_in_memory`."""

    @abstractmethod
    def place_of(self, document: int) -> DocumentSpan:
        """A document by its number; IndexError if the corpus has no such document."""

    @abstractmethod
    def ends(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ends of documents in stretches of the corpus.

        Args:
            starts, stops: int64 [n], each start below its stop.

        Returns:
            offsets, int64 [n + 1], and values, int64: the ends in stretch i are, ascending,
            ``values[offsets[i] : offsets[i + 1]]``. An end is the position after a delimiter; a stretch has the ends in
            ``(start, stop]``.
        """

    @abstractmethod
    def read(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]
    ) -> None:
        """Copy the tokens of pieces. Each piece lies within one document.

        Args:
            starts, lengths: int64 [n], position and tokens of each piece; at least 1 token.
            out: one-dimensional, of `dtype`. Elements that no piece covers keep their values.
            at: int64 [n], where in `out` each piece starts; pieces do not overlap.
        """

    def targets(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> SpansIn:
        """The loss spans in stretches of the corpus, cut to them. Called only if the source `has_spans`.

        Args:
            starts, stops: int64 [n]; each stretch lies within one document, and is not empty.
        """
        raise NotImplementedError

    def spans_of(self, documents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts and stops of documents: int64 [n] each; IndexError if the corpus lacks one of them.

        Args:
            documents: int64 [n], ascending, at least one.
        """
        places = [self.place_of(document) for document in documents.tolist()]
        return np.array([place.start for place in places]), np.array([place.stop for place in places])

    def will_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:  # noqa: B027 - a hint
        """A hint that these blocks of the corpus will be read next, in about this order. Most sources ignore it.

        A source that `is_in_memory` is given none.

        Args:
            starts, stops: int64 [n], positions of the first token of each, and of the one after its last.
        """

    def has_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:  # noqa: B027 - a hint
        """A hint that the reader that announced these blocks to `will_read` is done with them.

        Any thread may call it at any time, even during a read.
        """

    @property
    def kept(self) -> KeptDocuments | None:
        """The documents of its base that this source has; None: it has no base."""
        return None

    def num_shared(self, other: TokenSource) -> Shared | None:  # noqa: ARG002 - a source that knows its texts says it
        """How many documents another source has, too; None: not known."""
        return None

    @property
    def read_factor(self) -> float:
        """About how many tokens are read for each that is used, if the source is not in memory."""
        return 1.0

    @property
    def reading(self) -> str | None:
        """The file that is read, or was read last; None if there is none. A read that hangs, hangs there."""
        return None

    @property
    def counts(self) -> ReadCounts | None:
        """Counts of reads by range; sources that share a cache share them. None: nothing is read by range."""
        return None

    @property
    def memory_bytes(self) -> int:
        """Bytes that this source, together with sources of the same `counts`, may keep in memory."""
        return 0

    def kept_bytes(self, num_blocks: int, block_tokens: int) -> int:  # noqa: ARG002 - nothing is kept
        """Bytes that so many blocks occupy in that memory."""
        return 0


def fetched(sources: Iterable[TokenSource]) -> dict[str, float]:
    """Reads of sources by range in this process: sums of their `ReadCounts`, by name."""
    found = {id(counts): counts for source in sources if (counts := source.counts) is not None}.values()
    return {item.name: sum(getattr(each, item.name) for each in found) for item in fields(ReadCounts)}


def documents_at(source: TokenSource, positions: list[int]) -> list[DocumentSpan]:
    """The documents that hold some tokens; looked up concurrently where each costs a request."""
    if source.is_in_memory:
        return list(map(source.document_at, positions))
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        return list(pool.map(source.document_at, positions))
