"""Division that rounds up, and numbers as people write them: counts such as ``1.5B``, sizes such as ``16MiB``."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, TypeVar

from tokshard.errors import UsageError

Numbers = TypeVar("Numbers", bound=Any)
"""Whole numbers: an int, or a numpy array of int64, or of Python integers where they exceed 2**63."""

DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
"""The types in which other tools may store ids; always little-endian."""

_NUMBER = re.compile(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:[eE][+]?[0-9]{1,2})?)[ ]?([A-Za-z]*)", re.ASCII)
_MAX_CHARACTERS = 40

_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_BINARY = {prefix: 1024**power for power, prefix in enumerate("KMGTP", 1)}
_BYTES = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", 1)},
    **{f"{prefix}IB": size for prefix, size in _BINARY.items()},
}


def ceil_div(number: Numbers, by: Any) -> Numbers:
    """The quotient, rounded up: the parts of size `by` that hold `number`; element by element for arrays."""
    quotient: Numbers = -(-number // by)  # `//` rounds towards -inf, so negating before and after rounds up
    return quotient


def read_count(text: str) -> int:
    """A number of tokens, samples, documents or steps: ``4096``, ``1_000``, ``1e6``, ``256k``, ``1.5B``, ``2T``.

    ``B`` and ``G`` are 10^9; upper and lower case are the same.

    Raises:
        UsageError: it is not a whole number, or has a unit of bytes.
    """
    number, unit = _parts(text)
    if number is not None and unit not in _COUNTS and unit in _BYTES | {f"{prefix}I": 1 for prefix in _BINARY}:
        raise UsageError(
            f"{text!r} has a unit of bytes, expected a count such as 4096, 256M, 1.5B or 1e6",
            hint="k, M, B (or G) and T stand for 10^3, 10^6, 10^9 and 10^12",
        )
    found = _whole(number, _COUNTS.get(unit))
    if found is None:
        raise UsageError(
            f"{text!r} is not a whole number such as 4096, 256M, 1.5B or 1e6",
            hint="k, M, B (or G) and T stand for 10^3, 10^6, 10^9 and 10^12; digits may be grouped as in 1_000",
        )
    return found


def read_length(text: str) -> int:
    """A number of tokens that is usually a power of two, such as a `seq_len`: ``4096``, ``4_096``.

    Raises:
        UsageError: it is not a whole number, or has a suffix: ``4k`` may be 4000 or 4096.
    """
    number, unit = _parts(text)
    decimal, binary = _whole(number, _COUNTS.get(unit)), _whole(number, _BINARY.get(unit.removesuffix("I")))
    if unit and decimal is not None and binary is not None:
        raise UsageError(f"{text!r} may be {decimal} or {binary}", hint=f"give {decimal} or {binary}")
    if unit or decimal is None:
        raise UsageError(f"{text!r} is not a whole number such as 4096", hint="write all digits, without a suffix")
    return decimal


def read_bytes(text: str) -> int:
    """A size in bytes: ``4096``, ``256MB``, ``16MiB``, ``1.5GiB``.

    ``kB`` is 1,000 bytes and ``KiB`` 1,024; upper and lower case are the same.

    Raises:
        UsageError: it is not a whole number of bytes, or its unit is not a unit of bytes: ``256M`` may be two sizes.
    """
    number, unit = _parts(text)
    if unit.removesuffix("I") in _BINARY:
        prefix = text.strip().rstrip("iI")
        raise UsageError(
            f"{text!r} has no unit of bytes",
            hint=f"give {prefix}B (a power of 1000) or {prefix}iB (a power of 1024)",
        )
    found = _whole(number, _BYTES.get(unit))
    if found is None:
        raise UsageError(
            f"{text!r} is not a size in bytes such as 4096, 256MB or 16MiB",
            hint="kB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB are powers of 1024",
        )
    return found


def _parts(text: str) -> tuple[Fraction | None, str]:
    """The number and the unit in upper case; None and no unit if the text has another form."""
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= _MAX_CHARACTERS else None
    return (None, "") if match is None else (Fraction(match[1].replace("_", "")), match[2].upper())


def _whole(number: Fraction | None, factor: int | None) -> int | None:
    if number is None or factor is None or (number * factor).denominator != 1:
        return None
    return int(number * factor)
