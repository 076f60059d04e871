"""Converts values of kept fields to the types that a corpus stores: string, int64, float64 or bool."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from numbers import Number
from typing import Any
from uuid import UUID

import msgspec
import numpy as np

from tokshard.errors import UNDECODABLE

_TYPES: Mapping[str, type] = {"string": str, "int64": int, "float64": float, "bool": bool}

_INT64 = range(-(1 << 63), 1 << 63)


class WrongTypeError(Exception):
    """The value of a kept field does not have the requested type."""


def typed_value(value: Any, kind: str) -> Any:
    """Convert a value of a kept field from parquet, Arrow, csv or Python.

    Raises:
        WrongTypeError: it is not of the type that was asked for.
        UnicodeError: it is not UTF-8.
    """
    if value is None or (kind == "string" and is_missing(value)):
        return None
    if isinstance(value, bytes):
        value = value.decode()
    if kind == "string":
        return _as_string(value)
    if isinstance(value, str | Decimal):
        return _parsed_value(str(value).strip(), kind)
    wanted = _TYPES[kind]
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise WrongTypeError from error
    if type(value) is not wanted or (wanted is int and value not in _INT64):
        raise WrongTypeError
    return value


def is_missing(value: Any) -> bool:
    """Whether a value stands for none: None, or NaN and NaT, which pandas has in its place."""
    return value is None or (isinstance(value, float | date) and value != value)  # noqa: PLR0124


def _parsed_value(text: str, kind: str) -> Any:
    """Parse a value of csv as other programs write it: ``True``, ``007``, ``nan``.

    Raises:
        WrongTypeError: it is not of that type.
    """
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise WrongTypeError
        return text.lower() == "true"
    try:
        if "_" in text:  # which only Python accepts in numbers
            raise ValueError
        value: Any = _TYPES[kind](text)
        if value in (math.inf, -math.inf) and "inf" not in text.lower():
            raise ValueError  # a finite number that no float holds
    except ValueError as error:
        raise WrongTypeError from error
    if kind == "int64" and value not in _INT64:
        raise WrongTypeError
    return value


def _as_string(value: Any) -> str:
    """The text that JSON lines would give for the same value, if JSON has such a value."""
    is_text = isinstance(value, (str, tuple, np.generic, *_WRITTEN)) and not isinstance(value, bool)
    text = str(value) if is_text else json_text(value)
    text.encode()  # raises for lone surrogates
    return text


_WRITTEN = (Number, date, time, timedelta, UUID)
"""Types whose text is their value. That of others may hold an address, or be in any order, so no build repeats it."""


def json_text(value: Any) -> str:
    """A value of a table or of a Python program as JSON: null for NaN, lone surrogates for bytes that are not UTF-8.

    Raises:
        WrongTypeError: JSON cannot hold it.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=_plain)
        is_json = "NaN" not in text and "Infinity" not in text  # which only Python writes
        return text if is_json else json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise WrongTypeError(str(error)) from error


def _plain(value: Any) -> Any:
    """What JSON has in place of a value: texts of bytes, as in a column of their own, and of dates and decimals."""
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if isinstance(value, np.generic):
        return python_value(value)
    if isinstance(value, np.ndarray):
        return list(value) if value.ndim and value.dtype.kind in "mM" else value.tolist()
    if not isinstance(value, _WRITTEN):
        raise WrongTypeError(f"JSON has no {type(value).__name__}")
    return str(value)


def python_value(value: np.generic) -> Any:
    """A numpy scalar as a Python object. Times that Python does not have, as of nanoseconds, become texts."""
    found = value.item()
    is_time = isinstance(value, np.datetime64 | np.timedelta64)
    return str(value).replace("T", " ") if is_time and isinstance(found, int) else found


def json_value(raw: bytes | None, kind: str) -> Any:
    """Convert the raw JSON of a kept field.

    Raises:
        WrongTypeError: it is not of the type that was asked for.
    """
    if raw is None or raw == b"null":
        return None
    if kind == "string":  # numbers and objects are kept as their JSON text
        return msgspec.json.decode(raw, type=str) if raw[:1] == b'"' else raw.decode()
    try:
        value: Any = msgspec.json.decode(raw, type=_TYPES[kind])
    except UNDECODABLE as error:
        raise WrongTypeError from error
    if kind == "int64" and value not in _INT64:
        raise WrongTypeError
    return value
