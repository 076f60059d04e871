"""The order is the one that the golden values and the example of ORDER.md say, whatever becomes of code and model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.spec.order import packed
from tests.vectors import order, runs
from tokshard.runtime.order.permutation import ORDER_VERSION

PAGE = Path(__file__).parents[2] / "tokshard" / "runtime" / "ORDER.md"


@pytest.mark.parametrize("plan", order.FACTS["plans"])
def test_the_order_equals_the_golden_values(plan: str) -> None:
    facts = order.FACTS["plans"][plan]
    # through JSON, as the file is: a tuple is a list
    assert json.loads(json.dumps({**facts, **order.values_of(facts)})) == facts, (
        "the order changed: if that is meant, bump ORDER_VERSION and run 'python -m tests.vectors.order'"
    )


@pytest.mark.parametrize("run", runs.FACTS["runs"])
def test_a_run_reads_and_saves_what_the_golden_values_say(run: str) -> None:
    facts = runs.FACTS["runs"][run]
    for found, expected in zip(json.loads(json.dumps(runs.events_of(facts))), facts["events"], strict=True):
        assert found == expected, "runs changed: if that is meant, run 'python -m tests.vectors.runs'"


def test_the_golden_values_are_those_of_this_version() -> None:
    assert order.FACTS["order_version"] == ORDER_VERSION


def test_the_model_places_ten_chunks_as_the_page_does() -> None:
    """And the code as the model: test_packing.py."""
    lines = dict(re.findall(r"^(permutation|row 0) +(.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    names, sizes = zip(*re.findall(r"([a-j])([1-8])", lines["permutation"]), strict=True)
    lengths = [int(size) for size in sizes]
    expected = [row.split() for row in re.split(r" +row \d +", lines["row 0"].replace(", padding", ""))]

    chunks = [range(100 * number, 100 * number + length) for number, length in enumerate(lengths)]
    assert [[names[piece.start // 100] for piece in row] for row in packed(chunks, 4, 8)] == expected
    assert 8 * 4 - sum(lengths) == 1  # place of padding
