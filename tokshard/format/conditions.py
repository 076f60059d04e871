"""Conditions on kept columns, as users write them: ``lang=en``, ``score<0.5``, ``lang in en,fr``."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import UsageError


class Conditions:
    """Decides which documents meet all of some conditions.

    Args:
        texts: the conditions.
        columns: kept columns and their types.

    Raises:
        UsageError: a condition is about a column that is not there, or has no value of its type.
    """

    def __init__(self, texts: Sequence[str], columns: Mapping[str, str]) -> None:
        self._conditions = [_condition(text, columns) for text in texts]

    def are_met(self, columns: Mapping[str, pa.Array], num_documents: int) -> NDArray[np.bool_]:
        """Whether each document meets them: bool [documents]. A column that is not there has no values."""
        met = np.ones(num_documents, np.bool_)
        for name, is_met in self._conditions:
            found = columns[name].to_pylist() if name in columns else [None] * num_documents
            met &= np.array(list(map(is_met, found)), np.bool_)
        return met


_OPERATOR = re.compile(r"\s*(?P<sign>[=!<>~≠≤≥]+|\s+in\s)\s*(?P<value>.*)", re.DOTALL)
_SPELLINGS = {"==": "=", "===": "=", "!==": "!=", "=!": "!=", "<>": "!=", "~=": "!=", "!": "!=", "≠": "!="}
"""Signs of other languages that mean one of ours. Others, such as ``<=``, have none."""
_COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": lambda value, found: found is not None and found < value,
    ">": lambda value, found: found is not None and found > value,
    "in": operator.contains,
}
"""Sign to whether a document meets it, from the given value and the one that it has."""


def _condition(text: str, columns: Mapping[str, str]) -> tuple[str, Callable[[Any], bool]]:
    """The kept column of a condition, and whether a value of it meets that; None is a missing value."""
    # names may contain signs: the longest that fits wins
    for name in sorted(columns, key=len, reverse=True):
        found = _OPERATOR.fullmatch(text.removeprefix(name)) if text.startswith(name) else None
        if found is None:
            continue
        sign, kind, given = found["sign"].strip(), columns[name], found["value"].strip()
        if sign not in _COMPARED or (sign != "in" and re.match("[=!<>~]", given)):
            raise _unknown_sign(text, name, sign, given)
        if sign in {"<", ">"} and kind == "bool":
            raise UsageError(f"{text!r}: column {name} is bool, which has no order", hint=f"give {name}=true or false")
        values = [_value(name, part.strip(), kind) for part in (given.split(",") if sign == "in" else [given])]
        value = frozenset(values) if sign == "in" else values[0]
        return name, functools.partial(_COMPARED[sign], value)
    name = re.split(r"[=!<>~≠≤≥\s]", text, maxsplit=1)[0]
    if not name or name in columns or not re.search(r"[=<>≠≤≥]|\sin\s", text):
        raise UsageError(
            f"{text!r} is not a condition",
            hint="give one such as lang=en, lang!=en, score<0.5, score>0.5 or 'lang in en,fr'",
        )
    raise UsageError(f"the corpora have no kept column {name!r}", hint=f"kept columns: {', '.join(columns) or 'none'}")


def _unknown_sign(text: str, name: str, sign: str, given: str) -> UsageError:
    """The error for a condition with a sign that others have, or with two: its value may begin with the second."""
    if (meant := _SPELLINGS.get(sign)) is not None:
        return UsageError(f"{text!r} has the sign {sign}", hint=f"give '{name}{meant}{given}'")
    return UsageError(
        f"{text!r} has the sign {sign}" if sign not in _COMPARED else f"{text!r} has two signs",
        hint=f"the signs are =, !=, < and >; '{name} in VALUE' takes a value that begins with one",
    )


def _value(name: str, text: str, kind: str) -> Any:
    try:
        match kind:
            case "int64" if -(1 << 63) <= (number := int(text)) < 1 << 63:
                return number
            case "float64" if not math.isnan(fraction := float(text)):  # which equals nothing
                return fraction
            case "bool":
                return {"true": True, "false": False}[text.lower()]
            case "string":
                return text
    except (ValueError, KeyError):
        pass
    raise UsageError(f"{text!r} is not a value of column {name}, which is {kind}", hint="give another")
