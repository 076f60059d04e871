"""What a plan or a loader accepts it can save and load, up to the last sample. What is refused: test_refusals.py."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.loaders import expected_rows, one_corpus, rows_of, take, two_corpora
from tests.runtime.sources import PeriodicSource
from tokshard.errors import PlanError
from tokshard.runtime.plan import StreamPlan
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


@pytest.mark.parametrize(("first", "size"), [(2**62, 1), (2**62 - 2, 3)])
def test_the_last_sample_is_read_saved_and_loaded_and_none_behind_it(first: int, size: int) -> None:
    plan = one_corpus(seq_len=1)
    with StreamingLoader(plan, global_batch_size=size) as loader:
        loader.skip(first)
        assert rows_of(take(loader, 1)) == expected_rows(plan, range(first, 2**62 + 1))
        loader.load_state_dict(state := loader.state_dict())
        sampler = StreamDataset(plan, global_batch_size=size).sampler
        sampler.load_state_dict(state)
        for steps in (loader, sampler):
            with pytest.raises(PlanError, match=f"from sample {2**62 + 1} on ends with sample {2**62 + size}"):
                next(iter(steps))
        with pytest.raises(PlanError, match="the sample to skip to is"):
            loader.skip(1)
        assert loader.state_dict() == state


@pytest.mark.parametrize("num_streams", [1, 3])
def test_documents_are_found_up_to_the_last_sample_and_not_beyond_it(num_streams: int) -> None:
    plan = StreamPlan(PeriodicSource(10**15, 10**6), seq_len=4096, num_streams=num_streams)
    last_epoch = 2**62 * 4096 // 10**15
    (piece, *_) = plan.trace(2**62)
    found = [one.sample for one in plan.find("corpus", piece.document, epochs=range(last_epoch - 1, last_epoch + 2))]
    assert 2**62 in found
    assert max(sample for sample in found if sample is not None) == 2**62
