"""Rows of different lengths in one array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths, one after another.

    Args:
        values: [..., n].
        first: where in the last dimension each row starts: rows + 1 entries.
    """

    values: NDArray[Any]
    first: list[int]

    @classmethod
    def by_row(cls, values: NDArray[Any], rows: NDArray[np.int64], num_rows: int) -> Ragged:
        """Rows from the row number of each value, ascending."""
        return cls(values, np.searchsorted(rows, np.arange(num_rows + 1)).tolist())

    def of(self, start: int, stop: int) -> NDArray[Any]:
        """The values of the rows ``[start, stop)``."""
        found: NDArray[Any] = self.values[..., self.first[start] : self.first[stop]]
        return found
