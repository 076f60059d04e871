"""How an input can be divided among tasks, and the resulting parts. Reads nothing."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Lines:
    """An input of lines, which can be divided at any byte."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """An input made of groups.

    Args:
        group_bytes: size of each group, in bytes of the file.
    """

    group_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """An input that can only be read from its start, and is divided into segments while it is read."""


@dataclass(frozen=True, slots=True)
class Indivisible:
    """An input that is one record, or too small to divide."""


Divisibility = Lines | Grouped | Stream | Indivisible
