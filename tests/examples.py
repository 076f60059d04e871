"""How many examples a property is tried with."""

from __future__ import annotations

from hypothesis import settings

_USUAL = 40


def examples(number: int) -> int:
    """A part of the examples that the profile gives (see conftest.py): `number` of 40, and 10 times `number` at most.

    For a property whose examples are slow, or find little.
    """
    return max(1, number * min(settings.default.max_examples, 10 * _USUAL) // _USUAL)
