"""A plan with streams is plans side by side: where a stream looks.

The promises for any number of streams are in tests/contract; what samples hold, in test_page_model.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.runtime.sources import ListSource, PeriodicSource
from tokshard.runtime import StreamPlan


def test_find_asks_the_streams_that_own_the_document_only() -> None:
    source = ListSource([9, 4, 30, 1, 12, 3] * 30)
    plan = StreamPlan({"large": source}, seq_len=4, block_tokens=16, window_blocks=2, num_streams=13)
    plan.find("large", 7)
    start, stop = source.place_of(7).start, source.place_of(7).stop
    assert len(plan.readers[0]._kept) <= stop // 16 - start // 16 + 1


def test_tables_that_are_joined_again_and_again_have_the_blocks_of_their_windows_only() -> None:
    sizes: Any = {"seq_len": 8, "block_tokens": 64, "window_blocks": 4, "num_streams": 8}
    plan = StreamPlan(PeriodicSource(10**6, 30), allow_small_blocks=True, **sizes)
    (reader,) = plan.readers
    for start in range(0, 4_000, 160):  # 20 samples of each stream; a window has 32
        plan.lay_out(plan.cursor(), np.arange(start, start + 160), is_sequential=True)
        kept = [one for windows in reader._kept.values() for one in windows.values()]
        assert max(len(one.table.block_starts) for one in kept) <= 4 * len(kept)
