"""Which tokens a corpus is made of: counted in a sample of places, or in all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.format.corpus import Corpus
from tokshard.inspect.corpus.documents import spread
from tokshard.inspect.corpus.lengths import OnProgress
from tokshard.inspect.corpus.vocabulary import Vocabulary

SLICE_TOKENS = 16_384
NUM_SLICES = 512
"""Of a sample: about 8M tokens from the same distance apart."""


_DENSE_IDS = 1 << 22
"""Ids below are counted in an array; the few beyond, which a vocabulary may have up to 2**32, one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """How often each id occurs.

    Args:
        ids: int64 [used], those that occur, ascending.
        counts: int64 [used], how often.
        vocab_size: ids that could occur.
        is_full: whether every token of the corpus was counted.
    """

    ids: NDArray[np.int64]
    counts: NDArray[np.int64]
    vocab_size: int
    is_full: bool

    @property
    def num_tokens(self) -> int:
        """Tokens that were counted."""
        return int(self.counts.sum())

    @property
    def num_used(self) -> int:
        """Ids that occur."""
        return len(self.ids)

    def most_frequent(self, count: int) -> list[tuple[int, int]]:
        """Ids and how often they occur, most first; equal ones by id."""
        order = np.argsort(-self.counts, kind="stable")[:count]
        return list(zip(self.ids[order].tolist(), self.counts[order].tolist(), strict=True))

    def share_of(self, ids: frozenset[int]) -> float:
        """Of the tokens that were counted."""
        return float(self.counts[np.isin(self.ids, list(ids))].sum()) / self.num_tokens


def count_tokens(
    corpus: Corpus, *, is_full: bool = False, on_progress: OnProgress = lambda _done, _total: None
) -> TokenCounts:
    """Count ids; about 200M tokens per second. Memory does not depend on the largest id.

    Args:
        is_full: count all; else `NUM_SLICES` slices of `SLICE_TOKENS`, unless all are at most four times as many.

    Raises:
        DamagedCorpusError: a shard is missing or not what the manifest says.
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
        is_full=is_full,
    )


def token_summary(counts: TokenCounts, vocabulary: Vocabulary, *, num_frequent: int) -> dict[str, Any]:
    """What is worth saying of counts, as plain values."""
    unknown = frozenset() if vocabulary.unknown_id is None else frozenset([vocabulary.unknown_id])
    return {
        "counted": counts.num_tokens,
        "is_full": counts.is_full,
        "used": counts.num_used,
        "vocab_size": counts.vocab_size,
        "unknown_share": counts.share_of(unknown) if unknown else None,
        "byte_share": counts.share_of(vocabulary.byte_ids) if vocabulary.byte_ids else None,
        "normalizers": list(vocabulary.normalizers),
        "most_frequent": [
            {"id": token, "text": vocabulary.shown(token), "count": times, "share": times / counts.num_tokens}
            for token, times in counts.most_frequent(num_frequent)
        ],
    }


def _everything(corpus: Corpus) -> Iterator[NDArray[Any]]:
    for index in range(len(corpus.shards)):
        shard = corpus.shard(index)
        for batch in range(shard.num_batches):
            tokens = shard.batch(batch)[1]
            for start in range(0, len(tokens), 1 << 20):  # bincount makes int64 of what it gets
                yield tokens[start : start + (1 << 20)]
        corpus.close()


def _slices(corpus: Corpus) -> Iterator[NDArray[Any]]:
    """Slices from places the same distance apart, each within one record batch."""
    first_batches, tokens = corpus.shards.batch_tokens()
    ends = np.cumsum(tokens)
    for place in spread(NUM_SLICES, corpus.num_tokens):
        batch = int(np.searchsorted(ends, place, "right"))
        index = int(np.searchsorted(first_batches, batch, "right")) - 1
        values = corpus.shard(index).batch(batch - int(first_batches[index]))[1]
        start = min(place - int(ends[batch] - tokens[batch]), max(0, len(values) - SLICE_TOKENS))
        yield values[start : start + SLICE_TOKENS]
