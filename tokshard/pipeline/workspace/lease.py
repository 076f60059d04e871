"""The lock on the output of a build: either one build or commit may write, or any number of jobs of an array."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import secrets
import time
from collections.abc import Iterator

from tokshard.errors import BuildError
from tokshard.pipeline.workspace.places import JOBS, LOCK, Workspace
from tokshard.store import NO_ROOM, open_store, present

TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})
"""Errors of this process or machine, which say nothing about a file."""

_PREPARING = "a job that prepares the build, "
_POLL_SECONDS = 0.2
_TRIES = 3
_JOB = re.compile(r"(?P<index>\d+)-of-(?P<count>\d+)-[0-9a-f]+\.lock")


@contextlib.contextmanager
def lock(workspace: Workspace, *, is_preparing: bool = False) -> Iterator[bool]:
    """Lock the build directory until the context or the process ends.

    Args:
        is_preparing: for a job of an array, which holds the lock briefly. Other jobs may run; it waits for another job
            that prepares the build.

    Yields:
        False if the file system has no locks. Two simultaneous builds then do the work twice, and the later one wins.

    Raises:
        BuildError: another build holds it, jobs of one write there, or the directory cannot be written.
    """
    me = f"{_PREPARING if is_preparing else ''}{this_process()}"
    with contextlib.ExitStack() as stack:
        is_alone = None
        while is_alone is None:
            try:
                is_alone = stack.enter_context(workspace.store.hold(LOCK, me))
            except BlockingIOError as error:
                if not is_preparing:
                    # a lease in a bucket says who holds it, and when it can be taken over
                    has_details = error.strerror and error.strerror != os.strerror(errno.EAGAIN)
                    raise _in_use(workspace, f": {error.strerror or error}" if has_details else "") from None
                check_no_build(workspace)
                time.sleep(_POLL_SECONDS)
            except OSError as error:
                raise cannot_write(workspace.out, error) from error
        # a job shows itself before it checks the lock, so one of the two sees the other
        for job in () if is_preparing else running_jobs(workspace).values():
            raise BuildError(f"{job} is writing to {workspace.out}", hint="wait until all jobs have ended, or end them")
        yield is_alone


def check_no_build(workspace: Workspace) -> None:
    """Refuse to run a job beside a build that holds the directory.

    Raises:
        BuildError: there is such a build.
    """
    for _ in range(_TRIES):  # a new holder writes its name a moment after it takes the lock, so check more than once
        holder = lock_holder(workspace)
        if holder is None or holder.startswith(_PREPARING):
            return
        time.sleep(_POLL_SECONDS)
    raise _in_use(workspace)


def _in_use(workspace: Workspace, details: str = "") -> BuildError:
    return BuildError(
        f"another build is writing to {workspace.out}{details}", hint="wait for it, or give another --out"
    )


def lock_holder(workspace: Workspace) -> str | None:
    """The process that builds into a directory, by its own description; None if no build is running there."""
    return workspace.store.holder(LOCK)


@contextlib.contextmanager
def running_job(workspace: Workspace, job_index: int, num_jobs: int) -> Iterator[None]:
    """Show that a job runs, until the context or the process ends. Each run of a job has its own mark."""
    name = f"{JOBS}/{job_index:06d}-of-{num_jobs:06d}-{secrets.token_hex(8)}.lock"
    try:
        with workspace.store.hold(name, f"job {job_index} of {num_jobs}, {this_process()}"):
            yield
    finally:
        workspace.store.delete(name)


def running_jobs(workspace: Workspace) -> dict[tuple[int, int], str]:
    """(index, number of jobs) of each running job, and its own description; none if the store cannot tell."""
    found = {}
    for name in sorted(present(workspace.store, JOBS)):
        job = _JOB.fullmatch(name)
        if job is not None and (holder := workspace.store.holder(f"{JOBS}/{name}")) is not None:
            found[int(job["index"]), int(job["count"])] = holder
    return found


def this_process() -> str:
    """The name of this process in messages."""
    return f"process {os.getpid()} on {platform.node()}"


def cannot_write(path: str, error: OSError) -> BuildError:
    """The error for a directory or disk that cannot be written, or for a build whose files another process removed."""
    if error.errno == errno.ENOENT and _exists(path):
        return BuildError(
            f"files of the build in {path} are gone: another build began or ended there, or they were removed",
            hint="run the same command again when no other build or job writes there",
        )
    if error.errno in TOO_MANY_FILES:
        return BuildError(
            f"cannot write to {path}: {error.strerror or error}",
            hint="raise the limit of open files ('ulimit -n'), and run the same command to continue",
        )
    way_out = "make room" if error.errno in NO_ROOM else "check the disk and its permissions"
    return BuildError(
        f"cannot write to {path}: {error.strerror or error}",
        hint=f"{way_out}, or give another --out; the same command continues where this one stopped",
    )


def _exists(folder: str) -> bool:
    try:
        open_store(folder).names()
    except OSError:
        return False
    return True
