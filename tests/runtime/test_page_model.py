"""What ORDER.md says is what the package reads: a model that was written from the page alone gives the same samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime.modelled import assert_equal, model_of, stirred
from tests.runtime.plans import Drawn, arguments, packed, packings
from tests.runtime.sources import ListSource, PeriodicSource
from tests.runtime.transforms import stir
from tests.spec.order import Documents
from tests.spec.state import resumed
from tokshard.runtime.order import packing
from tokshard.runtime.order.windows import BLOCK_SECTIONS
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.state import load_state, save_state
from tokshard.runtime.stop import used_up

weights_of_three = st.lists(st.just(0.0) | st.floats(1e-9, 1e9), min_size=3, max_size=3).filter(any)


@settings(max_examples=examples(50), deadline=None)
@example(weights=[0.6, 0.3, 0.1], later=[0.0, 0.25, 0.75], num_streams=2)
@given(weights=weights_of_three, later=weights_of_three, num_streams=st.integers(1, 20))
def test_windows_are_by_default_as_large_as_the_largest_share(
    weights: list[float], later: list[float], num_streams: int
) -> None:
    corpora = {name: ListSource([9], name=name) for name in "abc"}
    first, then = (dict(zip(corpora, each, strict=True)) for each in (weights, later))
    options: Any = {"seq_len": 8, "weights": first, "schedule": [(5, then)], "num_streams": num_streams}
    assert StreamPlan(corpora, **options).shape.window_blocks == model_of(corpora, **options).W


IN_ROWS_OF_8 = {"seq_len": 8, "block_tokens": 1024, "seed": 0}


@settings(max_examples=examples(110), deadline=None)
@example(  # chunks above half a row and shorter ones that are put off
    drawn=packed([5, 4, 5, 5] * 140, window_blocks=1, pack={"a": "whole"}, **IN_ROWS_OF_8),
    num_stirred=0,
    far=list(range(10, 40)),
    step_tokens=packing.STEP_TOKENS,
)
@example(  # a tail of which no chunk begins in it, and which is read by itself
    drawn=packed([12] * 85 + [8], window_blocks=3, pack="whole", **IN_ROWS_OF_8),
    num_stirred=0,
    far=list(range(10, 40)),
    step_tokens=1024,
)
@given(
    drawn=arguments() | packings(),
    num_stirred=st.integers(0, 2),
    far=st.lists(st.integers(10, 2**50), max_size=6),
    step_tokens=st.sampled_from([1, packing.STEP_TOKENS]),
)
def test_the_page_alone_gives_the_samples_of_any_plan(
    drawn: Drawn, num_stirred: int, far: list[int], step_tokens: int
) -> None:
    corpora, options = drawn
    plan = StreamPlan(corpora, transforms=[stir] * num_stirred, **options)
    model = model_of(corpora, transforms=[stirred] * num_stirred, **options)
    assert plan.num_samples == (None if plan.epochs is None else model.num_samples)
    changes = options.get("schedule", ())
    samples = {*range(10), *far, *(start + more for start, _ in changes for more in (-1, 0, 1))}
    if plan.num_samples is not None:
        with pytest.raises(IndexError):
            plan.sample(plan.num_samples)
        samples = {sample % plan.num_samples for sample in samples} | {plan.num_samples - 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokshard.runtime.order.packing.STEP_TOKENS", step_tokens)
        for sample in samples:
            assert_equal(plan, model, sample)


FEW = {"a": ListSource([3]), "b": ListSource([40] * 9, first_token=9)}


@pytest.mark.filterwarnings("ignore:the change of seq_len")
@settings(max_examples=examples(120), deadline=None)
@example(  # a corpus of which some streams may have no sample
    drawn=(FEW, {"seq_len": 4, "block_tokens": 16, "num_streams": 3}), most=1.0, start=0, seq_len=4
)
@given(
    drawn=arguments(is_finite=False) | packings(),
    most=st.floats(0.3, 3),
    start=st.integers(0, 700),
    seq_len=st.sampled_from([None, None, 1, 2, 4, 8]),
)
def test_corpora_are_used_up_where_the_page_says_also_after_a_change_of_seq_len(
    drawn: Drawn, most: float, start: int, seq_len: int | None
) -> None:
    corpora, options = drawn
    before = StreamPlan(corpora, **options)
    state = save_state(before, before.cursor().advanced(start))
    options = options | {"seq_len": seq_len or before.seq_len, "max_epochs": most, "on_max_epochs": "warn"}
    are_cut = options.get("pack", "cut") == "cut"
    assume(are_cut or before.shape.block_tokens % (BLOCK_SECTIONS * options["seq_len"]) == 0)
    plan = StreamPlan(corpora, **options)
    run = resumed(model_of(corpora, **options), state["cursor"], max_epochs=[most] * len(corpora), seq_len="plan")
    expected = [(end, name) for end, name in zip(run.ends(), corpora, strict=True) if end is not None]
    assert used_up(plan, load_state(plan, state, seq_len="plan")) == sorted(expected)


@pytest.mark.parametrize("seq_len", [1, 500, 512, 1024, 16_384, 100_000])
@pytest.mark.parametrize("pack", ["cut", "whole"])
@pytest.mark.parametrize("num_streams", [1, 4, 16, 64])
def test_the_defaults_of_the_page_are_those_of_a_plan(seq_len: int, pack: Any, num_streams: int) -> None:
    corpora = {"a": ListSource([9]), "b": ListSource([8])}
    shape = StreamPlan(corpora, seq_len=seq_len, pack={"b": pack}, num_streams=num_streams).shape
    model = model_of(corpora, seq_len=seq_len, pack={"b": pack}, num_streams=num_streams)
    assert (shape.block_tokens, shape.window_blocks) == (model.B, model.W)


def test_default_weights_of_huge_corpora_are_rounded_as_the_page_says() -> None:
    sources = {str(size): PeriodicSource(size) for size in (2**53 + 1, 2**55 + 3, 2**56 + 2**53 + 7)}
    plan = StreamPlan(sources, seq_len=1024)
    documents = {
        name: Documents(bytes.fromhex(source.fingerprint), range(0, source.num_tokens, 1000), source.num_tokens, int)
        for name, source in sources.items()
    }
    model = model_of(documents, seq_len=1024)
    samples = [*range(20), *range(2**60, 2**60 + 20), 2**62]
    found = np.array(plan.mixture(plan.cursor()).locate(np.array(samples, np.int64))).T
    assert [tuple(entry) for entry in found.tolist()] == [model.located(sample) for sample in samples]
