"""A process that tries seeds of one kind, so that a trial that crashes or hangs is a trial that failed.

Run as ``python -m tests.soak.worker KIND FOLDER``: reads a seed per line, and answers each with a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Self

from tests.soak.kinds import KINDS, Kind
from tests.soak.record import Trial

ROOT = Path(__file__).parents[2]
START_SECONDS = 300
"""Seconds in which a process must have imported and made what its trials need."""


class UnpreparedError(RuntimeError):
    """A kind that cannot be tried."""


class Worker:
    """The side that asks. A context."""

    def __init__(self, name: str, kind: Kind, folder: Path) -> None:
        self._name, self._kind, self._folder = name, kind, folder
        self._process: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def try_(self, seed: int) -> Trial:
        """Try a seed.

        Raises:
            UnpreparedError: what the trials need could not be made.
        """
        if self._process is None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.worker", self._name, str(self._folder)],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RUST_BACKTRACE": "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            if (problem := self._ask("", START_SECONDS)) != {"ready": True}:
                self._end()
                raise UnpreparedError(f"{self._name}: what its trials need could not be made: {problem['problem']}")
        start = time.monotonic()
        answer = self._ask(str(seed), self._kind.limit_seconds)
        seconds = round(time.monotonic() - start, 3)
        if "outcome" not in answer:
            return self._failed(seed, answer["problem"], seconds)
        return Trial(kind=self._name, seed=seed, outcome=answer["outcome"], what=answer["what"], seconds=seconds)

    def _failed(self, seed: int, what: str, seconds: float) -> Trial:
        self._end()
        return Trial(kind=self._name, seed=seed, outcome="failed", what=what, seconds=seconds)

    def _ask(self, line: str, limit_seconds: float) -> dict[str, Any]:
        """The answer to a line; of a process that hangs or has ended, the problem."""
        if line:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], limit_seconds)[0]:
            return {"problem": f"no end in {limit_seconds:,.0f} s"}
        if not (answer := self._process.stdout.readline()):
            return {"problem": f"the process ended with {self._process.wait()}"}
        found: dict[str, Any] = json.loads(answer)
        return found

    def _end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


def _try(attempt: Any, seed: int) -> dict[str, str]:
    try:
        return {"outcome": "held", "what": attempt(seed)}
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return {"outcome": "failed", "what": "".join(traceback.format_exception(error))[-6_000:]}


def main(name: str, folder: Path) -> None:
    """Answer every seed on standard input."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what trials print is no answer
    with contextlib.ExitStack() as stack, contextlib.suppress(BrokenPipeError):  # the process that asks has ended
        attempt = KINDS[name].prepare(folder, stack)
        for answer in [{"ready": True}]:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        for line in sys.stdin:
            answers.write(json.dumps(_try(attempt, int(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
