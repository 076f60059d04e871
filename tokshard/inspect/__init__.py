"""Inspect corpora and plans: contents, documents, differences, training order, speed, damage."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int], None]
"""Called with the amount done so far and the total."""


def no_progress(done: int, total: int) -> None:
    """Report nothing."""
