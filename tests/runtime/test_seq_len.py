"""Another length of samples in the middle of a run: nothing is read twice, and what is left out is said.

That it reads what STATE.md says, with other corpora, skips and masks: test_histories.py.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.loaders import reads_of, resumed, rows_of, take
from tests.runtime.sources import ListSource
from tokshard.runtime.loader import NumpyLoader
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamDataset

pytestmark = pytest.mark.filterwarnings("ignore:the change of seq_len")

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40)
sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
shapes = st.fixed_dictionaries({"block_tokens": st.sampled_from([8, 16, 48]), "window_blocks": st.integers(1, 4)})


def plan_of(part: Sequence[int], seq_len: int, **options: Any) -> StreamPlan:
    return StreamPlan({"0": ListSource(part)}, seq_len=seq_len, allow_small_blocks=True, **options)


@pytest.mark.filterwarnings("ignore:the pass of")
@given(part=lengths, shape=shapes, seq_lens=st.lists(sizes, min_size=2, max_size=4), data=st.data())
def test_a_pass_that_changes_its_seq_len_reads_every_token_as_often_as_it_has_epochs_but_for_what_it_says(
    part: list[int], shape: dict[str, int], seq_lens: list[int], data: st.DataObject
) -> None:
    first, *later = seq_lens
    loader = NumpyLoader(plan_of(part, first, epochs=2, **shape), global_batch_size=1)
    for seq_len in later:
        left = (loader.plan.at(loader.cursor).num_samples or 0) - loader.cursor.sample
        take(loader, data.draw(st.integers(0, max(0, left - 1))))
        loader = resumed(plan_of(part, seq_len, epochs=2, **shape), loader.state_dict(), 1, seq_len="plan")
    num_samples = loader.plan.at(loader.cursor).num_samples
    assert num_samples is not None
    start = loader.cursor.sample
    assert len(take(loader, num_samples + 1)) == num_samples - start
    assert loader.cursor.sample == num_samples
    counts = reads_of(loader.plan, range(num_samples), loader.cursor)
    (stats,) = loader.stats()["corpora"].values()
    assert set(counts.values()) <= {1, 2}
    # a slice that is left out may reach beyond the end of the pass
    assert 0 <= counts.total() + stats["left_out"] - 2 * sum(part) < max(seq_lens)
    if all(length % before == 0 for before, length in pairwise(seq_lens)):
        assert set(counts.values()) == {2}
        assert stats["left_out"] == 0
    window = shape["window_blocks"] * shape["block_tokens"] + max(seq_lens) + shape["block_tokens"]
    assert stats["left_out"] < window * len(later)


@pytest.mark.filterwarnings("error")
def test_conversations_go_on_in_rows_of_twice_the_length_with_default_sizes_and_lose_nothing() -> None:
    corpora = {
        "chats": ListSource([300, 1500, 700, 4096, 2500, 900] * 40, name="chats"),
        "text": ListSource([5000, 200, 1200] * 90, name="text"),
    }
    pack = {"chats": "whole", "text": "cut"}
    loader = NumpyLoader(StreamPlan(corpora, seq_len=4096, pack=pack), global_batch_size=4)
    take(loader, 5)
    loader = resumed(StreamPlan(corpora, seq_len=8192, pack=pack), loader.state_dict(), 6, seq_len="plan")
    take(loader, 25)
    # each corpus was read once by then
    statistics = loader.stats()["corpora"].values()
    assert [found["left_out"] for found in statistics] == [0, 0]
    assert min(found["epoch"] for found in statistics) > 1
    counts = reads_of(loader.plan, range(loader.cursor.sample), loader.cursor)
    assert len(counts) == sum(source.num_tokens for source in corpora.values())
    last = resumed(StreamPlan(corpora, seq_len=8192, pack=pack), loader.state_dict(), 6, seq_len="plan")
    assert last.state_dict() == loader.state_dict()
    dataset = StreamDataset(StreamPlan(corpora, seq_len=8192, pack=pack), global_batch_size=6)
    dataset.sampler.load_state_dict(loader.state_dict())
    assert rows_of([dataset[next(iter(dataset.sampler))]]) == rows_of(take(last, 1))


def test_a_state_that_is_loaded_often_keeps_no_plan_for_each_load() -> None:
    state = NumpyLoader(plan_of([9] * 40, 8), global_batch_size=1).state_dict()
    loader, plans = resumed(plan_of([9] * 40, 16), state, 1, seq_len="plan"), list[int]()
    for _ in range(20):
        loader.load_state_dict(loader.state_dict())
        take(loader, 1)
        plans.append(sum(type(one) is StreamPlan for one in gc.get_objects()))
    assert max(plans[5:]) <= max(plans[:5])


def test_what_a_change_leaves_out_is_warned_of_with_numbers() -> None:
    plan, shape = plan_of, {"block_tokens": 64, "window_blocks": 2}
    loader = NumpyLoader(plan([30] * 9, 8, **shape), global_batch_size=1)
    take(loader, 3)
    with pytest.warns(UserWarning, match=r"from 8 to 12 leaves out \d+ tokens of '0' \(\d+\.\d% of an epoch\), which"):
        resumed(plan([30] * 9, 12, **shape), loader.state_dict(), 1, seq_len="plan")


def test_a_plan_that_is_not_given_sizes_takes_those_of_the_run() -> None:
    corpus = ListSource([300, 1500, 700] * 40)
    loader = NumpyLoader(
        StreamPlan(corpus, seq_len=64, block_tokens=16_384, window_blocks=3, pack="whole"), global_batch_size=2
    )
    take(loader, 3)
    state = loader.state_dict()
    loader = NumpyLoader(StreamPlan(corpus, seq_len=64, pack="whole"), global_batch_size=2)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert (loader.plan.shape.block_tokens, loader.plan.shape.window_blocks) == (16_384, 3)
    resumed(StreamPlan(corpus, seq_len=128, pack="whole"), state, 2, seq_len="plan")
