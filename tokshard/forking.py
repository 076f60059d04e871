"""What does not wait in a forked child for a thread of its parent: a lock, and properties that are computed once.

DataLoader forks its workers by default on Linux up to Python 3.13, while the prefetch thread of a loader may run.
"""

from __future__ import annotations

import os
import sys
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property  # noqa: PLC0414, TID251 - for others to import
else:

    class cached_property:  # noqa: N801 - as functools names it
        """`functools.cached_property` without its lock, as from Python 3.12 on: two threads may compute the same value.

        The lock is one for all objects of a class, and held while the value is computed.
        """

        def __init__(self, function: Any) -> None:
            self._function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._function(instance)
            return value


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
