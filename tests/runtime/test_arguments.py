"""What a plan or a loader accepts it can save and load, up to the last sample. What is refused: test_refusals.py."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.loaders import expected_rows, one_corpus, rows_of, take, two_corpora
from tests.runtime.sources import PeriodicSource
from tokshard.errors import PlanError
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamDataset, StreamingLoader


@pytest.mark.parametrize("number", [int, np.int64, np.uint8, torch.tensor])
def test_numbers_of_any_kind_are_saved_and_loaded(number: Any) -> None:
    changes = [(number(9), {"a": number(0), "b": 1})]
    weights = {"a": 1, "b": number(2)}
    plan = two_corpora(seed=number(7), schedule=changes, start_epoch={"a": number(3)}, weights=weights)
    loader = StreamingLoader(plan, global_batch_size=number(4))
    loader.skip(number(5))
    with pytest.warns(UserWarning, match="set_weights replaces 1 planned change of weights, next at sample 9;"):
        loader.set_weights({"a": number(3), "b": 1})
    loader.set_weights({"a": number(3), "b": 1})  # none is left to replace
    state = loader.state_dict()
    assert json.loads(state["cursor"])["sample"] == 5
    other, sampler = StreamingLoader(plan, global_batch_size=4), StreamDataset(plan, global_batch_size=4).sampler
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
