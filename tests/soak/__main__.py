"""``python -m tests.soak``: trials of every kind, in turn, for some minutes or until each kind had its number.

What was tried is in a file with its seed, and is not tried again. ``python -m tests.soak KIND SEED`` tries one alone.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.kinds import KINDS, Kind
from tests.soak.worker import Record, Trial, UnpreparedError, Worker

TURN_SECONDS = 45
"""About how long a process tries one kind before the next kind has its turn."""


@dataclass(kw_only=True)
class Soak:
    """Trials that are to be made.

    Args:
        seconds: after which no trial begins; None: each kind has its number of trials.
        first: the seed from which on each kind counts.
    """

    kinds: Mapping[str, Kind]
    record: Record
    folder: Path
    seconds: float | None
    first: int
    spent: Counter[str] = field(default_factory=Counter)
    unprepared: set[str] = field(default_factory=set)
    stopped: threading.Event = field(default_factory=threading.Event)
    _start: float = field(default_factory=time.monotonic)

    def run(self, jobs: int) -> None:
        """Try until the end, in some processes at once."""
        threads = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            show("interrupted: waiting for the trials in progress")
            self.stopped.set()
            for thread in threads:
                thread.join()

    def _work(self, number: int) -> None:
        """Take turns: the next kind is the one that had the least of its share of the time."""
        while left := [name for name in self.kinds if not self._is_over(name)]:
            name = min(left, key=lambda name: self.spent[name] / (self.kinds[name].share or 0.01))
            start, stop = time.monotonic(), time.monotonic() + TURN_SECONDS
            self.spent[name] += TURN_SECONDS
            with closing(Worker(name, self.kinds[name], self.folder / f"{name}-{number}")) as worker:
                while not self._is_over(name) and time.monotonic() < stop:
                    if (seed := self.record.next_seed(name, self.first, self._most(name))) is None:
                        break
                    try:
                        trial = worker.try_(seed)
                    except UnpreparedError as error:
                        show(f"FAILED {error}")
                        self.unprepared.add(name)
                        break
                    self.record.add(trial)
                    if trial.outcome == "failed":
                        show(f"FAILED {name} {trial.seed}: {trial.what.strip().splitlines()[-1][:300]}")
            self.spent[name] += time.monotonic() - start - TURN_SECONDS  # type: ignore[assignment]

    def _is_over(self, name: str) -> bool:
        if self.stopped.is_set() or name in self.unprepared:
            return True
        if self.seconds is not None:
            return time.monotonic() > self._start + self.seconds
        return len(self.record.of(name)) >= self._most(name)

    def _most(self, name: str) -> float:
        return self.kinds[name].num_trials if self.seconds is None else math.inf


def show(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def table(kinds: Sequence[str], record: Record) -> Iterator[str]:
    """What the record says of each kind."""
    yield f"{'kind':<10} {'trials':>7} {'failed':>7} {'hours':>7}  what came of them"
    for name in kinds:
        trials = record.of(name)
        found = Counter(trial.what for trial in trials if trial.outcome == "held")
        what = ", ".join(f"{count:,} {word}" for word, count in found.most_common(6))
        num_failed = len(trials) - found.total()
        yield f"{name:<10} {len(trials):>7,} {num_failed:>7,} {sum(t.seconds for t in trials) / 3600:>7.2f}  {what}"
    for trial in failed(kinds, record):
        yield f"failed: make soak ONLY='{trial.kind} {trial.seed}'"


def failed(kinds: Sequence[str], record: Record) -> list[Trial]:
    return [trial for name in kinds for trial in record.of(name) if trial.outcome == "failed"]


def alone(name: str, seed: int) -> int:
    """Try one seed, and show all that is known of it."""
    with tempfile.TemporaryDirectory() as folder, closing(Worker(name, KINDS[name], Path(folder))) as worker:
        trial = worker.try_(seed)
    show(f"{trial.kind} {trial.seed} {trial.outcome} in {trial.seconds:.1f} s: {trial.what.rstrip()}")
    return int(trial.outcome == "failed")


def main(words: Sequence[str]) -> int:
    """Run what the words ask for; 1 if a trial failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("kind", nargs="?", choices=KINDS, metavar="KIND", help=f"this one only, of {', '.join(KINDS)}")
    parser.add_argument("seed", nargs="?", type=int, metavar="SEED", help="try this one alone")
    parser.add_argument("--minutes", type=float, help="try for so long, rather than each kind its number of trials")
    parser.add_argument("--jobs", type=int, default=2, help="processes that try at once")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--record", type=Path, default=Path(".soak/record.jsonl"), help="the file of what was tried")
    given = parser.parse_args(words)
    if given.seed is not None:
        return alone(given.kind, given.seed)
    is_short = given.minutes is not None and given.kind is None
    kinds = {
        name: kind
        for name, kind in KINDS.items()
        if name == (given.kind or name) and kind.is_here and (kind.share or not is_short)
    }
    record = Record(given.record)
    seconds = None if given.minutes is None else given.minutes * 60
    left = sum((kind.num_trials - len(record.of(name))) * kind.trial_seconds for name, kind in kinds.items())
    ends = f"for {(left / given.jobs if seconds is None else seconds) / 60:,.0f} minutes"
    show(f"{given.jobs} processes try {ends}. Interrupt it at any time: {given.record} says what was tried.")
    for name, kind in kinds.items():
        number = f" of {kind.num_trials:,}" if seconds is None else ""
        show(f"  {name:<10} {len(record.of(name)):,}{number} tried, seeds from {given.first}")
    with tempfile.TemporaryDirectory(prefix="tokshard-soak-") as folder:
        soak = Soak(kinds=kinds, record=record, folder=Path(folder), seconds=seconds, first=given.first)
        soak.run(given.jobs)
    for line in table(list(kinds), record):
        show(line)
    return 130 if soak.stopped.is_set() else int(bool(soak.unprepared or failed(list(kinds), record)))


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
    # a shell lets its background processes ignore Ctrl-C; a kill ends the run in order, too
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    os.nice(10)
    sys.exit(main(sys.argv[1:]))
