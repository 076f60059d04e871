"""Numbers at the door: what a plan or a loader takes is an integer that it can count with, save and load."""

from __future__ import annotations

import math
import operator
from typing import Any

from tokshard.errors import PlanError

MAX_SAMPLE = 1 << 62
"""Samples are counted up to here, which leaves room for batches made ahead in 64 bits."""


def integer(name: str, value: Any, *, least: int | None = None, most: int | None = MAX_SAMPLE) -> int:
    """An argument as a Python integer; numpy's are taken, floats are not, whatever their value.

    Raises:
        PlanError: it is not an integer, or out of range.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        whole = isinstance(value, float) and math.isfinite(value) and value == int(value)
        example = str(int(value)) if whole else "4096"
        raise PlanError(
            f"{name} is {value!r:.100} ({type(value).__name__}), expected an integer",
            hint=f"give an integer such as {example}",
        ) from None
    if least is not None and number < least:
        raise PlanError(f"{name} is {number}, expected at least {least}", hint=f"give {name} of {least} or more")
    if most is not None and number > most:
        raise PlanError(f"{name} is {number}, expected at most {most}", hint=f"give a smaller {name}")
    return number


def real(name: str, value: Any) -> float:
    """An argument as a float.

    Raises:
        PlanError: it is not a number.
    """
    try:
        if isinstance(value, str | bytes | bool):
            raise TypeError
        return float(value)
    except (OverflowError, TypeError, ValueError):
        raise PlanError(
            f"{name} is {value!r:.100} ({type(value).__name__}), expected a number", hint="give a number such as 0.5"
        ) from None
