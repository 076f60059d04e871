"""Promise 7: cursor size and time to first batch do not grow with the corpus; resuming replays nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.contract.builds import select
from tests.contract.small import rows_of_views
from tests.corpora import TINY_TOKENIZER, write_corpus
from tests.runtime.loaders import expected_rows, rows_of, take
from tests.runtime.sources import ListSource, PeriodicSource
from tokshard.runtime import StreamingLoader, StreamPlan

FAR = 10**12


class CountingSource(PeriodicSource):
    """Counts what is asked of the storage."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_reads = self.num_scanned = 0

    def tokens_of(self, start: int, length: int) -> NDArray[Any]:
        self.num_reads += 1
        return super().tokens_of(start, length)

    def ends_of(self, start: int, stop: int) -> NDArray[np.int64]:
        self.num_scanned += stop - start
        return super().ends_of(start, stop)


def loader_of(num_tokens: int, num_streams: int = 1) -> tuple[StreamingLoader, CountingSource]:
    """One rank of as many as there are streams."""
    source = CountingSource(num_tokens)
    sizes = {"seq_len": 64, "seed": 2, "block_tokens": 4096, "window_blocks": 64}
    plan = StreamPlan({"corpus": source}, num_streams=num_streams, **sizes)
    place = {"dp_rank": num_streams - 1, "dp_world_size": num_streams}
    return StreamingLoader(plan, global_batch_size=8 * num_streams, prefetch_factor=1, **place), source


def first_batch(num_tokens: int, skipped: int) -> tuple[float, CountingSource, int]:
    """Seconds to the first batch, what it asked of the storage, and the size of the state."""
    loader, source = loader_of(num_tokens)
    loader.skip(skipped)
    started = time.perf_counter()
    take(loader, 1)
    seconds = time.perf_counter() - started
    size = len(loader.state_dict()["cursor"])
    loader.close()
    return seconds, source, size


@pytest.mark.parametrize("skipped", [0, FAR])
def test_a_corpus_of_10_to_the_14_tokens_needs_no_more_than_one_of_a_million(skipped: int) -> None:
    small_seconds, small, small_size = min((first_batch(10**6, skipped) for _ in range(3)), key=lambda found: found[0])
    huge_seconds, huge, huge_size = min((first_batch(10**14, skipped) for _ in range(3)), key=lambda found: found[0])
    assert huge_size <= small_size + 40  # the number of tokens is in it, as the weight
    assert huge_size < 650
    assert huge.num_scanned <= 2 * small.num_scanned
    assert huge.num_reads <= small.num_reads + 100  # the thread may be some steps ahead, in both
    assert huge_seconds < 10 * small_seconds + 0.5


def test_plans_over_views_of_thousands_of_documents_look_at_those_of_a_window(tmp_path: Path) -> None:
    base = write_corpus(tmp_path / "base", ListSource([2, 1, 3] * 2_000).documents(), tokenizer=TINY_TOKENIZER)
    views = {name: select(base, tmp_path / name, list(range(first, 6_000, 4))) for name, first in (("a", 0), ("b", 1))}
    for corpora in ({"a": views["a"]}, views):
        with rows_of_views() as numbers:
            plan = StreamPlan(corpora, seq_len=8, block_tokens=64, window_blocks=2, allow_small_blocks=True)
            if len(corpora) == 1:  # two are compared with each other
                assert sum(numbers) < 50
            numbers.clear()
            loader = StreamingLoader(plan, global_batch_size=2, dp_rank=0, dp_world_size=1, prefetch_factor=1)
            take(loader, 1)
            loader.close()
        assert sum(numbers) < 1_000 * len(corpora)


@pytest.mark.parametrize("num_streams", [1, 2, 64])
def test_resuming_at_sample_10_to_the_12_replays_nothing_and_a_rank_looks_at_the_windows_of_its_own_stream_only(
    num_streams: int,
) -> None:
    states = []
    for num_tokens in (10**11, 10**14):
        saver, _ = loader_of(num_tokens, num_streams)
        saver.skip(FAR)
        states.append(saver.state_dict()["cursor"])
        loader, source = loader_of(num_tokens, num_streams)
        loader.load_state_dict(saver.state_dict())
        assert (source.num_reads, source.num_scanned) == (0, 0)
        batches = take(loader, 3)
        loader.close()
        samples = [row["sample_index"] for row in rows_of(batches)]
        assert sorted(samples) == [*range(FAR + num_streams - 1, FAR + 24 * num_streams, num_streams)]
        assert rows_of(batches) == expected_rows(loader.plan, samples)
        shape = loader.plan.shape
        # the window of the stream, another where samples cross into it, and what the thread makes of the next
        assert source.num_scanned <= 3 * shape.window_blocks * shape.block_tokens
        # four batches of eight samples, the one that was prefetched too; a sample of 64 tokens has a piece or two, and
        # a label that lies beyond it
        assert source.num_reads <= 6 * (8 * 4 + 24)
    assert len(states[1]) <= len(states[0]) + 10
    assert len(states[1]) < 650 + 6 * num_streams


def test_after_many_changes_of_weights_a_state_holds_the_counts_of_every_stream() -> None:
    sizes = []
    for num_tokens in (10**9, 10**13):
        corpora = {name: PeriodicSource(num_tokens + number) for number, name in enumerate("abc")}
        plan = StreamPlan(corpora, seq_len=64, num_streams=8, seed=3)
        loader = StreamingLoader(plan, global_batch_size=8)
        for change in range(40):
            loader.skip(10**9)
            loader.set_weights({"a": 1, "b": change, "c": 2})
        state = loader.state_dict()
        other = StreamingLoader(plan, global_batch_size=8)
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert other.stats()["corpora"] == loader.stats()["corpora"]
        sizes.append(len(state["cursor"]))
    assert sizes[1] <= sizes[0] + 50
    assert sizes[1] < 4_000
