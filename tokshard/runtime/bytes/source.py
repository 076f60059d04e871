"""The interface between an order and the bytes that it reads.

An order asks a corpus where its documents end, and copies tokens of it. Each call is for many places, so that a source
with slow answers can request all of them at once. Only arrays of integers cross the interface: a source may keep its
tokens in memory maps, files or an object store, or compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray


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


class TokenSource(Protocol):
    """The tokens of a corpus, shard after shard, as one sequence. Positions count its tokens from 0."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the corpus."""

    @property
    def fingerprint(self) -> str:
        """Content fingerprint: 64 hexadecimal digits."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a token id: uint16 or uint32."""

    @property
    def tokenizer(self) -> str:
        """Hash of the tokenizer, which all corpora of a plan share."""

    @property
    def is_in_memory(self) -> bool:
        """Whether reading never waits for longer than a page fault. Changes speed only.

        If all sources of a plan are in memory, several batches are read at once, which takes fewer calls. Otherwise
        each batch is read by itself, so that none waits for the reads of later ones.
        """

    def document_at(self, position: int) -> DocumentSpan:
        """The document that holds a token. Threads call it at the same time, unless the source `is_in_memory`."""

    def place_of(self, document: int) -> DocumentSpan:
        """A document by its number; IndexError if the corpus has no such document."""

    def ends(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where documents end in stretches of the corpus.

        Args:
            starts, stops: int64 [n], each start below its stop.

        Returns:
            offsets, int64 [n + 1], and values, int64: the ends in stretch i are, ascending,
            ``values[offsets[i] : offsets[i + 1]]``. An end is the position after a delimiter; those in
            ``(start, stop]`` belong to a stretch.
        """

    def read(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]
    ) -> None:
        """Copy the tokens of pieces. Each piece lies within one document.

        Args:
            starts, lengths: int64 [n], position and tokens of each piece; at least 1 token.
            out: one-dimensional, of `dtype`. What no piece covers stays as it was.
            at: int64 [n], where in `out` each piece starts; pieces do not overlap.
        """

    def will_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """A hint that these blocks of the corpus will be read next, in about this order. Most sources ignore it.

        Args:
            starts, stops: int64 [n], positions of the first token of each and of the one after its last.
        """

    def has_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """A hint that the reader that announced these blocks to `will_read` is done with them."""

    def spans_of(self, documents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where documents start and stop: int64 [n] each; IndexError if the corpus lacks one of them."""

    @property
    def reading(self) -> str | None:
        """The file that was read last, or is read; None: there is none."""

    @property
    def earlier_fingerprints(self) -> Sequence[str]:
        """Content fingerprints of the corpus before each time that it grew."""


def completed(source: Any) -> TokenSource:
    """A source with all members. Those after `read` may be missing: hints are ignored, spans are asked one by one."""
    if all(hasattr(source, name) for name in _DEFAULTS):
        found: TokenSource = source
        return found
    return cast("TokenSource", _Completed(source))


class _Completed:
    """A source of someone else, and defaults for what it lacks."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        source = self.__dict__.get("_source")
        if source is None or name.startswith("__") or name not in _DEFAULTS or hasattr(source, name):
            return getattr(source, name)
        return _DEFAULTS[name](source)

    def __reduce__(self) -> tuple[Any, ...]:
        return (completed, (self._source,))

    def __repr__(self) -> str:
        return repr(self._source)


def _spans_of(source: TokenSource, documents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    places = [source.place_of(document) for document in documents.tolist()]
    starts, stops = np.array([(place.start, place.stop) for place in places], np.int64).reshape(-1, 2).T.copy()
    return starts, stops


def _ignored(_: NDArray[np.int64], __: NDArray[np.int64]) -> None:
    pass


_DEFAULTS: Mapping[str, Callable[[TokenSource], Any]] = {
    "will_read": lambda _: _ignored,
    "has_read": lambda _: _ignored,
    "spans_of": lambda source: partial(_spans_of, source),
    "reading": lambda _: None,
    "earlier_fingerprints": lambda _: (),
}
