"""Text for a terminal: nothing in it steers the terminal, and it fits."""

from __future__ import annotations

from collections.abc import Sequence

from tokshard.wording import aligned, bytes_text, counted, one_line, printable, wrapped

__all__ = ["aligned", "bytes_text", "can_encode", "counted", "one_line", "printable", "shorten", "table", "wrapped"]


def shorten(text: str, width: int) -> str:
    """A line of at most `width` characters; of a longer one the middle is left out."""
    if len(text) <= width:
        return text
    tail = (width - 3) // 2
    return text[: width - 3 - tail] + "..." + text[len(text) - tail :]


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
