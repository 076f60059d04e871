"""What was tried, in a file: one JSON line per trial, so that a run that is killed goes on where it was."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of a seed.

    Args:
        what: in a few words what came of it; of one that failed, all that is known.
    """

    kind: str
    seed: int
    outcome: Literal["held", "failed"]
    what: str
    seconds: float


class Record:
    """The trials of a file. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # a kill may have cut the last line
        if whole != content:
            path.write_bytes(whole)
        self.trials = [Trial(**json.loads(line)) for line in whole.splitlines()]
        self._taken = {(trial.kind, trial.seed) for trial in self.trials}

    def next_seed(self, kind: str, first: int, most: int | None) -> int | None:
        """The next seed of a kind that was not tried, and is not being tried; from now on it is.

        Args:
            most: seeds that are to be tried; None: any number. When they are, there is no next one.
        """
        with self._lock:
            if most is not None and sum(name == kind for name, _ in self._taken) >= most:
                return None
            seed = first
            while (kind, seed) in self._taken:
                seed += 1
            self._taken.add((kind, seed))
            return seed

    def add(self, trial: Trial) -> None:
        """Write a trial down."""
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(asdict(trial)) + "\n")
            self.trials.append(trial)

    def of(self, kind: str) -> Sequence[Trial]:
        """The trials of one kind."""
        with self._lock:
            return [trial for trial in self.trials if trial.kind == kind]
