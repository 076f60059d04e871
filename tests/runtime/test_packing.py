"""Rows that are packed whole: every token once an epoch whatever the lengths, and nothing is cut that need not be.

Each row by the page: test_page_model.py. What loaders make of such rows: tests/contract, test_loader.py.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.examples import examples
from tests.runtime.sources import ListSource
from tests.spec import order as spec
from tokshard.runtime import NumpyLoader
from tokshard.runtime.order import packing
from tokshard.runtime.plan import StreamPlan


def is_cut(pieces: list[Any], seq_len: int, lengths: list[int]) -> int:
    """Pieces that are not whole chunks."""
    return sum(
        piece.start % seq_len > 0 or piece.stop not in (piece.start + seq_len, lengths[piece.document])
        for piece in pieces
    )


@settings(max_examples=examples(80), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), max_size=60),
    seq_len=st.integers(1, 30),
    part=st.sampled_from([1, 2, 5]),
    num_rows=st.integers(1, 12),
    is_counted=st.booleans(),
)
@example(lengths=[5, 4, 5, 4, 2], seq_len=10, part=1, num_rows=2, is_counted=True)  # has room only longest first
@example(lengths=[5, 4, 5, 4, 2], seq_len=10, part=1, num_rows=2, is_counted=False)
def test_rows_are_chosen_as_by_one_who_looks_at_all_of_them_for_each_chunk(
    lengths: list[int], seq_len: int, part: int, num_rows: int, is_counted: bool
) -> None:
    lengths = [min(length, max(1, seq_len // part)) for length in lengths]
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), num_rows * seq_len, "right"))]
    chunks = [range(100 * number, 100 * number + length) for number, length in enumerate(lengths)]
    sizes = packing.Sizes(block=0, section=0, row=seq_len, is_counted=is_counted)
    rows, late = packing.result_of(packing.placed(np.array(lengths, np.int64), num_rows, sizes))
    found = rows.tolist()
    assert sorted(late.tolist()) == [number for number, row in enumerate(found) if row < 0]
    model = spec.packed(chunks, num_rows, seq_len, is_counted=sizes.is_counted)
    row_of = {chunk: row for row, held in enumerate(model) for chunk in held}
    assert found == [row_of.get(chunk, -1) for chunk in chunks]


def web_lengths(num_tokens: int, median: float, seed: int = 0) -> NDArray[np.int64]:
    """Lengths as documents of the web have them, in tokens."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(median), 1.1, int(num_tokens / median)))
    lengths = np.maximum(1, drawn).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens))]


def test_no_document_of_the_web_that_fits_into_a_row_is_cut_and_one_token_in_129_is_padding() -> None:
    lengths = web_lengths(700_000, 32).tolist()
    plan = StreamPlan(ListSource(lengths), seq_len=128, block_tokens=65_536, window_blocks=8, pack="whole", seed=1)
    traced = plan.traces(np.arange(4_000))
    assert sum(is_cut(pieces, 128, lengths) for pieces in traced) == 0
    num_tokens = Counter(sum(piece.stop - piece.start for piece in pieces) for pieces in traced)
    assert 0.005 < 1 - sum(size * count for size, count in num_tokens.items()) / (128 * len(traced)) < 0.01
    assert 0 not in num_tokens


class Watched(ListSource):
    """A source that refuses to read what was not announced."""

    is_in_memory = False

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.announced = np.zeros(len(self.tokens) + 1, np.int64)

    def will_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            self.announced[start : stop + 1] += 1  # with the label of the last token

    def has_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            self.announced[start : stop + 1] -= 1

    def tokens_of(self, start: int, length: int) -> Any:
        assert self.announced[start : start + length].min() > 0, "a section reaches beyond its block"
        return super().tokens_of(start, length)


def test_what_is_announced_reaches_to_the_end_of_the_last_section_of_a_block() -> None:
    source = Watched([300, 21, 7, 40] * 40)
    plan = StreamPlan(source, seq_len=4, block_tokens=2048, window_blocks=2, pack="whole", epochs=2)
    with NumpyLoader(plan, global_batch_size=8) as loader:
        assert sum(1 for _ in loader) == -(-(plan.num_samples or 0) // 8)


def test_the_table_of_many_short_chunks_is_made_in_seconds() -> None:
    lengths = np.maximum(1, web_lengths(8 << 20, 12))
    started = time.process_time()
    sizes = packing.Sizes(block=0, section=0, row=32_768, is_counted=False)
    found, _ = packing.result_of(packing.placed(lengths, int(lengths.sum()) // 32_768 + 3, sizes))
    assert time.process_time() - started < 1e-5 * len(lengths)
    assert found.min() >= 0
