"""The documents that two corpora share, where they are known without reading tokens."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format import names
from tokshard.format.corpus import Corpus
from tokshard.format.files import map_file
from tokshard.format.kept import Kept, Shared, ranges_of
from tokshard.format.view import View

_FENCE_ROWS = 1_024
_ROWS_AT_ONCE = 1 << 20


def num_shared(one: Corpus, other: Corpus) -> Shared | None:
    """Documents of one base that two views have, or equal texts of two builds with ``--dedup exact``; None: not known.

    The train and the validation corpus of a split share none, because a hash of the text divides them.

    Of texts it reads the hashes, 16 bytes each: about 0.5 CPU-seconds for a million. Builds also keep the hashes of
    texts that became no document (under min-tokens, in the other split): then it is the most that there can be.

    Raises:
        OSError: hashes cannot be read.
    """
    if one.fingerprint == other.fingerprint:
        return Shared(one.num_documents)
    first, second = (_stored(corpus).manifests[0].build for corpus in (one, other))  # appends keep these settings
    if first.split != second.split and replace(first, split=second.split) == second:
        return Shared(0)
    common = _num_common(_stored(one), _stored(other))
    if common and (views := [corpus.kept for corpus in (one, other) if isinstance(corpus, View)]):
        return Shared(_num_in_all(views, common))
    files = [list(_texts(corpus)) for corpus in (one, other)]
    if not all(files):
        return Shared(common) if common else None
    documents = [one.num_documents, other.num_documents]
    count = min(_num_distinct(*files), *documents)
    return Shared(count, is_exact=not count or [_num_distinct(texts) for texts in files] == documents)


def _num_common(one: Corpus, other: Corpus) -> int:
    """The documents of the newest generation that two stored corpora share: the first ones of both."""
    counts = np.cumsum([manifest.num_documents for manifest in one.manifests]).tolist()
    known = zip(one.content_fingerprints, counts, strict=True)
    return max((count for content, count in known if content in other.content_fingerprints), default=0)


def _num_in_all(tables: Sequence[Kept], stop: int) -> int:
    """The number of documents before `stop` that each of some views of one corpus has."""
    total = 0
    for ranges in ranges_of(tables):
        edges = np.minimum(np.concatenate([bounds for of_view in ranges for bounds in of_view]), stop)
        steps = np.concatenate([np.repeat([1, -1], len(starts)) for starts, _ in ranges])
        order = np.argsort(edges, kind="stable")
        depth = np.cumsum(steps[order])[:-1]
        total += int(np.diff(edges[order])[depth == len(tables)].sum())
    return total


def numbers_left_out(corpus: Corpus, view: Corpus) -> Iterator[NDArray[np.int64]]:
    """The documents of a corpus that a view leaves out: their numbers in the corpus, ascending, in parts.

    What was appended to the corpus after the view was made is not left out.

    Args:
        corpus: the base of the view, or another view of it.

    Raises:
        UsageError: the view is of another corpus.
    """
    base = _stored(corpus)
    if not isinstance(view, View) or not (common := _num_common(view.base, base)):
        hint = f"make one with tokshard select {shlex.quote(corpus.location)}, which takes --drop-ids FILE"
        if isinstance(corpus, View) and corpus.base.fingerprint in view.content_fingerprints:
            hint = "give the corpus first, and its view second"
        raise UsageError(f"{view.location} is not a view of {corpus.location}", hint=hint)
    for start in range(0, corpus.num_documents, _ROWS_AT_ONCE):
        numbers = np.arange(start, min(start + _ROWS_AT_ONCE, corpus.num_documents))
        in_base = corpus.kept.in_base(numbers) if isinstance(corpus, View) else numbers
        yield numbers[(view.kept.of_base(in_base) < 0) & (in_base < common)]


def _stored(corpus: Corpus) -> Corpus:
    """The corpus that has the shards."""
    return corpus.base if isinstance(corpus, View) else corpus


def _texts(corpus: Corpus) -> Iterator[NDArray[np.bytes_]]:
    """The hashes of the texts of each generation: S16 [texts], ascending. Nothing, if one lacks them."""
    if isinstance(corpus, View) or not all(names.HASHES in manifest.files for _, manifest in corpus.generations):
        return
    for store, manifest in corpus.generations:
        blocks, rest = divmod(manifest.files[names.HASHES].num_bytes, 16 * _FENCE_ROWS + 8)
        count = blocks * _FENCE_ROWS + max(0, rest - 8) // 16
        pairs = np.frombuffer(map_file(store, names.HASHES), "<u8", 2 * count)
        yield pairs.astype(">u8").view("S16")


def _num_distinct(generations: Sequence[NDArray[np.bytes_]], others: Sequence[NDArray[np.bytes_]] | None = None) -> int:
    """The distinct texts of some generations; with `others`, those that are in one of these, too."""
    total = 0
    for number, texts in enumerate(generations):
        for start in range(0, len(texts), _ROWS_AT_ONCE):
            part = texts[start : start + _ROWS_AT_ONCE]
            is_new = ~_in_any(part, generations[:number])  # a generation lists texts of earlier ones that came again
            total += int((is_new if others is None else is_new & _in_any(part, others)).sum())
    return total


def _in_any(part: NDArray[np.bytes_], files: Sequence[NDArray[np.bytes_]]) -> NDArray[np.bool_]:
    found = np.zeros(len(part), np.bool_)
    for texts in files:
        low, high = texts.searchsorted(part[[0, -1]])
        found |= np.isin(part, texts[low : high + 1], assume_unique=True)
    return found
