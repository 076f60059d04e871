"""The order is the one that the golden values say, whatever becomes of the code and of the model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.vectors import order, runs

EXPECTED = json.loads(order.FILE.read_text(encoding="utf-8"))
EXPECTED_RUNS = json.loads(runs.FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def made() -> Any:
    return json.loads(order.text(order.made()))


@pytest.mark.parametrize("part", ["located", "pieces", "rows", "num_samples"])
@pytest.mark.parametrize("plan", order.PLANS)
def test_the_order_equals_the_golden_values(made: Any, plan: str, part: str) -> None:
    assert made["plans"][plan][part] == EXPECTED["plans"][plan][part], (
        "the order changed: if that is meant, bump ORDER_VERSION and run 'python -m tests.vectors.order'"
    )


def test_the_golden_values_are_those_of_this_version_and_of_these_plans(made: Any) -> None:
    assert made == EXPECTED


@pytest.fixture(scope="module")
def made_runs() -> Any:
    return json.loads(runs.text(runs.made()))


@pytest.mark.parametrize("run", runs.RUNS)
def test_a_run_reads_and_saves_what_the_golden_values_say(made_runs: Any, run: str) -> None:
    for found, expected in zip(made_runs["runs"][run]["events"], EXPECTED_RUNS["runs"][run]["events"], strict=True):
        assert found == expected, "runs changed: if that is meant, run 'python -m tests.vectors.runs'"


def test_the_golden_values_of_runs_are_those_of_these_runs(made_runs: Any) -> None:
    assert made_runs == EXPECTED_RUNS
