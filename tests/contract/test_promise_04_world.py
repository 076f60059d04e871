"""Promise 4: the global batches do not depend on world size, workers, prefetch and the history of stops.

tests/runtime/test_rescale.py proves it with real processes that are killed.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.sources import ListSource
from tests.runtime.test_loader import expected_rows, rows_of, take
from tokshard.runtime import StreamingLoader, StreamPlan

BATCH = 12

incarnations = st.lists(
    st.fixed_dictionaries(
        {"ranks": st.sampled_from([1, 2, 3, 4, 6, 12]), "steps": st.integers(0, 3), "prefetch": st.integers(1, 6)}
    ),
    min_size=1,
    max_size=6,
)


def plan_of() -> StreamPlan:
    corpora = {"a": ListSource([9, 4, 30, 1, 12, 3] * 3), "b": ListSource([5, 17, 2] * 4, first_token=1000)}
    return StreamPlan(corpora, weights={"a": 0.7, "b": 0.3}, seq_len=8, block_tokens=32, window_blocks=2, seed=5)


def run(state: dict[str, Any] | None, *, ranks: int, steps: int, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """The rows of all ranks in the order of ranks, step by step, and the state at the end."""
    loaders = [
        StreamingLoader(plan_of(), global_batch_size=BATCH, dp_rank=rank, dp_world_size=ranks, **options)
        for rank in range(ranks)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    per_rank = [take(loader, steps) if steps else [] for loader in loaders]
    (one, *others) = [loader.state_dict() for loader in loaders]
    assert all(other == one for other in others)
    for loader in loaders:
        loader.close()
    return [row for step in zip(*per_rank, strict=True) for row in rows_of(list(step))], one


@given(history=incarnations)
def test_any_history_of_world_sizes_and_stops_gives_the_same_global_batches(history: list[dict[str, int]]) -> None:
    state, rows = None, []
    for job in history:
        more, state = run(state, ranks=job["ranks"], steps=job["steps"], prefetch_factor=job["prefetch"])
        rows += more
    assert rows == expected_rows(plan_of(), range(BATCH * sum(job["steps"] for job in history)))


@pytest.mark.slow
def test_worker_processes_that_come_and_go_give_the_same_global_batches() -> None:
    state, rows = None, []
    for ranks, workers in ((2, 2), (1, 0), (3, 1), (1, 3)):
        more, state = run(state, ranks=ranks, steps=3, num_workers=workers, multiprocessing_context="forkserver")
        rows += more
    assert rows == expected_rows(plan_of(), range(BATCH * 12))
