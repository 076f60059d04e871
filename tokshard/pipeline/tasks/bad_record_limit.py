"""``--max-bad-records``: how many bad records a build leaves out before it fails."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from tokshard.errors import UsageError
from tokshard.numbers import read_count

MIN_RECORDS = 10_000
"""Records that must have been read before a share of bad ones stops a running build."""

_LOUD_RECORDS = 1_000
"""Records that must have been read before a running build warns that half of them are bad."""

_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)[ ]?%", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRecordLimit:
    """``--max-bad-records``. Tasks are judged in input order, whichever ends first.

    Args:
        count: bad records allowed; None if `share` is given.
        share: of the records read so far. It is judged after each task once `MIN_RECORDS` were read, and at the end.
    """

    count: int | None = None
    share: Fraction | None = None

    def __str__(self) -> str:
        return f"{self.count:,}" if self.share is None else f"{float(100 * self.share):g}%"

    def is_exceeded(self, bad: int, records: int, *, is_end: bool) -> bool:
        """Whether `bad` of `records` records are too many."""
        if self.count is not None and bad > self.count:
            return True
        return self.share is not None and (is_end or records >= MIN_RECORDS) and bad > self.share * records


def parse_bad_record_limit(text: str | int | None) -> BadRecordLimit | None:
    """``--max-bad-records``: a count, or a share such as ``0.1%``.

    Raises:
        UsageError: it is neither.
    """
    if text is None:
        return None
    hint = "give a number such as 100, or a share such as 0.1%"
    match = _SHARE.fullmatch(str(text).strip())
    if match is not None and (share := Fraction(match[1]) / 100) <= 1:
        return BadRecordLimit(share=share)
    try:
        return BadRecordLimit(count=read_count(str(text)))
    except UsageError as error:
        raise UsageError(f"max_bad_records is {text!r}", hint=hint) from error


def loss_warning(bad: int, records: int, example: str = "", *, is_end: bool) -> str | None:
    """A warning if half of the records read, or more, are left out as bad; else None.

    Args:
        example: what is wrong with one of them.
        is_end: all records were read; else there is no warning before `_LOUD_RECORDS`.
    """
    if 2 * bad < records or records < (1 if is_end else _LOUD_RECORDS):
        return None
    so_far = "" if is_end else " read so far"
    such_as = f", such as: {example}" if example else ""
    return f"{bad / records:.0%} of the records{so_far} are bad and left out ({bad:,} of {records:,}){such_as}"
