"""How long the documents of a corpus are, exactly: from the offsets of its shards, without a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokshard.format.corpus import Corpus
from tokshard.format.manifest import DocumentLengths

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)

ALWAYS_READ = 20_000_000
"""Documents of a corpus whose offsets are read without being asked: 160 MB."""

OnProgress = Callable[[int, int], None]
"""Is called with what is done so far and what there is to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Document lengths in tokens, delimiters included.

    Args:
        lengths: int64 [distinct], ascending.
        counts: int64 [distinct], documents of each.
        is_exact: whether lengths are those of documents; else each stands for the middle of a power of two.
    """

    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]
    is_exact: bool

    def percentiles(self) -> dict[int, int]:
        """`PERCENTILES` by nearest rank: so many percent of the documents are at most so long."""
        ends = np.cumsum(self.counts)
        ranks = [max(1, -(-percent * int(ends[-1]) // 100)) for percent in PERCENTILES]
        found = self.lengths[np.searchsorted(ends, ranks)]
        return dict(zip(PERCENTILES, found.tolist(), strict=True))


def read_lengths(corpus: Corpus, on_progress: OnProgress = lambda _done, _total: None) -> Lengths:
    """Exact lengths; reads 8 bytes per document, and needs memory for as many numbers as there are distinct lengths.

    Raises:
        DamagedCorpusError: a shard is missing or not what the manifest says.
    """
    lengths, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    done = 0
    for index in range(len(corpus.shards)):
        shard = corpus.shard(index)
        for batch in range(shard.num_batches):
            found, times = np.unique(np.diff(shard.batch(batch)[0]), return_counts=True)
            lengths, places = np.unique(np.concatenate([lengths, found]), return_inverse=True)
            merged = np.zeros(len(lengths), np.int64)
            np.add.at(merged, places, np.concatenate([counts, times]))
            counts = merged
            done += int(times.sum())
            on_progress(done, corpus.num_documents)
        corpus.close()
    return Lengths(lengths=lengths, counts=counts, is_exact=True)


def estimated_lengths(lengths: DocumentLengths) -> Lengths:
    """Lengths as the manifest has them, by powers of two: off by at most a factor of 1.5."""
    middles = [min(max(3 << index >> 1, lengths.shortest), lengths.longest) for index in range(len(lengths.counts))]
    return Lengths(lengths=np.array(middles, np.int64), counts=np.array(lengths.counts, np.int64), is_exact=False)
