"""Announces to a source the blocks that will be read, so that one with slow answers can fetch them ahead of need."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from tokshard.runtime.bytes.source import TokenSource
from tokshard.runtime.order.windows import CorpusOrder, Window

MAX_WINDOWS = 4
"""The current window, the next two, and one more if one of them is short."""


def blocks_of(order: CorpusOrder, window: Window) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the blocks of a window start and stop in the corpus: int64 [blocks] each, in the order of the window."""
    size = order.shape.block_tokens
    starts = order.blocks(window) * size
    stops = starts + size
    if window.tail_tokens:
        stops[-1] = starts[-1] + window.tail_tokens
    return starts, stops


class Announcements:
    """The windows whose blocks one reader has announced to its source."""

    def __init__(self, source: TokenSource, order: CorpusOrder) -> None:
        self._source, self._order = source, order
        # of each window the starts and stops of its blocks, and how many of them were announced
        self._windows: OrderedDict[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.int64], int]] = OrderedDict()

    def announce(self, window: Window, part: float = 1.0) -> None:
        """Announce the blocks of a window, up to a part of them."""
        key = (window.epoch, window.index)
        if key in self._windows:
            starts, stops, done = self._windows[key]
        else:
            (starts, stops), done = blocks_of(self._order, window), 0
        high = min(len(starts), math.ceil(part * len(starts)))
        if high > done:
            self._windows[key] = starts, stops, high
            while len(self._windows) > MAX_WINDOWS:  # of a reader at places that do not follow each other
                self._forget(next(iter(self._windows)))
            self._source.will_read(starts[done:high], stops[done:high])

    def keep(self, windows: Collection[Window]) -> None:
        """The reader is done with all but these windows."""
        kept = {(window.epoch, window.index) for window in windows}
        for key in [key for key in self._windows if key not in kept]:
            self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        starts, stops, done = self._windows.pop(key)
        self._source.has_read(starts[:done], stops[:done])
