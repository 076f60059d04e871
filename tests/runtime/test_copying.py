"""Tokens are the same whether they are copied as slices, gathered with an index, or copied as halves.

From the maps of a corpus on disk: test_reader.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tokshard.runtime.bytes import copying
from tokshard.runtime.bytes.copying import copy_halves, copy_slices, gather


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("copy", [copy_slices, gather, copy_halves])
def test_pieces_are_copied_to_their_places(copy: Callable[..., None], dtype: Any) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.permutation([*rng.integers(1, 20, 40_000), 1_500, 90_000])  # more than are copied at once
    memory = rng.integers(1, 60_000, 100_000, dtype)[1:]  # at an address that is a multiple of no more than an item
    starts, ends, half = rng.integers(0, len(memory) - lengths + 1), np.cumsum(lengths), len(lengths) // 2
    # the first half of the pieces one after another, the others in reverse order
    at = np.concatenate([(ends - lengths)[:half], ends[-1] + ends[half - 1] - ends[half:]])
    out, expected = np.zeros((2, ends[-1]), dtype)
    copy(memory, starts, lengths, out, at)
    for start, length, place in zip(starts.tolist(), lengths.tolist(), at.tolist(), strict=True):
        expected[place : place + length] = memory[start : start + length]
    assert np.array_equal(out, expected)


def test_many_pieces_of_middle_length_are_copied_as_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    for name in ("copy_halves", "gather", "copy_slices"):
        monkeypatch.setattr(copying, name, lambda *_, name=name: found.append(name))
    none = np.zeros(2_000, np.int64)
    for count, length in ((2_000, 29), (2_000, 30), (2_000, 1_499), (2_000, 1_500), (999, 349), (999, 350)):
        copying.copy_pieces(none, none[:count], np.full(count, length), none, none[:count])
    assert found == ["gather", "copy_halves", "copy_halves", "copy_slices", "gather", "copy_slices"]
