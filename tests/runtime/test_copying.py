"""Tokens are the same whether they are copied as slices, gathered by their addresses, or copied as halves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.runtime.sources import ListSource
from tokshard.runtime.bytes import copying
from tokshard.runtime.bytes.mapped import MappedTokens
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows import narrow as narrow_rows
from tokshard.runtime.rows.narrow import PADDING_INDEX

WAYS: dict[str, dict[str, int]] = {
    "slices": {"GATHER_BELOW": 0},
    "gathered": {"GATHER_BELOW": 1 << 60},
    "halves": {"MANY": 0, "HALVES_FROM": 0, "HALVES_BELOW": 1 << 60},
}


class MappedSource(ListSource):
    """Documents in memory, copied as those of memory maps are: record batches of four documents.

    Tokens of 16 bits lie at an address that is a multiple of no more than that.
    """

    def __init__(self, lengths: list[int], *, narrow: bool = False, **options: Any) -> None:
        super().__init__(lengths, **options)
        if narrow:
            self.dtype = np.dtype(np.uint16)
            self.tokens = np.concatenate([np.zeros(3, np.uint16), self.tokens.astype(np.uint16)])[3:]
        self.starts = np.unique(np.concatenate([[0], self.stops[3::4], self.stops[-1:]]))
        self.mapped = MappedTokens(self.starts, self.dtype)
        for batch in reversed(range(len(self.starts) - 1)):
            self.mapped.add(batch, self.tokens[self.starts[batch] : self.starts[batch + 1]])

    def read(self, starts: Any, lengths: Any, out: Any, at: Any) -> None:
        batches = np.searchsorted(self.starts, starts, "right") - 1
        self.mapped.read(batches, starts, lengths, out, at)


def in_every_way(copy: Any) -> list[Any]:
    """What a function returns if all pieces are copied in one way, for each way."""
    found = []
    for way in WAYS.values():
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"MANY": 1 << 60, **way}.items():
                patch.setattr(copying, name, value)
            found.append(copy())
    return found


def read(plan: StreamPlan, samples: list[int], parts: list[tuple[int, int]]) -> list[NDArray[Any]]:
    """The tokens of some stretches of one layout."""
    layout = plan.lay_out(plan.cursor(), np.array(samples, np.int64))
    return [layout.read(start, stop).tokens for start, stop in parts]


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)
sizes = st.fixed_dictionaries(
    {"seq_len": st.integers(1, 30), "block_tokens": st.integers(1, 64), "window_blocks": st.integers(1, 6)}
)


@given(
    documents=st.lists(lengths, min_size=1, max_size=3),
    sizes=sizes,
    narrow=st.booleans(),
    samples=st.sets(st.integers(0, 60), min_size=1, max_size=20),
    read_tokens=st.sampled_from([1, 50, 1 << 20]),
    data=st.data(),
)
def test_every_way_of_copying_gives_the_same_rows_for_every_layout(
    documents: list[list[int]],
    sizes: dict[str, int],
    narrow: bool,
    samples: set[int],
    read_tokens: int,
    data: st.DataObject,
) -> None:
    options: dict[str, Any] = {"weights": {str(number): 1.0 for number in range(len(documents))}}
    if len(documents) == 1 and data.draw(st.booleans()):
        options |= {"epochs": data.draw(st.integers(1, 2))}
    sources = {
        str(number): MappedSource(parts, narrow=narrow, first_token=1 + 5000 * number, name=str(number))
        for number, parts in enumerate(documents)
    }
    plan = StreamPlan(sources, allow_small_blocks=True, **sizes, **options)
    most = plan.num_samples or 100
    rows = sorted({min(sample, most - 1) for sample in samples}) + [PADDING_INDEX] * data.draw(st.integers(0, 3))
    stretch = st.lists(st.integers(0, len(rows)), min_size=2, max_size=2, unique=True).map(sorted)
    parts = [(0, len(rows)), *data.draw(st.lists(stretch, max_size=4))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrow_rows, "READ_TOKENS", read_tokens)
        first, *others = in_every_way(lambda: [part.tolist() for part in read(plan, rows, parts)])
    assert others == [first] * 2
    for row, sample in enumerate(rows):
        expected = plan.sample(sample)["input_ids"].tolist() if sample != PADDING_INDEX else [0] * plan.seq_len
        assert first[0][row] == expected


def test_more_tokens_than_are_numbered_at_once_are_copied_too() -> None:
    plan = StreamPlan(MappedSource([7] * 30_000), seq_len=50_000)
    slices, gathered, halves = in_every_way(lambda: read(plan, [0, 1, 2], [(0, 3)])[0])
    assert np.array_equal(slices, gathered)
    assert np.array_equal(slices, halves)


def test_many_pieces_of_middle_length_are_copied_as_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    for name in ("copy_halves", "gather", "copy_slices"):
        monkeypatch.setattr(copying, name, lambda *_, name=name: found.append(name))
    none = np.zeros(2_000, np.int64)
    for count, length in ((2_000, 29), (2_000, 30), (2_000, 1_499), (2_000, 1_500), (999, 349), (999, 350)):
        copying.copy_pieces(none, none[:count], np.full(count, length), none, none[:count])
    assert found == ["gather", "copy_halves", "copy_halves", "copy_slices", "gather", "copy_slices"]
