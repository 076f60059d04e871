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

ROOT = Path(__file__).parents[1]


class ChildFailedError(Exception):
    """A process ended with an error, or did not end in time."""


@contextlib.contextmanager
def child(command: Sequence[str], said: IO[str], *, is_leader: bool = True) -> Iterator[Any]:
    """``python COMMAND`` from the root of the repository, killed at the end of the block.

    Args:
        is_leader: what it started is killed with it. A child of a child must not be one: it would outlive its parent.
    """
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=subprocess.STDOUT,
        start_new_session=is_leader,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            if is_leader:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait()


def run(
    command: Sequence[str], *, seconds: float, until: Callable[[], bool] = lambda: False, is_leader: bool = True
) -> tuple[int | None, str]:
    """Wait for a process to end, or for `until`. `is_leader` is that of `child`.

    Returns:
        Its exit code, None if it was still running; and what it said.
    """
    end = time.monotonic() + seconds
    with tempfile.TemporaryFile("w+", errors="replace") as said, child(command, said, is_leader=is_leader) as process:
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
        raise ChildFailedError(f"no answer in {max(0, seconds):.0f} s")
    if status:
        raise ChildFailedError(f"ended with {status}: {last_lines(said)}")
    found = json.loads(said.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def last_lines(said: str) -> str:
    """The end of an output, in one line."""
    return " ".join([line.strip() for line in said.splitlines() if line.strip()][-2:])[-400:]


def lines_of(log: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that may be being written."""
    text = log.read_text() if log.exists() else ""
    return [json.loads(each) for each in text.splitlines(keepends=True) if each.endswith("\n")]
