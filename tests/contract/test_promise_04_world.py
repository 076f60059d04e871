"""Promise 4: the global batches do not depend on world size, workers, prefetch and the history of stops.

tests/runtime/test_rescale.py proves it with real processes that are killed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime.loaders import expected_rows, rows_of, rows_of_ranks, take
from tests.runtime.sources import ListSource
from tokshard.runtime import NumpyLoader, StreamingLoader, StreamPlan
from tokshard.runtime.cursor import Cursor

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


def run(
    state: dict[str, Any] | None,
    *,
    ranks: int,
    steps: int,
    change: Callable[[StreamingLoader], None] | None = None,
    **options: Any,
) -> tuple[list[Any], dict[str, Any], Cursor]:
    """The rows of all ranks in the order of samples, step by step, and the state and the cursor at the end.

    Args:
        change: is done to every loader after the steps, which are then taken once more.
    """
    loaders = [
        StreamingLoader(plan_of(), global_batch_size=BATCH, dp_rank=rank, dp_world_size=ranks, **options)
        for rank in range(ranks)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    per_rank = [take(loader, steps) if steps else [] for loader in loaders]
    if change:
        for loader, batches in zip(loaders, per_rank, strict=True):
            change(loader)
            batches.extend(take(loader, steps))
    (one, *others) = [loader.state_dict() for loader in loaders]
    assert all(other == one for other in others)
    cursor = loaders[0].cursor
    for loader in loaders:
        loader.close()
    return rows_of_ranks(per_rank), one, cursor


@settings(max_examples=examples(20))
@given(history=incarnations)
def test_any_history_of_world_sizes_and_stops_gives_the_same_global_batches(history: list[dict[str, int]]) -> None:
    state, rows = None, []
    for job in history:
        more, state, _ = run(state, ranks=job["ranks"], steps=job["steps"], prefetch_factor=job["prefetch"])
        rows += more
    assert rows == expected_rows(plan_of(), range(BATCH * sum(job["steps"] for job in history)))


def plan_with_streams(num_streams: int) -> StreamPlan:
    """One corpus that is dealt to up to 12 streams, and one that is shared."""
    corpora = {"a": ListSource([9, 4, 30, 1, 12, 3] * 30), "b": ListSource([5, 17, 2] * 4, first_token=5000)}
    sizes = {"seq_len": 4, "block_tokens": 16, "window_blocks": 2, "seed": 5}
    return StreamPlan(corpora, weights={"a": 0.7, "b": 0.3}, num_streams=num_streams, **sizes)


stream_jobs = st.lists(
    st.fixed_dictionaries(
        {
            "ranks": st.integers(1, 7),
            "rounds": st.integers(1, 3),  # samples of each stream in a step
            "steps": st.integers(0, 2),
            "skip": st.sampled_from([0, 0, 1, 5]),
            "weight": st.none() | st.sampled_from([0.0, 0.25, 0.9]),
        }
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=examples(7))
@pytest.mark.parametrize("num_streams", [1, 2, 12, pytest.param(64, marks=pytest.mark.soak)])
@given(jobs=stream_jobs)
def test_any_history_of_world_and_batch_sizes_gives_the_same_global_batches_with_streams(
    num_streams: int, jobs: list[dict[str, Any]]
) -> None:
    plan, state, received, steps = plan_with_streams(num_streams), None, [], []
    for job in jobs:
        batch_size, states = num_streams * job["rounds"], []
        of_ranks: list[list[dict[str, Any]]] = []
        for rank in range(job["ranks"]):
            # as another process: a plan, and tables, of its own
            with NumpyLoader(
                plan.reader(), global_batch_size=batch_size, dp_rank=rank, dp_world_size=job["ranks"], uneven="pad"
            ) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                loader.skip(job["skip"])
                if job["weight"] is not None:
                    loader.set_weights({"a": job["weight"], "b": 1 - job["weight"]})
                start = loader.cursor.sample
                of_ranks.append([batch for _, batch in zip(range(job["steps"]), loader, strict=False)])
                states.append(loader.state_dict())
        assert states == states[:1] * job["ranks"]
        state = states[0]
        for step in range(job["steps"]):
            steps.append(range(start + step * batch_size, start + (step + 1) * batch_size))
            rows = [row for batches in of_ranks for row in rows_of([batches[step]])]
            real = [row for row in rows if row["sample_index"] >= 0]
            # with one stream, a hash turns the parts of a step
            received += sorted(real, key=lambda row: row["sample_index"]) if num_streams == 1 else real
    with NumpyLoader(plan, global_batch_size=num_streams) as last:
        last.load_state_dict(state or {})
        cursor = last.cursor
    expected = [g for step in steps for g in sorted(step, key=lambda g: (g % num_streams, g))]
    assert received == expected_rows(plan, expected, cursor)


@pytest.mark.parametrize("num_streams", [2, 8])
def test_ranks_that_are_as_many_as_streams_read_one_stream_each(num_streams: int) -> None:
    plan = plan_with_streams(num_streams)
    for rank in range(num_streams):
        with NumpyLoader(plan, global_batch_size=3 * num_streams, dp_rank=rank, dp_world_size=num_streams) as loader:
            loader.skip(5)  # steps need not begin at the first stream
            samples = np.concatenate([batch["sample_index"] for _, batch in zip(range(2), loader, strict=False)])
        assert set((samples % num_streams).tolist()) == {rank}


def test_worlds_that_change_give_the_same_batches_through_skips_weights_and_masks(tmp_path: Path) -> None:
    state, rows = None, []
    for number, ranks in enumerate((2, 1, 3)):
        masked = tmp_path / f"{number}.txt"
        masked.write_text(f"0\n{4 - 2 * number}\n")

        def change(loader: StreamingLoader, number: int = number, masked: Path = masked) -> None:
            loader.skip(BATCH)
            loader.set_weights({"a": 3 - number, "b": 1})
            loader.mask("a", masked)

        more, state, cursor = run(state, ranks=ranks, steps=1, change=change)
        rows += more
    # two steps of each three are read
    read = [step * BATCH + place for step in (0, 2, 3, 5, 6, 8) for place in range(BATCH)]
    expected = expected_rows(plan_of(), read, cursor)
    assert [row["sample_index"] for row in rows] == [row["sample_index"] for row in expected]
    assert rows == expected
