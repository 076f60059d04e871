"""``python -m tests.soak``: trials of every kind, in turn, for some minutes or until each kind had its number.

What was tried is in a file with its seed, and is not tried again. ``python -m tests.soak KIND SEED`` tries one alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.kinds import KINDS, Kind
from tests.soak.record import Record
from tests.soak.worker import UnpreparedError, Worker

TURN_SECONDS = 45
"""About how long a process tries one kind before the next kind has its turn."""


@dataclass(kw_only=True)
class Soak:
    """Trials that are to be made.

    Args:
        kinds: that are tried.
        seconds: after which no trial begins; None: each kind has its number of trials.
        first: the seed from which on each kind counts.
        shares: of the time, by kind.
    """

    kinds: Mapping[str, Kind]
    record: Record
    folder: Path
    seconds: float | None
    first: int
    spent: Counter[str] = field(default_factory=Counter)
    unprepared: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _start: float = field(default_factory=time.monotonic)
    stopped: threading.Event = field(default_factory=threading.Event)

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
        while (name := self._next()) is not None:
            folder, start = self.folder / f"{name}-{number}", time.monotonic()
            with Worker(name, self.kinds[name], folder) as worker:
                try:
                    self._turn(name, worker)
                except UnpreparedError as error:
                    show(f"FAILED {error}")
                    self.unprepared.add(name)
            with self._lock:
                self.spent[name] += time.monotonic() - start - TURN_SECONDS
            shutil.rmtree(folder, ignore_errors=True)

    def _turn(self, name: str, worker: Worker) -> None:
        stop = time.monotonic() + TURN_SECONDS
        most = self.kinds[name].num_trials if self.seconds is None else None
        while not self._is_over(name) and time.monotonic() < stop:
            if (seed := self.record.next_seed(name, self.first, most)) is None:
                return
            trial = worker.try_(seed)
            self.record.add(trial)
            if trial.outcome == "failed":
                show(f"FAILED {name} {trial.seed}: {trial.what.strip().splitlines()[-1][:300]}")

    def _next(self) -> str | None:
        """The kind that had the least of its share of the time."""
        with self._lock:
            left = [name for name in self.kinds if not self._is_over(name)]
            if not left:
                return None
            name = min(left, key=lambda name: self.spent[name] / self._share(name))
            self.spent[name] += TURN_SECONDS
            return name

    def _share(self, name: str) -> float:
        return self.kinds[name].share or 0.01

    def _is_over(self, name: str) -> bool:
        if self.stopped.is_set() or name in self.unprepared:
            return True
        if self.seconds is not None:
            return time.monotonic() > self._start + self.seconds
        return len(self.record.of(name)) >= self.kinds[name].num_trials


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
        failed = sum(trial.outcome == "failed" for trial in trials)
        yield f"{name:<10} {len(trials):>7,} {failed:>7,} {sum(t.seconds for t in trials) / 3600:>7.2f}  {what}"
    for trial in record.trials:
        if trial.outcome == "failed" and trial.kind in kinds:
            yield f"failed: make soak ONLY='{trial.kind} {trial.seed}'"


def alone(name: str, seed: int) -> int:
    """Try one seed, and show all that is known of it."""
    with tempfile.TemporaryDirectory() as folder, Worker(name, KINDS[name], Path(folder)) as worker:
        trial = worker.try_(seed)
    show(f"{trial.kind} {trial.seed} {trial.outcome} in {trial.seconds:.1f} s: {trial.what.rstrip()}")
    return int(trial.outcome == "failed")


def main(words: Sequence[str]) -> int:
    """Run what the words ask for; 1 if a trial failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("only", nargs="*", metavar="KIND [SEED]", help=f"of {', '.join(KINDS)}; with a seed, it alone")
    parser.add_argument("--minutes", type=float, help="try for so long, rather than each kind its number of trials")
    parser.add_argument("--jobs", type=int, default=2, help="processes that try at once")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--record", type=Path, default=Path(".soak/record.jsonl"), help="the file of what was tried")
    given = parser.parse_args(words)
    if given.only and (given.only[0] not in KINDS or not all(map(str.isdecimal, given.only[1:2])) or given.only[2:]):
        parser.error(f"{' '.join(given.only)}: give a kind ({', '.join(KINDS)}), or a kind and a seed")
    if len(given.only) == 2:
        return alone(given.only[0], int(given.only[1]))
    kinds = {name: kind for name, kind in KINDS.items() if name in (given.only or KINDS)}
    record = Record(given.record)
    seconds = None if given.minutes is None else given.minutes * 60
    short = given.minutes is not None and not given.only
    kinds = {name: kind for name, kind in kinds.items() if kind.is_here and (kind.share or not short)}
    left = sum((kind.num_trials - len(record.of(name))) * kind.trial_seconds for name, kind in kinds.items())
    ends = f"for {(left / given.jobs if seconds is None else seconds) / 60:,.0f} minutes"
    ends += "" if seconds is not None else " or so, to the number of each kind"
    show(f"{given.jobs} processes try {ends}. Interrupt it at any time: {given.record} says what was tried.")
    for name, kind in kinds.items():
        done, number = len(record.of(name)), f" of {kind.num_trials:,}" if seconds is None else ""
        show(f"  {name:<10} {kind.about} ({done:,}{number} tried, seeds from {given.first})")
    for name in [] if given.only else sorted(KINDS.keys() - kinds.keys()):
        show(f"  {name:<10} left out: {'it takes longer' if KINDS[name].is_here else f'no {KINDS[name].needs} here'}")
    with tempfile.TemporaryDirectory(prefix="tokshard-soak-") as folder:
        soak = Soak(kinds=kinds, record=record, folder=Path(folder), seconds=seconds, first=given.first)
        soak.run(given.jobs)
    for line in table(list(kinds), record):
        show(line)
    if soak.stopped.is_set():
        return 130
    return int(
        bool(soak.unprepared) or any(trial.outcome == "failed" and trial.kind in kinds for trial in record.trials)
    )


if __name__ == "__main__":
    # a shell lets its background processes ignore Ctrl-C; a kill ends the run in order, too
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(AttributeError):
        os.nice(10)
    sys.exit(main(sys.argv[1:]))
