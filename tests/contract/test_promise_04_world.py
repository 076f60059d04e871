"""Promise 4: the global batches do not depend on world size, workers, prefetch and the history of stops.

tests/runtime/test_histories.py has what else may happen to a job: skips, masks, other weights, corpora and lengths.
tests/runtime/test_ranks.py has real processes, one of which is killed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime.sources import ListSource
from tokshard.runtime import NumpyLoader, StreamingLoader, StreamPlan
from tokshard.testing import Job, assert_exact_resume


def plan_with_streams(num_streams: int) -> StreamPlan:
    """One corpus that is dealt to up to 12 streams, and one that is shared."""
    corpora = {"a": ListSource([9, 4, 30, 1, 12, 3] * 30), "b": ListSource([5, 17, 2] * 4, first_token=5000)}
    sizes = {"seq_len": 4, "block_tokens": 16, "window_blocks": 2, "seed": 5}
    return StreamPlan(corpora, weights={"a": 0.7, "b": 0.3}, num_streams=num_streams, **sizes)


@settings(max_examples=examples(40))
@pytest.mark.parametrize("num_streams", [1, 12, pytest.param(64, marks=pytest.mark.soak)])
@given(
    jobs=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 7)), min_size=1, max_size=6),
    loader=st.sampled_from([NumpyLoader, StreamingLoader]),
    prefetch=st.integers(0, 6),
)
def test_any_history_of_worlds_and_batch_sizes_gives_the_same_global_batches(
    num_streams: int, jobs: list[tuple[int, int, int]], loader: Any, prefetch: int
) -> None:
    """World sizes do not divide the batch sizes."""
    history = [Job(steps, num_streams * rounds, world) for steps, rounds, world in jobs]
    make = partial(loader, uneven="pad", prefetch_factor=prefetch)
    assert_exact_resume(plan_with_streams(num_streams), make, jobs=[Job(1, num_streams), *history])


@pytest.mark.parametrize("num_streams", [2, 8])
def test_ranks_that_are_as_many_as_streams_read_one_stream_each(num_streams: int) -> None:
    plan = plan_with_streams(num_streams)
    for rank in range(num_streams):
        with NumpyLoader(plan, global_batch_size=3 * num_streams, dp_rank=rank, dp_world_size=num_streams) as loader:
            loader.skip(5)  # steps need not begin at the first stream
            samples = np.concatenate([batch["sample_index"] for _, batch in zip(range(2), loader, strict=False)])
        assert set((samples % num_streams).tolist()) == {rank}
