"""Weights that change all the time, and places that change under batches made ahead: never a batch of before."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime.loaders import expected_rows, rows_of, take, two_corpora
from tests.runtime.sources import ListSource, PeriodicSource
from tokshard.runtime.order.mixture import Mixture
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamingLoader

NAMES = ["a", "b", "c", "d", "e"]
Changes = list[tuple[int, dict[str, float]]]


def five_corpora(**options: Any) -> StreamPlan:
    sources = {name: ListSource([9, 4, 30, 1], first_token=1 + 100 * index) for index, name in enumerate(NAMES)}
    return StreamPlan(sources, **{"seq_len": 4, "block_tokens": 16, "window_blocks": 2, "seed": 7, **options})


def random_weights(rng: random.Random, names: list[str]) -> dict[str, float]:
    weights = {name: rng.choice([0.0, rng.random(), rng.paretovariate(0.5)]) for name in names}
    return weights if any(weights.values()) else dict.fromkeys(names, 1.0)


@pytest.mark.slow
def test_hundreds_of_changes_keep_a_small_state_and_give_the_sequence_of_the_same_schedule() -> None:
    rng, plan = random.Random(5), five_corpora()
    loader = StreamingLoader(plan, global_batch_size=2, prefetch_factor=1)
    changes: Changes = []
    rows: list[dict[str, Any]] = []
    for _ in range(200):
        weights = random_weights(rng, NAMES)
        changes.append((loader.cursor.sample, weights))
        loader.set_weights(weights)
        rows += rows_of(take(loader, 1))
        if rng.random() < 0.03:  # saved and loaded at any step
            state = loader.state_dict()
            assert len(state["cursor"]) < 10_000
            loader.close()
            loader = StreamingLoader(plan, global_batch_size=2, prefetch_factor=rng.randint(1, 3))
            loader.load_state_dict(state)
    assert len(loader.cursor.segments) <= 17
    loader.close()
    planned = five_corpora(weights=changes[0][1], schedule=changes[1:])
    assert rows == expected_rows(planned, range(400))


@settings(max_examples=examples(15))
@given(data=st.data())
def test_a_schedule_and_the_same_changes_by_hand_give_the_same_wherever_the_state_was_saved(
    data: st.DataObject,
) -> None:
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    starts = sorted(data.draw(st.sets(st.integers(1, 30), max_size=25)))
    schedule = [(2 * start, random_weights(rng, NAMES)) for start in starts]
    planned = five_corpora(schedule=schedule)
    stops = data.draw(st.sets(st.integers(1, 34), max_size=4))
    by_plan, by_hand = (StreamingLoader(plan, global_batch_size=2) for plan in (planned, five_corpora()))
    rows: list[list[dict[str, Any]]] = [[], []]
    for step in range(35):
        if 2 * step in dict(schedule):
            by_hand.set_weights(dict(schedule)[2 * step])
        if step in stops:
            states = [loader.state_dict() for loader in (by_plan, by_hand)]
            by_plan.close()
            by_hand.close()
            by_plan, by_hand = (StreamingLoader(plan, global_batch_size=2) for plan in (planned, five_corpora()))
            by_plan.load_state_dict(states[0])
            by_hand.load_state_dict(states[1])
        rows[0] += rows_of(take(by_plan, 1))
        rows[1] += rows_of(take(by_hand, 1))
    by_plan.close()
    by_hand.close()
    assert rows[0] == rows[1] == expected_rows(planned, range(70))


def test_the_samples_of_a_long_schedule_count_its_past_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    count = Mixture._advanced
    monkeypatch.setattr(Mixture, "_advanced", lambda *arguments: counted.append(1) or count(*arguments))
    plan = long_schedule(300, 3, 4)
    for sample in range(1_300, 1_400):
        plan.sample(sample)
    assert len(counted) < 310


def long_schedule(num_segments: int, num_corpora: int, every: int) -> StreamPlan:
    rng = random.Random(1)
    names = [f"corpus {number}" for number in range(num_corpora)]
    sources = {name: PeriodicSource(100_000 + number, 50) for number, name in enumerate(names)}
    schedule = [(every * number, random_weights(rng, names)) for number in range(1, num_segments)]
    return StreamPlan(sources, schedule=schedule, seq_len=16, block_tokens=64, window_blocks=4, seed=2)


@pytest.mark.soak
def test_a_schedule_of_5000_changes_of_50_corpora_starts_quickly_and_is_compact_when_it_is_past() -> None:
    plan = long_schedule(5_000, 50, 8)
    loader = StreamingLoader(plan, global_batch_size=8)
    started = time.process_time()
    assert rows_of(take(loader, 1)) == expected_rows(plan, range(8))
    assert time.process_time() - started < 10  # 0.1 s on a quiet machine
    assert len(loader.state_dict()["cursor"]) < 15_000
    loader.skip(40_000)
    state = loader.state_dict()
    assert len(state["cursor"]) < 15_000
    loader.close()
    resumed = StreamingLoader(plan, global_batch_size=8)
    resumed.load_state_dict(state)
    assert rows_of(take(resumed, 2)) == expected_rows(plan, range(40_008, 40_024))
    resumed.close()


# what was made ahead for another place

actions = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 4)),
        st.tuples(st.just("weights"), st.integers(0, 10**6)),
        st.tuples(st.just("skip"), st.integers(0, 9)),
        st.tuples(st.just("load"), st.integers(0, 20)),
        st.tuples(st.just("save"), st.just(0)),
        st.tuples(st.just("close"), st.just(0)),
    ),
    max_size=15,
)


def check(loader: StreamingLoader, history: list[tuple[str, int]], *, inside: bool) -> None:
    """Apply a history, and compare every batch with the samples that the cursor names before it."""
    plan, size = loader.plan, 3
    states, batches = [loader.state_dict()], iter(loader)
    for action, number in [*history, ("take", 2)]:
        if action == "take":
            if not inside:
                batches = iter(loader)
            for _ in range(number):
                cursor = loader.cursor
                batch = next(batches)
                expected = expected_rows(plan, range(cursor.sample, cursor.sample + size), cursor)
                assert rows_of([batch]) == expected
                assert loader.cursor.sample == cursor.sample + size
        elif action == "weights":
            loader.set_weights(random_weights(random.Random(number), list(plan.names)))
        elif action == "skip":
            loader.skip(number)
        elif action == "load":
            loader.load_state_dict(states[number % len(states)])
        elif action == "save":
            states.append(loader.state_dict())
        else:
            loader.close()


@pytest.mark.parametrize("inside", [True, False])
@given(history=actions, prefetch=st.integers(1, 8))
def test_no_batch_of_before_comes_after_a_change_of_place_or_weights(
    inside: bool, history: list[tuple[str, int]], prefetch: int
) -> None:
    loader = StreamingLoader(two_corpora(), global_batch_size=3, prefetch_factor=prefetch)
    check(loader, history, inside=inside)
    loader.close()


def test_changes_without_a_batch_in_between_leave_no_batches_behind() -> None:
    loader = StreamingLoader(two_corpora(), global_batch_size=3, prefetch_factor=2)
    take(loader, 1)
    for number in range(500):
        loader.set_weights({"a": 1 + number, "b": 1})
    assert rows_of(take(loader, 1)) == expected_rows(loader.plan, range(3, 6), loader.cursor)
    assert loader.stats()["queue"] <= 4
    assert len(loader.cursor.segments) <= 2
    loader.close()
