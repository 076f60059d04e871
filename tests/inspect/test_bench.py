"""How steps are counted."""

from __future__ import annotations

import itertools

import torch

from tokshard.inspect.plan import bench
from tokshard.inspect.plan.bench import endless, take_steps


def test_steps_go_on_until_both_the_time_and_the_number_are_reached(monkeypatch):
    clock = itertools.count()  # every look at it is a second
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(next(clock)))
    batch = {"input_ids": torch.zeros(2, 5)}
    steps = take_steps(itertools.repeat(batch), seconds=4.0)
    assert (steps.num_tokens, steps.wall_seconds, steps.tokens_per_second) == (40, 4.0, 10.0)
    assert take_steps(itertools.repeat(batch), num_steps=7).num_tokens == 70


def test_the_longest_step_is_reported_with_the_median(monkeypatch):
    times = iter([0.0, 1.0, 2.0, 5.0, 6.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(times))
    steps = take_steps(itertools.repeat({"input_ids": torch.zeros(1)}), num_steps=4)
    assert (steps.median_seconds, steps.longest_seconds) == (1.0, 3.0)


def test_a_finite_pass_is_read_again():
    assert list(itertools.islice(endless([1, 2]), 5)) == [1, 2, 1, 2, 1]
