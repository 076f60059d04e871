"""Token sources without bytes on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.bytes.source import DocumentSpan, SpansIn, TokenSource

EOS = 0


def ragged(parts: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ends of stretches in the form of `TokenSource.ends`."""
    return np.cumsum([0, *map(len, parts)]), np.concatenate([np.empty(0, np.int64), *parts])


class Source(TokenSource):
    """What sources have in common that read piece by piece."""

    is_in_memory = False

    def ends(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return ragged([self.ends_of(*pair) for pair in zip(starts.tolist(), stops.tolist(), strict=True)])

    def read(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]
    ) -> None:
        assert out.dtype == self.dtype
        for start, length, place in zip(starts.tolist(), lengths.tolist(), at.tolist(), strict=True):
            out[place : place + length] = self.tokens_of(start, length)

    def ends_of(self, start: int, stop: int) -> NDArray[np.int64]:
        raise NotImplementedError

    def tokens_of(self, start: int, length: int) -> NDArray[Any]:
        raise NotImplementedError


class ListSource(Source):
    """Documents in memory. Every token but the delimiter is unique, so that a test can tell where it came from.

    Args:
        lengths: tokens of each document, delimiter included.
        first_token: the id of the first token.
        inner_delimiters: put the delimiter's id into the middle of documents, too.
    """

    dtype = np.dtype(np.uint32)
    tokenizer = "tokenizer"
    is_in_memory = True

    def __init__(
        self, lengths: Sequence[int], *, first_token: int = 1, name: str = "", inner_delimiters: bool = False
    ) -> None:
        self.lengths = list(lengths)
        self.name = name
        total = sum(lengths)
        self.tokens = np.arange(first_token, first_token + total, dtype=np.uint32)
        self.stops = np.cumsum(np.array(lengths, np.int64)) if total else np.empty(0, np.int64)
        self.tokens[self.stops - 1] = EOS
        if inner_delimiters:
            self.tokens[::7] = EOS

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.lengths, self.tokens, self.name))

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.tokens.tobytes() + self.stops.tobytes() + self.name.encode()).hexdigest()

    def ends_of(self, start: int, stop: int) -> NDArray[np.int64]:
        return self.stops[(self.stops > start) & (self.stops <= stop)]

    def tokens_of(self, start: int, length: int) -> NDArray[Any]:
        assert 0 <= start < start + length <= len(self.tokens)
        return self.tokens[start : start + length]

    def document_at(self, position: int) -> DocumentSpan:
        document = int(np.searchsorted(self.stops, position, "right"))
        stop = int(self.stops[document])
        return DocumentSpan("memory", document, stop - self.lengths[document], stop)

    def place_of(self, document: int) -> DocumentSpan:
        if not 0 <= document < len(self.stops):
            raise IndexError(document)
        stop = int(self.stops[document])
        return DocumentSpan("memory", document, stop - self.lengths[document], stop)

    def documents(self) -> list[list[int]]:
        return [part.tolist() for part in np.split(self.tokens, self.stops[:-1])]


class SpannedSource(ListSource):
    """A `ListSource` with loss spans.

    Args:
        target_weights: of each document, the weights of its tokens; 0 for one that is no target, as its first.
    """

    has_spans = True

    def __init__(self, target_weights: Sequence[Sequence[float]], *, first_token: int = 1, name: str = "") -> None:
        super().__init__(list(map(len, target_weights)), first_token=first_token, name=name)
        self.target_weights = target_weights
        self._weights = np.concatenate([np.array(weights, np.float32) for weights in target_weights])

    def targets(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> SpansIn:
        found = []
        for stretch, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            changes = np.flatnonzero(np.diff(self._weights[start:stop])) + 1 + start
            for first, last in pairwise([start, *changes.tolist(), stop]):
                if weight := self._weights[first]:
                    found.append((stretch, first, last, weight))
        stretches, firsts, lasts, weights = np.array(found, np.float64).reshape(-1, 4).T
        return SpansIn(*(part.astype(np.int64) for part in (stretches, firsts, lasts)), weights.astype(np.float32))


def _rebuild(lengths: list[int], tokens: NDArray[np.uint32], name: str) -> ListSource:
    source = ListSource(lengths, name=name)
    source.tokens = tokens
    return source


class PeriodicSource(Source):
    """A corpus of any size whose documents all have one length; tokens are computed when they are read."""

    dtype = np.dtype(np.uint16)
    tokenizer = "tokenizer"
    is_in_memory = True

    def __init__(self, num_tokens: int, document_tokens: int = 1000) -> None:
        self.num_tokens, self._length = num_tokens, document_tokens
        self.fingerprint = hashlib.sha256(f"{num_tokens} {document_tokens}".encode()).hexdigest()

    def ends_of(self, start: int, stop: int) -> NDArray[np.int64]:
        first = (start // self._length + 1) * self._length
        found = np.arange(first, stop + 1, self._length, dtype=np.int64)
        return np.append(found, stop) if stop == self.num_tokens and (not len(found) or found[-1] != stop) else found

    def tokens_of(self, start: int, length: int) -> NDArray[Any]:
        return (np.arange(start, start + length) % 60_000).astype(np.uint16)

    def document_at(self, position: int) -> DocumentSpan:
        document = position // self._length
        return DocumentSpan(
            "none", document, document * self._length, min(self.num_tokens, (document + 1) * self._length)
        )

    def place_of(self, document: int) -> DocumentSpan:
        start = document * self._length
        if not 0 <= start < self.num_tokens:
            raise IndexError(document)
        return DocumentSpan("none", document, start, min(self.num_tokens, start + self._length))
