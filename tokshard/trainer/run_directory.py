"""The directory of a run: one job at a time holds it, and all of its ranks see the same one."""

from __future__ import annotations

import os
import platform
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from torch import distributed

from tokshard.errors import TrainerError
from tokshard.format.opening import check_outside_corpora
from tokshard.store.posix import PosixStore
from tokshard.trainer.parallel import together

LOCK = "run.lock"
SEEN_SECONDS = 10.0
"""How long to wait for a file of another process: a network file system may show it late."""


@contextmanager
def run_directory(out: str) -> Iterator[None]:
    """Make the directory of a run, and lock it. Every rank calls this.

    The system frees the lock when this process ends, for whatever reason.

    Raises:
        UsageError: it lies in a corpus.
        TrainerError: the directory cannot be made, another job holds it, or a rank sees a different directory.
    """
    path, holder = os.path.join(out, LOCK), f"process {os.getpid()} on {platform.node()}, {secrets.token_hex(8)}"
    seen = [holder]
    with ExitStack() as stack:
        with together(f"{out} cannot be the directory of a run", hint="give a writable train.out"):
            if distributed.get_rank() == 0:
                _lock(out, holder, stack)
                with open(path, "rb") as file:
                    os.fsync(file.fileno())  # a network file system shows it to others then
        distributed.broadcast_object_list(seen)
        with together():
            _look_for(path, seen[0])
        yield


def _lock(out: str, holder: str, stack: ExitStack) -> None:
    check_outside_corpora(out, key="train.out")  # whose files `verify` would call foreign
    store = PosixStore(out)
    try:
        if not stack.enter_context(store.hold(LOCK, holder)):
            sys.stderr.write(f"warning: {out}/{LOCK} cannot be locked here: run one job at a time in {out}\n")
    except BlockingIOError as error:
        other = (store.holder(LOCK) or "a process").partition(",")[0]
        raise TrainerError(
            f"{out} is in use by another job: {other} holds {out}/{LOCK}",
            hint="wait until that job has ended, or give another train.out",
        ) from error


def _look_for(path: str, holder: str) -> None:
    """Wait until this process sees the file of the process that locked the directory.

    Raises:
        TrainerError: it sees another directory of the same name, as on a disk of its own.
    """
    left = SEEN_SECONDS  # counted by pauses: a clock goes on while the job is suspended
    while True:
        with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            if file.read() == holder:
                return
        if left <= 0:
            raise TrainerError(
                f"{path} on {platform.node()} differs from what rank 0 wrote there",
                hint="give a train.out on a file system that all ranks share",
            )
        time.sleep(0.1)
        left -= 0.1
