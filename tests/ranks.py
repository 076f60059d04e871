"""The ranks of a job as forks of one process, which has imported what they need once for all of them."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def forked(run: Callable[[], object], *, seconds: int = 0) -> int:
    """The process of a rank. It exits with the number that `run` returns, with 0 if that is none, with 1 if it raises.

    Args:
        seconds: it is killed after so many, because a rank whose other one is gone may wait for it; 0: never.
    """
    if pid := os.fork():
        return pid
    status = 1
    signal.alarm(seconds)
    try:
        found = run()
        status = found if isinstance(found, int) else 0
    except BaseException:  # noqa: BLE001 - a process edge
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def worst_of(pids: Iterable[int]) -> int:
    """0 if all of the processes end well."""
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids)
