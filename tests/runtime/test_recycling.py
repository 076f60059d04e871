"""Memory of batches is used again, but never while anything of a batch is held."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.loaders import Batch, expected_rows, one_corpus, rows_of, take, two_corpora
from tokshard.runtime.rows.recycling import Recycler
from tokshard.runtime.tensors import StreamingLoader

ROWS = ("input_ids", "labels", "position_ids")

HOLDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda tensor: tensor,
    "a row of it": lambda tensor: tensor[1],
    "a slice of columns": lambda tensor: tensor[:, 2:4],
    "another shape": lambda tensor: tensor.view(-1),
    "its transpose": lambda tensor: tensor.t(),
    "a numpy view": lambda tensor: tensor.numpy(),
    "a part of a numpy view": lambda tensor: tensor.numpy()[1:, ::2],
    "its storage": lambda tensor: tensor.untyped_storage(),
    "a dlpack capsule": torch.utils.dlpack.to_dlpack,
    "numpy over dlpack": np.from_dlpack,
    "a memoryview": lambda tensor: memoryview(tensor.numpy()),
    "a detached tensor": lambda tensor: tensor.detach(),
}


def content(held: Any) -> bytes:
    """The bytes of what is held."""
    if type(held).__name__ == "PyCapsule":
        raise TypeError("a capsule is read once")
    if isinstance(held, torch.UntypedStorage):
        return bytes(held.tolist())
    if isinstance(held, torch.Tensor):
        return held.contiguous().numpy().tobytes()
    return np.asarray(held).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("key", ROWS)
def test_what_the_loop_keeps_of_a_batch_is_never_overwritten(hold: str, key: str) -> None:
    loader = StreamingLoader(two_corpora(), global_batch_size=3, prefetch_factor=1)
    kept, before = [], []
    for number, batch in enumerate(loader):
        held = HOLDS[hold](batch[key])
        before.append(batch[key].tolist() if hold == "a dlpack capsule" else content(held))
        kept.append(held)
        if number == 30:
            break
    loader.close()
    after = [
        torch.utils.dlpack.from_dlpack(held).tolist() if hold == "a dlpack capsule" else content(held) for held in kept
    ]
    assert after == before


def addresses(loader: Any, steps: int, keep: Callable[[list[Batch], Batch], None]) -> set[int]:
    """Where the batches of a run lie in memory."""
    held: list[Batch] = []
    found = set()
    for number, batch in enumerate(loader):
        found.add(batch["input_ids"].data_ptr())
        keep(held, batch)
        if number + 1 == steps:
            break
    return found


def test_memory_of_batches_that_were_dropped_is_used_again() -> None:
    loader = StreamingLoader(two_corpora(), global_batch_size=3, prefetch_factor=2)
    found = addresses(loader, 200, lambda held, batch: None)
    loader.close()
    assert len(found) <= 2 + 4


def test_memory_is_used_again_while_the_loop_holds_a_few_batches_at_a_time() -> None:
    loader = StreamingLoader(two_corpora(), global_batch_size=3, prefetch_factor=2)

    def keep_three(held: list[Batch], batch: Batch) -> None:
        held.append(batch)
        del held[:-3]

    found = addresses(loader, 200, keep_three)
    loader.close()
    assert len(found) <= 2 + 4


def test_more_batches_than_are_recycled_can_be_held_and_stay_what_they_are() -> None:
    plan = two_corpora()
    loader = StreamingLoader(plan, global_batch_size=3, prefetch_factor=2)
    batches = take(loader, 60)
    assert rows_of(batches) == expected_rows(plan, range(180))
    assert len({batch["input_ids"].data_ptr() for batch in batches}) == 60
    del batches  # and memory is used again afterwards
    found = addresses(loader, 100, lambda held, batch: None)
    loader.close()
    assert len(found) <= 2 + 4


@given(seed=st.integers(0, 10_000), prefetch=st.integers(1, 4))
def test_batches_that_are_held_for_a_random_time_stay_what_they_are(seed: int, prefetch: int) -> None:
    rng, plan = random.Random(seed), two_corpora()
    loader = StreamingLoader(plan, global_batch_size=2, prefetch_factor=prefetch)
    held: dict[int, Any] = {}
    for step, batch in enumerate(loader):
        held[step] = {"input_ids": batch["input_ids"][:, :3]} if rng.random() < 0.3 else batch
        for old in rng.sample(sorted(held), rng.randint(0, len(held))):
            rows = expected_rows(plan, range(2 * old, 2 * old + 2))
            assert held.pop(old)["input_ids"].tolist()[0][:3] == rows[0]["input_ids"][:3]
        if step == 15:
            break
    loader.close()


def test_batches_that_other_threads_hold_stay_what_they_are() -> None:
    plan = two_corpora()
    loader = StreamingLoader(plan, global_batch_size=2, prefetch_factor=3)
    waiting: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
    wrong: list[int] = []
    expected = {row["sample_index"]: row["input_ids"] for row in expected_rows(plan, range(600))}

    def check() -> None:
        while (batch := waiting.get()) is not None:
            rows = zip(batch["sample_index"].tolist(), batch["input_ids"].tolist(), strict=True)
            wrong.extend(sample for sample, tokens in rows if tokens != expected[sample])

    threads = [threading.Thread(target=check) for _ in range(3)]
    for thread in threads:
        thread.start()
    for batch in take_lazily(loader, 300):
        waiting.put(batch)
    for _ in threads:
        waiting.put(None)
    for thread in threads:
        thread.join()
    loader.close()
    assert wrong == []


def take_lazily(loader: StreamingLoader, count: int) -> Any:
    for number, batch in enumerate(loader):
        yield batch
        if number + 1 == count:
            return


def test_a_batch_that_the_loop_changes_in_place_changes_no_other() -> None:
    plan = two_corpora()
    loader = StreamingLoader(plan, global_batch_size=3, prefetch_factor=2)
    for number, batch in enumerate(loader):
        assert rows_of([batch]) == expected_rows(plan, range(3 * number, 3 * number + 3))
        for tensor in batch.values():
            tensor.fill_(-7)
        if number == 40:
            break
    loader.close()


def test_arrays_of_another_shape_are_given_up_when_they_are_in_the_way() -> None:
    recycler = Recycler(2)
    held = recycler.empty((3, 9, 9))
    for shape in ((3, 2, 4), (3, 1, 4), (3, 5, 5)):
        recycler.empty(shape)
        assert [array.shape for array in recycler._arrays] == [held.shape, shape]


def test_documents_of_every_kind_are_not_mixed_up_by_memory_that_is_used_again() -> None:
    # short last rows and padding rows: what is not written has to be cleared
    plan = one_corpus(epochs=1)
    for _ in range(3):
        loader = StreamingLoader(plan, global_batch_size=4, prefetch_factor=1)
        for _ in range(3):
            real = [row for row in rows_of(list(loader)) if row["sample_index"] >= 0]
            assert real == expected_rows(plan, range(plan.num_samples or 0))
        loader.close()


@pytest.mark.parametrize("has_gil", [True, False])
def test_memory_is_used_again_only_where_reference_counts_are_exact(
    has_gil: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys._is_gil_enabled", lambda: has_gil, raising=False)
    recycler = Recycler(2)
    recycler.empty((3, 4))  # which nothing holds any more
    assert len(recycler._arrays) == has_gil
