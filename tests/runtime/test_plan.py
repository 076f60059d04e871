"""What a plan says of itself, and what it refuses. That its samples are those of the rules: test_page_model.py."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime.sources import ListSource, PeriodicSource
from tokshard.errors import PlanError
from tokshard.runtime.loader import NumpyLoader
from tokshard.runtime.plan import StreamPlan

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40)
shapes = st.fixed_dictionaries(
    {"seq_len": st.integers(1, 30), "block_tokens": st.integers(1, 64), "window_blocks": st.integers(1, 6)}
)


def plan_of(sources: Any, **options: Any) -> StreamPlan:
    return StreamPlan(sources, **{"allow_small_blocks": True, **options})


@settings(max_examples=examples(30))
@given(parts=lengths, shape=shapes, seed=st.integers(0, 100), epochs=st.integers(1, 3))
def test_every_token_is_an_input_once_per_epoch_and_every_label_a_target_once(
    parts: list[int], shape: dict[str, int], seed: int, epochs: int
) -> None:
    source = ListSource(parts)
    plan = plan_of(source, epochs=epochs, seed=seed, **shape)
    read, targets = [], []
    for sample in range(plan.num_samples or 0):
        row = plan.sample(sample)
        num_tokens = sum(piece.stop - piece.start for piece in plan.trace(sample))
        read += row["input_ids"][:num_tokens].tolist()
        targets += row["labels"][row["labels"] != -100].tolist()
    assert sorted(read) == sorted(source.tokens.tolist() * epochs)
    followers = [token for document in source.documents() for token in document[1:]]
    assert sorted(targets) == sorted(followers * epochs)


def test_a_sample_beyond_2_to_the_40_is_as_quick_as_the_first() -> None:
    plan = plan_of(
        {"a": PeriodicSource(10**14), "b": PeriodicSource(3 * 10**12)}, seq_len=4096, weights={"a": 1, "b": 2}
    )
    for sample in (2**40, 2**50 + 12345):
        row = plan.sample(sample)
        assert row["sample_index"].tolist() == [sample]
        assert plan.trace(sample)


@pytest.mark.parametrize("seq_len", [1, 63, 64, 65, 128])
def test_the_boundaries_of_any_number_of_pieces_are_there_and_the_end_fills_up_a_power_of_two(seq_len: int) -> None:
    plan = plan_of(ListSource([1] * 300), seq_len=seq_len)  # as many pieces as tokens
    bounds = plan.sample(0)["cu_seqlens"].tolist()
    assert bounds[: seq_len + 1] == list(range(seq_len + 1))
    assert set(bounds[seq_len:]) == {seq_len}
    assert len(bounds) >= 64
    assert len(bounds).bit_count() == 1


def test_a_plan_pickles_to_an_equal_plan() -> None:
    plan = plan_of({"a": ListSource([5, 9]), "b": ListSource([30], name="b")}, seq_len=4, seed=8)
    again = pickle.loads(pickle.dumps(plan))
    assert again.fingerprint == plan.fingerprint
    assert again.sample(3)["input_ids"].tolist() == plan.sample(3)["input_ids"].tolist()


def test_a_plan_pickles_without_the_tables_and_permutations_that_it_read_with() -> None:
    plan = plan_of({"a": ListSource([5] * 4_000)}, seq_len=4, block_tokens=16, seed=8)
    before = len(pickle.dumps(plan))
    plan.sample(3)
    next(iter(NumpyLoader(plan, global_batch_size=2, prefetch_factor=0)))
    assert len(pickle.dumps(plan)) < before + 1_000


def test_the_fingerprint_knows_content_seed_and_sizes_but_no_names_and_weights() -> None:
    a, b = ListSource([5, 9]), ListSource([30], name="b")
    plan = plan_of({"a": a, "b": b}, seq_len=4, seed=8)
    same = plan_of({"x": a, "y": b}, seq_len=4, seed=8, weights={"x": 1, "y": 5})
    assert same.fingerprint == plan.fingerprint
    others = [
        plan_of({"a": b, "b": a}, seq_len=4, seed=8),
        plan_of({"a": a}, seq_len=4, seed=8),
        plan_of({"a": a, "b": b}, seq_len=5, seed=8),
        plan_of({"a": a, "b": b}, seq_len=4, seed=9),
        plan_of({"a": a, "b": b}, seq_len=4, seed=8, block_tokens=99),
        plan_of({"a": a, "b": b}, seq_len=4, seed=8, window_blocks=99),
        plan_of({"a": a, "b": b}, seq_len=4, seed=8, start_epoch={"a": 1}),
    ]
    assert len({plan.fingerprint, *(other.fingerprint for other in others)}) == len(others) + 1


def test_start_epoch_continues_the_order_of_an_earlier_plan() -> None:
    source = ListSource([7, 3, 11, 5, 6])
    whole = plan_of(source, seq_len=4, epochs=2, block_tokens=8, window_blocks=2)
    later = plan_of({"corpus": source}, seq_len=4, epochs=1, block_tokens=8, window_blocks=2, start_epoch={"corpus": 1})
    assert source.num_tokens % 4 == 0
    second = [whole.sample(sample)["input_ids"].tolist() for sample in range(8, 16)]
    assert [later.sample(sample)["input_ids"].tolist() for sample in range(8)] == second


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"seq_len": 0}, "seq_len is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"epochs": 0}, "epochs is 0"),
        ({"block_tokens": 15, "allow_small_blocks": False}, "block_tokens is 15, less than 4 samples of 4"),
        ({"block_tokens": 2**30, "window_blocks": 4}, "2**32 tokens or more"),
        # the last window of an epoch has the tail besides, almost another block
        ({"block_tokens": 2**30, "window_blocks": 3}, "2**32 tokens or more"),
        ({"weights": {"x": 1.0}}, "weights are for x; the plan has corpus"),
        ({"weights": {"corpus": -1.0}}, "weights are {'corpus': -1.0}"),
        ({"weights": {"corpus": 0.0}}, "not all 0"),
        ({"weights": {"corpus": float("nan")}}, "finite"),
        ({"schedule": [(5, {"corpus": 1}), (5, {"corpus": 2})]}, "ascending"),
        ({"start_epoch": {"x": 1}}, "start_epoch"),
    ],
)
def test_arguments_that_make_no_plan_are_refused_with_their_values(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(ListSource([5, 9]), **{"seq_len": 4, **options})
    assert problem in caught.value.problem
    assert caught.value.hint


def test_corpora_without_tokens_or_of_different_tokenizers_are_refused() -> None:
    with pytest.raises(PlanError, match="holds no tokens"):
        plan_of({"empty": ListSource([])}, seq_len=4)
    other = ListSource([5])
    other.tokenizer = "another"
    with pytest.raises(PlanError, match="different tokenizers"):
        plan_of({"a": ListSource([5]), "b": other}, seq_len=4)
