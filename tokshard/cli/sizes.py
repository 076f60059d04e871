"""Numbers as people write them: ``4096``, ``256M``, ``2T``, ``16MiB``."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import click

_SIZE = re.compile(r"([0-9][0-9_]{0,17}(?:\.[0-9]{1,9})?)[ ]?(?:([KMGT])(I?))?(B?)", re.ASCII | re.IGNORECASE)
_PREFIXES = " KMGT"


class Size(click.ParamType):  # type: ignore[type-arg] # not yet generic in click 8.1
    """A whole number with an optional decimal (K, M, G, T) or binary (KiB, MiB, GiB, TiB) prefix."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; anything else is a usage error that shows how one is written."""
        if isinstance(value, int):
            return value
        number = parse_size(value)
        if number is None:
            self.fail(f"{value!r} is not a whole number such as 4096, 256M, 2T or 1GiB.", param, ctx)
        return number


def parse_size(text: str) -> int | None:
    """The number that a text stands for; None if it is none, or not a whole one.

    ``K`` is 1,000 and ``Ki`` 1,024; a ``B`` may follow, and upper and lower case are the same.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    digits, prefix, binary, _ = match.groups()
    base = 1024 if binary else 1000
    number = Fraction(digits.replace("_", "")) * base ** _PREFIXES.index((prefix or " ").upper())
    return int(number) if number.denominator == 1 else None


SIZE = Size()


class WholeNumbers(click.ParamType):  # type: ignore[type-arg] # as above
    """Whole numbers from 0 with commas between: ``0,1,2``."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers, each once and in order; anything else is a usage error."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(re.fullmatch("[0-9]{1,4}", part, re.ASCII) for part in parts):
            self.fail(f"{value!r} is not a list of whole numbers such as 0,1,2.", param, ctx)
        return tuple(dict.fromkeys(map(int, parts)))


class Span(click.ParamType):  # type: ignore[type-arg] # as above
    """A number, or the numbers from one up to another: ``1000``, ``1000:1010``."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> range:
        """The numbers; anything else is a usage error."""
        if isinstance(value, range):
            return value
        first, colon, last = value.partition(":")
        start = parse_size(first)
        stop = parse_size(last) if colon else start + 1 if start is not None else None
        if start is None or stop is None or stop <= start:
            self.fail(f"{value!r} is no number such as 1000, nor a range such as 1000:1010 (1000 to 1009).", param, ctx)
        return range(start, stop)
