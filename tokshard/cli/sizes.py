"""Numbers on the command line: counts, lengths, sizes in bytes, lists and ranges."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from tokshard.errors import UsageError
from tokshard.numbers import read_bytes, read_count, read_length

_END = 1 << 63


class WrongNumber(click.BadParameter):
    """A refused number, with what to write instead."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(problem)  # click adds the option
        self.hint = hint


class Number(click.ParamType):  # type: ignore[type-arg] # not yet generic in click 8.1
    """A whole number.

    Args:
        name: of the kind, for the help.
        read: a text to the number; raises UsageError.
        least: smaller ones are refused.
    """

    def __init__(self, name: str, read: Callable[[str], int], least: int = 0) -> None:
        self.name = name
        self._read = read
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; anything else is a usage error that shows how to write one."""
        if not isinstance(value, str):
            return int(value)
        try:
            number = self._read(value)
        except UsageError as error:
            raise WrongNumber(error.problem, error.hint) from error
        if number < self._least:
            self.fail(f"must be at least {self._least}", param, ctx)
        if number >= _END:
            self.fail(f"{value!r} is 2^63 or more", param, ctx)
        return number


class FloatRange(click.FloatRange):
    """A number in a range. NaN is in none, which click does not see."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; anything else is a usage error."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


COUNT = Number("count", read_count)
POSITIVE_COUNT = Number("count", read_count, 1)
LENGTH = Number("number", read_length)
BYTES = Number("bytes", read_bytes)


def span(text: str) -> range:
    """A number, or the numbers from one up to another: ``1000``, ``1000:1010``. The type of an option."""
    first, colon, last = text.partition(":")
    try:
        start = read_count(first)
        stop = read_count(last) if colon else start + 1
    except UsageError as error:
        problem = f"{text!r} is not a number such as 1000, nor a range such as 1000:1010 (1000 to 1009)"
        raise WrongNumber(problem, error.hint) from error
    if stop <= start:
        raise click.BadParameter(f"{text!r} is an empty range; 1000:1010 is 1000 to 1009")
    return range(start, stop)
