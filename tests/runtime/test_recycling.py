"""Memory of batches is used again, but never while anything of a batch is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples import crossed
from tests.runtime.loaders import two_corpora
from tokshard.runtime.rows.recycling import Recycler
from tokshard.runtime.tensors import StreamingLoader

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
    if type(held).__name__ == "PyCapsule":  # which is read once
        held = torch.utils.dlpack.from_dlpack(held)
    if isinstance(held, torch.UntypedStorage):
        return bytes(held.tolist())
    return np.ascontiguousarray(held).tobytes()


@pytest.mark.slow
@crossed("hold, key", list(HOLDS), ["input_ids", "labels", "position_ids", "compact"])
def test_what_the_loop_keeps_of_a_batch_is_never_overwritten(hold: str, key: str) -> None:
    kept, before, is_compact = [], [], key == "compact"
    with StreamingLoader(two_corpora(), global_batch_size=3, prefetch_factor=1, compact=is_compact) as loader:
        for _, batch in zip(range(31), loader, strict=False):
            tensor = batch["input_ids" if is_compact else key]
            kept.append(HOLDS[hold](tensor))
            before.append(content(HOLDS[hold](tensor)))
    assert list(map(content, kept)) == before


@pytest.mark.parametrize("compact", [False, True])
def test_memory_that_the_loop_gives_up_is_used_again(compact: bool) -> None:
    with StreamingLoader(two_corpora(), global_batch_size=2, prefetch_factor=2, compact=compact) as loader:
        places = {batch["input_ids"].data_ptr() for _, batch in zip(range(60), loader, strict=False)}
    assert len(places) <= 6


def test_a_recycler_keeps_so_many_arrays_and_gives_up_those_that_are_in_the_way() -> None:
    recycler = Recycler(2)
    first, second = recycler.empty((3, 4)), recycler.empty((3, 4))
    assert recycler.empty((3, 4)) is not first
    assert len(recycler._arrays) == 2, "both are held, and no third is kept"
    held = [id(first), id(second)]
    del first, second
    assert id(recycler.empty((3, 4))) in held
    kept = recycler.empty((3, 4))
    for shape in ((3, 2, 4), (3, 1, 4), (3, 5, 5)):
        recycler.empty(shape)
        assert [array.shape for array in recycler._arrays] == [kept.shape, shape]


@pytest.mark.parametrize("has_gil", [True, False])
def test_memory_is_used_again_only_where_reference_counts_are_exact(
    has_gil: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys._is_gil_enabled", lambda: has_gil, raising=False)
    recycler = Recycler(2)
    recycler.empty((3, 4))  # which nothing holds any more
    assert len(recycler._arrays) == has_gil
