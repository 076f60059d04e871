"""The order is the one that the golden values say, whatever becomes of the code and of the naive model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.vectors import order

EXPECTED = json.loads(order.FILE.read_text(encoding="utf-8"))


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
