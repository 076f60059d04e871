"""Statistics of a corpus: the lengths of its documents, and how often each token occurs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.format.corpus import Corpus
from tokshard.format.manifest import DocumentLengths
from tokshard.inspect import OnProgress, no_progress
from tokshard.inspect.corpus.documents import spread
from tokshard.inspect.corpus.vocabulary import Vocabulary, load_vocabulary
from tokshard.numbers import ceil_div

NUM_FREQUENT = 12
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)

ALWAYS_READ = 20_000_000
"""Exact lengths are read without `--full` up to this many documents: 160 MB of offsets."""

SLICE_TOKENS = 16_384
NUM_SLICES = 512
"""Size of a sample: about 8M tokens, in evenly spaced slices."""

_SLICES_OF_A_MAP = 32
"""After so many slices the shards are mapped anew: pages that were read count as memory of the process."""

_DENSE_IDS = 1 << 22
"""Smaller ids are counted in an array; the few larger ones (a vocabulary may have up to 2**32 ids) one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Document lengths in tokens, delimiters included.

    Args:
        lengths: int64 [distinct], ascending.
        counts: int64 [distinct], documents of each length.
        is_exact: if False, each length is the middle of a power of two.
    """

    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]
    is_exact: bool

    def percentiles(self) -> dict[int, int]:
        """Percent to length, for `PERCENTILES`, by nearest rank: that percentage of documents is at most as long."""
        ends = np.cumsum(self.counts)
        ranks = [max(1, ceil_div(percent * int(ends[-1]), 100)) for percent in PERCENTILES]
        found = self.lengths[np.searchsorted(ends, ranks)]
        return dict(zip(PERCENTILES, found.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequentToken:
    """A token with its readable spelling, how often it occurs, and its share of the counted tokens."""

    id: int
    text: str
    count: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """How often each id occurs.

    Args:
        ids: int64 [used], the ids that occur, ascending.
        counts: int64 [used].
        vocab_size: number of possible ids.
        is_full: whether every token of the corpus was counted, not only a sample.
    """

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]
    vocab_size: int
    vocabulary: Vocabulary
    is_full: bool

    @property
    def num_tokens(self) -> int:
        """Tokens that were counted."""
        return int(self.counts.sum())

    @property
    def used_share(self) -> float:
        """The share of the vocabulary that occurs."""
        return len(self.ids) / self.vocab_size

    @property
    def unknown_share(self) -> float | None:
        """The share of unknown tokens; None if the vocabulary lacks an unknown token."""
        unknown = self.vocabulary.unknown_id
        return None if unknown is None else self._share_of([unknown])

    @property
    def byte_share(self) -> float | None:
        """The share of tokens that are parts of characters; None if the vocabulary lacks such tokens."""
        return self._share_of(list(self.vocabulary.byte_ids)) if self.vocabulary.byte_ids else None

    def most_frequent(self, count: int) -> list[FrequentToken]:
        """The most frequent tokens in descending order; ties by id."""
        order = np.argsort(-self.counts, kind="stable")[:count]
        shown, total = self.vocabulary.shown, self.num_tokens
        pairs = zip(self.ids[order].tolist(), self.counts[order].tolist(), strict=True)
        return [FrequentToken(id=token, text=shown(token), count=of, share=of / total) for token, of in pairs]

    def facts(self) -> dict[str, Any]:
        """The fields of the JSON: how many were counted, the ids in use, and shares of the counted tokens."""
        return {
            "counted": self.num_tokens,
            "is_full": self.is_full,
            "used": len(self.ids),
            "vocab_size": self.vocab_size,
            "unknown_share": self.unknown_share,
            "byte_share": self.byte_share,
            "normalizers": self.vocabulary.normalizers,
            "most_frequent": self.most_frequent(NUM_FREQUENT),
        }

    def _share_of(self, ids: list[int]) -> float:
        return float(self.counts[np.isin(self.ids, ids)].sum()) / self.num_tokens


def corpus_lengths(corpus: Corpus, *, is_full: bool) -> Lengths:
    """Exact lengths; for more than `ALWAYS_READ` documents estimates from the manifest, unless `is_full`.

    Raises:
        DamagedCorpusError: a shard is missing or does not match the manifest.
    """
    if is_full or corpus.num_documents <= ALWAYS_READ:
        return read_lengths(corpus)
    return estimated_lengths(corpus.manifest.document_lengths)


def read_lengths(corpus: Corpus) -> Lengths:
    """Exact lengths, from the offsets of the shards: reads 8 bytes per document and no token.

    Raises:
        DamagedCorpusError: a shard is missing or does not match the manifest.
    """
    lengths, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for index in range(len(corpus.shards)):
        shard = corpus.shard(index)
        for batch in range(shard.num_batches):
            found, times = np.unique(np.diff(shard.batch(batch)[0]), return_counts=True)
            lengths, places = np.unique(np.concatenate([lengths, found]), return_inverse=True)
            merged = np.zeros(len(lengths), np.int64)
            np.add.at(merged, places, np.concatenate([counts, times]))
            counts = merged
        corpus.close()
    return Lengths(lengths=lengths, counts=counts, is_exact=True)


def estimated_lengths(lengths: DocumentLengths) -> Lengths:
    """Lengths from the powers of two in the manifest: off by at most a factor of 1.5."""
    middles = [min(max(3 << index >> 1, lengths.shortest), lengths.longest) for index in range(len(lengths.counts))]
    return Lengths(lengths=np.array(middles, np.int64), counts=np.array(lengths.counts, np.int64), is_exact=False)


def count_tokens(corpus: Corpus, *, is_full: bool = False, on_progress: OnProgress = no_progress) -> TokenCounts:
    """Count ids, about 200M tokens per second. Memory does not depend on the largest id.

    Args:
        is_full: count all tokens; otherwise `NUM_SLICES` slices of `SLICE_TOKENS`, unless the corpus has at most four
            times as many.
        on_progress: receives tokens.

    Raises:
        DamagedCorpusError: a shard is missing or does not match the manifest.
    """
    is_full = is_full or corpus.num_tokens <= 4 * NUM_SLICES * SLICE_TOKENS
    to_count = corpus.num_tokens if is_full else NUM_SLICES * SLICE_TOKENS
    counts, beyond = np.zeros(0, np.int64), Counter[int]()
    done = 0
    for tokens in _everything(corpus) if is_full else _slices(corpus):
        done += len(tokens)
        far = tokens[tokens >= _DENSE_IDS]
        if len(far):
            ids, times = np.unique(far, return_counts=True)
            beyond.update(dict(zip(ids.tolist(), times.tolist(), strict=True)))
        found = np.bincount(tokens[tokens < _DENSE_IDS] if len(far) else tokens, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
        on_progress(min(done, to_count), to_count)
    used = np.flatnonzero(counts)
    far_ids = sorted(beyond)
    ids = np.concatenate([used, np.array(far_ids, np.int64)])
    return TokenCounts(
        ids=ids,
        counts=np.concatenate([counts[used], np.array([beyond[token] for token in far_ids], np.int64)]),
        vocab_size=max(corpus.vocab_size, int(ids[-1]) + 1),
        vocabulary=load_vocabulary(corpus),
        is_full=is_full,
    )


def _everything(corpus: Corpus) -> Iterator[NDArray[Any]]:
    for index in range(len(corpus.shards)):
        shard = corpus.shard(index)
        for batch in range(shard.num_batches):
            tokens = shard.batch(batch)[1]
            for start in range(0, len(tokens), 1 << 20):  # bincount converts its input to int64
                yield tokens[start : start + (1 << 20)]
        corpus.close()


def _slices(corpus: Corpus) -> Iterator[NDArray[Any]]:
    """Evenly spaced slices, each within one record batch."""
    firsts = corpus.shards.first_tokens
    for number, place in enumerate(spread(NUM_SLICES, corpus.num_tokens)):
        if not number % _SLICES_OF_A_MAP:
            corpus.close()
        index = int(firsts.searchsorted(place, "right")) - 1
        shard, start = corpus.shard(index), place - int(firsts[index])
        ends = np.cumsum([shard.num_tokens_of(batch) for batch in range(shard.num_batches)])
        batch = int(ends.searchsorted(start, "right"))
        values = shard.batch(batch)[1]
        start = min(start - int(ends[batch]) + len(values), max(0, len(values) - SLICE_TOKENS))
        yield values[start : start + SLICE_TOKENS]
