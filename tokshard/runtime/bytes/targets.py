"""The loss spans of a corpus, read by record batch and kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokshard.forking import ForkLock
from tokshard.format.loss import Targets
from tokshard.runtime.bytes.fetchers import Fetchers
from tokshard.runtime.bytes.source import SpansIn

KEPT_BYTES = 512 << 20
"""Spans that a corpus keeps in each process, 8 bytes each: enough for some 40 billion tokens of conversations."""


class _Kept(NamedTuple):
    borders: NDArray[np.uint32]
    weights: NDArray[np.float32] | None

    @property
    def nbytes(self) -> int:
        return self.borders.nbytes + (0 if self.weights is None else self.weights.nbytes)


class TargetReader:
    """Finds loss spans by position. Threads may share it.

    Args:
        first_tokens: int64 [record batches + 1], position of the first token of each, and the end of the corpus.
        load: returns the targets of a record batch, by its number in the corpus.
    """

    def __init__(self, first_tokens: NDArray[np.int64], load: Callable[[int], Targets]) -> None:
        self._first_tokens, self._load = first_tokens, load
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._asked: dict[int, Future[_Kept]] = {}  # until they are kept
        self._num_bytes = 0
        self._lock = ForkLock()

    def find(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> SpansIn:
        """The spans in stretches, as `TokenSource.targets` returns them."""
        batches = self._first_tokens.searchsorted(starts, "right") - 1
        order = np.argsort(batches, kind="stable")
        bounds = np.flatnonzero(np.diff(batches[order], prepend=-1, append=-1))
        found = [_NO_SPANS]
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            mine = order[low:high]
            batch = int(batches[mine[0]])
            base = self._first_tokens[batch]
            found.append(_spans_in(self._of(batch), mine, starts[mine] - base, stops[mine] - base, int(base)))
        stretches = np.concatenate([part.stretches for part in found])
        in_order = np.argsort(stretches, kind="stable")
        return SpansIn(*(np.concatenate(parts)[in_order] for parts in zip(*found, strict=True)))

    def ask(self, starts: NDArray[np.int64], stops: NDArray[np.int64], fetchers: Fetchers) -> None:
        """Load the spans of stretches ahead of need, in threads of `fetchers`."""
        first, last = (self._first_tokens.searchsorted(places, "right") - 1 for places in (starts, stops - 1))
        for batch in dict.fromkeys(np.concatenate([first, last]).tolist()):
            with self._lock.now:
                if batch not in self._kept and batch not in self._asked:
                    self._asked[batch] = fetchers.start(partial(self._loaded, batch), is_urgent=False)

    def _of(self, batch: int) -> _Kept:
        with self._lock.now:
            kept, asked = self._kept.get(batch), self._asked.get(batch)
            if kept is not None:
                self._kept.move_to_end(batch)
                return kept
        return self._loaded(batch) if asked is None else asked.result()

    def _loaded(self, batch: int) -> _Kept:
        """Load the spans of a record batch, and keep them: also of one that no row needs, as many have."""
        try:
            targets = self._load(batch)
            kept = _Kept(targets.borders.astype(np.uint32), targets.weights)
            with self._lock.now:
                self._num_bytes += kept.nbytes - (self._kept[batch].nbytes if batch in self._kept else 0)
                self._kept[batch] = kept
                while self._num_bytes > KEPT_BYTES and len(self._kept) > 1:
                    self._num_bytes -= self._kept.popitem(last=False)[1].nbytes
        finally:
            with self._lock.now:
                self._asked.pop(batch, None)
        return kept


def _spans_in(
    kept: _Kept, stretches: NDArray[np.int64], lows: NDArray[np.int64], highs: NDArray[np.int64], base: int
) -> SpansIn:
    """The spans in stretches of one record batch.

    Args:
        lows, highs: int64 [n], the stretches; they count from the first token of the batch.
        base: position of that token in the corpus.
    """
    # the span that holds a stretch's first token counts, as does one that begins before its end
    first = kept.borders.searchsorted(lows, "right") // 2
    stop = np.maximum((kept.borders.searchsorted(highs) + 1) // 2, first)
    counts = stop - first
    after = np.cumsum(counts)
    spans = np.arange(int(counts.sum())) + np.repeat(first - after + counts, counts)
    starts = np.maximum(kept.borders[2 * spans].astype(np.int64), np.repeat(lows, counts))
    stops = np.minimum(kept.borders[2 * spans + 1].astype(np.int64), np.repeat(highs, counts))
    weights = np.ones(len(spans), np.float32) if kept.weights is None else kept.weights[spans]
    return SpansIn(np.repeat(stretches, counts), starts + base, stops + base, weights)


_NOTHING = np.empty(0, np.int64)
_NO_SPANS = SpansIn(_NOTHING, _NOTHING, _NOTHING, np.empty(0, np.float32))
