"""Runs against models of ORDER.md and STATE.md that were written by someone who had never seen the code."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.examples import examples
from tests.runtime.histories import Histories


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "number"), [(12, 200), (60, 20)])
def test_whatever_happens_to_a_run_the_pages_alone_say_what_it_reads_saves_and_refuses(steps: int, number: int) -> None:
    # to make a failing history smaller takes many minutes: add Phase.shrink
    some = settings(max_examples=examples(number), stateful_step_count=steps, deadline=None, phases=[Phase.generate])
    run_state_machine_as_test(Histories, settings=some)
