"""A process that tries seeds of one kind, so that one that crashes or hangs is a trial that failed; and the record."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.soak.kinds import Kind

START_SECONDS = 300
"""Seconds in which a process must have imported and made what its trials need."""

Answer = tuple[str, str]
"""``held`` or ``failed``, and what came of it."""


@dataclass(frozen=True)
class Trial:
    """What was tried, and in a few words what came of it; of one that failed, all that is known."""

    kind: str
    seed: int
    outcome: str
    what: str
    seconds: float


class Record:
    """The trials of a file, a line for each. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # a kill may have cut the last line
        path.write_bytes(whole)
        self.trials = [Trial(**json.loads(line)) for line in whole.splitlines()]
        self._taken = {(trial.kind, trial.seed) for trial in self.trials}

    def next_seed(self, kind: str, first: int, most: float) -> int | None:
        """The next seed of a kind that was not tried, and is not being tried; from now on it is. None after `most`."""
        with self._lock:
            taken = {seed for name, seed in self._taken if name == kind}
            if len(taken) >= most:
                return None
            seed = next(seed for seed in itertools.count(first) if seed not in taken)
            self._taken.add((kind, seed))
            return seed

    def add(self, trial: Trial) -> None:
        """Write a trial down."""
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(asdict(trial)) + "\n")
            self.trials.append(trial)

    def of(self, kind: str) -> list[Trial]:
        """The trials of one kind."""
        with self._lock:
            return [trial for trial in self.trials if trial.kind == kind]


class UnpreparedError(RuntimeError):
    """A kind that cannot be tried."""


class Worker:
    """The side that asks: it starts the process again after a crash or a hang. Close it."""

    def __init__(self, name: str, kind: Kind, folder: Path) -> None:
        self._name, self._kind, self._folder = name, kind, folder
        self._process: Any = None
        self._pipe: Any = None

    def try_(self, seed: int) -> Trial:
        """Try a seed.

        Raises:
            UnpreparedError: what the trials need could not be made.
        """
        if self._process is None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(self._kind, self._folder, theirs))
            self._process.start()
            theirs.close()
            outcome, what = self._answer(START_SECONDS)
            if outcome == "failed":
                self.close()
                raise UnpreparedError(f"{self._name}: what its trials need could not be made: {what}")
        start = time.monotonic()
        self._pipe.send(seed)
        outcome, what = self._answer(self._kind.limit_seconds)
        return Trial(self._name, seed, outcome, what, round(time.monotonic() - start, 3))

    def _answer(self, limit_seconds: float) -> Answer:
        """What the process answers. One that hangs or has ended is gone then."""
        try:
            if self._pipe.poll(limit_seconds):
                found: Answer = self._pipe.recv()
                return found
            problem = f"no end in {limit_seconds:,.0f} s"
        except (EOFError, OSError):
            self._process.join()
            problem = f"the process ended with {self._process.exitcode}"
        self.close()
        return "failed", problem

    def close(self) -> None:
        if self._process is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                self._process.join(10)
            self._pipe.close()
            self._process = None


def serve(kind: Kind, folder: Path, pipe: Any) -> None:
    """Answer seeds until the other side is gone."""
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    os.dup2(2, 1)  # what trials print is no part of the table
    with contextlib.ExitStack() as stack, contextlib.suppress(EOFError, BrokenPipeError):
        prepared: list[Any] = []
        pipe.send(_outcome(lambda: prepared.append(kind.prepare(folder, stack))))
        while True:
            seed = pipe.recv()
            pipe.send(_outcome(lambda seed=seed: prepared[0](seed)))


def _outcome(call: Any) -> Answer:
    try:
        return "held", str(call())
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return "failed", "".join(traceback.format_exception(error))[-6_000:]
