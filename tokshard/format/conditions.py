"""Conditions on kept columns, as users write them: ``lang=en``, ``score<0.5``, ``lang in en,fr``."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.arrays import number_array, value_array
from tokshard.format.schema import SUPPORTED_COLUMN_TYPES

Condition = tuple[str, str, pa.Array]
"""A kept column, a sign, and the value or values that it is compared with."""


def parse_conditions(texts: Sequence[str], columns: Mapping[str, str]) -> list[Condition]:
    """Conditions on kept columns, all of which a document has to meet.

    Args:
        texts: the conditions.
        columns: kept columns and their types.

    Raises:
        UsageError: a condition is on an unknown column, or its value is not of the column's type.
    """
    return [_condition(text, columns) for text in texts]


def columns_there(columns: Mapping[str, str]) -> str:
    """The hint for a column that is missing: those that are there, or how to get one."""
    if columns:
        return f"columns: {', '.join(columns)}"
    return "a build keeps columns with --keep-field, and tokshard select takes others with --join"


def check_type(name: str, kind: str) -> None:
    """Refuse a column whose values cannot be compared.

    Raises:
        UsageError: it is not of a type that kept columns have.
    """
    if kind not in SUPPORTED_COLUMN_TYPES:
        raise UsageError(
            f"the column {name!r} is {kind}, which cannot be compared",
            hint="name another column, or convert this one to numbers, texts, dates, or true and false",
        )


def are_met(conditions: Sequence[Condition], columns: Mapping[str, pa.Array], num_documents: int) -> NDArray[np.bool_]:
    """Whether each document meets conditions: bool [documents]. An absent column has no values.

    Raises:
        UsageError: numbers or dates that are texts would be compared in another order than theirs, or with other texts.
    """
    met = np.ones(num_documents, np.bool_)
    of_texts = []
    for name, sign, value in conditions:
        if name in columns and sign[0] in "<>" and value.type == pa.string():
            of_texts.append((name, sign, value))
        else:
            met &= _is_met(columns[name], sign, value) if name in columns else sign == "!="
    looked_at = number_array(np.flatnonzero(met))
    for name, sign, value in of_texts:
        _check_order(name, columns[name].take(looked_at), sign, value)
        met &= _is_met(columns[name], sign, value)
    return met


def _is_met(column: pa.Array, sign: str, value: pa.Array) -> NDArray[np.bool_]:
    """Whether each value of a column meets a condition. A missing value differs from all others."""
    import pyarrow.compute as pc  # takes 50 ms, and most commands need none

    if sign == "in" and pa.types.is_floating(column.type):
        column = pc.add(column, 0.0)  # -0.0 equals 0.0
    found = pc.is_in(column, value) if sign == "in" else getattr(pc, _COMPARED[sign])(column, value[0])
    bits = pc.fill_null(found, sign == "!=")
    return np.unpackbits(np.frombuffer(bits.buffers()[1], np.uint8), bitorder="little")[
        bits.offset : bits.offset + len(bits)
    ].astype(np.bool_)


_IN_TEXTS: Mapping[str, tuple[str, str]] = {
    "numbers": (
        r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$",
        "keep the column as numbers, with --keep-field {}:float64, or join a column of numbers",
    ),
    "dates": (
        r"^(\d{4}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}|(19|20)\d{6}(\D|$))",
        "write all as 2024-01-31, in the column {} and in the condition",
    ),
}
"""What texts may stand for: their form, and what to do where their order is another one."""

_OF_EITHER = "|".join(form for form, _ in _IN_TEXTS.values())


def _check_order(name: str, column: pa.Array, sign: str, value: pa.Array) -> None:
    """Refuse a comparison of texts that stand for numbers or dates in another order than theirs: 10 is before 9."""
    import pyarrow.compute as pc

    given = value[0].as_py()
    for what, (form, hint) in _IN_TEXTS.items():
        if not re.match(form, given):
            continue
        found = column.filter(pc.match_substring_regex(column, form))
        others = column.filter(pc.invert(pc.match_substring_regex(column, _OF_EITHER)))
        if len(found) and (taken := _is_met(others, sign, value)).any():
            other = others[int(taken.argmax())].as_py()
            without = shlex.quote(f"{name}!={other}")
            raise UsageError(
                f"the column {name!r} holds {what} as texts, and {name}{sign}{given} takes {other!r:.80}, too",
                hint=hint.format(name) + f"; or leave such documents out, with --where {without}" * (len(other) < 80),
            )
        if what == "numbers":
            numbers = number_array(np.array(found.to_pylist(), "f8"))
            differs = _is_met(numbers, sign, pa.array([float(given)])) != _is_met(found, sign, value)
        else:
            differs = ~np.array(pc.match_substring_regex(found, _written_alike(given)), np.bool_)
        if differs.any():
            other = found[int(np.flatnonzero(differs)[0])].as_py()
            raise UsageError(
                f"the column {name!r} holds texts: {other!r} and {given!r} would not be compared as {what}",
                hint=hint.format(name),
            )


def _written_alike(date: str) -> str:
    """A pattern for dates that, beside `date`, sort as texts do: year first, with the same separators and zeros."""
    if not (parts := re.fullmatch(r"\d{4}(?:([-/.])\d\d(?:\1\d\d(?:(\D).*)?)?|\d{4}(?:(\D).*)?)", date)):
        return "$^"
    mark, day = re.escape(parts[1] or ""), re.escape(parts[2] or parts[3] or "") or r"\D"
    return rf"^\d{{4}}({mark}\d\d({mark}\d\d({day}.*)?)?)?$"


_OPERATOR = re.compile(r"\s*(?P<sign>[=!<>~≠≤≥]+|\s+in\s)\s*(?P<value>.*)", re.DOTALL)
_SPELLINGS = {
    **dict.fromkeys(("==", "==="), "="),
    **dict.fromkeys(("!==", "=!", "<>", "~=", "!", "≠"), "!="),
    **dict.fromkeys(("=<", "≤"), "<="),
    **dict.fromkeys(("=>", "≥"), ">="),
}
"""Signs of other languages, and ours for each."""
_COMPARED: Mapping[str, str] = {
    "=": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
    "in": "is_in",
}
"""Sign to the function of Arrow that compares."""


def _condition(text: str, columns: Mapping[str, str]) -> Condition:
    # names may contain signs: the longest that fits wins
    for name in sorted(columns, key=len, reverse=True):
        found = _OPERATOR.fullmatch(text.removeprefix(name)) if text.startswith(name) else None
        if found is None:
            continue
        sign, kind, given = found["sign"].strip(), columns[name], found["value"].strip()
        check_type(name, kind)
        if sign not in _COMPARED or (sign != "in" and re.match("[=!<>~]", given)):
            raise _unknown_sign(text, name, sign, given)
        if sign != "in" and re.fullmatch(r"""(["']).*\1""", given):
            raise UsageError(
                f"{text!r} has quotes around the value",
                hint=f"give {shlex.quote(name + sign + given[1:-1])}; '{name} in VALUE' takes a value that has quotes",
            )
        if sign[0] in "<>" and kind == "bool":
            raise UsageError(f"{text!r}: column {name} is bool, which has no order", hint=f"give {name}=true or false")
        values = [_value(name, part.strip(), kind) for part in (given.split(",") if sign == "in" else [given])]
        return name, sign, value_array(values, SUPPORTED_COLUMN_TYPES[kind])
    name = re.split(r"[=!<>~≠≤≥\s]", text, maxsplit=1)[0]
    if not name or name in columns or not re.search(r"[=<>≠≤≥]|\sin\s", text):
        raise UsageError(
            f"{text!r} is not a condition",
            hint="give one such as lang=en, lang!=en, score<0.5, score>=0.5 or 'lang in en,fr'",
        )
    raise UsageError(f"the corpora have no kept column {name!r}", hint=columns_there(columns))


def _unknown_sign(text: str, name: str, sign: str, given: str) -> UsageError:
    """The error for a condition with a sign that others have, or with two: its value may begin with the second."""
    if (meant := _SPELLINGS.get(sign)) is not None:
        return UsageError(f"{text!r} has the sign {sign}", hint=f"give '{name}{meant}{given}'")
    return UsageError(
        f"{text!r} has the sign {sign}" if sign not in _COMPARED else f"{text!r} has two signs",
        hint=f"the signs are {', '.join(_COMPARED)}; '{name} in VALUE' takes a value that begins with one",
    )


def _value(name: str, text: str, kind: str) -> Any:
    try:
        match kind:
            case "int64" if -(1 << 63) <= (number := int(text)) < 1 << 63:
                return number
            case "float64" if not math.isnan(fraction := float(text) + 0.0):  # NaN equals nothing; -0.0 is 0.0
                return fraction
            case "bool":
                return {"true": True, "false": False}[text.lower()]
            case "string":
                text.encode()  # a UnicodeError is a ValueError
                return text
    except (ValueError, KeyError):
        pass
    raise UsageError(f"{text!r} is not a value of column {name}, which is {kind}", hint="give another")
