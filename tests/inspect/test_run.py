"""Steps of a run: counted from any checkpoint, they have the samples that the loop received."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.sources import ListSource, PeriodicSource
from tokshard.errors import UsageError
from tokshard.inspect.plan.run import Run
from tokshard.inspect.plan.streams import advise
from tokshard.runtime import NumpyLoader
from tokshard.runtime.plan import StreamPlan


def plan_of(**options):
    return StreamPlan(ListSource([5, 30, 2, 8]), seq_len=4, allow_small_blocks=True, **options)


def run_of(plan, size, cursor, step):
    return Run(plan=plan, global_batch_size=size, cursor=cursor, step=step, checkpoint="checkpoint")


@given(
    size=st.integers(1, 7),
    ramp=st.dictionaries(st.integers(2, 20), st.integers(1, 9), max_size=3).map(lambda ramp: sorted(ramp.items())),
    history=st.lists(st.one_of(st.just("step"), st.integers(1, 20)), max_size=30),
    after=st.integers(0, 5),
)
def test_every_step_before_and_after_a_checkpoint_has_the_samples_that_the_loop_received(size, ramp, history, after):
    plan, sizes = plan_of(), [dict(ramp).get(1, size)]
    for step in range(2, 40):
        sizes.append(dict(ramp).get(step, sizes[-1]))
    cursor, starts, skipped = plan.cursor(), [], set()
    for event in history:
        if event == "step":
            starts.append(cursor.sample)
            cursor = cursor.advanced(sizes[len(starts) - 1])
        else:
            skipped |= set(range(cursor.sample, cursor.sample + event))
            cursor = cursor.skipping(event)
    run = replace(run_of(plan, size, cursor, len(starts)), ramp=ramp)
    assert [run.samples_in(steps) for steps in range(40)] == [sum(sizes[:steps]) for steps in range(40)]
    sample = cursor.sample
    for _ in range(after):
        starts.append(sample)
        sample += sizes[len(starts) - 1]
    assert [run.start_of(step) for step in range(1, len(starts) + 1)] == starts
    assert not run.had_other_batch_size
    for step, (start, rows) in enumerate(zip(starts, sizes, strict=False), 1):
        assert [run.place_of(start + row) for row in range(rows)] == [(step, 0, row) for row in range(rows)]
    assert all(run.place_of(sample) is None for sample in skipped)


@given(size=st.integers(1, 12), done=st.integers(0, 20), epochs=st.integers(1, 2))
def test_the_steps_of_a_finite_pass_end_where_it_ends_wherever_it_is_looked_at_from(size, done, epochs):
    plan = plan_of(epochs=epochs)
    last = -(-plan.num_samples // size)
    done = min(done, last)
    run = run_of(plan, size, plan.cursor().advanced(min(done * size, plan.num_samples)), done)
    assert [run.start_of(step) for step in range(1, last + 1)] == list(range(0, plan.num_samples, size))
    places = [run.place_of(sample) for sample in range(plan.num_samples)]
    assert places == [(1 + sample // size, 0, sample % size) for sample in range(plan.num_samples)]
    for step, problem in ((last + 1, f"there is no step {last + 1}"), (0, "there is no step 0: steps count from 1")):
        with pytest.raises(UsageError, match=problem):
            run.start_of(step)


def test_a_run_ends_where_a_corpus_is_used_up():
    plan = plan_of(max_epochs=1)  # 45 tokens: 12 samples
    run = Run(plan=plan, global_batch_size=5, cursor=plan.cursor())
    assert run.start_of(2) == 5
    assert run.start_of(3) == 10
    with pytest.raises(
        UsageError, match=r"no step 4: it would start at sample 15, and corpus 'corpus' is used up at 12"
    ):
        run.start_of(4)
    assert run.place_of(11) == (3, 0, 1)
    assert run.place_of(12) is None


def test_after_a_change_of_the_batch_size_steps_are_counted_back_from_the_checkpoint_as_far_as_they_go():
    plan = plan_of()
    run = run_of(plan, 8, plan.cursor().advanced(3 * 4 + 2 * 8), 5)
    assert run.had_other_batch_size
    assert [run.start_of(step) for step in (3, 4, 5, 6)] == [4, 12, 20, 28]
    with pytest.raises(
        UsageError, match="step 1 is not known: checkpoint has read 28 samples in 5 steps, fewer than 8"
    ):
        run.start_of(1)
    assert run.place_of(0) == (2, 0, 4)
    unknown = run_of(plan, 8, run.cursor, None)
    with pytest.raises(UsageError, match="not a multiple of a batch of 8"):
        unknown.start_of(1)
    assert unknown.place_of(3) is None


@pytest.mark.timeout(20)
def test_places_of_many_samples_of_many_corpora_that_may_be_used_up_take_no_time():
    """Where the pass ends is a search for each corpus, which takes milliseconds: 40 seconds if each sample asks."""
    corpora = {f"corpus {number}": PeriodicSource(10**9 + number) for number in range(20)}
    plan = StreamPlan(corpora, seq_len=4096, max_epochs=4)
    run = Run(plan=plan, global_batch_size=512, cursor=plan.cursor())
    assert [run.place_of(sample) for sample in (0, 512, 4095)] == [(1, 0, 0), (2, 0, 0), (8, 0, 511)]
    assert all(run.place_of(sample) == (1 + sample // 512, 0, sample % 512) for sample in range(4096))


def test_streams_are_advised_for_the_weights_that_the_run_has_now():
    corpora = {"large": PeriodicSource(10**9), "small": PeriodicSource(10**6)}
    now, later = {"large": 1.0, "small": 0.0}, {"large": 0.0, "small": 1.0}

    def advised(ramp=(), **options):
        plan = StreamPlan(corpora, seq_len=64, **options)
        return advise(Run(plan=plan, global_batch_size=8, ramp=ramp, cursor=plan.cursor()), 4)

    assert advised(weights=now, schedule=[(100, later)]) == advised(weights=now)
    assert advised(weights=now) != advised(weights=later)
    assert (advised(weights=now).num_streams, advised([(9, 6)], weights=now).num_streams) == (4, 2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("start", [0, 3])
def test_a_sample_of_streams_has_the_rank_and_row_that_read_it(world_size, start):
    plan = plan_of(num_streams=4)
    run = Run(plan=plan, global_batch_size=8, cursor=plan.cursor().skipping(start), world_size=world_size, uneven="pad")
    for rank in range(world_size):
        with NumpyLoader(plan, global_batch_size=8, dp_rank=rank, dp_world_size=world_size, uneven="pad") as loader:
            loader.skip(start)
            for step, batch in zip((1, 2), loader, strict=False):
                for row, sample in enumerate(batch["sample_index"].tolist()):
                    assert sample < 0 or run.place_of(sample) == (step, rank, row)


def test_of_a_step_whose_first_samples_had_weights_that_are_not_kept_the_rows_dealt_by_cost_are_not_known():
    corpora = {"a": ListSource([5, 30, 2, 8] * 9), "b": ListSource([9, 1, 7] * 9)}
    schedule = [(10 * number + 5, {"a": 1 + number % 3, "b": 1}) for number in range(40)]
    plan = StreamPlan(corpora, seq_len=4, allow_small_blocks=True, schedule=schedule)
    cursor = plan.cursor().advanced(400)
    run = replace(run_of(plan, 8, cursor.compacted(plan.mixture(cursor)), 50), world_size=2, deal="cost")
    first = run.cursor.segments[0].start
    assert (first, run.place_of(first)) == (245, None)
    assert {run.place_of(sample)[0] for sample in range(248, 264)} == {32, 33}
