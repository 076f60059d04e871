"""Numbers and foreign names as text for people, the same everywhere: bytes, counts, plurals, safe text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping

LABEL_WIDTH = 12
"""Characters before the values of `aligned` lines."""

_MIN_WIDTH = 40

# C0 and C1 controls except tab and newline, marks of text direction, line separators, lone surrogates
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_LINE_BREAKING = re.compile("[\t\n]")


def printable(text: str) -> str:
    """A text whose control characters are written as escapes; tabs and newlines stay."""
    return _UNSAFE.sub(_escape, text)


def one_line(text: str) -> str:
    """`printable`, and tabs and newlines are written as escapes too."""
    return _LINE_BREAKING.sub(_escape, printable(text))


def aligned(lines: Iterable[tuple[str, str]], *, width: int) -> str:
    """Lines of ``label   value``; long values continue below, under their start."""
    return "\n".join(
        line
        for label, value in lines
        for line in wrapped(f"{label:<{LABEL_WIDTH}}{one_line(value)}", width=width, indent=" " * LABEL_WIDTH)
    )


def wrapped(line: str, *, width: int, indent: str) -> list[str]:
    """A line as several of at most `width` characters, those after the first indented; no word is broken."""
    lines = textwrap.wrap(
        line,
        width=max(_MIN_WIDTH, width),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [""]


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 shard``, ``2 shards``; an irregular plural is given."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"


def first_line(error: BaseException) -> str:
    """The first line of the text of an error, which says what happened; its type if it has no text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def listed(words: Iterable[str], conjunction: str) -> str:
    """Words as people list them: ``a, b and c``."""
    *others, last = list(words) or [""]
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def shorten(text: str, width: int) -> str:
    """A line of at most `width` characters; a longer one loses its middle."""
    if len(text) <= width:
        return text
    tail = (width - 3) // 2
    return text[: width - 3 - tail] + "..." + text[len(text) - tail :]


def bytes_text(number: float) -> str:
    """A number of bytes in three digits, such as ``20.1 MB``; decimal prefixes."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 999.5:
            return f"{number:.3g} {prefix}B" if prefix else f"{number:.0f} B"
        number /= 1000
    return f"{number:.3g} EB" if number < 999.5 else f"{number:,.0f} EB"


def count_text(number: float) -> str:
    """A number of things in three digits, such as ``20.1M``: thousands, millions, billions, trillions."""
    for prefix in ("", "k", "M", "B", "T"):
        if number < 999.5 or prefix == "T":
            break
        number /= 1000
    return f"{number:.3g}{prefix}" if prefix and number < 999.5 else f"{number:,.0f}{prefix}"


def as_typed(number: int) -> str:
    """A count as the command line takes it: ``256M``; all digits where that would not be exact."""
    return _with_suffix(number, {"T": 10**12, "B": 10**9, "M": 10**6})


def as_typed_bytes(number: int) -> str:
    """A size as the command line takes it: ``16MiB``; all digits where that would not be exact."""
    return _with_suffix(number, {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10})


def _with_suffix(number: int, sizes: Mapping[str, int]) -> str:
    found = ((suffix, size) for suffix, size in sizes.items() if number and number % size == 0)
    suffix, size = next(found, ("", 1))
    return f"{number // size}{suffix}"


def _escape(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode()


def clock(seconds: float) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
