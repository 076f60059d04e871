"""A plan with streams is plans side by side: what a stream owns, and where it looks.

The promises for any number of streams are in tests/contract; what samples hold, in test_page_model.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.disk import small_units, write
from tests.runtime.sources import ListSource, PeriodicSource, SpannedSource
from tokshard import select_corpus
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.bytes.ranged import RangedCorpus


@pytest.mark.parametrize("window_blocks", [1, 3])
def test_a_corpus_is_dealt_if_each_stream_gets_four_windows(window_blocks: int) -> None:
    for more, num_parts in ((0, 5), (-1, 1)):
        source = PeriodicSource((4 * 5 * window_blocks + more) * 16 + 3)
        plan = StreamPlan(source, seq_len=4, block_tokens=16, window_blocks=window_blocks, num_streams=5)
        (order,) = plan.corpora
        assert order.num_parts == num_parts
        assert order.num_windows == sum(order.part_windows(part) for part in range(num_parts))
        assert order.num_tokens == sum(order.part_tokens(part) for part in range(num_parts)) == source.num_tokens


def test_find_asks_the_streams_that_own_the_document_only() -> None:
    source = ListSource([9, 4, 30, 1, 12, 3] * 30)
    plan = StreamPlan({"large": source}, seq_len=4, block_tokens=16, window_blocks=2, num_streams=13)
    plan.find("large", 7)
    start, stop = source.place_of(7).start, source.place_of(7).stop
    assert len(plan.readers[0]._kept) <= stop // 16 - start // 16 + 1


@pytest.mark.parametrize("pack", ["cut", "whole"])
def test_a_rank_that_reads_one_stream_by_range_counts_the_others_without_their_tokens(
    pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[set[int]] = []
    spans = [[0, 0, 1, 1, 0.5], [0, 1, 0, 2, 2, 0.25, 0, 0, 1], [0, 0], [0] + [1] * 20]
    monkeypatch.setattr(RangedCorpus, "will_read", lambda _, starts, __: announced[-1].update(starts.tolist()))
    with small_units(batch_tokens=64, stride=16):
        corpora = {
            "text": write(tmp_path / "text", ListSource([9, 4, 30, 1, 12, 3, 21] * 160)),
            "chat": write(tmp_path / "chat", SpannedSource(spans * 360, first_token=20_000)),
        }
        select_corpus(corpora["chat"], out=tmp_path / "view", min_tokens=3)
        for path in (*corpora.values(), tmp_path / "view"):
            steps = []
            for rank in range(3):
                announced.append(set())
                source = CorpusSource(path, access="pread")
                plan = StreamPlan(
                    source, seq_len=8, seed=3, num_streams=3, pack=pack, block_tokens=1_024, window_blocks=1
                )
                assert plan.corpora[0].is_dealt
                with NumpyLoader(plan, global_batch_size=6, dp_rank=rank, dp_world_size=3, prefetch_factor=0) as loader:
                    steps.append(list(itertools.islice(loader, 60)))
            for batches in zip(*steps, strict=True):
                targets = sum(int((batch["labels"] != -100).sum()) for batch in batches)
                weight = sum(batch.get("loss_weights", batch["labels"] != -100).sum() for batch in batches)
                assert {int(batch["step_targets"]) for batch in batches} == {targets}
                assert {float(batch["step_weight"]) for batch in batches} == {float(weight)}
            assert all(announced[-3:])
            if path.name != "view":  # its blocks begin anywhere in the base
                assert not announced[-1] & announced[-2], "each rank announces its own blocks"


def test_tables_that_are_joined_again_and_again_have_the_blocks_of_their_windows_only() -> None:
    sizes: Any = {"seq_len": 8, "block_tokens": 64, "window_blocks": 4, "num_streams": 8}
    plan = StreamPlan(PeriodicSource(10**6, 30), allow_small_blocks=True, **sizes)
    (reader,) = plan.readers
    for start in range(0, 4_000, 160):  # 20 samples of each stream; a window has 32
        plan.lay_out(plan.cursor(), np.arange(start, start + 160), is_sequential=True)
        kept = [one for windows in reader._kept.values() for one in windows.values()]
        assert max(len(one.table.block_starts) for one in kept) <= 4 * len(kept)
