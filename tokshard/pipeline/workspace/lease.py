"""Who may write into the output of a build."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from tokshard.errors import BuildError
from tokshard.pipeline.workspace.places import LOCK, Workspace

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def lock(workspace: Workspace) -> Iterator[bool]:
    """Hold the build directory alone, until the context or the process ends.

    Yields:
        False where the file system has no locks: two builds at once do work twice then, and the later one wins.

    Raises:
        BuildError: another build holds it, or the directory cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            lease = workspace.store.lease(LOCK, f"process {os.getpid()} on {platform.node()}")
            is_alone = stack.enter_context(lease)
        except BlockingIOError:
            raise BuildError(
                f"another build is writing to {workspace.out}",
                hint="wait for it, or give another --out",
            ) from None
        except OSError as error:
            raise cannot_write(workspace.out, error) from error
        yield is_alone


def lock_holder(workspace: Workspace) -> str | None:
    """The process that builds into a directory, as it calls itself; None if there is none."""
    return workspace.store.lease_holder(LOCK)


def cannot_write(path: Path, error: OSError) -> BuildError:
    """The error for a directory or disk that takes no more."""
    way_out = "make room" if error.errno in _NO_ROOM else "check the disk and its permissions"
    return BuildError(
        f"cannot write to {path}: {error.strerror or error}",
        hint=f"{way_out}, or give another --out; the same command continues where this one stopped",
    )
