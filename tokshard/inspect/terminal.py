"""Text for a terminal: nothing in it steers the terminal, and it fits."""

from __future__ import annotations

from collections.abc import Sequence

from tokshard.wording import aligned, bytes_text, counted, one_line, printable

__all__ = ["aligned", "bytes_text", "can_encode", "counted", "one_line", "printable", "shorten", "table"]


def shorten(text: str, width: int) -> str:
    """A line of at most `width` characters; of a longer one the middle is left out."""
    if len(text) <= width:
        return text
    tail = (width - 3) // 2
    return text[: width - 3 - tail] + "..." + text[len(text) - tail :]


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
