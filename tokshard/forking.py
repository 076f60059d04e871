"""The CPUs of this process, and signals of others; locks, cached properties and decoded types that are safe with forks.

DataLoader forks its workers by default on Linux up to Python 3.13, while the prefetch thread of a loader may run. A
child never waits for a lock that a thread of its parent held.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
import tempfile
from collections.abc import Iterator
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakSet

import msgspec

Type = TypeVar("Type")

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property  # noqa: PLC0414, TID251 - for others to import
else:

    class cached_property(functools.cached_property):  # noqa: N801, TID251 - as functools names it
        """`functools.cached_property` without its lock, as from Python 3.12 on: two threads may compute the same value.

        All objects of a class share that lock, and it is held while a value is computed.
        """

        def __init__(self, function: Any) -> None:
            super().__init__(function)
            self.lock = contextlib.nullcontext()


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Renewed(Protocol):
    """An object that is reset in a forked child."""

    def renew(self) -> None:
        """Forget what belongs to the parent: its threads, and locks that they hold."""


class ForkLock:
    """A re-entrant lock. The guarded data must be usable at any moment, because another thread may fork.

    Attributes:
        now: the lock of this process, for ``with``.
    """

    def __init__(self) -> None:
        self.now = RLock()
        renew_in_children(self)

    def renew(self) -> None:
        """Have another one, whichever thread of the parent held it."""
        self.now = RLock()


_renewed: WeakSet[Renewed] = WeakSet()


def renew_in_children(one: Renewed) -> None:
    """Renew an object in every child that is forked while the object exists."""
    _renewed.add(one)


def _renew_all() -> None:
    for one in list(_renewed):
        one.renew()


os.register_at_fork(after_in_child=_renew_all)


_decoding = ForkLock()


def decodable(kind: type[Type]) -> type[Type]:
    """A decorator of classes that msgspec decodes, perhaps in several threads.

    msgspec looks at the fields of a class when it first decodes one; two threads that do so at once crash the process.
    """
    with _decoding.now:
        msgspec.json.Decoder(kind)
    return kind


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, on Linux.

    Raises:
        OSError: there is no such process, or no ``/proc``.
    """
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes started inside: they must be set before any import."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def not_started(error: OSError) -> tuple[str, str]:
    """The problem and the hint if no worker process can be started."""
    is_full = error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
    place = "" if is_full else f" in the temporary directory {tempfile.gettempdir()} or in /dev/shm"
    way = "raise the limits of the system (ulimit)" if is_full else "set TMPDIR to a short path, such as /tmp"
    return f"worker processes cannot be started{place}: {error}", f"{way}, or give --workers 1"
