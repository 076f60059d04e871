"""A histogram of document lengths, in text."""

from __future__ import annotations

from collections.abc import Sequence

from tokshard.format.manifest import DocumentLengths
from tokshard.inspect.terminal import can_encode

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MIN_BAR_WIDTH = 8
_MAX_WIDTH = 100
"""Longer bars are not read more easily."""


def length_histogram(lengths: DocumentLengths, *, width: int, encoding: str) -> str:
    """Documents by length in tokens, a line per power of two from the shortest to the longest.

    Args:
        width: characters in a line; a terminal that is wider than `_MAX_WIDTH` is not filled.
        encoding: of the output; one that has no block characters gets ``#``.
    """
    used = [index for index, count in enumerate(lengths.counts) if count]
    if not used:
        return "no documents"
    buckets = range(used[0], used[-1] + 1)
    labels = [_range_text(index) for index in buckets]
    counts = [lengths.counts[index] for index in buckets]
    total = sum(counts)
    label_width = max(len("tokens"), *map(len, labels))
    count_width = max(len("documents"), *(len(f"{count:,}") for count in counts))
    bar_width = max(_MIN_BAR_WIDTH, min(width, _MAX_WIDTH) - label_width - count_width - len("  100.0%  ") - 2)
    bars = _bars(counts, bar_width, is_ascii=not can_encode(_EIGHTHS, encoding))
    lines = [f"{'tokens':>{label_width}}  {'documents':>{count_width}}"]
    for label, count, bar in zip(labels, counts, bars, strict=True):
        lines.append(f"{label:>{label_width}}  {count:>{count_width},}  {count / total:6.1%}  {bar}".rstrip())
    return "\n".join(lines)


def _range_text(index: int) -> str:
    first, last = 1 << index, (2 << index) - 1
    return f"{first:,}" if first == last else f"{first:,}-{last:,}"


def _bars(counts: Sequence[int], width: int, *, is_ascii: bool) -> list[str]:
    """A bar per count, the longest of `width`. Every count but 0 shows."""
    unit = 1 if is_ascii else 8
    largest = max(counts)
    lengths = [max(1, round(count * width * unit / largest)) if count else 0 for count in counts]
    if is_ascii:
        return ["#" * length for length in lengths]
    return [_EIGHTHS[8] * (length // 8) + _EIGHTHS[length % 8].strip() for length in lengths]
