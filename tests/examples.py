"""How much is tried by default: examples of a property, cases of a table."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import product
from typing import Any

import pytest
from hypothesis import settings

_USUAL = 40


def examples(number: int) -> int:
    """A part of the examples that the profile gives (see conftest.py): `number` of 40, and 10 times `number` at most.

    For a property whose examples are slow, or find little. At least two: the first one is always the simplest.
    """
    return max(2, number * min(settings.default.max_examples, 10 * _USUAL) // _USUAL)


def some(
    names: str, cases: Collection[Any], *, default: int = 1, ids: Callable[[Any], str] | None = None
) -> pytest.MarkDecorator:
    """Parametrize a test with cases. By default the first ones run; the soak runs all of them.

    Args:
        names: the names of the arguments, separated by commas.
        cases: the values of each case: a tuple, or the value itself for a single name.
        default: how many run by default.
        ids: names a value, as in `pytest.mark.parametrize`.
    """
    marked = []
    for number, case in enumerate(cases):
        values = case if "," in names else (case,)
        marked.append(pytest.param(*values, marks=pytest.mark.soak if number >= default else ()))
    return pytest.mark.parametrize(names, marked, ids=ids)


def crossed(names: str, *axes: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with all combinations of values. By default only a few run; the soak runs the rest.

    Those that run by default cover every value of every axis at least once. This is enough where a defect belongs to
    one value, and not to a pair of them.

    Args:
        names: the names of the arguments, separated by commas.
        axes: the values of each argument.
    """
    longest = max(map(len, axes))
    tried = {tuple(number % len(axis) for axis in axes) for number in range(longest)}
    cases = []
    for places in product(*(range(len(axis)) for axis in axes)):
        values = [list(axis)[place] for axis, place in zip(axes, places, strict=True)]
        cases.append(pytest.param(*values, marks=() if places in tried else pytest.mark.soak))
    return pytest.mark.parametrize(names, cases)
