"""A compact batch is a tenth of the full one, and makes the same batch on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime.loaders import SIZES, dataloader, two_corpora
from tests.runtime.sources import ListSource, PeriodicSource
from tokshard.runtime import FillInTheMiddle, NumpyLoader, StreamDataset, StreamingLoader, StreamPlan, expand
from tokshard.runtime.loader import narrow_batches
from tokshard.runtime.rows import narrow as narrow_rows
from tokshard.runtime.rows.steps import RankRows
from tokshard.runtime.tensors import as_tensors


class NarrowSource(ListSource):
    """A corpus with few enough tokens for uint16."""

    dtype = np.dtype(np.uint16)

    def tokens_of(self, start: int, length: int) -> Any:
        return super().tokens_of(start, length).astype(np.uint16)


def fully(batch: dict[str, Any]) -> dict[str, Any]:
    """All that can differ between two batches."""
    return {key: (str(value.dtype), tuple(value.shape), value.tolist()) for key, value in batch.items()}


def first(loader: Any, count: int) -> list[dict[str, Any]]:
    return [batch for _, batch in zip(range(count), loader, strict=False)]


def reverse(sample: Any, random: Any) -> Any:
    """Another text, other boundaries, and labels of its own."""
    from tokshard.runtime import Sample

    lengths = sample.piece_lengths[::-1]
    following = np.where(random.uniform(len(lengths)) < 0.5, -100, 2**40)
    return Sample(tokens=sample.tokens[::-1].copy(), piece_lengths=lengths, next_tokens=following)


TRANSFORMS: dict[str, tuple[Any, ...]] = {
    "none": (),
    "fill in the middle": (FillInTheMiddle(prefix_id=1, middle_id=2, suffix_id=3, rate=0.8),),
    "labels of its own": (reverse,),
}


@st.composite
def plans(draw: st.DrawFn) -> StreamPlan:
    lengths = st.lists(st.integers(1, 30), min_size=3, max_size=12)
    kind = draw(st.sampled_from([ListSource, NarrowSource]))
    count = draw(st.integers(1, 2))
    drawn = [draw(lengths) for _ in range(count)]  # repeated until there are two blocks
    corpora = {str(number): kind(some * -(-96 // sum(some)), name=str(number)) for number, some in enumerate(drawn)}
    transforms = TRANSFORMS[draw(st.sampled_from(list(TRANSFORMS)))]
    return StreamPlan(
        corpora,
        seed=draw(st.integers(0, 99)),
        epochs=draw(st.integers(1, 2)) if count == 1 else None,
        transforms=transforms,
        seq_len=draw(st.sampled_from([1, 6, 16])),
        block_tokens=48,
        window_blocks=2,
        allow_small_blocks=True,
    )


@pytest.mark.parametrize("kind", [NumpyLoader, StreamingLoader])
@settings(max_examples=examples(20), deadline=None)
@given(plan=plans(), batch=st.integers(1, 5), ranks=st.integers(1, 3), data=st.data())
def test_expanding_a_compact_batch_gives_the_full_one(
    kind: Any, plan: StreamPlan, batch: int, ranks: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    sizes: dict[str, Any] = {"global_batch_size": batch, "dp_rank": rank, "dp_world_size": ranks, "uneven": "pad"}
    with kind(plan, **sizes) as loader, kind(plan, **sizes, compact=True) as narrow:
        full, compact = first(loader, 6), first(narrow, 6)
    assert [fully(expand(each)) for each in compact] == [fully(each) for each in full]


@pytest.mark.parametrize(("source", "dtype"), [(NarrowSource, "uint16"), (ListSource, "uint32")])
def test_a_compact_batch_has_the_documented_arrays(source: Any, dtype: str) -> None:
    plan = StreamPlan(source([9, 4, 30, 1, 12, 3, 7]), epochs=1, seed=4, **SIZES)
    with NumpyLoader(plan, global_batch_size=4, compact=True) as loader:
        batch = list(loader)[-1]  # 66 tokens are 11 samples: the last row is padding
    assert {key: (value.dtype.name, value.shape) for key, value in batch.items()} == {
        "input_ids": (dtype, (4, 6)),
        "next_tokens": ("int64", (63,)),
        "num_tokens": ("int32", (4,)),
        "corpus_index": ("int64", (4,)),
        "sample_index": ("int64", (4,)),
        "cu_seqlens": ("int32", (64,)),
        "max_seqlen": ("int64", ()),
    }
    assert batch["num_tokens"].tolist() == [6, 6, 6, 0]
    with StreamingLoader(plan, global_batch_size=4, compact=True) as tensors:
        found = {key: (str(value.dtype), tuple(value.shape)) for key, value in next(iter(tensors)).items()}
    assert found == {key: (f"torch.{value.dtype}", value.shape) for key, value in batch.items()}


@pytest.mark.parametrize("kind", [NumpyLoader, StreamingLoader])
def test_a_state_does_not_depend_on_compact(kind: Any) -> None:
    plan = two_corpora()
    with kind(plan, global_batch_size=4) as loader:
        expected = [fully(batch) for batch in first(loader, 9)]
    found, state, states = [], None, []
    for number in range(9):  # stop after every step, and go on with the other kind of batch
        with kind(plan, global_batch_size=4, compact=number % 2 == 0) as loader:
            if state is not None:
                loader.load_state_dict(state)
            batch = next(iter(loader))
            found.append(fully(expand(batch) if number % 2 == 0 else batch))
            state = loader.state_dict()
            states.append(state)
    assert found == expected
    with kind(plan, global_batch_size=4) as loader:
        assert states == states_of(loader, 9)


def states_of(loader: Any, count: int) -> list[Any]:
    return [loader.state_dict() for _, _ in zip(range(count), loader, strict=False)]


def test_compact_batches_that_are_held_are_never_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_rows, "READ_TOKENS", 4 * 4 * 7)
    plan = two_corpora()
    with StreamingLoader(plan, global_batch_size=4, compact=True, prefetch_factor=1) as loader:
        held = first(loader, 40)
    with StreamingLoader(plan, global_batch_size=4) as loader:
        assert [fully(expand(batch)) for batch in held] == [fully(batch) for batch in first(loader, 40)]
    assert len({batch["input_ids"].data_ptr() for batch in held}) == 40


def test_memory_of_compact_batches_is_used_again() -> None:
    with StreamingLoader(two_corpora(), global_batch_size=4, compact=True, prefetch_factor=2) as loader:
        found = {batch["input_ids"].data_ptr() for _, batch in zip(range(200), loader, strict=False)}
    assert len(found) <= 2 + 4


def test_a_dataset_gives_compact_batches() -> None:
    plan = two_corpora()
    full = first(dataloader(StreamDataset(plan, global_batch_size=4)), 5)
    compact = first(dataloader(StreamDataset(plan, global_batch_size=4, compact=True)), 5)
    assert [fully(expand(batch)) for batch in compact] == [fully(batch) for batch in full]


@pytest.mark.parametrize("document_tokens", [40, 750])
def test_a_tenth_of_the_bytes_goes_to_the_device(document_tokens: int) -> None:
    plan = StreamPlan(PeriodicSource(10**9, document_tokens), seq_len=4096, seed=1, window_blocks=64)
    sizes = {}
    for is_compact in (False, True):
        with NumpyLoader(plan, global_batch_size=8, compact=is_compact) as loader:
            sizes[is_compact] = sum(value.nbytes for value in next(iter(loader)).values())
    assert sizes[True] < 0.1 * sizes[False]


def test_expanding_never_asks_the_device_for_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    with StreamingLoader(two_corpora(), global_batch_size=4, compact=True) as loader:
        batch = next(iter(loader))

    def refuse(*_: Any) -> Any:
        raise AssertionError("this waits for the device")

    repeat, sizes = torch.Tensor.repeat_interleave, []

    def repeat_interleave(tensor: torch.Tensor, *arguments: Any, output_size: int | None = None) -> torch.Tensor:
        sizes.append(output_size)
        return repeat(tensor, *arguments, output_size=output_size)

    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__index__", "__float__"):
            patched.setattr(torch.Tensor, name, refuse)
        patched.setattr(torch.Tensor, "repeat_interleave", repeat_interleave)
        expand(batch)
    assert sizes == [24]  # which it would ask the device for


@pytest.mark.parametrize("kind", [NumpyLoader, StreamingLoader])
def test_short_rows_and_rows_of_padding_have_no_labels(kind: Any) -> None:
    plan = StreamPlan(ListSource([9, 4, 30, 1, 12, 3, 8]), epochs=1, seed=4, **SIZES)  # 11 samples and a token
    num_tokens: set[int] = set()
    for rank in range(3):
        sizes: dict[str, Any] = {"global_batch_size": 4, "dp_rank": rank, "dp_world_size": 3, "uneven": "pad"}
        with kind(plan, **sizes) as loader, kind(plan, **sizes, compact=True) as narrow:
            full, compact = list(loader), list(narrow)
        assert [fully(expand(each)) for each in compact] == [fully(each) for each in full]
        num_tokens.update(*(each["num_tokens"].tolist() for each in compact))
    assert num_tokens == {0, 1, 6}


def test_every_tensor_of_a_compact_batch_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.data_ptr())
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    plan = two_corpora()
    narrow = next(narrow_batches(plan, RankRows(global_batch_size=4), plan.cursor()))
    batch = as_tensors(narrow, pin_memory=True, compact=True)
    assert len(pinned) == len(batch)
    assert pinned != [tensor.data_ptr() for tensor in batch.values()]
    assert fully(expand(batch)) == fully(as_tensors(narrow))


@pytest.mark.parametrize("kind", [NumpyLoader, StreamingLoader])
def test_a_full_batch_cannot_be_expanded(kind: Any) -> None:
    with kind(two_corpora(), global_batch_size=4) as loader:
        batch = next(iter(loader))
    with pytest.raises(ValueError, match=r"has input_ids, labels, .* and no next_tokens: .* compact=True"):
        expand(batch)


def test_numpy_arrays_have_no_device() -> None:
    with NumpyLoader(two_corpora(), global_batch_size=4, compact=True) as loader:
        batch: Any = next(iter(loader))
    with pytest.raises(ValueError, match="device is 'cpu', and the batch has numpy arrays"):
        expand(batch, device="cpu")
