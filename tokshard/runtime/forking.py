"""What a forked child needs anew: a thread of the parent may hold it at that moment, and does not exist in the child.

DataLoader forks its workers by default on Linux up to Python 3.13, while the prefetch thread of a loader may run.
"""

from __future__ import annotations

import os
from threading import RLock
from typing import Protocol
from weakref import WeakSet


class Forked(Protocol):
    """Has a state that a thread may be about to change."""

    def renew_after_fork(self) -> None:
        """Called in the child, which has one thread: forget what a thread of the parent may have left half done."""


_forked: WeakSet[Forked] = WeakSet()


def renew_after_fork(holder: Forked) -> None:
    """Have `holder` renew itself in every forked child, as long as it lives."""
    _forked.add(holder)


class ForkLock:
    """A re-entrant lock that is free in a forked child."""

    def __init__(self) -> None:
        self._lock = RLock()
        renew_after_fork(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew_after_fork(self) -> None:
        """Nobody holds it."""
        self._lock = RLock()


def _renew() -> None:
    for holder in list(_forked):
        holder.renew_after_fork()


os.register_at_fork(after_in_child=_renew)
