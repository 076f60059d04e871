"""Strides of tokens in memory, up to a limit. Needs a lock around it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class TokenMemory:
    """Strides of tokens, in slots of one array that is allocated once and filled as strides come.

    Strides that a reader has announced stay until it is done with them. Others are dropped when a slot is needed, those
    first that were not used for longest. So memory grows to what readers announce at a time, and up to the limit.

    Args:
        num_slots: strides that are kept.
        stride_tokens: tokens of a stride.

    Attributes:
        tokens: [slots * stride_tokens] of `dtype`; what no stride was written to is not backed by memory.
    """

    def __init__(self, num_slots: int, stride_tokens: int, dtype: np.dtype[Any]) -> None:
        self.tokens: NDArray[Any] = np.empty(num_slots * stride_tokens, dtype)
        self.stride_tokens = stride_tokens
        self._num_slots, self._num_used = num_slots, 0
        self._free: list[int] = []
        self._slots: dict[int, int] = {}
        self._readers: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, stride: int) -> bool:
        return stride in self._slots

    @property
    def room(self) -> int:
        """Slots that are free or hold what no reader has announced."""
        return self._num_slots - len(self._slots) + len(self._idle)

    def slots(self, strides: Sequence[int]) -> NDArray[np.int64]:
        """The slot of each stride, int64 [n]; -1: it is not here."""
        find, idle = self._slots.get, self._idle
        if idle:
            for stride in strides:
                if stride in idle:
                    idle.move_to_end(stride)
        return np.fromiter((find(stride, -1) for stride in strides), np.int64, len(strides))

    def announce(self, strides: Iterable[int]) -> None:
        """A reader will read these: keep them."""
        readers, idle = self._readers, self._idle
        for stride in strides:
            readers[stride] = readers.get(stride, 0) + 1
            idle.pop(stride, None)

    def release(self, strides: Iterable[int]) -> None:
        """A reader that announced these is done with them."""
        for stride in strides:
            left = self._readers.get(stride, 0) - 1
            if left > 0:
                self._readers[stride] = left
                continue
            self._readers.pop(stride, None)
            if stride in self._slots:
                self._idle[stride] = None

    def reserve(self, strides: Iterable[int]) -> list[tuple[int, int]]:
        """A slot for each stride that is not here, as far as there is room; the caller's until it is published.

        Returns:
            Pairs of a stride and its slot.
        """
        return [
            (stride, slot) for stride in strides if stride not in self._slots and (slot := self._slot()) is not None
        ]

    def fill(self, slot: int, tokens: NDArray[Any]) -> None:
        """Write a stride into a slot that was reserved. Needs no lock."""
        start = slot * self.stride_tokens
        self.tokens[start : start + len(tokens)] = tokens

    def publish(self, reserved: Iterable[tuple[int, int]]) -> None:
        """Let all have the strides of slots that were filled."""
        for stride, slot in reserved:
            if stride in self._slots:  # of another fetch
                self._free.append(slot)
                continue
            self._slots[stride] = slot
            if stride not in self._readers:
                self._idle[stride] = None

    def _slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._idle:  # before new memory is touched
            dropped, _ = self._idle.popitem(last=False)
            return self._slots.pop(dropped)
        if self._num_used == self._num_slots:
            return None
        self._num_used += 1
        return self._num_used - 1
