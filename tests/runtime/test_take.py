"""`take`: a part of a corpus, in whole blocks, the same for every seed and inside every larger part.

Which blocks, by the page: test_page_model.py.
"""

from __future__ import annotations

import pytest

from tests.runtime.loaders import take as take_batches
from tests.runtime.sources import ListSource
from tokshard.runtime import NumpyLoader
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.stop import used_up

SIZES = {"seq_len": 5, "block_tokens": 20}


@pytest.mark.parametrize(("part", "blocks"), [(0.29, 29), (0.57, 57), (0.994, 99), (0.01, 1), (1 / 3, 33), (1.0, 100)])
def test_a_part_is_so_many_of_a_hundred_blocks(part: float, blocks: int) -> None:
    plan = StreamPlan(ListSource([10] * 200), take=part, **SIZES)
    assert plan.corpora[0].num_tokens == 20 * blocks


def test_each_corpus_of_a_plan_has_its_own_part() -> None:
    sources = {name: ListSource([10] * 8, name=name) for name in "abc"}
    plan = StreamPlan(sources, take={"a": 0.5, "c": 0.25}, **SIZES)
    assert [corpus.num_tokens for corpus in plan.corpora] == [40, 80, 20]
    # weights that are left out are the tokens that are taken
    assert plan.cursor().segments[0].weights == (40.0, 80.0, 20.0)
    assert [corpus.num_tokens for corpus in StreamPlan(sources, take=0.5, **SIZES).corpora] == [40, 40, 40]
    assert len({StreamPlan(sources, take=all_of, **SIZES).fingerprint for all_of in (1, 1.0, {"a": 1}, {})}) == 1


def test_limits_and_epochs_count_the_tokens_that_are_taken() -> None:
    plan = StreamPlan({"a": ListSource([10] * 8)}, take=0.5, max_epochs=2, **SIZES)
    assert used_up(plan, plan.cursor())[0][0] == 2 * 40 // 5
    with NumpyLoader(plan, global_batch_size=4) as loader:
        take_batches(loader, 3)
        found = loader.stats()["corpora"]["a"]
    assert found == {"samples": 12, "tokens": 60, "left_out": 0, "epoch": 1.5, "weight": 40.0}
