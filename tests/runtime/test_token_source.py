"""`assert_token_source`: a source that does what `TokenSource` says passes, and what is wrong with another is named."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.disk import ACCESS, write
from tests.runtime.sources import ListSource, PeriodicSource, SpannedSource
from tokshard.runtime import CorpusSource, DocumentSpan, SpansIn, TokenSource
from tokshard.testing import assert_token_source

LENGTHS = [5, 9, 1, 30, 12] * 9
WEIGHTS = [[0, 1, 1, 0.5, 0, 0], [0], [0, 3], [0] * 9, [0, 0, 1]] * 9


@pytest.mark.parametrize(
    "source",
    [
        ListSource(LENGTHS),
        ListSource([1]),
        SpannedSource(WEIGHTS),
        PeriodicSource(10**14 + 7),
    ],
    ids=["documents", "one token", "loss spans", "any size"],
)
def test_a_right_source_passes(source: TokenSource) -> None:
    assert_token_source(source)


@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize("memory", [ListSource(LENGTHS), SpannedSource(WEIGHTS)], ids=["documents", "loss spans"])
def test_a_corpus_on_disk_passes(tmp_path: Path, access: str, memory: ListSource) -> None:
    assert_token_source(CorpusSource(write(tmp_path / "corpus", memory, shard_tokens=100), access=access))


class WithoutNumTokens(ListSource):
    num_tokens: Any = 0  # type: ignore[assignment]


class Wide(ListSource):
    dtype = np.dtype(np.int64)  # type: ignore[assignment]


class Named(ListSource):
    fingerprint: Any = "mine"  # type: ignore[assignment]


class OffByOne(ListSource):
    def document_at(self, position: int) -> DocumentSpan:
        return super().document_at(max(0, position - 1))


class NumberedFromOne(ListSource):
    def document_at(self, position: int) -> DocumentSpan:
        found = super().document_at(position)
        return replace(found, document=found.document + 1)


class OfNumpy(ListSource):
    def document_at(self, position: int) -> DocumentSpan:
        found = super().document_at(position)
        return replace(found, start=np.int64(found.start))  # type: ignore[arg-type]


class Clipping(ListSource):
    def place_of(self, document: int) -> DocumentSpan:
        return super().place_of(min(max(0, document), len(self.stops) - 1))


class SpansOfOthers(ListSource):
    def spans_of(self, documents: Any) -> Any:
        return self.stops[documents], self.stops[documents] + 1


class WithEndsAtStarts(ListSource):
    def ends_of(self, start: int, stop: int) -> Any:
        return self.stops[(self.stops >= start) & (self.stops < stop)]


class WithListsOfEnds(ListSource):
    def ends(self, starts: Any, stops: Any) -> Any:
        offsets, values = super().ends(starts, stops)
        return offsets[:-1], values


class InOrder(ListSource):
    """Ignores where pieces are to go."""

    def read(self, starts: Any, lengths: Any, out: Any, at: Any) -> None:
        super().read(starts, lengths, out, np.cumsum(lengths) - lengths)


class Short(ListSource):
    """Leaves the last token of a longer piece as it was."""

    def read(self, starts: Any, lengths: Any, out: Any, at: Any) -> None:
        super().read(starts, np.maximum(lengths - 1, 1), out, at)


class Shifted(ListSource):
    """Forgets where long pieces start."""

    def tokens_of(self, start: int, length: int) -> Any:
        return super().tokens_of(max(0, start - (length > 5)), length)


class OfOneThread(ListSource):
    """Keeps what is read in a place that threads share."""

    shared = 0

    def tokens_of(self, start: int, length: int) -> Any:
        return super().tokens_of(start, length) + (threading.current_thread() is not threading.main_thread())


class Uncut(SpannedSource):
    def targets(self, starts: Any, stops: Any) -> SpansIn:
        places = [self.document_at(start) for start in starts.tolist()]
        return super().targets(np.array([one.start for one in places]), np.array([one.stop for one in places]))


class WithFirstTokens(SpannedSource):
    def targets(self, starts: Any, stops: Any) -> SpansIn:
        count = len(starts)
        return SpansIn(np.arange(count), starts, stops, np.ones(count, np.float32))


class OfAllOrNothing(SpannedSource):
    """A stretch is a target if its first token is."""

    def targets(self, starts: Any, stops: Any) -> SpansIn:
        found = super().targets(starts, starts + 1)
        return found._replace(stops=stops[found.stretches])


class Weightless(SpannedSource):
    def targets(self, starts: Any, stops: Any) -> SpansIn:
        found = super().targets(starts, stops)
        return found._replace(weights=found.weights * np.float32(0))


class Forgetful(ListSource):
    def __reduce__(self) -> Any:
        return (ListSource, (self.lengths,), {"tokens": self.tokens + 1})


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (WithoutNumTokens(LENGTHS), "num_tokens is 0, expected an int of at least 1"),
        (Wide(LENGTHS), r"dtype is dtype\('int64'\), expected numpy's dtype uint16 or uint32"),
        (Named(LENGTHS), "fingerprint is 'mine', expected 64 hexadecimal digits in lower case"),
        (OffByOne(LENGTHS), r"document_at\(\d+\) is .*, which does not hold that token of 513"),
        (NumberedFromOne(LENGTHS), r"document_at\(0\) is .*: document 0 is the one that starts at 0"),
        (OfNumpy(LENGTHS), "whose numbers are not Python's integers"),
        (Clipping(LENGTHS), r"place_of\(-1\) is .*, expected an IndexError"),
        (SpansOfOthers(LENGTHS), r"spans_of gives document 0 \[5, 6\], expected \[0, 5\]"),
        (WithEndsAtStarts(LENGTHS), r"ends in the stretch \(\d+, \d+\] are \[.*\], expected \["),
        (WithListsOfEnds(LENGTHS), r"the offsets of ends are int64 \[\d+\], expected int64 \["),
        (InOrder(LENGTHS), "read changes elements of `out` that no piece covers"),
        (Short(LENGTHS), "read does not write all elements of `out` that a piece covers"),
        (Shifted(LENGTHS), r"read of \d+ pieces gives \d+ for token \d+, .*; read alone, the token is \d+"),
        (OfOneThread(LENGTHS), "gives other tokens in 4 threads at once"),
        (Uncut(WEIGHTS), "spans of targets are empty, or not cut to their stretch"),
        (WithFirstTokens(WEIGHTS), "targets have token .* the first token of a document is never a target"),
        (OfAllOrNothing(WEIGHTS), r"targets give token \d+ the weight .*; asked for alone, it has"),
        (Weightless(WEIGHTS), "weights of targets are not finite and above 0"),
        (Forgetful(LENGTHS), "a pickled copy has another fingerprint"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_what_is_wrong_with_a_source_is_named(source: TokenSource, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        assert_token_source(source)
