"""The loader gives exactly the samples of `plan.sample`, for every division of the work and every history of stops."""

from __future__ import annotations

import json
import math
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime.loaders import (
    SIZES,
    dataloader,
    expected_rows,
    global_rows,
    one_corpus,
    rows_of,
    rows_of_ranks,
    take,
    two_corpora,
)
from tests.runtime.sources import ListSource, PeriodicSource
from tests.runtime.states import replaced
from tokshard.errors import LoaderError, PlanError, PlanMismatchError
from tokshard.runtime import prefetch
from tokshard.runtime.locality import steps_per_window
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamDataset, StreamingLoader, belong_to_the_loop

SOAK = pytest.mark.soak


@settings(max_examples=examples(40), deadline=None)
@given(batch=st.integers(1, 12), steps=st.integers(1, 8), prefetch=st.integers(1, 5), data=st.data())
def test_the_global_batches_are_those_of_the_plan_for_every_world_size_and_prefetch_depth(
    batch: int, steps: int, prefetch: int, data: st.DataObject
) -> None:
    plan = two_corpora()
    ranks = data.draw(st.sampled_from([size for size in range(1, batch + 1) if batch % size == 0]))
    found = global_rows(plan, steps, batch=batch, ranks=ranks, prefetch_factor=prefetch)
    assert found == expected_rows(plan, range(batch * steps))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.utils.data.DataLoader(StreamingLoader(one_corpus(epochs=1), global_batch_size=2)),
        lambda: torch.utils.data.DataLoader(StreamingLoader(two_corpora(), global_batch_size=2)),
        lambda: torch.utils.data.DataLoader(StreamingLoader(two_corpora(), global_batch_size=2), batch_size=None),
        lambda: torch.utils.data.DataLoader(StreamDataset(two_corpora(), global_batch_size=2)),
        lambda: torch.utils.data.DataLoader(StreamDataset(two_corpora(), global_batch_size=2), batch_size=8),
        lambda: torch.utils.data.DataLoader(StreamDataset(two_corpora(), global_batch_size=2), batch_size=None),
        lambda: torch.utils.data.DataLoader(StreamDataset(two_corpora(), global_batch_size=2), shuffle=True),
        lambda: torch.utils.data.DataLoader(
            dataset := StreamDataset(two_corpora(), global_batch_size=2), 8, sampler=dataset.sampler
        ),
        lambda: [StreamDataset(two_corpora(), global_batch_size=2)[0]],
    ],
)
def test_dataloaders_that_would_read_something_else_are_refused_with_what_to_do(make: Any) -> None:
    with pytest.raises((LoaderError, TypeError), match=r"sampler=dataset\.sampler|without a DataLoader"):
        next(iter(make()))


def test_batches_are_tensors_of_the_documented_shapes_and_types() -> None:
    loader = StreamingLoader(two_corpora(), global_batch_size=4)
    batch = take(loader, 1)[0]
    loader.close()
    for key in ("input_ids", "labels", "position_ids"):
        assert (batch[key].shape, batch[key].dtype) == ((4, 6), torch.int64)
    for key in ("corpus_index", "sample_index"):
        assert (batch[key].shape, batch[key].dtype) == ((4,), torch.int64)
    assert batch["cu_seqlens"].dtype == torch.int32
    starts = torch.nonzero(batch["position_ids"].flatten() == 0).flatten().tolist()
    assert batch["cu_seqlens"][: len(starts)].tolist() == starts
    assert set(batch["cu_seqlens"][len(starts) :].tolist()) == {24}
    assert int(batch["max_seqlen"]) == max(np.diff([*starts, 24]))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_pinned_memory_without_an_accelerator_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="pin_memory has no effect"):
        loader = StreamingLoader(two_corpora(), global_batch_size=2, pin_memory=True)
    assert len(take(loader, 1)) == 1
    loader.close()


# stops and resumes


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_any_history_of_stops_on_other_sizes_gives_the_same_global_sequence(data: st.DataObject) -> None:
    plan = two_corpora()
    state, rows, sample = None, [], 0
    for _ in range(data.draw(st.integers(1, 5))):
        ranks = data.draw(st.integers(1, 4))
        batch = ranks * data.draw(st.integers(1, 3))
        steps = data.draw(st.integers(0, 4))
        loaders = [
            StreamingLoader(
                plan,
                global_batch_size=batch,
                dp_rank=rank,
                dp_world_size=ranks,
                prefetch_factor=data.draw(st.integers(1, 4)),
            )
            for rank in range(ranks)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        per_rank = [take(loader, steps) if steps else [] for loader in loaders]
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states), "the state is the same on every rank"
        state = states[0]
        rows += rows_of_ranks(per_rank)
        sample += steps * batch
        for loader in loaders:
            loader.close()
    assert rows == expected_rows(plan, range(sample))


def test_stopping_and_resuming_at_every_single_step_gives_the_same_sequence() -> None:
    plan = two_corpora()
    whole = global_rows(plan, 12, batch=3, ranks=1)
    for stop in range(12):
        first = StreamingLoader(plan, global_batch_size=3)
        rows = rows_of(take(first, stop)) if stop else []
        state = first.state_dict()
        first.close()
        second = StreamingLoader(two_corpora(), global_batch_size=3)
        second.load_state_dict(state)
        assert rows + rows_of(take(second, 12 - stop)) == whole
        second.close()


def test_the_state_counts_what_the_loop_received_and_not_what_was_prefetched() -> None:
    loader = StreamingLoader(two_corpora(), global_batch_size=2, prefetch_factor=8)
    batches = iter(loader)
    for received in range(1, 5):
        next(batches)
        assert loader.cursor.sample == 2 * received
    loader.close()


def test_the_state_is_small_json_that_torch_save_takes(tmp_path: Path) -> None:
    loader = StreamingLoader(two_corpora(), global_batch_size=2)
    take(loader, 3)
    loader.set_weights({"a": 1, "b": 2})
    state = loader.state_dict()
    assert len(state["cursor"]) < 700
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    loader.close()


def test_a_moved_and_renamed_corpus_resumes() -> None:
    loader = StreamingLoader(two_corpora(), global_batch_size=2)
    take(loader, 3)
    a, b = ListSource([9, 4, 30, 1, 12, 3] * 3), ListSource([5, 17, 2] * 4, first_token=1000)
    other = StreamPlan({"x": a, "y": b}, weights={"x": 0.7, "y": 0.3}, seed=4, **SIZES)
    resumed = StreamingLoader(other, global_batch_size=2)
    resumed.load_state_dict(loader.state_dict())
    assert rows_of(take(resumed, 3)) == expected_rows(two_corpora(), range(6, 12))
    loader.close()
    resumed.close()


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"seed": 5}, "seed differs (4, now 5)"),
        ({"seq_len": 5}, "seq_len differs (6, now 5)"),
        ({"block_tokens": 32}, "block_tokens differs (16, now 32)"),
        ({"window_blocks": 4}, "window_blocks differs (3, now 4)"),
    ],
)
def test_a_state_of_another_plan_is_refused_with_both_values(options: dict[str, Any], difference: str) -> None:
    loader = StreamingLoader(two_corpora(**options), global_batch_size=2)
    with pytest.raises(PlanMismatchError) as caught:
        loader.load_state_dict(StreamingLoader(two_corpora(), global_batch_size=2).state_dict())
    assert difference in caught.value.problem
    assert caught.value.hint


def test_a_state_of_changed_content_or_other_corpora_is_refused() -> None:
    state = StreamingLoader(one_corpus(), global_batch_size=2).state_dict()
    changed = StreamPlan({"corpus": ListSource([9, 4, 31, 1, 12, 3, 7])}, seed=4, **SIZES)
    with pytest.raises(PlanMismatchError, match="the content of corpus 'corpus' differs"):
        StreamingLoader(changed, global_batch_size=2).load_state_dict(state)
    with pytest.raises(PlanMismatchError, match=r"the number of corpora differs \(1, now 2\)"):
        StreamingLoader(two_corpora(), global_batch_size=2).load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"cursor": "x"}, {"cursor": '{"a": 1}'}, {"cursor": None}, {"_snapshot": {}}])
def test_a_foreign_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(PlanMismatchError, match="not a state of a tokshard loader"):
        StreamingLoader(one_corpus(), global_batch_size=2).load_state_dict(state)


@pytest.mark.parametrize(
    ("old", "new"),
    [('"sample":6', '"sample":-1'), ('"counts":[]', '"counts":[[0.5]]'), ('"weights":[[0', '"weights":[["x"')],
)
def test_a_damaged_state_is_refused(old: str, new: str) -> None:
    loader = StreamingLoader(one_corpus(), global_batch_size=2)
    take(loader, 3)
    state = loader.state_dict()
    loader.close()
    with pytest.raises(PlanMismatchError, match="damaged"):
        loader.load_state_dict(replaced(state, old, new))


# weights and skips


def test_new_weights_apply_from_the_next_batch_and_only_there() -> None:
    plan = two_corpora()
    loader = StreamingLoader(plan, global_batch_size=5, prefetch_factor=7)
    batches = iter(loader)
    rows = rows_of([next(batches), next(batches)])
    loader.set_weights({"a": 0, "b": 1})
    rows += rows_of([next(batches), next(batches)])
    loader.set_weights({"a": 1, "b": 1})
    rows += rows_of([next(batches)])
    assert rows == expected_rows(plan, range(25), loader.cursor)
    assert [row["corpus_index"] for row in rows[10:20]] == [1] * 10
    planned = two_corpora(schedule=[(10, {"a": 0, "b": 1}), (20, {"a": 1, "b": 1})])
    assert rows == expected_rows(planned, range(25))
    loader.close()


def test_resuming_with_the_weights_of_the_plan() -> None:
    loader = StreamingLoader(two_corpora(), global_batch_size=5)
    take(loader, 2)
    other = two_corpora(weights={"a": 0, "b": 1}, schedule=[(15, {"a": 1, "b": 0})])
    resumed = StreamingLoader(other, global_batch_size=5)
    resumed.load_state_dict(loader.state_dict(), weights="plan")
    rows = rows_of(take(resumed, 2))
    assert [row["corpus_index"] for row in rows] == [1] * 5 + [0] * 5
    planned = two_corpora(schedule=[(10, {"a": 0, "b": 1}), (15, {"a": 1, "b": 0})])
    assert rows == expected_rows(planned, range(10, 20))
    loader.close()
    resumed.close()


def test_skipped_samples_are_passed_over_and_stay_on_record() -> None:
    plan = two_corpora()
    loader = StreamingLoader(plan, global_batch_size=4)
    batches = iter(loader)
    rows = rows_of([next(batches)])
    loader.skip(8)
    loader.skip(4)
    rows += rows_of([next(batches)])
    assert rows == expected_rows(plan, range(4)) + expected_rows(plan, range(16, 20))
    assert loader.cursor.skipped == ((4, 16),)
    resumed = StreamingLoader(plan, global_batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.cursor.skipped == ((4, 16),)
    assert resumed.stats()["skipped_samples"] == 12
    loader.close()


def test_stats_say_what_was_read() -> None:
    loader = StreamingLoader(two_corpora(), global_batch_size=5)
    rows = rows_of(take(loader, 4))
    stats = loader.stats()
    loader.close()
    assert stats["batches"] == 4
    assert stats["samples"] == 20
    ends = [[*row["position_ids"][1:], 0] for row in rows]  # 0 after the last token of a piece
    labels = sum(
        label >= 0 and not after
        for row, end in zip(rows, ends, strict=True)
        for label, after in zip(row["labels"], end, strict=True)
    )
    assert stats["bytes_read"] == (20 * 6 + labels) * 4
    read = sum(row["corpus_index"] == 0 for row in rows)
    found = {"samples": read, "tokens": 6 * read, "left_out": 0, "epoch": 6 * read / 177, "weight": 0.7}
    assert stats["corpora"]["a"] == found


# finite passes


@settings(max_examples=examples(40))
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    batch=st.integers(1, 9),
    ranks=st.integers(1, 5),
    epochs=st.integers(1, 3),
)
def test_a_finite_pass_is_read_once_with_the_same_number_of_batches_on_every_rank(
    lengths: list[int], batch: int, ranks: int, epochs: int
) -> None:
    source = ListSource(lengths)
    plan = StreamPlan(source, epochs=epochs, **SIZES)
    loaders = [
        StreamingLoader(plan, global_batch_size=batch, dp_rank=rank, dp_world_size=ranks, uneven="pad")
        for rank in range(ranks)
    ]
    for _ in range(2):  # a second pass is the same
        per_rank = [list(loader) for loader in loaders]
        assert {len(batches) for batches in per_rank} == {len(loaders[0])}
        rows = rows_of_ranks(per_rank)
        real = [row for row in rows if row["sample_index"] >= 0]
        assert real == expected_rows(plan, range(plan.num_samples or 0))
        for row in rows:
            if row["sample_index"] < 0:
                assert row["corpus_index"] == -1
                assert set(row["labels"]) == {-100}
        targets = [label for row in rows for label in row["labels"] if label != -100]
        followers = [token for document in source.documents() for token in document[1:]]
        assert sorted(targets) == sorted(followers * epochs)
    for loader in loaders:
        loader.close()


def test_a_finite_pass_resumes_in_its_middle() -> None:
    plan = one_corpus(epochs=2)
    whole = StreamingLoader(plan, global_batch_size=2)
    rows = rows_of(list(whole))
    for stop in range(1, len(whole)):
        first = StreamingLoader(plan, global_batch_size=2)
        before = rows_of(take(first, stop))
        second = StreamingLoader(plan, global_batch_size=2)
        second.load_state_dict(first.state_dict())
        assert before + rows_of(list(second)) == rows
        first.close()
        second.close()
    whole.close()
    with pytest.raises(TypeError):
        len(StreamingLoader(one_corpus(), global_batch_size=2))


def test_uneven_ranks_get_equal_rows_and_read_the_same_batch() -> None:
    plan = two_corpora()
    for ranks in (2, 3, 4, 5, 7):
        rows = []
        loaders = [
            StreamingLoader(plan, global_batch_size=5, dp_rank=rank, dp_world_size=ranks, uneven="pad")
            for rank in range(ranks)
        ]
        per_rank = [take(loader, 3) for loader in loaders]
        assert {len(batch["sample_index"]) for batches in per_rank for batch in batches} == {-(-5 // ranks)}
        rows = rows_of_ranks(per_rank)
        assert [row for row in rows if row["sample_index"] >= 0] == expected_rows(plan, range(15))
        for loader in loaders:
            loader.close()


# refusals and faults


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"global_batch_size": 5, "dp_rank": 0, "dp_world_size": 2}, "2 ranks do not divide a global batch of 5"),
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"global_batch_size": 4, "dp_rank": 2, "dp_world_size": 2}, "dp_rank is 2 of 2"),
        ({"global_batch_size": 4, "dp_rank": 1}, "only one is given"),
        ({"global_batch_size": 4, "prefetch_factor": -1}, "prefetch_factor is -1"),
        ({"global_batch_size": 4, "uneven": "drop"}, "uneven is 'drop'"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        StreamingLoader(two_corpora(), **options)
    assert problem in caught.value.problem
    assert caught.value.hint


@pytest.mark.parametrize(("batch", "ranks", "near"), [(5, 2, 4), (7, 3, 6), (2, 3, 3)])
def test_ranks_that_do_not_divide_the_batch_are_told_the_nearest_batch_that_they_divide(
    batch: int, ranks: int, near: int
) -> None:
    with pytest.raises(PlanError) as caught:
        StreamingLoader(two_corpora(), global_batch_size=batch, dp_rank=0, dp_world_size=ranks)
    assert caught.value.hint == f"use uneven='pad', or a global_batch_size such as {near}"


class SlowSource(ListSource):
    """A source whose storage hangs, until the test is over."""

    over = threading.Event()
    reading = "/data/shard-00-0000000-000000-0000.arrow"

    def read(self, starts: Any, lengths: Any, out: Any, at: Any) -> None:
        self.over.wait(60)
        super().read(starts, lengths, out, at)


def test_a_read_that_hangs_times_out_with_the_name_of_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "STOP_SECONDS", 0.05)  # what reads comes back when the test is over
    plan = StreamPlan({"slow": SlowSource([5, 9])}, **SIZES)
    loader = StreamingLoader(plan, global_batch_size=2, timeout_seconds=0.2)
    with pytest.raises(LoaderError, match=r"no batch came for 0\.2 s; the last reads were in /data/shard-00"):
        take(loader, 1)
    SlowSource.over.set()


class HangsOnce(ListSource):
    """A source whose storage hangs when it is asked for ends of documents first, until the test is over."""

    is_in_memory = False

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.is_first, self.over = True, threading.Event()

    def ends(self, *arguments: Any) -> Any:
        is_first, self.is_first = self.is_first, False
        if is_first:
            self.over.wait(60)
        return super().ends(*arguments)


def test_a_loader_goes_on_without_the_tables_that_a_thread_that_hangs_may_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetch, "STOP_SECONDS", 0.05)  # what reads comes back when the test is over
    lengths = [5, 9, 30, 12, 7] * 8
    slow = HangsOnce(lengths)
    loader = StreamingLoader(StreamPlan({"corpus": slow}, **SIZES), global_batch_size=4, timeout_seconds=1)
    with pytest.raises(LoaderError, match="no batch came for 1 s"):
        take(loader, 1)
    expected = take(StreamingLoader(StreamPlan({"corpus": ListSource(lengths)}, **SIZES), global_batch_size=4), 9)
    assert rows_of(take(loader, 9)) == rows_of(expected)
    slow.over.set()


def test_the_global_random_generators_are_left_alone() -> None:
    def states() -> tuple[Any, ...]:
        legacy = np.random.get_state()[1].tolist()  # noqa: NPY002 - the global state that must not change
        return random.getstate(), legacy, torch.get_rng_state().tolist()

    before = states()
    loader = StreamingLoader(two_corpora(), global_batch_size=2)
    take(loader, 5)
    loader.close()
    assert states() == before


def test_two_loaders_in_one_process_do_not_touch_each_other() -> None:
    plan = two_corpora()
    one, two = StreamingLoader(plan, global_batch_size=2), StreamingLoader(plan, global_batch_size=3)
    pairs = [(a, b) for a, b, _ in zip(one, two, range(6), strict=False)]
    assert rows_of([a for a, _ in pairs]) == expected_rows(plan, range(12))
    assert rows_of([b for _, b in pairs]) == expected_rows(plan, range(18))
    one.close()
    two.close()


# other loaders


# These passes are finite and read to their end: a DataLoader that is left in the middle ends its workers, and torch
# sometimes aborts one while it does.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("workers", "method"),
    # each spawned worker imports torch; StatefulDataLoader and StreamingLoader have such in other tests
    [(0, None), (3, "fork"), *(pytest.param(n, "spawn", marks=SOAK) for n in (1, 3))],
)
def test_the_dataset_gives_the_same_batches_under_a_plain_dataloader(workers: int, method: str | None) -> None:
    plan = one_corpus(epochs=3)
    datasets = [StreamDataset(plan, global_batch_size=4, dp_rank=rank, dp_world_size=2) for rank in range(2)]
    batches = [list(dataloader(one, num_workers=workers, multiprocessing_context=method)) for one in datasets]
    rows = [row for row in rows_of_ranks(batches) if row["sample_index"] >= 0]
    assert rows == expected_rows(plan, range(plan.num_samples or 0))


of_torchdata = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated:UserWarning", "ignore:.*fork.*:DeprecationWarning"
)


def stateful(plan: StreamPlan, workers: int, method: str | None = "fork", **options: Any) -> Any:
    dataloaders = pytest.importorskip("torchdata.stateful_dataloader")
    dataset = StreamDataset(plan, global_batch_size=4)
    if workers:
        options |= {"num_workers": workers, "multiprocessing_context": method, "worker_init_fn": belong_to_the_loop}
    return dataloaders.StatefulDataLoader(dataset, batch_size=None, sampler=dataset.sampler, **options)


def real_rows(batches: Any) -> list[dict[str, Any]]:
    return [row for row in rows_of(list(batches)) if row["sample_index"] >= 0]


@pytest.mark.slow
@of_torchdata
@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=SOAK)])
def test_the_dataset_resumes_under_a_stateful_dataloader(workers: int, method: str | None) -> None:
    plan = one_corpus(epochs=3)
    whole = expected_rows(plan, range(plan.num_samples or 0))
    first = stateful(plan, workers, method)
    states = [first.state_dict() for _ in first]
    for stop in (1, 4):
        second = stateful(plan, workers, method)
        second.load_state_dict(states[stop - 1])
        assert real_rows(second) == whole[4 * stop :]


@pytest.mark.slow
@of_torchdata
@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (2, 1)])
def test_the_state_of_a_stateful_dataloader_goes_on_with_another_number_of_workers(before: int, after: int) -> None:
    plan = one_corpus(epochs=3)
    whole = expected_rows(plan, range(plan.num_samples or 0))
    first = stateful(plan, before)
    states = [json.loads(json.dumps(first.state_dict())) for _ in first]
    for stop in (1, 4):
        second = stateful(plan, after)
        second.sampler.load_state_dict(states[stop - 1])
        rows = real_rows(second)
        assert rows == whole[4 * stop :]


@pytest.mark.slow
@of_torchdata
def test_a_state_between_two_snapshots_of_a_stateful_dataloader_needs_as_many_workers() -> None:
    plan = one_corpus(epochs=3)
    whole = expected_rows(plan, range(plan.num_samples or 0))
    first = stateful(plan, 2, snapshot_every_n_steps=3)
    states = [first.state_dict() for _ in first]
    other, same = stateful(plan, 0), stateful(plan, 2, snapshot_every_n_steps=3)
    with pytest.raises(LoaderError, match="is 1 steps after its last snapshot") as caught:
        other.sampler.load_state_dict(states[3])
    assert "num_workers as before" in caught.value.hint
    other.sampler.load_state_dict(states[2])
    assert real_rows(other) == whole[12:]
    same.load_state_dict(states[3])
    assert real_rows(same) == whole[16:]


@pytest.mark.slow
@of_torchdata
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_dataloader_ends_a_pass_in_the_same_way_with_any_number_of_workers(workers: int) -> None:
    plan = one_corpus(epochs=1)
    first = stateful(plan, workers)
    states = [first.state_dict() for _ in first]
    # after the loop, the next one is a pass, as in the loader that gave the state; at its last batch, nothing is left
    for state, lengths in ((first.state_dict(), [len(states)] * 2), (states[-1], [0, len(states)])):
        second = stateful(plan, workers)
        second.load_state_dict(state)
        assert [len(list(second)) for _ in range(2)] == lengths
    assert len(list(first)) == len(states)


def test_without_torch_distributed_a_loader_is_rank_0_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert "rank 0 of 1" in repr(StreamingLoader(two_corpora(), global_batch_size=2))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "rank 0 of 1" in repr(StreamingLoader(two_corpora(), global_batch_size=2))


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_a_loader_made_before_torch_distributed_in_a_job_of_several_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "2")
    with pytest.raises(PlanError, match=f"{variable} is 2, but torch") as caught:
        StreamingLoader(two_corpora(), global_batch_size=2)
    assert caught.value.hint
    loader = StreamingLoader(two_corpora(), global_batch_size=4, dp_rank=1, dp_world_size=4)
    assert "rank 1 of 4" in repr(loader)


def test_windows_of_fewer_than_16_steps_are_a_warning_unless_they_were_chosen() -> None:
    source = PeriodicSource(10**10)
    tokens_per_step = 8 << 20  # a default window has 64M tokens
    with pytest.warns(UserWarning, match=r"a window of corpus 'big' lasts 8\.0 steps.*window_blocks=2048 makes it 16"):
        StreamingLoader(StreamPlan({"big": source}, seq_len=4096), global_batch_size=tokens_per_step // 4096)
    StreamingLoader(StreamPlan({"big": source}, seq_len=4096, window_blocks=1024), global_batch_size=2048)
    StreamingLoader(StreamPlan({"big": source}, seq_len=4096), global_batch_size=1024)


def test_a_plan_says_how_many_steps_read_a_window() -> None:
    plan = StreamPlan(
        {"big": PeriodicSource(10**10), "small": PeriodicSource(10**6), "off": PeriodicSource(10**9)},
        weights={"big": 0.75, "small": 0.25, "off": 0},
        seq_len=4096,
    )
    assert steps_per_window(plan, 1024) == {"big": pytest.approx(64 / 3), "small": math.inf, "off": math.inf}


def test_a_finished_pass_that_is_resumed_is_over_for_one_loop() -> None:
    plan = one_corpus(epochs=1)
    whole = expected_rows(plan, range(plan.num_samples or 0))
    first = StreamingLoader(plan, global_batch_size=4)
    list(first)
    assert [row for row in rows_of(list(first)) if row["sample_index"] >= 0] == whole, "a further loop begins again"
    skipping = StreamingLoader(plan, global_batch_size=4)
    skipping.skip(10**6)
    resumed, dataset = StreamingLoader(plan, global_batch_size=4), StreamDataset(plan, global_batch_size=4)
    resumed.load_state_dict(first.state_dict())
    dataset.sampler.load_state_dict(first.state_dict())
    for loader in (skipping, resumed, dataloader(dataset)):
        with pytest.warns(UserWarning, match="this loop gives nothing; the next one begins the pass again"):
            assert list(loader) == []
        assert [row for row in rows_of(list(loader)) if row["sample_index"] >= 0] == whole
    for loader in (first, skipping, resumed):
        loader.close()


def test_a_loop_that_leaves_a_resumed_pass_at_its_last_batch_is_followed_by_a_whole_pass() -> None:
    plan = StreamPlan({"a": ListSource([5, 9, 3, 12])}, seq_len=4, epochs=1, block_tokens=16, window_blocks=2)
    first = StreamingLoader(plan, global_batch_size=1)
    next(iter(first))
    loader = StreamingLoader(plan, global_batch_size=1)
    loader.load_state_dict(first.state_dict())
    for number, _ in enumerate(loader, 2):
        if number == len(loader):
            break
    assert len(list(loader)) == len(loader)


def test_a_loader_without_a_thread_gives_the_same_batches() -> None:
    plan, threads = two_corpora(), threading.active_count()
    with StreamingLoader(plan, global_batch_size=4, prefetch_factor=0) as loader:
        rows = rows_of(take(loader, 5))
        loader.skip(3)
        rows += rows_of(take(loader, 2))
        assert threading.active_count() == threads
    assert rows == expected_rows(plan, [*range(20), *range(23, 31)])
