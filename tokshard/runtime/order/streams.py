"""The mixtures of all streams of a plan, for global samples.

Each stream has a tree of roundings of its own, on its own counter, so that nothing is counted over streams. Their trees
start at staggered remainders: the root of C streams gives exactly what one that rounds once would give, by Hermite's
identity, ``floor(x) + floor(x + 1/C) + ... + floor(x + (C-1)/C) = floor(C x)``. Without the stagger all streams would
round at the same time. ORDER.md, section 13, has the rules.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.order.mixture import Balance, Mixture, Segment
from tokshard.runtime.order.permutation import KEY_WORDS, Permutation
from tokshard.runtime.order.rounding import ONE
from tokshard.runtime.order.seeds import derive_key
from tokshard.runtime.order.tally import Tally


def samples_before(sample: int, stream: int, num_streams: int) -> int:
    """How many samples of a stream come before a global sample."""
    return -(-(sample - stream) // num_streams)


def samples_before_each(sample: int, num_streams: int) -> NDArray[np.int64]:
    """How many samples of each stream come before a global sample: int64 [streams]."""
    return -(-(sample - np.arange(num_streams, dtype=np.int64)) // num_streams)


def segments_of(segments: tuple[Segment, ...], stream: int, num_streams: int) -> tuple[Segment, ...]:
    """The segments of a run as one stream counts them. Of several that start at the same sample, the last counts."""
    if num_streams == 1:
        return segments
    return tuple(
        Segment(start=samples_before(segment.start, stream, num_streams), weights=segment.weights)
        for segment in segments
    )


class Mixtures:
    """The corpora of a run's samples, stream by stream. With one stream, a global sample is a sample of it.

    Args:
        seed: of the plan.
        num_streams: of the plan.
        segments: by ascending start, a global sample.
        balances: of each stream at the start of the first segment; empty: that is the start of the run.
    """

    def __init__(
        self, *, seed: int, num_streams: int, segments: tuple[Segment, ...], balances: tuple[Balance, ...]
    ) -> None:
        self.seed, self.num_streams, self.segments, self.balances = seed, num_streams, segments, balances
        # two threads may make the same
        self._streams: dict[int, Mixture] = {}
        self._tallies: dict[int, Tally] = {}  # by segment, at its start, as far as they were asked for

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.seed, self.num_streams, self.segments, self.balances))  # without what was counted

    def changed(self, segments: tuple[Segment, ...]) -> Mixtures:
        """The same with other segments, which keeps what was counted for those that are the same."""
        changed = Mixtures(seed=self.seed, num_streams=self.num_streams, segments=segments, balances=self.balances)
        for stream, mixture in list(self._streams.items()):
            changed._streams[stream] = mixture.changed(segments_of(segments, stream, self.num_streams))
        for index, tally in list(self._tallies.items()):
            if self.segments[: index + 1] == segments[: index + 1]:
                changed._tallies[index] = tally
        return changed

    def since(self, sample: int) -> Mixtures:
        """The same from a global sample on, without the segments that end before it."""
        later = [segment for segment, following in pairwise(self.segments) if following.start > sample]
        kept = (*later, self.segments[-1])
        if len(kept) == len(self.segments):
            return self
        return _rebuild(self.seed, self.num_streams, kept, self.balances_before(kept[0].start))

    def weights_at(self, sample: int) -> tuple[float, ...]:
        """The weights in force at a global sample, which is not before the first segment."""
        return self.segments[bisect_right(self.segments, sample, key=lambda segment: segment.start) - 1].weights

    def of(self, stream: int) -> Mixture:
        """The mixture of one stream, for the samples of that stream."""
        mixture = self._streams.get(stream)
        if mixture is None:
            num_corpora = len(self.segments[0].weights)
            balance = self.balances[stream] if self.balances else self.start_of(stream, num_corpora)
            key = derive_key(self.seed, "mixture", words=num_corpora - 1) if self.num_streams == 1 else None
            mixture = Mixture(key=key, segments=segments_of(self.segments, stream, self.num_streams), balance=balance)
            self._streams[stream] = mixture
        return mixture

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Corpus of each global sample, and which sample of that corpus it is in its stream.

        Args:
            samples: int64 [n], ascending within each stream.

        Returns:
            int64 [n] twice.

        Raises:
            ValueError: a sample lies before the first segment.
        """
        if self.num_streams == 1:
            return self.of(0).locate(samples)
        corpora, corpus_samples = np.empty_like(samples), np.empty_like(samples)
        numbers, streams = np.divmod(samples, self.num_streams)
        for stream in np.unique(streams).tolist():
            mine = np.flatnonzero(streams == stream)
            corpora[mine], corpus_samples[mine] = self.of(stream).locate(numbers[mine])
        return corpora, corpus_samples

    def counts_before(self, sample: int) -> tuple[int, ...]:
        """How many samples of each corpus come before a global sample, over all streams.

        Raises:
            ValueError: the sample lies before the first segment.
        """
        if self.num_streams == 1:
            return self.of(0).counts_before(sample)
        return tuple(self._tally_before(sample).counts.sum(1).tolist())

    def balances_before(self, sample: int) -> tuple[Balance, ...]:
        """The balance of each stream before a global sample.

        Raises:
            ValueError: the sample lies before the first segment.
        """
        if self.num_streams == 1:
            return (self.of(0).balance_before(sample),)
        return self._tally_before(sample).balances()

    def sample_of(self, corpus: int, corpus_sample: int, stream: int = 0) -> int | None:
        """The global sample that is sample `corpus_sample` of a corpus in a stream; None if there is none.

        Raises:
            ValueError: that sample came before the first segment.
        """
        number = self.of(stream).sample_of(corpus, corpus_sample)
        return None if number is None else number * self.num_streams + stream

    def _tally_before(self, sample: int) -> Tally:
        index = bisect_right(self.segments, sample, key=lambda segment: segment.start) - 1
        if index < 0:
            raise ValueError(f"sample {sample} lies before the first weights, which start at {self.segments[0].start}")
        known = max((other for other in list(self._tallies) if other <= index), default=0)
        if known not in self._tallies:
            num_corpora = len(self.segments[0].weights)
            starts = (self.start_of(stream, num_corpora) for stream in range(self.num_streams))
            self._tallies[0] = Tally.of(self.balances or tuple(starts))
        for past in range(known, index):
            self._tallies[past + 1] = self._advanced(past, self.segments[past + 1].start)
        return self._advanced(index, sample)

    def _advanced(self, index: int, sample: int) -> Tally:
        """From the start of a segment to a sample."""
        segment = self.segments[index]
        before = samples_before_each(segment.start, self.num_streams)
        return self._tallies[index].after(samples_before_each(sample, self.num_streams) - before, segment.weights)

    def start_of(self, stream: int, num_corpora: int) -> Balance:
        """The balance with which a stream starts a run."""
        if self.num_streams == 1:
            return Balance.at_start(num_corpora)
        places = _places(self.seed, self.num_streams, num_corpora - 1)[:, stream].tolist()
        remainders = tuple((2 * place + 1) * ONE // (2 * self.num_streams) for place in places)
        return Balance(counts=(0,) * num_corpora, remainders=remainders)


@lru_cache(maxsize=2)
def _places(seed: int, num_streams: int, num_nodes: int) -> NDArray[np.uint16]:
    """The place of each stream among those that start at a node, in a row between 0 and 1: uint16 [nodes, streams]."""
    places = np.empty((num_nodes, num_streams), np.uint16)
    for node in range(num_nodes):
        key = derive_key(seed, "phases", window=node, words=KEY_WORDS)
        places[node] = Permutation(length=num_streams, key=key).all()
    return places


def _rebuild(seed: int, num_streams: int, segments: tuple[Segment, ...], balances: tuple[Balance, ...]) -> Mixtures:
    return Mixtures(seed=seed, num_streams=num_streams, segments=segments, balances=balances)
