"""How much is tried by default: examples of a property, cases of a table."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Any

import pytest
from hypothesis import settings

_USUAL = 40


def examples(number: int) -> int:
    """A part of the examples that the profile gives (see conftest.py): `number` of 40, and 10 times `number` at most.

    For a property whose examples are slow, or find little.
    """
    return max(1, number * min(settings.default.max_examples, 10 * _USUAL) // _USUAL)


def crossed(names: str, *axes: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with every combination of some values; those that add no new value are for the soak.

    For a table whose cells fail by their row or by their column: each value of an axis is tried, in turn with those of
    the others.

    Args:
        names: of the arguments, with commas between them.
        axes: values of each.
    """
    longest = max(map(len, axes))
    tried = {tuple(number % len(axis) for axis in axes) for number in range(longest)}
    cases = []
    for places in product(*(range(len(axis)) for axis in axes)):
        values = [list(axis)[place] for axis, place in zip(axes, places, strict=True)]
        cases.append(pytest.param(*values, marks=() if places in tried else pytest.mark.soak))
    return pytest.mark.parametrize(names, cases)
