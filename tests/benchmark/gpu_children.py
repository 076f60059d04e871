"""Work in processes of its own, so that a failure or a hang costs its own row and no other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]


class ChildFailedError(Exception):
    """A process ended with an error, or did not end in time."""


@contextlib.contextmanager
def child(command: Sequence[str], said: IO[str], environment: dict[str, str] | None = None) -> Iterator[Any]:
    """``python COMMAND`` from the root of the repository; it and what it started are killed at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(command: Sequence[str], *, seconds: float, until: Callable[[], bool] = lambda: False) -> tuple[int | None, str]:
    """Wait for a process to end, or for `until`.

    Returns:
        Its exit code, None if it was still running; and what it said.
    """
    end = time.monotonic() + seconds
    with tempfile.TemporaryFile("w+", errors="replace") as said, child(command, said) as process:
        while process.poll() is None and time.monotonic() < end and not until():
            time.sleep(0.05)
        status = process.returncode
        said.seek(0)
        return status, said.read()


def answer(command: Sequence[str], *, seconds: float) -> dict[str, Any]:
    """The JSON in the last line of a process.

    Raises:
        ChildFailedError: it failed, or did not end in time.
    """
    status, said = run(command, seconds=seconds)
    if status is None:
        raise ChildFailedError(f"no answer in {seconds:.0f} s")
    if status:
        raise ChildFailedError(f"ended with {status}: {last_lines(said)}")
    found = json.loads(said.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def last_lines(said: str) -> str:
    """The end of an output, in one line."""
    return " ".join([line.strip() for line in said.splitlines() if line.strip()][-2:])[-400:]
