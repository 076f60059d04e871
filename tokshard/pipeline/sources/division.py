"""How an input can be divided among tasks, and the resulting parts. Reads nothing."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

CHUNK_BYTES = 1 << 20
"""Chunk j of an input holds the lines whose first byte is in ``[j, j + 1) * CHUNK_BYTES``. Decides shard bounds."""


class Span(msgspec.Struct, frozen=True):
    """A part of an input: by default, all of it.

    Args:
        start, stop: the lines whose first byte is in ``[start, stop)``, or the numbers of row groups (parquet) or
            record batches (Arrow). With `stop` None, to the end.
    """

    start: int = 0
    stop: int | None = None


LINES: Final = "lines"
STREAM: Final = "stream"
INDIVISIBLE: Final = "indivisible"

Divisibility = Literal["lines", "stream", "indivisible"] | tuple[int, ...]
"""How an input can be divided: at any line; while it is read, and only from its start; not at all, as it is one record
or too small; or between groups, of which these are the bytes in the file."""
