"""Text for a terminal: nothing in it steers the terminal, and it fits."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

_LABEL_WIDTH = 12
_MIN_WIDTH = 40

# C0 and C1 controls but tab and newline, what turns the direction of text, line separators, lone surrogates
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_LINE_BREAKING = re.compile("[\t\n]")


def printable(text: str) -> str:
    """A text whose control characters are written as escapes; tabs and newlines stay."""
    return _UNSAFE.sub(_escape, text)


def one_line(text: str) -> str:
    """`printable`, and tabs and newlines are written as escapes too."""
    return _LINE_BREAKING.sub(_escape, printable(text))


def shorten(text: str, width: int) -> str:
    """A line of at most `width` characters; of a longer one the middle is left out."""
    if len(text) <= width:
        return text
    tail = (width - 3) // 2
    return text[: width - 3 - tail] + "..." + text[len(text) - tail :]


def aligned(lines: Iterable[tuple[str, str]], *, width: int) -> str:
    """Lines of ``label   value``; long values go on below, under their start."""
    wrapper = textwrap.TextWrapper(
        width=max(_MIN_WIDTH, width),
        subsequent_indent=" " * _LABEL_WIDTH,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(wrapper.fill(f"{label:<{_LABEL_WIDTH}}{one_line(value)}") for label, value in lines)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns, the first to the left and the others to the right; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def can_encode(text: str, encoding: str) -> bool:
    """Whether an output of this encoding can show a text."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _escape(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode()
