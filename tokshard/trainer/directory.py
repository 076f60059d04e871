"""The directory of a run: written by one job, the same on all of its ranks."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from torch import distributed

from tokshard.errors import TrainerError
from tokshard.trainer.parallel import together

LOCK = "run.lock"
SEEN_SECONDS = 10.0
"""How long a rank looks for what rank 0 has written: a network file system may show it late."""


class _Holder(msgspec.Struct):
    host: str
    process: int
    token: str


@contextmanager
def held(out: str) -> Iterator[None]:
    """Make the directory of a run and hold it; every rank calls it.

    Rank 0 has the lock. The system frees it when its process ends, however that ends.

    Raises:
        TrainerError: it cannot be made, another job holds it, or a rank sees another directory there.
    """
    is_first, descriptor = distributed.get_rank() == 0, -1
    holder = _Holder(host=platform.node(), process=os.getpid(), token=secrets.token_hex(8))
    try:
        with together():
            if is_first:
                descriptor = _lock(out, holder)
        token: list[str] = [holder.token]
        distributed.broadcast_object_list(token)
        with together():
            _look_for(out, token[0])
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def sync(path: str) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(out: str, holder: _Holder) -> int:
    path = os.path.join(out, LOCK)
    descriptor = -1
    try:
        os.makedirs(out, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        _flock(descriptor, path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, msgspec.json.encode(holder), 0)
        os.fsync(descriptor)
    except OSError as error:
        other = _holder(path)
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(error, BlockingIOError):
            who = f"process {other.process} on {other.host}" if other else "another process"
            raise TrainerError(
                f"{out} is in use by another job: {who} holds {path}",
                hint="wait until that job has ended, or give another train.out",
            ) from error
        raise TrainerError(
            f"{out} cannot be the directory of a run: {error}", hint="give a train.out that can be made and written"
        ) from error
    return descriptor


def _flock(descriptor: int, path: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        sys.stderr.write(f"warning: {path} cannot be locked ({error.strerror}): run one job at a time in it\n")


def _look_for(out: str, token: str) -> None:
    deadline = time.monotonic() + SEEN_SECONDS
    while (holder := _holder(os.path.join(out, LOCK))) is None or holder.token != token:
        if time.monotonic() > deadline:
            raise TrainerError(
                f"{out} on {platform.node()} is not the directory that rank 0 writes",
                hint="give a train.out on a file system that all ranks share",
            )
        time.sleep(0.1)


def _holder(path: str) -> _Holder | None:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(4096), type=_Holder)
    except (OSError, msgspec.MsgspecError):
        return None
