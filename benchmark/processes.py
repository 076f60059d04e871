"""Run a process and say what it and everything below it cost.

    python -m benchmark.processes SECONDS PYTHON ARGUMENTS...

does so in a process of its own, for one that has children already or is not small, and prints a line of JSON.
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

_PR_SET_CHILD_SUBREAPER = 36
_ORPHAN_SECONDS = 30
_THREAD_SETTINGS = {"TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS"}  # figures are those of the defaults


class Cost(NamedTuple):
    """What a process and all its descendants cost.

    Args:
        wall_seconds: until the process ended, as its user waits; its orphans may end later.
        peak_bytes: resident memory of the largest single process. Linux counts what the parent had at the fork too,
            so whoever measures has to be small.
        stderr: its end.
    """

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int
    stdout: str
    stderr: str


class ProcessFailedError(Exception):
    """A measured process ended with an error, or left others behind.

    Args:
        exit_code: negative for a signal; None if what it started does not end.
    """

    def __init__(self, problem: str, exit_code: int | None = None):
        super().__init__(problem)
        self.exit_code = exit_code


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends first (Linux).

    Without this the cost of a `multiprocessing` fork server, and of every worker below it, goes to process 1 and is
    in no one's usage: a build with two workers then looks cheaper than with one. `Bench.build` checks for that.
    """
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def run(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    python: str | None = None,
    kill_after: float | None = None,
) -> Cost:
    """Run ``python COMMAND`` from the root of the repository; one at a time, after `adopt_orphans`.

    Args:
        python: default: the interpreter of this process.
        kill_after: seconds until it and all processes of its group get SIGKILL.

    Raises:
        ProcessFailedError: its exit code is not 0, or what it started does not end.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _THREAD_SETTINGS}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        started = time.perf_counter()
        process = subprocess.Popen(
            [python or sys.executable, *command],
            cwd=ROOT,
            env=kept | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=kill_after is not None,
        )
        timer = threading.Timer(kill_after or 0, os.killpg, (process.pid, signal.SIGKILL))
        try:
            if kill_after is not None:
                timer.start()
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            timer.cancel()
        wall_seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)  # wait4 took it from under Popen
        usages = [usage, *_orphans(command)]
        stderr.seek(0)
        said = stderr.read().decode(errors="replace")
        if process.returncode:
            problem = f"exit code {process.returncode}: python {' '.join(command)}\n{said[-3000:]}"
            raise ProcessFailedError(problem, process.returncode)
        stdout.seek(0)
        return Cost(
            cpu_seconds=sum(each.ru_utime + each.ru_stime for each in usages),
            wall_seconds=wall_seconds,
            peak_bytes=max(each.ru_maxrss for each in usages) * (1 if sys.platform == "darwin" else 1024),
            stdout=stdout.read().decode(),
            stderr=said[-100_000:],
        )


def _orphans(command: Sequence[str]) -> list[resource.struct_rusage]:
    """Usage of what the process left behind, with the children that those waited for."""
    found = []
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while True:
        try:
            pid, _, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid:
            found.append(usage)
        elif time.monotonic() > deadline:
            raise ProcessFailedError(f"python {' '.join(command)} left processes that do not end")
        else:
            time.sleep(0.005)


def main() -> None:
    seconds, python, *command = sys.argv[1:]
    adopt_orphans()
    try:
        said = run(command, python=python, kill_after=float(seconds))._asdict()
    except ProcessFailedError as error:
        said = {"exit_code": error.exit_code, "problem": str(error)}
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main()
