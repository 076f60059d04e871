"""The printer of tables, with bars and shortened names; `tokshard.wording` has what other rooms also need."""

from __future__ import annotations

from collections.abc import Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def table(rows: Sequence[Sequence[str]], *, width: int | None, left: Sequence[int] = (0,)) -> str:
    """A table with a line per row.

    Args:
        rows: the first one is the header.
        width: characters per line. Columns that do not fit follow below, with the first column repeated; None: no
            limit.
        left: columns that are aligned left; the others are aligned right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    parts: list[list[int]] = []
    room = 0
    for column, size in enumerate(widths[1:], 1):
        room -= 2 + size
        if not parts or (width is not None and room < 0):
            parts.append([])
            room = (width or 0) - widths[0] - 2 - size
        parts[-1].append(column)
    blocks = []
    for part in parts:
        columns = [0, *part]
        aligned_left = [place for place, column in enumerate(columns) if column in left]
        sizes = [widths[column] for column in columns]
        blocks.append("\n".join(table_line([row[n] for n in columns], sizes, left=aligned_left) for row in rows))
    return "\n\n".join(blocks)


def table_line(cells: Sequence[str], widths: Sequence[int], *, left: Sequence[int]) -> str:
    """One line of a table: as many cells as there are widths, aligned right except for the columns in `left`."""
    return "  ".join(
        cell.ljust(size) if column in left else cell.rjust(size)
        for column, (cell, size) in enumerate(zip(cells, widths, strict=False))
    ).rstrip()


def bars(counts: Sequence[int], width: int, encoding: str | None) -> list[str]:
    """A horizontal bar per count, the longest of `width` characters. Every count except 0 is visible.

    Args:
        encoding: of the output; one without block characters gets ``#``.
    """
    unit = 8 if can_encode(_EIGHTHS, encoding) else 1
    largest = max(counts)
    lengths = [max(1, round(count * width * unit / largest)) if count else 0 for count in counts]
    if unit == 1:
        return ["#" * length for length in lengths]
    return [_EIGHTHS[8] * (length // 8) + _EIGHTHS[length % 8].strip() for length in lengths]


def can_encode(text: str, encoding: str | None) -> bool:
    """Whether an output with this encoding can show a text; one without an encoding takes any."""
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
