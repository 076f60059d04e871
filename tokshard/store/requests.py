"""Requests to one bucket or web server, tried again where that may help.

A token may expire in a run of months. So if a store refuses a process that it let in before, the request is made once
more, with the credentials read again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tokshard.errors import StoreError, is_panic
from tokshard.store.addresses import Address
from tokshard.store.failures import FAILURES, gave_up, is_refusal, reason, status_of, verdict
from tokshard.store.providers import open_provider

if TYPE_CHECKING:
    from obstore.store import ObjectStore

Answer = TypeVar("Answer")

_FIRST_DELAY, _LONGEST_DELAY = 0.2, 10.0
_LARGE_TRIES = 3
_JITTER = random.SystemRandom()
"""Not the generator of `random`, whose numbers belong to the program that reads."""
_LONGEST_TRY, _LONGEST_LARGE_TRY = 70.0, 900.0
"""Seconds, by the limits that `open_provider` sets."""
_WARN_AFTER, _WARN_EVERY = 10.0, 60.0

LOST = "run the same command again when no other process writes there: it continues"
"""What to do when a lease was lost."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """Time limits of requests.

    Args:
        patience: for how many seconds a request is tried again, once the store has answered anything.
        first_patience: the same before its first answer, because a wrong address should not take minutes.
        lease_seconds: a lease that was not renewed for so long may be taken over.
    """

    patience: float = 300.0
    first_patience: float = 30.0
    lease_seconds: float = 60.0


_owner: list[int] = []
"""The process that used a store first. `obstore` has threads of its own, which a fork does not copy."""


def _check_owner(root: str) -> None:
    """Refuse a process that was forked after a store was used: it would hang, or end its parent."""
    _owner[:] = _owner or [os.getpid()]
    if _owner != [os.getpid()]:
        raise StoreError(
            f"{root} cannot be reached from process {os.getpid()}: it was forked from process {_owner[0]}, which had "
            "used a store already",
            hint="start processes with 'forkserver' or 'spawn' (DataLoader: multiprocessing_context='forkserver'), or "
            "read in the process itself, with num_workers=0",
        )


class TryAgainError(OSError):
    """An answer that does not fit the request, such as one that is too short."""


def now() -> float:
    """Seconds by a clock that cannot be set, and that continues while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Requests:
    """Makes requests to a bucket, container or web server. Opens when the first one is made. Thread-safe.

    Attributes:
        leases: the keys of the leases that are held, and from when on, by `now`, another process may take each.
        fence: the known reason why nothing may be written any more; see `lost`.
    """

    def __init__(self, address: Address, options: RemoteOptions) -> None:
        self.address, self.options = address, options
        self.leases: dict[str, float] = {}
        self.fence: str | None = None
        self._is_open = self._has_answered = self._has_let_in = False
        self._warned_at = 0.0
        self._ending = threading.Event()
        self._opening = threading.Lock()
        self._providers: dict[bool, ObjectStore] = {}  # a new dict once the credentials are read anew

    def where(self, key: str) -> str:
        """A key as messages name it."""
        return f"{self.address.root}/{key}" if key else self.address.root

    def make(
        self,
        request: Callable[[ObjectStore], Answer],
        *,
        key: str,
        is_write: bool = False,
        is_large: bool = False,
        abandoned: threading.Event | None = None,
    ) -> Answer:
        """Make a request until it succeeds, its failure is final, or patience ends; large ones at least three times."""
        _check_owner(self.address.root)
        waited, tries, is_renewed = 0.0, 0, False
        while True:
            if is_write:
                self._check_may_write(key)
            providers = self._providers
            began = time.monotonic()
            try:
                answer = request(self._open(providers, is_large=is_large))
            except StoreError:
                self._has_answered = True
                raise
            except FAILURES as error:
                tries += 1
                if self._has_let_in and not is_renewed and not self.address.is_server and is_refusal(error):
                    is_renewed = True
                    self._renew(providers)
                    continue
                self._check_final(error, key=key, is_renewed=is_renewed)
                # no try lasts longer, unless the job was suspended
                waited += min(time.monotonic() - began, _LONGEST_LARGE_TRY if is_large else _LONGEST_TRY)
                delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2**tries) * _JITTER.uniform(0.5, 1.0)
                is_late = waited + delay > self._patience() and tries >= (_LARGE_TRIES if is_large else 1)
                is_unwanted = self._ending.is_set() or (abandoned is not None and abandoned.is_set())
                if is_late or is_unwanted:
                    scheme = self.address.scheme
                    raise gave_up(error, where=self.where(key), scheme=scheme, tries=tries, seconds=waited) from error
                self._warn(key, waited, error)
                (abandoned or self._ending).wait(delay)
                waited += delay
            except BaseException as error:
                if not is_panic(error):
                    raise
                raise StoreError(
                    f"{self.where(key)}: obstore cannot make this request: {error}",
                    hint="look for line feeds, spaces and wrong ports in the variables of the store (endpoint, keys)",
                ) from error
            else:
                self._has_answered = self._has_let_in = True
                return answer

    def _check_final(self, error: Exception, *, key: str, is_renewed: bool) -> None:
        """Raise the error for a failure, unless another try may succeed."""
        if isinstance(error, TryAgainError):
            return
        if isinstance(error, OSError) and error.errno in (errno.ESTALE, errno.ENODATA, errno.EEXIST):
            raise error
        self._has_answered = self._has_answered or status_of(error) is not None
        problem = verdict(error, where=self.where(key), scheme=self.address.scheme, is_renewed=is_renewed)
        if problem is not None:
            raise problem from error

    def _patience(self) -> float:
        return self.options.patience if self._has_answered else self.options.first_patience

    def _warn(self, key: str, waited: float, error: Exception) -> None:
        if waited > _WARN_AFTER and time.monotonic() - self._warned_at > _WARN_EVERY:
            self._warned_at = time.monotonic()
            words = "%s: no success for %.0f s, last with: %s; tried again for up to %.0f s"
            _logger.warning(words, self.where(key), waited, reason(error), self._patience())

    def _check_may_write(self, key: str) -> None:
        if self.address.is_server:
            raise StoreError(
                f"{self.where(key)} cannot be written: files of web servers can only be read",
                hint="give a directory, or s3://, gs:// or az://",
            )
        if (problem := self.lost()) is not None:
            raise StoreError(problem, hint=LOST)

    def lost(self) -> str | None:
        """Why nothing may be written any more, which is final; None while writing is allowed."""
        late = [lease for lease, until in list(self.leases.items()) if now() >= until]
        if late and self.fence is None:
            seconds = self.options.lease_seconds
            self.fence = f"{self.where(late[0])} was not renewed for {seconds:.0f} s: another process may take it now"
        return self.fence

    def _open(self, providers: dict[bool, ObjectStore], *, is_large: bool) -> ObjectStore:
        with self._opening:
            if not self._is_open:
                self._is_open = True
                _set_at_exit(self._ending)
            if is_large not in providers:
                providers[is_large] = open_provider(self.address, is_large=is_large)
            return providers[is_large]

    def _renew(self, refused: dict[bool, ObjectStore]) -> None:
        """Read the credentials anew for the next requests, once for all that were refused with the same ones."""
        with self._opening:
            if self._providers is refused:
                self._providers = {}


def _set_at_exit(ending: threading.Event) -> None:
    """Set an event when the interpreter begins to exit: it waits for threads of pools, which wait for their requests.

    Functions of `atexit` would be too late: they run after those threads have ended.
    """
    reference = weakref.ref(ending)

    def end() -> None:
        if (event := reference()) is not None:
            event.set()

    with contextlib.suppress(RuntimeError):  # it ends already
        threading._register_atexit(end)  # type: ignore[attr-defined]  # noqa: SLF001 -- there is no public one
