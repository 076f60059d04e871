"""Reuse of the memory of batches."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Recycler:
    """Arrays that are reused once nothing else refers to them.

    In new memory, a batch of some hundred kilobytes costs more in page faults than in copying, and the allocator
    returns such memory as soon as it is freed. Reference counts tell whether an array is in use: tensors and views
    count, a device that copies from it does not. Without the GIL, counts are not exact, and nothing is reused.

    Args:
        size: the number of arrays kept.
    """

    def __init__(self, size: int) -> None:
        has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
        self._size = size if has_gil else 0
        self._arrays: list[NDArray[Any]] = [np.empty(0, np.int64)]
        self._unused = self._holders(0)
        self._arrays.clear()
        self._numbers = np.empty(0, np.int64)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = np.int64) -> NDArray[Any]:
        """An array with arbitrary content. A recycler is for arrays of one dtype."""
        for index in range(len(self._arrays)):
            if self._holders(index) == self._unused and self._arrays[index].shape == shape:
                return self._arrays[index]
        array = np.empty(shape, dtype)
        if len(self._arrays) >= self._size:
            held = [index for index in range(len(self._arrays)) if self._holders(index) > self._unused]
            self._arrays = [self._arrays[index] for index in held]
        if len(self._arrays) < self._size:
            self._arrays.append(array)
        return array

    def numbers(self, size: int) -> NDArray[np.int64]:
        """0, 1, ...: int64 [size], read-only."""
        if len(self._numbers) < size:
            self._numbers = np.arange(size)
            self._numbers.setflags(write=False)
        return self._numbers[:size]

    def _holders(self, index: int) -> int:
        return sys.getrefcount(self._arrays[index])
