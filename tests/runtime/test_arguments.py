"""What a plan or a loader accepts it can save and load; everything else is refused at the door."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.loaders import expected_rows, one_corpus, rows_of, take, two_corpora
from tests.runtime.sources import ListSource, PeriodicSource
from tokshard.errors import PlanError, PlanMismatchError
from tokshard.runtime.loader import NumpyLoader
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.infilling import FillInTheMiddle
from tokshard.runtime.tensors import StreamDataset, StreamingLoader

WRONG = ["4k", "8", 4.0, 4.5, 1e6, np.float64(8), math.nan, math.inf, None, True, [4], Fraction(4), 2**63, -1]
"""Never a number of samples, tokens, rows or ranks."""

integers = st.integers(0, 40).flatmap(
    lambda value: st.sampled_from([value, np.int64(value), np.uint8(value), torch.tensor(value)])
)
numbers = st.one_of(integers, st.sampled_from(WRONG), st.floats(), st.integers())


@given(
    seed=numbers,
    start=numbers,
    first=numbers,
    batch=numbers,
    skip=numbers,
    weight=st.one_of(st.floats(), st.integers()),
)
def test_whatever_is_accepted_is_saved_and_loaded(
    seed: Any, start: Any, first: Any, batch: Any, skip: Any, weight: Any
) -> None:
    try:
        plan = two_corpora(
            seed=seed,
            schedule=[(start, {"a": weight, "b": 1})],
            start_epoch={"a": first},
            weights={"a": 1, "b": weight},
        )
        loader = StreamingLoader(plan, global_batch_size=batch)
        loader.skip(skip)
        loader.set_weights({"a": weight, "b": 1})
    except PlanError:
        return
    state = loader.state_dict()
    assert json.loads(state["cursor"])["sample"] == int(skip)
    other, sampler = (
        StreamingLoader(plan, global_batch_size=batch),
        StreamDataset(plan, global_batch_size=batch).sampler,
    )
    for one in (other, sampler):
        one.load_state_dict(state)
    assert other.state_dict()["cursor"] == iter(sampler).state_dict()["cursor"] == state["cursor"]


DOORS: dict[str, Callable[[Any], Any]] = {
    "seq_len": lambda value: one_corpus(seq_len=value),
    "seed": lambda value: one_corpus(seed=value),
    "block_tokens": lambda value: one_corpus(block_tokens=[value]),
    "window_blocks": lambda value: one_corpus(window_blocks=value if value is not None else "x"),
    "epochs": lambda value: one_corpus(epochs=value if value is not None else "x"),
    "start_epoch": lambda value: one_corpus(start_epoch={"corpus": value}),
    "schedule": lambda value: one_corpus(schedule=[(value, {"corpus": 1})]),
    "global_batch_size": lambda value: StreamingLoader(one_corpus(), global_batch_size=value),
    "dataset's global_batch_size": lambda value: StreamDataset(one_corpus(), global_batch_size=value),
    "dp_rank": lambda value: StreamingLoader(one_corpus(), global_batch_size=4, dp_rank=value, dp_world_size=4),
    "dp_world_size": lambda value: StreamingLoader(one_corpus(), global_batch_size=4, dp_rank=0, dp_world_size=value),
    "prefetch_factor": lambda value: StreamingLoader(one_corpus(), global_batch_size=4, prefetch_factor=value),
    "skip": lambda value: StreamingLoader(one_corpus(), global_batch_size=4).skip(value),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_number_of_another_type_or_out_of_range_is_refused_with_a_hint(door: str, value: Any) -> None:
    if door == "seed" and value == 2**63 and type(value) is int:
        return  # a seed is a word of 64 bits
    with pytest.raises(PlanError) as caught:
        DOORS[door](value)
    assert caught.value.hint
    assert len(caught.value.problem.splitlines()) == 1


def test_the_hint_for_a_float_is_the_integer_that_was_meant() -> None:
    loader = StreamingLoader(one_corpus(), global_batch_size=4)
    with pytest.raises(PlanError, match=r"num_samples is 1000000\.0 \(float\), expected an integer") as caught:
        loader.skip(1e6)  # type: ignore[arg-type]
    assert caught.value.hint == "give an integer such as 1000000"
    loader.skip(np.int64(8))  # type: ignore[arg-type]
    assert loader.cursor.sample == 8


Plan: Any = StreamPlan
Loader: Any = StreamingLoader
FillIn: Any = FillInTheMiddle
made: Any = one_corpus


@pytest.mark.parametrize(
    "make",
    [
        lambda: Plan(["a", "b"], seq_len=4),
        lambda: Plan({"a": 5}, seq_len=4),
        lambda: Plan({5: ListSource([3])}, seq_len=4),
        lambda: Plan(None, seq_len=4),
        lambda: made(weights=[1]),
        lambda: made(weights={"corpus": "half"}),
        lambda: made(schedule=5),
        lambda: made(schedule=[5]),
        lambda: made(schedule=[(5, 1)]),
        lambda: made(schedule={"corpus": 1}),
        lambda: made(start_epoch=[1]),
        lambda: made(take="half"),
        lambda: made(take={"corpus": "half"}),
        lambda: made(max_epochs="2"),
        lambda: made(transforms=[5]),
        lambda: made(transforms=5),
        lambda: made(epochs=2**32 - 1, seq_len=1).sample("x"),
        lambda: made().sample(1.0),
        lambda: made().trace("x"),
        lambda: made().sample(0, {"cursor": "{}"}),
        lambda: made().find("corpus", "x"),
        lambda: made().find("corpus", 0, epochs=1.5),
        lambda: made().find("corpus", 0, epochs=["x"]),
        lambda: FillIn(prefix_id="x", suffix_id=2, middle_id=3),
        lambda: FillIn(prefix_id=1.0, suffix_id=2, middle_id=3),
        lambda: FillIn(prefix_id=1, suffix_id=2, middle_id=3, rate="half"),
        lambda: Loader("corpus", global_batch_size=4),
        lambda: Loader(made(), global_batch_size=4, timeout_seconds="10"),
        lambda: Loader(made(), global_batch_size=4, timeout_seconds=0),
        lambda: Loader(made(), global_batch_size=4, timeout_seconds=math.nan),
        lambda: Loader(made(), global_batch_size=4).set_weights({"corpus": "half"}),
        lambda: Loader(made(), global_batch_size=4).set_weights(1),
    ],
)
def test_a_wrong_type_is_refused_with_a_hint(make: Callable[[], Any]) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    assert caught.value.hint


@pytest.mark.parametrize("state", [None, 5, "x", [], b"{}"])
def test_a_state_of_another_type_is_no_state(state: Any) -> None:
    for loader in (
        StreamingLoader(one_corpus(), global_batch_size=2),
        StreamDataset(one_corpus(), global_batch_size=2).sampler,
    ):
        with pytest.raises(PlanMismatchError, match="not a state of a tokshard loader"):
            loader.load_state_dict(state)


@pytest.mark.parametrize("sample", [2**62 + 1, 2**63, 2**64, 10**30, -1])
def test_a_sample_that_cannot_be_counted_is_an_index_error(sample: int) -> None:
    for read in (one_corpus().sample, one_corpus().trace):
        with pytest.raises(IndexError, match=f"sample {sample}"):
            read(sample)


@pytest.mark.parametrize(("first", "size"), [(2**62, 1), (2**62 - 2, 3)])
def test_the_last_sample_is_read_saved_and_loaded_and_none_behind_it(first: int, size: int) -> None:
    plan = one_corpus(seq_len=1)
    with StreamingLoader(plan, global_batch_size=size) as loader:
        loader.skip(first)
        assert rows_of(take(loader, 1)) == expected_rows(plan, range(first, 2**62 + 1))
        loader.load_state_dict(state := loader.state_dict())
        with pytest.raises(PlanError, match=f"from sample {2**62 + 1} on ends with sample {2**62 + size}"):
            take(loader, 1)
        with pytest.raises(PlanError, match="the sample to skip to is"):
            loader.skip(1)
        assert loader.state_dict() == state


@pytest.mark.parametrize("make", [NumpyLoader, StreamingLoader, lambda *a, **k: StreamDataset(*a, **k).sampler])
def test_a_step_that_reaches_beyond_the_last_sample_is_refused_after_a_resume_too(make: Callable[..., Any]) -> None:
    plan = one_corpus(seq_len=1)
    with NumpyLoader(plan, global_batch_size=4) as skipping:
        skipping.skip(2**62 - 5)
        state = skipping.state_dict()
    loader = make(plan, global_batch_size=4)
    loader.load_state_dict(state)
    steps = iter(loader)
    next(steps)
    with pytest.raises(PlanError, match=r"samples are counted up to 2\*\*62") as caught:
        next(steps)
    assert "smaller global_batch_size" in caught.value.hint


@pytest.mark.parametrize("num_streams", [1, 3])
def test_documents_are_found_up_to_the_last_sample_and_not_beyond_it(num_streams: int) -> None:
    plan = StreamPlan(PeriodicSource(10**15, 10**6), seq_len=4096, num_streams=num_streams)
    last_epoch = 2**62 * 4096 // 10**15
    (piece, *_) = plan.trace(2**62)
    found = [one.sample for one in plan.find("corpus", piece.document, epochs=range(last_epoch - 1, last_epoch + 2))]
    assert 2**62 in found
    assert max(sample for sample in found if sample is not None) == 2**62


def test_a_batch_that_no_int32_counts_is_refused_and_the_hint_is_the_largest() -> None:
    plan = one_corpus(seq_len=1024, block_tokens=4096)
    for make in (StreamingLoader, StreamDataset):
        with pytest.raises(PlanError, match=r"2\*\*31 tokens or more") as caught:
            make(plan, global_batch_size=2**40)
        assert caught.value.hint == f"give a global_batch_size of at most {2**21 - 1}"
        make(plan, global_batch_size=2**21 - 1)
    StreamingLoader(plan, global_batch_size=2**22, dp_rank=0, dp_world_size=4)
