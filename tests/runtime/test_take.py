"""`take`: a part of a corpus, in whole blocks, the same for every seed and inside every larger part.

Which blocks, by the page: test_page_model.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.runtime.loaders import take as take_batches
from tests.runtime.sources import ListSource
from tokshard.runtime import NumpyLoader
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.stop import used_up

SIZES = {"seq_len": 5, "block_tokens": 20}
parts = st.floats(0.01, 1)


def blocks_of(plan: StreamPlan) -> list[int]:
    """The blocks that a pass reads, each as often as it reads a token of it; those of the tail are one more."""
    (source,), block = plan.sources, plan.shape.block_tokens
    pieces = [piece for sample in range(plan.num_samples or 0) for piece in plan.trace(sample)]
    return [
        (source.place_of(piece.document).start + place) // block
        for piece in pieces
        for place in range(piece.start, piece.stop)
    ]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    block=st.integers(1, 64),
    takes=st.tuples(parts, parts),
    seeds=st.tuples(*[st.integers(0, 9)] * 2),
)
def test_whole_blocks_are_taken_and_a_smaller_part_lies_inside_a_larger_one_whatever_the_seeds(
    lengths: list[int], block: int, takes: tuple[float, float], seeds: tuple[int, int]
) -> None:
    small, large = sorted(takes)
    assume(int(small * (sum(lengths) // block) + 0.5) > 0)
    sizes: Any = {"epochs": 1, "seq_len": 9, "block_tokens": block, "allow_small_blocks": True}
    read = [
        blocks_of(StreamPlan(ListSource(lengths), take=part, seed=seed, **sizes))
        for part, seed in zip((small, large), seeds, strict=True)
    ]
    assert set(read[0]) <= set(read[1])
    for blocks in read:
        assert {blocks.count(each) for each in blocks if each < sum(lengths) // block} <= {block}


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
