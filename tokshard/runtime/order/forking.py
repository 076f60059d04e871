"""A lock that is free in a forked child, even if a thread of the parent held it at the fork.

DataLoader forks its workers by default on Linux up to Python 3.13, while the prefetch thread of a loader may run.
"""

from __future__ import annotations

import os
from threading import RLock
from weakref import WeakSet


class ForkLock:
    """A re-entrant lock. The guarded data must be usable at any moment, because another thread may fork."""

    def __init__(self) -> None:
        self._lock = RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Release it, whichever thread of the parent held it."""
        self._lock = RLock()


_locks: WeakSet[ForkLock] = WeakSet()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
