"""The directory of a run: one job writes to it, and all of its ranks see the same one."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TextIO

from torch import distributed

from tokshard.errors import TrainerError
from tokshard.trainer.parallel import together

LOCK = "run.lock"
SEEN_SECONDS = 10.0
"""How long a rank waits to see what rank 0 wrote: a network file system may show it late."""


@contextmanager
def held(out: str) -> Iterator[None]:
    """Make the directory of a run and lock it. Every rank calls this.

    Rank 0 holds the lock, and the system frees it when that process ends, for whatever reason.

    Raises:
        TrainerError: the directory cannot be made, another job holds it, or a rank sees a different directory.
    """
    path = os.path.join(out, LOCK)
    holder = [f"process {os.getpid()} on {platform.node()}, {secrets.token_hex(8)}"]
    with ExitStack() as stack:
        with together(f"{out} cannot be the directory of a run", hint="give a train.out that can be made and written"):
            if distributed.get_rank() == 0:
                os.makedirs(out, exist_ok=True)
                _lock(stack.enter_context(open(path, "a+", encoding="utf-8", errors="replace")), path, holder[0])
        distributed.broadcast_object_list(holder)
        with together():
            _look_for(path, holder[0])
        yield


def sync(path: str) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(file: TextIO, path: str, holder: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        raise TrainerError(
            f"{os.path.dirname(path)} is in use by another job: {file.read().partition(',')[0]} holds {path}",
            hint="wait until that job has ended, or give another train.out",
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        sys.stderr.write(f"warning: {path} cannot be locked ({error.strerror}): run one job at a time in it\n")
    file.truncate(0)
    file.write(holder)
    file.flush()
    os.fsync(file.fileno())


def _look_for(path: str, holder: str) -> None:
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            if file.read() == holder:
                return
        if time.monotonic() > deadline:
            raise TrainerError(
                f"{path} on {platform.node()} is not what rank 0 has written there",
                hint="give a train.out on a file system that all ranks share",
            )
        time.sleep(0.1)
