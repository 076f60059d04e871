"""Promise 14: a step is a set of rows: what it holds, and its targets, do not depend on who computes which row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.examples import examples
from tests.runtime.loaders import targets_in
from tests.runtime.sources import ListSource, SpannedSource
from tokshard.errors import PlanError
from tokshard.runtime import (
    NumpyLoader,
    Sample,
    SampleRandom,
    StreamPlan,
)

TEXT = ListSource([9, 4, 30, 1, 12, 3, 21] * 12)
SPANS = [[0, 0, 1, 1, 0.5], [0, 1, 0, 2, 2, 0.25, 0, 0, 1], [0, 0], [0] + [1] * 20]
CHAT = SpannedSource(SPANS * 12, first_token=5_000, name="chat")
CUT: dict[str, Any] = {"block_tokens": 32, "window_blocks": 3, "pack": "cut"}
WHOLE: dict[str, Any] = {"block_tokens": 8 * 128, "window_blocks": 1, "pack": {"text": "cut", "chat": "whole"}}


def plan_of(seq_len: int = 8, **options: Any) -> StreamPlan:
    return StreamPlan({"text": TEXT, "chat": CHAT}, seq_len=seq_len, seed=3, allow_small_blocks=True, **options)


PLANS: dict[str, Callable[..., StreamPlan]] = {
    "text alone": partial(lambda **options: StreamPlan(TEXT, seq_len=8, seed=3, **options), **CUT),
    "spans and weights": partial(plan_of, **CUT),
    "rows of whole conversations": partial(plan_of, **WHOLE),
    "streams that share corpora": partial(plan_of, num_streams=3, **CUT),
    "a pass that ends in the middle of a step": lambda: StreamPlan(CHAT, seq_len=8, seed=3, epochs=1, **CUT),
}


def check(batches: list[Any]) -> None:
    found = {(int(batch["step_targets"]), np.float32(batch["step_weight"])) for batch in batches}
    assert found == {targets_in(batches)}


def test_targets_are_left_out_where_a_rank_cannot_know_them() -> None:
    dealt = StreamPlan(ListSource([9, 4, 30] * 80), seq_len=8, seed=3, num_streams=2, **CUT)
    assert dealt.corpora[0].is_dealt
    for plan, ranks, is_known in (
        (plan_of(transforms=[lambda sample, _: sample], **CUT), 1, False),
        (dealt, 2, False),
        (dealt, 1, True),
        (StreamPlan(dealt.sources[0], seq_len=8, seed=3, **CUT), 2, True),
    ):
        with NumpyLoader(plan, global_batch_size=4, dp_rank=0, dp_world_size=ranks) as loader:
            batch = next(iter(loader))
        assert ("step_targets" in batch, "step_weight" in batch) == (is_known, is_known)


DEALT = PLANS | {
    "streams with corpora of their own": lambda: StreamPlan(
        ListSource([9, 4, 30, 1, 12] * 90), seq_len=8, seed=3, num_streams=3, **CUT
    ),
    "a transform": partial(plan_of, transforms=[lambda sample, _: sample], **CUT),
}


def costs_of(batch: Any) -> Any:
    """The squares of the pieces of each row, added up."""
    bounds = np.unique(batch["cu_seqlens"])
    return np.bincount(bounds[:-1] // 8, np.diff(bounds) ** 2, len(batch["sample_index"]))


@settings(max_examples=examples(60))
@given(
    plan=st.sampled_from(list(DEALT)),
    world=st.integers(1, 12),
    size=st.sampled_from([6, 12, 18]),
    most=st.sampled_from([4096, 8, 1]),
)
def test_rows_dealt_by_cost_are_those_of_the_step_and_even(plan: str, world: int, size: int, most: int) -> None:
    made = DEALT[plan]()
    options: dict[str, Any] = {"global_batch_size": size, "dp_world_size": world, "uneven": "pad", "prefetch_factor": 0}
    with ExitStack() as stack:
        small.shrink(stack.enter_context(pytest.MonkeyPatch.context()).setattr, dealt_rows=most)
        in_order, by_cost = (
            [stack.enter_context(NumpyLoader(made, dp_rank=rank, deal=deal, **options)) for rank in range(world)]
            for deal in ("order", "cost")
        )
        for _, before, after in zip(range(5), zip(*in_order, strict=True), zip(*by_cost, strict=True), strict=False):
            had, has = ([batch["sample_index"].tolist() for batch in batches] for batches in (before, after))
            assert sorted(chain(*has)) == sorted(chain(*had))
            for batch, samples in zip(after, has, strict=True):
                for row, sample in enumerate(samples):
                    expected = made.sample(sample) if sample >= 0 else {}
                    for key in expected.keys() & {"input_ids", "labels", "position_ids"}:
                        assert batch[key][row].tolist() == expected[key].tolist()
            if "step_targets" in before[0]:
                check(list(after))
            # ranks that share rows have nearly the same cost, and so has the n-th row of each
            owner = {sample: rank for rank, samples in enumerate(had) for sample in samples}
            costs = [costs_of(batch) for batch in after]
            for rank, samples in enumerate(has):
                shares = {owner[sample] for sample in samples if sample >= 0}
                if made.num_streams > 1:
                    mine, before_that = ({s % made.num_streams for s in of if s >= 0} for of in (samples, had[rank]))
                    assert mine <= before_that
                assert len(shares) * len(samples) <= max(most, len(samples))
                for other in shares:
                    both = np.concatenate([costs[rank], costs[other]])
                    assert abs(costs[rank].sum() - costs[other].sum()) <= both.max() - both.min()
                    assert (costs[rank][:-1] >= costs[other][1:]).all()


PADDED = {"global_batch_size": 6, "uneven": "pad"}, range(1, 17)
DIVIDED = {"global_batch_size": 24, "uneven": "refuse"}, [1, 2, 3, 4, 6, 8, 12]
"""Options of loaders, and the worlds that they allow."""


@settings(max_examples=examples(30))
@given(
    data=st.data(),
    spread=st.sampled_from([PADDED, DIVIDED]),
    plan=st.sampled_from(["spans and weights", "rows of whole conversations", "streams that share corpora"]),
    deal=st.sampled_from(["order", "cost"]),
    ahead=st.integers(0, 4),
)
def test_a_world_that_changes_at_every_step_reads_the_plan(
    data: st.DataObject, spread: tuple[dict[str, Any], Any], plan: str, deal: Any, ahead: int
) -> None:
    options, allowed = spread
    alone, size = PLANS[plan](), options["global_batch_size"]
    worlds = data.draw(st.lists(st.sampled_from(allowed), min_size=2, max_size=12))
    loaders: list[NumpyLoader] = []
    for step, world in enumerate(worlds):
        while len(loaders) > world:
            loaders.pop(0).close()  # any rank may go: those that are left move up
        while len(loaders) < world:
            new = NumpyLoader(PLANS[plan](), prefetch_factor=ahead, deal=deal, **options)
            if loaders:
                new.load_state_dict(loaders[0].state_dict())
            loaders.append(new)
        for rank, loader in enumerate(loaders):
            loader.resize(rank, world)
        batches = [next(iter(loader)) for loader in loaders]
        check(batches)
        rows = {
            sample: {key: batch[key][row].tolist() for key in ("input_ids", "labels", "position_ids", "loss_weights")}
            for batch in batches
            for row, sample in enumerate(batch["sample_index"].tolist())
            if sample >= 0
        }
        assert sum(int((batch["sample_index"] >= 0).sum()) for batch in batches) == size
        assert sorted(rows) == list(range(size * step, size * step + size))
        for sample, row in rows.items():
            expected = alone.sample(sample)
            assert row == {key: expected[key].tolist() for key in row}
        assert len({str(loader.state_dict()) for loader in loaders}) == 1
    for loader in loaders:
        loader.close()


def test_ranks_that_do_not_fit_a_step_are_refused_and_nothing_changes() -> None:
    plan = plan_of(**CUT)
    with NumpyLoader(plan, global_batch_size=6, dp_rank=1, dp_world_size=2) as loader, pytest.raises(PlanError):
        loader.resize(0, 4)
    with NumpyLoader(plan, global_batch_size=6, dp_rank=1, dp_world_size=2) as other:
        loop, expected = iter(loader), iter(other)
        assert next(loop)["sample_index"].tolist() == next(expected)["sample_index"].tolist()
        with pytest.raises(PlanError, match="dp_rank is 3 of 3"):
            loader.resize(3, 3)
        loader.resize(1, 2)
        assert next(loop)["sample_index"].tolist() == next(expected)["sample_index"].tolist()
    loader.close()


def test_batches_of_another_size_go_on_where_the_others_ended_without_a_list_that_is_gone(tmp_path: Path) -> None:
    listed = tmp_path / "list"
    listed.write_text("1\n")
    loaders = [NumpyLoader(plan_of(**CUT), global_batch_size=6, dp_rank=rank, dp_world_size=2) for rank in range(2)]
    for loader in loaders:
        loader.mask(loader.plan.names[0], listed)
    listed.unlink()
    loops, read = [iter(loader) for loader in loaders], 0
    for size in (6, 4, 4, 10, 2):
        for rank, loader in enumerate(loaders):
            loader.resize(global_batch_size=size)
            with pytest.raises(PlanError, match="2 ranks do not divide a global batch of 3"):
                loader.resize(rank, global_batch_size=3)
        batches = [next(loop) for loop in loops]
        check(batches)
        assert sorted(np.concatenate([batch["sample_index"] for batch in batches])) == [
            *range(read, read := read + size)
        ]
    assert len({str(loader.state_dict()) for loader in loaders}) == 1
    for loader in loaders:
        loader.close()


def test_batches_made_ahead_are_kept_where_the_world_stays_as_it_was() -> None:
    made: list[tuple[int, ...]] = []

    def noted(sample: Sample, _: SampleRandom) -> Sample:
        made.append(tuple(sample.tokens.tolist()))
        return sample

    with NumpyLoader(plan_of(transforms=[noted], **CUT), global_batch_size=6, dp_rank=1, dp_world_size=2) as loader:
        for _, _ in zip(range(20), loader, strict=False):
            loader.resize(1, 2)
    assert len(made) == len(set(made))
