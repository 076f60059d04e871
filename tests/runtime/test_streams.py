"""A plan with streams is plans side by side: what a stream owns, and what a node reads.

The promises for any number of streams are in tests/contract; what samples hold, in test_page_model.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpora import write_corpus
from tests.runtime.disk import LARGE_VOCABULARY
from tests.runtime.sources import ListSource, PeriodicSource
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.runtime.bytes.cache import Cache
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.bytes.source import fetched


@pytest.mark.parametrize(
    ("block_tokens", "num_streams", "blocks"),
    [(65_536, 1, 1024), (65_536, 4, 256), (65_536, 16, 64), (65_536, 64, 64), (1 << 20, 2, 64)],
)
def test_default_windows_of_streams_have_the_blocks_of_one_window_together_but_at_least_64_each(
    block_tokens: int, num_streams: int, blocks: int
) -> None:
    plan = StreamPlan(PeriodicSource(10**6), seq_len=8, block_tokens=block_tokens, num_streams=num_streams)
    assert plan.shape.window_blocks == blocks


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


@pytest.mark.slow
def test_nodes_with_a_stream_each_fetch_a_corpus_once_together(tmp_path: Path) -> None:
    memory = ListSource([500] * 1_100)
    directory = write_corpus(tmp_path / "corpus", memory.documents(), tokenizer=LARGE_VOCABULARY)
    sizes: Any = {"seq_len": 1_024, "block_tokens": 16_384, "window_blocks": 2, "seed": 3}
    num_steps, fetched_bytes = memory.num_tokens // 1_024 // 8, {}
    for num_streams in (1, 4):
        mapped = StreamPlan({"corpus": directory}, num_streams=num_streams, **sizes)
        fetched_bytes[num_streams] = 0.0
        for rank in range(4):
            source = CorpusSource(directory, access="pread", cache=Cache(memory_bytes=1 << 20))
            plan = StreamPlan({"corpus": source}, num_streams=num_streams, **sizes)
            with NumpyLoader(plan, global_batch_size=8, dp_rank=rank, dp_world_size=4) as loader:
                batches = list(itertools.islice(loader, num_steps))
            for row, sample in enumerate(batches[-1]["sample_index"].tolist()):
                assert np.array_equal(batches[-1]["input_ids"][row], mapped.sample(sample)["input_ids"])
            fetched_bytes[num_streams] += fetched([source])["fetched_bytes"]
    corpus_bytes = memory.num_tokens * 4
    # a block of two strides is fetched with the one that has the label of its last token, and the next window begun
    assert fetched_bytes[1] > 4 * corpus_bytes
    assert fetched_bytes[4] < 2 * corpus_bytes
