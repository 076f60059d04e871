"""`assert_token_source`: a source that does what `TokenSource` says passes, and what is wrong with another is named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.disk import ACCESS, write
from tests.runtime.sources import ListSource, PeriodicSource, SpannedSource
from tokshard.runtime import CorpusSource, SpansIn, TokenSource
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


def answer_with(name: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    """A method of `ListSource` whose answer is changed."""
    return {name: lambda source, *arguments: change(getattr(ListSource, name)(source, *arguments))}


def asked_for(name: str, change: Callable[..., Any]) -> dict[str, Any]:
    """A method of `ListSource` that takes other arguments for those that it is given."""
    return {name: lambda source, *arguments: getattr(ListSource, name)(source, *change(*arguments))}


def targets_of_whole_documents(source: SpannedSource, starts: Any, stops: Any) -> SpansIn:
    places = [source.document_at(start) for start in starts.tolist()]
    return SpannedSource.targets(
        source, np.array([one.start for one in places]), np.array([one.stop for one in places])
    )


def targets_if_the_first_token_is_one(source: SpannedSource, starts: Any, stops: Any) -> SpansIn:
    found = SpannedSource.targets(source, starts, starts + 1)
    return found._replace(stops=stops[found.stretches])


def targets_of_weight_0(source: SpannedSource, starts: Any, stops: Any) -> SpansIn:
    found = SpannedSource.targets(source, starts, stops)
    return found._replace(weights=found.weights * np.float32(0))


def another_token_in_other_threads(tokens: Any) -> Any:
    return tokens + (threading.current_thread() is not threading.main_thread())


WRONG: dict[str, dict[str, Any]] = {
    "num_tokens is 0, expected an int of at least 1": {"num_tokens": 0},
    r"dtype is dtype\('int64'\), expected numpy's dtype uint16 or uint32": {"dtype": np.dtype(np.int64)},
    "fingerprint is 'mine', expected 64 hexadecimal digits in lower case": {"fingerprint": "mine"},
    r"document_at\(\d+\) is .*, which does not hold that token of 513": asked_for(
        "document_at", lambda position: [max(0, position - 1)]
    ),
    r"document_at\(0\) is .*: document 0 is the one that starts at 0": answer_with(
        "document_at", lambda found: replace(found, document=found.document + 1)
    ),
    r"document_at\(0\) is \(0, 5\), expected a DocumentSpan": answer_with(
        "document_at", lambda found: (found.start, found.stop)
    ),
    "whose numbers are not Python's integers": answer_with(
        "document_at", lambda found: replace(found, start=np.int64(found.start))
    ),
    r"place_of\(-1\) is .*, expected an IndexError": asked_for(
        "place_of", lambda document: [min(max(0, document), len(LENGTHS) - 1)]
    ),
    r"spans_of gives document 0 \[5, 6\], expected \[0, 5\]": {
        "spans_of": lambda source, documents: (source.stops[documents], source.stops[documents] + 1)
    },
    r"ends in the stretch \(\d+, \d+\] are \[.*\], expected \[": asked_for(
        "ends_of", lambda start, stop: [start - 1, stop - 1]
    ),
    r"the offsets of ends are int64 \[\d+\], expected int64 \[": answer_with(
        "ends", lambda found: (found[0][:-1], found[1])
    ),
    "read changes elements of `out` that no piece covers": asked_for(
        "read", lambda starts, lengths, out, at: [starts, lengths, out, np.cumsum(lengths) - lengths]
    ),
    "read does not write all elements of `out` that a piece covers": asked_for(
        "read", lambda starts, lengths, out, at: [starts, np.maximum(lengths - 1, 1), out, at]
    ),
    r"read of \d+ pieces gives \d+ for token \d+, .*; read alone, the token is \d+": asked_for(
        "tokens_of", lambda start, length: [max(0, start - (length > 5)), length]
    ),
    "gives other tokens in 4 threads at once": answer_with("tokens_of", another_token_in_other_threads),
    "a pickled copy has another fingerprint": {
        "__reduce__": lambda source: (ListSource, (source.lengths,), {"tokens": source.tokens + 1})
    },
    "spans of targets are empty, or not cut to their stretch": {"targets": targets_of_whole_documents},
    "targets have token .* the first token of a document is never a target": {
        "targets": lambda _, starts, stops: SpansIn(
            np.arange(len(starts)), starts, stops, np.ones(len(starts), np.float32)
        )
    },
    r"targets give token \d+ the weight .*; asked for alone, it has": {"targets": targets_if_the_first_token_is_one},
    "weights of targets are not finite and above 0": {"targets": targets_of_weight_0},
}
"""What is said of a source, and how it differs from a right one."""


@pytest.mark.parametrize("problem", WRONG)
def test_what_is_wrong_with_a_source_is_named(problem: str) -> None:
    has_spans = "targets" in WRONG[problem]
    base, content = (SpannedSource, WEIGHTS) if has_spans else (ListSource, LENGTHS)
    source = type("Wrong", (base,), WRONG[problem])(content)
    with pytest.raises(AssertionError, match=problem):
        assert_token_source(source)
