"""A check for tests of sources: a `TokenSource` gives the same answers in bulk as token by token."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.bytes.source import DocumentSpan, ReadCounts, TokenSource

_DOCUMENTS, _PIECE_TOKENS, _THREADS = 5, 200, 4
"""Consecutive documents that are looked up, tokens of the longest piece, and threads that read at once."""

_is_hash = re.compile("[0-9a-f]{64}").fullmatch

Array = NDArray[Any]


def assert_token_source(source: TokenSource, *, num_places: int = 20, seed: int = 0) -> None:
    """Check that your own source keeps the contract of `TokenSource`, so that every plan over it is exact.

    Consecutive documents are looked up from several places on, and at both ends of the corpus. Their ends, tokens and
    loss spans are requested in stretches and pieces of many sizes, in any order: together, one by one, and by several
    threads. If the source pickles, a copy is checked, too.

    ::

        from tokshard.testing import assert_token_source


        def test_my_source():
            assert_token_source(MySource("..."))

    Args:
        source: the source, of any size; a few thousand tokens are read.
        num_places: the number of places to try.
        seed: seed of the drawn places and pieces.

    Raises:
        AssertionError: names the member, its arguments and the error in its answer.
    """
    _check_facts(source)
    rng, last = np.random.default_rng(seed), source.num_tokens - 1
    places = [0, last, *rng.integers(0, last, num_places, endpoint=True).tolist()]
    rows = [_documents_from(source, place) for place in places]
    documents = [one for _, one in sorted({one.document: one for row in rows for one in row}.items())]
    _check_places(source, documents, rng)
    _check_ends(source, rows, rng)
    starts, lengths = _pieces(documents, rng)
    tokens = _check_read(source, starts, lengths)
    if source.has_spans:
        _check_targets(source, documents, starts, lengths)
    _check_threads(source, rows, starts, lengths, tokens)
    with suppress(pickle.PicklingError, TypeError, AttributeError):  # one that does not pickle is read in one process
        copy = pickle.loads(pickle.dumps(source))  # noqa: S301 - of this process
        _expect(copy.fingerprint == source.fingerprint, "a pickled copy has another fingerprint")
        _expect(np.array_equal(_read(copy, starts, lengths), tokens), "a pickled copy reads other tokens")


def _expect(is_right: bool | np.bool_, problem: str) -> None:
    if not is_right:
        raise AssertionError(problem)


def _check_facts(source: TokenSource) -> None:
    """Check the members that do not look at tokens."""
    facts: dict[str, tuple[Any, bool, str]] = {
        "num_tokens": (n := source.num_tokens, type(n) is int and n >= 1, "an int of at least 1"),
        "fingerprint": (h := source.fingerprint, bool(_is_hash(str(h))), "64 hexadecimal digits in lower case"),
        "dtype": (d := source.dtype, d in map(np.dtype, ("uint16", "uint32")), "numpy's dtype uint16 or uint32"),
        "tokenizer": (t := source.tokenizer, isinstance(t, str), "a string"),
        "is_in_memory": (m := source.is_in_memory, isinstance(m, bool), "a bool"),
        "has_spans": (s := source.has_spans, isinstance(s, bool), "a bool"),
        "earlier_fingerprints": (e := source.earlier_fingerprints, all(map(_is_hash, e)), "fingerprints"),
        "reading": (r := source.reading, isinstance(r, str | None), "a string or None"),
        "counts": (c := source.counts, isinstance(c, ReadCounts | None), "ReadCounts or None"),
        "memory_bytes": (b := source.memory_bytes, type(b) is int and b >= 0, "an int of at least 0"),
        "kept_bytes(2, 64)": (k := source.kept_bytes(2, 64), type(k) is int and k >= 0, "an int of at least 0"),
    }
    for name, (found, is_right, expected) in facts.items():
        _expect(is_right, f"{name} is {found!r:.100}, expected {expected}")


def _documents_from(source: TokenSource, place: int) -> list[DocumentSpan]:
    """Consecutive documents, from the one that holds a token on."""
    found: list[DocumentSpan] = []
    while len(found) < _DOCUMENTS and place < source.num_tokens:
        one, asked = source.document_at(place), f"document_at({place})"
        _expect(isinstance(one, DocumentSpan), f"{asked} is {one!r:.100}, expected a DocumentSpan")
        numbers = (one.document, one.start, one.stop)
        _expect({*map(type, numbers)} == {int}, f"{asked} is {one}, whose numbers are not Python's integers")
        _expect(
            one.start <= place < one.stop <= source.num_tokens,
            f"{asked} is {one}, which does not hold that token of {source.num_tokens:,}",
        )
        _expect((one.start == 0) == (one.document == 0), f"{asked} is {one}: document 0 is the one that starts at 0")
        _expect(
            not found or (one.start, one.document) == (place, found[-1].document + 1),
            f"{asked} is {one}, expected the document after {found[-1:]}",
        )
        found.append(one)
        place = one.stop
    return found


def _check_places(source: TokenSource, documents: Sequence[DocumentSpan], rng: np.random.Generator) -> None:
    for one in documents:
        within = int(rng.integers(one.start, one.stop))
        _expect((found := source.document_at(within)) == one, f"document_at({within}) is {found}, expected {one}")
        _expect((found := source.place_of(one.document)) == one, f"place_of({one.document}) is {found}, expected {one}")
    for wrong in (-1, documents[-1].document + 1):
        with suppress(IndexError):
            found = source.place_of(wrong)
            raise AssertionError(f"place_of({wrong}) is {found}, expected an IndexError: there is no such document")
    bounds = np.stack(source.spans_of(np.array([one.document for one in documents], np.int64)), axis=1).tolist()
    for one, found_bounds in zip(documents, bounds, strict=True):
        expected = [one.start, one.stop]
        _expect(found_bounds == expected, f"spans_of gives document {one.document} {found_bounds}, expected {expected}")


def _check_ends(source: TokenSource, rows: Sequence[Sequence[DocumentSpan]], rng: np.random.Generator) -> None:
    asked: list[tuple[int, int, list[int]]] = []
    for row in rows:
        low, high, ends = row[0].start, row[-1].stop, [one.stop for one in row]
        middle = int(rng.integers(low, high))
        bounds = [(low, high), (middle, high), *((end - 1, end) for end in ends), *pairwise([low, *ends])]
        asked += [(start, stop, [end for end in ends if start < end <= stop]) for start, stop in bounds]
    asked = [asked[at] for at in rng.permutation(len(asked)).tolist()]
    offsets, values = source.ends(*(np.array([stretch[at] for stretch in asked], np.int64) for at in (0, 1)))
    _check_arrays("the offsets of ends", [offsets], ["int64"], len(asked) + 1)
    _check_arrays("the values of ends", [values], ["int64"], int(offsets[-1]))
    for (start, stop, expected), (first, last) in zip(asked, pairwise(offsets.tolist()), strict=True):
        found = values[first:last].tolist()
        _expect(found == expected, f"ends in the stretch ({start}, {stop}] are {found}, expected {expected}")


def _check_arrays(what: str, arrays: Sequence[Array], dtypes: Sequence[str], size: int | None = None) -> None:
    found = [f"{array.dtype} {list(array.shape)}" for array in arrays]
    size = len(arrays[0]) if size is None else size
    expected = [f"{dtype} [{size}]" for dtype in dtypes]
    _expect(found == expected, f"{what} are {', '.join(found)}, expected {', '.join(expected)}")


def _pieces(documents: Sequence[DocumentSpan], rng: np.random.Generator) -> tuple[Array, Array]:
    """Starts and lengths of pieces of all documents, at their starts, at their ends and between, in any order."""
    found: list[tuple[int, int]] = []
    for one in documents:
        size = one.stop - one.start
        length = int(rng.integers(1, min(size, _PIECE_TOKENS), endpoint=True))
        between = one.start + int(rng.integers(0, size - length, endpoint=True))
        found += [(start, length) for start in {one.start, between, one.stop - length}]
    starts, lengths = np.array(found, np.int64)[rng.permutation(len(found))].T.copy()
    return starts, lengths


def _check_read(source: TokenSource, starts: Array, lengths: Array) -> Array:
    """The tokens of pieces, one piece after the other."""
    together = _read(source, starts, lengths)
    places = _tokens_of(starts, lengths)
    alone = _read(source, places, np.ones_like(places))
    for wrong in np.flatnonzero(together != alone)[:1].tolist():
        piece = int(np.searchsorted(np.cumsum(lengths), wrong, "right"))
        raise AssertionError(
            f"read of {len(starts)} pieces gives {together[wrong]} for token {places[wrong]}, in the piece of "
            f"{lengths[piece]} tokens from {starts[piece]} on; read alone, the token is {alone[wrong]}"
        )
    return together


def _tokens_of(starts: Array, lengths: Array) -> Array:
    """The positions of the tokens of pieces."""
    return np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])


def _read(source: TokenSource, starts: Array, lengths: Array) -> Array:
    """The tokens of pieces, read twice to places in another order, with a gap before each piece and at the end."""
    at, order = np.empty_like(starts), np.random.default_rng(0).permutation(len(starts))
    at[order] = np.cumsum(lengths[order] + 1) - lengths[order]
    places = _tokens_of(at, lengths)
    is_gap = np.ones(len(places) + len(starts) + 1, np.bool_)
    is_gap[places] = False
    outs = [np.full(len(is_gap), value, source.dtype) for value in (0, 1)]
    for value, out in enumerate(outs):
        source.read(starts, lengths, out, at)
        _expect((out[is_gap] == value).all(), "read changes elements of `out` that no piece covers")
    first, second = (out[places] for out in outs)
    is_same = np.array_equal(first, second)
    _expect(is_same, "read does not write all elements of `out` that a piece covers, or changes its answer")
    return first


def _check_targets(source: TokenSource, documents: Sequence[DocumentSpan], starts: Array, lengths: Array) -> None:
    together, places = _weights(source, starts, starts + lengths), _tokens_of(starts, lengths)
    alone = _weights(source, places, places + 1)
    for wrong in np.flatnonzero(together != alone)[:1].tolist():
        given = f"targets give token {places[wrong]} the weight {together[wrong]}"
        raise AssertionError(f"{given} in a piece of its document; asked for alone, it has {alone[wrong]}")
    firsts = np.array([one.start for one in documents], np.int64)
    for wrong in np.flatnonzero(_weights(source, firsts, firsts + 1))[:1].tolist():
        raise AssertionError(f"targets have token {firsts[wrong]}, but the first token of a document is never a target")


def _weights(source: TokenSource, starts: Array, stops: Array) -> Array:
    """The weight of each token of stretches, stretch after stretch; 0 if it is not a target."""
    spans = source.targets(starts, stops)
    _check_arrays("the arrays of targets", spans, ["int64", "int64", "int64", "float32"])
    of, weights = spans.stretches, spans.weights
    same = of[1:] == of[:-1]
    _expect((same | (of[1:] > of[:-1])).all(), "the stretches of targets do not ascend")
    is_cut = (starts[of] <= spans.starts) & (spans.starts < spans.stops) & (spans.stops <= stops[of])
    _expect(is_cut.all(), "spans of targets are empty, or not cut to their stretch")
    _expect((spans.stops[:-1] <= spans.starts[1:])[same].all(), "spans of targets overlap, or do not ascend")
    _expect((np.isfinite(weights) & (weights > 0)).all(), "weights of targets are not finite and above 0")
    found, bases = np.zeros(int((stops - starts).sum()), np.float32), np.cumsum(stops - starts) - stops
    for stretch, start, stop, weight in zip(*(array.tolist() for array in spans), strict=True):
        found[start + bases[stretch] : stop + bases[stretch]] = weight
    return found


def _check_threads(
    source: TokenSource, rows: Sequence[Sequence[DocumentSpan]], starts: Array, lengths: Array, expected: Array
) -> None:
    """Read in several threads, with hints before and during the reads."""
    blocks = tuple(
        np.array(bounds, np.int64) for bounds in zip(*((row[0].start, row[-1].stop) for row in rows), strict=True)
    )
    source.will_read(*blocks)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = [pool.submit(_read, source, starts, lengths) for _ in range(_THREADS)]
        source.has_read(*blocks)
        are_same = all(np.array_equal(one.result(), expected) for one in found)
    _expect(are_same, f"read of {len(starts)} pieces gives other tokens in {_THREADS} threads at once")
