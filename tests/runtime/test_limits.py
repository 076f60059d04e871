"""`max_epochs`: a corpus is read so often and no more, or the job says that it is.

Where a pass of one stream ends, by the page: test_page_model.py and test_loader.py.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime.loaders import SIZES, Batch, dataloader, take
from tests.runtime.sources import ListSource
from tokshard.runtime import NumpyLoader
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.stop import used_up
from tokshard.runtime.tensors import StreamDataset, StreamingLoader

A, B = ListSource([9, 4, 30, 1, 12, 3]), ListSource([5, 17, 2, 7], first_token=1000)
A_TOKENS, B_TOKENS = 59, 31
ONLY_A = {"a": 1, "b": 0}


def plan_of(**options: Any) -> StreamPlan:
    return StreamPlan({"a": A, "b": B}, **{"weights": {"a": 0.5, "b": 0.5}, "seed": 4, **SIZES, **options})


def most_samples(epochs: float, num_tokens: int) -> int:
    """Samples that so many passes over a corpus have, the last one begun included."""
    return math.ceil(Fraction(epochs) * num_tokens / SIZES["seq_len"])


def corpora_of(plan: StreamPlan, count: int) -> list[int]:
    found: list[int] = plan.mixture(plan.cursor()).locate(np.arange(count))[0].tolist()
    return found


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


@given(
    num_streams=st.sampled_from([1, 2, 5, 13]),
    epochs=st.sampled_from([0.5, 1.0, 1.7]),
    start=st.integers(0, 700),
    limited=st.sampled_from(["large", "small"]),
)
def test_a_corpus_is_used_up_when_a_stream_asks_for_more_than_max_epochs_of_its_part(
    num_streams: int, epochs: float, start: int, limited: str
) -> None:
    corpora = {"large": ListSource([9, 4, 30, 1, 12, 3] * 30), "small": ListSource([5, 17, 2] * 4)}
    limits: dict[str, Any] = {"max_epochs": {limited: epochs}, "on_max_epochs": "warn", "num_streams": num_streams}
    plan = StreamPlan(
        corpora, weights={"large": 3, "small": 1}, **{**SIZES, "seq_len": 4, "window_blocks": 2}, **limits
    )
    number = plan.names.index(limited)
    located, corpus_samples = plan.mixture(plan.cursor()).locate(np.arange(5_000))
    order, mine = plan.corpora[number], np.flatnonzero(located == number)
    index, parts, part_samples = order.by_part(mine, corpus_samples[mine])
    allowed = [epochs * order.part_tokens(part) for part in parts.tolist()]
    beyond = mine[index][part_samples * plan.seq_len >= allowed]
    assert used_up(plan, plan.cursor().advanced(start)) == [(int(beyond[beyond >= start].min()), limited)]


# a job that is only warned


def warned(action: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    assert {warning.filename for warning in caught} <= {__file__, take.__code__.co_filename}
    return [str(warning.message) for warning in caught]


@settings(max_examples=examples(16))
@given(epochs=st.floats(0.3, 8), batch=st.integers(1, 9))
def test_a_job_that_only_warns_reads_on_and_says_once_of_each_corpus_that_it_is_used_up(
    epochs: float, batch: int
) -> None:
    plan = plan_of(max_epochs=epochs, on_max_epochs="warn")
    loader = StreamingLoader(plan, global_batch_size=batch)
    batches: list[Batch] = []
    messages = warned(lambda: batches.extend(take(loader, 20)))
    loader.close()
    corpora = corpora_of(plan, 20 * batch)
    assert [int(corpus) for batch in batches for corpus in batch["corpus_index"]] == corpora
    for number, (name, tokens) in enumerate((("a", A_TOKENS), ("b", B_TOKENS))):
        places = [sample for sample, corpus in enumerate(corpora) if corpus == number]
        most = most_samples(epochs, tokens)
        mine = [message for message in messages if f"corpus '{name}' is used up" in message]
        assert len(mine) == (len(places) > most)
        if mine:
            assert f"used up at sample {places[most]}:" in mine[0]


def test_a_job_is_told_once_with_the_step_that_reads_more_and_again_when_it_resumes() -> None:
    plan = plan_of(max_epochs={"b": 1}, on_max_epochs="warn")
    ((limit, _),) = used_up(plan, plan.cursor())
    loader, resumed = (NumpyLoader(plan, global_batch_size=1) for _ in range(2))
    assert warned(lambda: take(loader, limit)) == []
    assert len(warned(lambda: take(loader, 1))) == 1

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
