"""`take`: a part of a corpus, in whole blocks, the same for every seed and inside every larger part."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.runtime import page_model
from tests.runtime.loaders import take as take_batches
from tests.runtime.page_model import Used
from tests.runtime.sources import ListSource
from tests.runtime.test_page_model import assert_equal, documents_of_source
from tokshard.errors import PlanError, PlanMismatchError
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.stop import used_up
from tokshard.runtime.tensors import StreamingLoader

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40)
parts = st.floats(0.01, 1)
shapes = st.fixed_dictionaries(
    {"seq_len": st.integers(1, 30), "block_tokens": st.integers(1, 64), "window_blocks": st.integers(1, 6)}
)


def plan_of(source: Any, **options: Any) -> StreamPlan:
    return StreamPlan(source, allow_small_blocks=True, **options)


def positions_of(plan: StreamPlan, source: ListSource) -> list[int]:
    """The tokens of the corpus that a finite pass reads, by their place in it."""
    starts = source.stops - np.array(source.lengths)
    found: list[int] = []
    for sample in range(plan.num_samples or 0):
        for piece in plan.trace(sample):
            start = int(starts[piece.document])
            found += range(start + piece.start, start + piece.stop)
    return found


def blocks_of(lengths: list[int], block: int) -> int:
    return sum(lengths) // block


def num_taken(part: float, num_blocks: int) -> int:
    return math.floor(Fraction(part) * num_blocks + Fraction(1, 2))


@pytest.mark.parametrize("seed", range(4))
def test_one_block_that_is_taken_is_read_many_times_in_a_sample(seed: int) -> None:
    source = ListSource([3, 2, 4, 1, 9, 5, 2, 6])
    shape = {"seq_len": 45, "block_tokens": 8, "window_blocks": 2}
    options = {"seed": seed, "take": 0.25, "epochs": 20}
    plan = plan_of({"a": source}, **options, **shape)
    model = page_model.Plan([Used(documents_of_source(source), take=0.25)], seed=seed, epochs=20, **shape)
    assert plan.num_samples == model.num_samples == 4
    for sample in range(4):
        assert_equal(plan, model, sample)


@given(lengths=lengths, shape=shapes, part=parts, epochs=st.integers(1, 3))
def test_every_token_of_the_blocks_that_are_taken_is_an_input_once_per_epoch(
    lengths: list[int], shape: dict[str, int], part: float, epochs: int
) -> None:
    block = shape["block_tokens"]
    num_blocks = blocks_of(lengths, block)
    assume(num_taken(part, num_blocks) > 0)
    source = ListSource(lengths)
    read = sorted(positions_of(plan_of(source, take=part, epochs=epochs, **shape), source))
    if part == 1:
        assert read == sorted([*range(source.num_tokens)] * epochs)
        return
    taken = sorted({position // block for position in read})
    assert len(taken) == num_taken(part, num_blocks)
    assert read == sorted([*(block * number + place for number in taken for place in range(block))] * epochs)


@given(lengths=lengths, shape=shapes, small=parts, large=parts, seeds=st.tuples(*[st.integers(0, 9)] * 2))
def test_what_a_smaller_part_reads_lies_inside_what_a_larger_one_reads_whatever_the_seeds(
    lengths: list[int], shape: dict[str, int], small: float, large: float, seeds: tuple[int, int]
) -> None:
    small, large = sorted([small, large])
    assume(num_taken(small, blocks_of(lengths, shape["block_tokens"])) > 0)
    source = ListSource(lengths)
    plans = [
        plan_of(source, take=part, seed=seed, epochs=1, **shape)
        for part, seed in zip((small, large), seeds, strict=True)
    ]
    assert set(positions_of(plans[0], source)) <= set(positions_of(plans[1], source))


def test_the_blocks_that_are_taken_lie_anywhere_in_the_corpus() -> None:
    source = ListSource([10] * 400)
    read = positions_of(plan_of(source, take=0.1, epochs=1, seq_len=10, block_tokens=40), source)
    blocks = sorted({position // 40 for position in read})
    assert len(blocks) == 10
    assert min(blocks) < 25
    assert max(blocks) > 75
    assert blocks != list(range(min(blocks), min(blocks) + 10))


@given(lengths=lengths, shape=shapes, part=parts)
def test_labels_are_the_next_token_of_the_document_also_where_it_goes_on_in_a_block_that_is_left_out(
    lengths: list[int], shape: dict[str, int], part: float
) -> None:
    assume(num_taken(part, blocks_of(lengths, shape["block_tokens"])) > 0)
    source = ListSource(lengths)
    followers = [after for document in source.documents() for after in [*document[1:], -100]]
    plan = plan_of(source, take=part, epochs=1, **shape)
    read = positions_of(plan, source)
    labels = [label for sample in range(plan.num_samples or 0) for label in plan.sample(sample)["labels"].tolist()]
    assert labels[: len(read)] == [followers[position] for position in read]
    assert set(labels[len(read) :]) <= {-100}


@pytest.mark.parametrize(("part", "blocks"), [(0.29, 29), (0.57, 57), (0.994, 99), (0.01, 1), (1 / 3, 33), (1.0, 100)])
def test_a_part_is_so_many_of_a_hundred_blocks(part: float, blocks: int) -> None:
    plan = plan_of(ListSource([10] * 200), take=part, epochs=1, seq_len=5, block_tokens=20)
    assert plan.corpora[0].num_tokens == 20 * blocks


@given(blocks=st.integers(1, 500), data=st.data())
def test_one_of_n_blocks_is_a_part_of_1_over_n_and_k_of_n_of_k_over_n(blocks: int, data: st.DataObject) -> None:
    taken = data.draw(st.integers(1, blocks))
    plan = plan_of(ListSource([2] * blocks), take=taken / blocks, seq_len=1, block_tokens=2)
    assert plan.corpora[0].num_full_blocks == taken


def test_each_corpus_of_a_plan_has_its_own_part() -> None:
    sources = {"a": ListSource([10] * 8), "b": ListSource([10] * 8, name="b"), "c": ListSource([10] * 8, name="c")}
    sizes = {"seq_len": 5, "block_tokens": 20, "seed": 1}
    plan = StreamPlan(sources, take={"a": 0.5, "c": 0.25}, **sizes)
    assert [corpus.num_tokens for corpus in plan.corpora] == [40, 80, 20]
    # weights that are left out are the tokens that are taken
    assert plan.cursor().segments[0].weights == (40.0, 80.0, 20.0)
    everywhere = StreamPlan(sources, take=0.5, **sizes)
    assert [corpus.num_tokens for corpus in everywhere.corpora] == [40, 40, 40]


def test_limits_and_epochs_count_the_tokens_that_are_taken() -> None:
    source = ListSource([10] * 8)
    plan = StreamPlan({"a": source}, take=0.5, max_epochs=2, seq_len=5, block_tokens=20)
    assert used_up(plan, plan.cursor())[0][0] == 2 * 40 // 5
    loader = StreamingLoader(plan, global_batch_size=4)
    take_batches(loader, 3)
    assert loader.stats()["corpora"]["a"] == {
        "samples": 12,
        "tokens": 60,
        "left_out": 0,
        "epoch": 1.5,
        "weight": 40.0,
    }
    loader.close()


def test_the_same_content_twice_takes_the_same_blocks_and_reads_them_in_another_order() -> None:
    source = ListSource([10] * 40)
    plan = StreamPlan(
        {"a": source, "b": source},
        take=0.5,
        weights={"a": 1, "b": 1},
        start_epoch={"b": 1},
        seq_len=10,
        block_tokens=40,
    )
    read: list[list[int]] = [[], []]
    for sample in range(60):
        (piece, *more) = plan.trace(sample)
        read[plan.names.index(piece.corpus)] += [part.document for part in (piece, *more)]
    assert sorted(set(read[0])) == sorted(set(read[1]))
    assert len(set(read[0])) == 20
    assert read[0][:20] != read[1][:20]


@pytest.mark.parametrize(("before", "after"), [(0.5, 0.25), (0.5, 1.0), (1.0, 0.5)])
def test_a_state_of_another_part_is_refused_with_both_values(before: float, after: float) -> None:
    options = {"seq_len": 5, "block_tokens": 20}
    source = ListSource([10] * 8)
    state = StreamingLoader(StreamPlan({"a": source}, take=before, **options), global_batch_size=2).state_dict()
    other = StreamPlan({"a": source}, take=after, **options)
    with pytest.raises(PlanMismatchError, match=rf"take of corpus 'a' differs \({before}, now {after}\)"):
        StreamingLoader(other, global_batch_size=2).load_state_dict(state)


def test_the_whole_of_a_corpus_may_be_taken_as_an_integer() -> None:
    source = ListSource([10] * 8)
    whole = [StreamPlan({"a": source}, take=part, seq_len=5).fingerprint for part in (1, 1.0, {"a": 1}, {})]
    assert len(set(whole)) == 1


@pytest.mark.parametrize(
    ("take", "problem"),
    [
        (0, "take is 0.0 for corpus 'a'"),
        (-0.1, "take is -0.1 for corpus 'a'"),
        (1.5, "take is 1.5 for corpus 'a'"),
        (float("nan"), "take is nan for corpus 'a'"),
        ({"x": 0.5}, "take is {'x': 0.5}; the plan has a"),
        (0.1, "take=0.1 of corpus 'a' is less than one of its 4 blocks of 20 tokens"),
    ],
)
def test_parts_that_are_none_are_refused(take: Any, problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        StreamPlan({"a": ListSource([10] * 8)}, take=take, seq_len=5, block_tokens=20)
    assert problem in caught.value.problem
    assert caught.value.hint
