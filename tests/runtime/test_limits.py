"""`max_epochs`: a corpus is read so often and no more, or the job says that it is.

Where a corpus is used up, by the page: test_page_model.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.runtime.loaders import SIZES, dataloader, take
from tests.runtime.sources import ListSource
from tokshard.runtime import NumpyLoader
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.stop import used_up
from tokshard.runtime.tensors import StreamDataset

A, B = ListSource([9, 4, 30, 1, 12, 3]), ListSource([5, 17, 2, 7], first_token=1000)


def plan_of(**options: Any) -> StreamPlan:
    return StreamPlan({"a": A, "b": B}, **{"weights": {"a": 0.5, "b": 0.5}, "seed": 4, **SIZES, **options})


def test_a_pass_that_a_corpus_ends_says_so_in_every_loop() -> None:
    """That all ranks end it at the same step: tests/contract/test_promise_04_world.py."""
    with NumpyLoader(plan_of(max_epochs=2.5), global_batch_size=6) as loader:
        for is_over in (False, True):
            with pytest.warns(UserWarning, match="would read corpus 'b' more than max_epochs times") as caught:
                assert (list(loader) == []) == is_over
            assert caught[0].filename == __file__


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_finite_pass_of_as_many_epochs_as_are_allowed_is_read_to_its_end_without_a_warning(epochs: int) -> None:
    plan = StreamPlan(A, epochs=epochs, max_epochs=epochs, seed=4, **SIZES)
    with NumpyLoader(plan, global_batch_size=4) as loader:
        assert sum(int((batch["sample_index"] >= 0).sum()) for batch in loader) == plan.num_samples


# a job that is only warned


def warned(action: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    assert {warning.filename for warning in caught} <= {__file__, take.__code__.co_filename}
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_job_that_only_warns_says_once_of_each_corpus_in_which_step_it_is_used_up(batch: int) -> None:
    plan = plan_of(max_epochs=1.5, on_max_epochs="warn")
    limits = used_up(plan, plan.cursor())
    assert len(limits) == 2
    with NumpyLoader(plan, global_batch_size=batch) as loader:
        told = [(step, said.partition(":")[0]) for step in range(60) for said in warned(lambda: take(loader, 1))]
    assert told == [(sample // batch, f"corpus '{name}' is used up at sample {sample}") for sample, name in limits]


def test_a_job_is_told_once_whatever_its_weights_become_and_again_when_it_resumes() -> None:
    plan = plan_of(max_epochs={"b": 1}, on_max_epochs="warn")
    ((limit, _),) = used_up(plan, plan.cursor())
    loader, resumed = (NumpyLoader(plan, global_batch_size=1) for _ in range(2))
    assert len(warned(lambda: take(loader, limit + 1))) == 1

    def change_weights() -> None:
        for step in range(60):
            take(loader, 1)
            loader.set_weights({"a": 1 + step % 3, "b": 1})

    assert warned(change_weights) == []
    resumed.load_state_dict(loader.state_dict())
    dataset = StreamDataset(plan, global_batch_size=1)
    dataset.sampler.load_state_dict(loader.state_dict())
    assert len(warned(lambda: take(resumed, 20))) == 1
    with pytest.warns(UserWarning, match="'b' is used up at sample") as told:
        take(dataloader(dataset), 20)
    assert len(told) == 1


def test_a_warning_that_is_an_error_loses_no_batch() -> None:
    plan = plan_of(max_epochs={"b": 1}, on_max_epochs="warn")
    ((limit, _),) = used_up(plan, plan.cursor())
    with NumpyLoader(plan, global_batch_size=1) as loader:
        take(loader, limit)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="'b' is used up"):
                take(loader, 1)
            assert [int(batch["sample_index"][0]) for batch in take(loader, 2)] == [limit, limit + 1]
