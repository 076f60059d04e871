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
    return "\n".join(
        line
        for label, value in lines
        for line in wrapped(f"{label:<{_LABEL_WIDTH}}{one_line(value)}", width=width, indent=" " * _LABEL_WIDTH)
    )


def wrapped(line: str, *, width: int, indent: str) -> list[str]:
    """A line as several of at most `width` characters, those after the first indented; no word is broken."""
    return textwrap.wrap(
        line,
        width=max(_MIN_WIDTH, width),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def table(rows: Sequence[Sequence[str]], *, width: int) -> str:
    """Columns, the first to the left and the others to the right; the first row is the header.

    Args:
        width: characters in a line; the columns that do not fit follow below, each time after the first one.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    parts: list[list[int]] = []
    room = 0
    for column, size in enumerate(widths[1:], 1):
        room -= 2 + size
        if not parts or room < 0:
            parts.append([])
            room = width - widths[0] - 2 - size
        parts[-1].append(column)
    return "\n\n".join(
        "\n".join("  ".join([row[0].ljust(widths[0]), *(row[n].rjust(widths[n]) for n in part)]) for row in rows)
        for part in parts
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
