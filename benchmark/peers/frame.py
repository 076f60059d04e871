"""What every section of the comparison with peers uses: one text, one tokenizer, one way to run and measure a peer.

A section is a module of this folder with ``run(frame: Frame) -> Section`` (or a list of sections).
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from benchmark.peers.environments import Environments, MissingError, last_line
from benchmark.processes import ROOT

PROGRAMS = "benchmark.peers.programs"
NOT_ASKED = "It was not asked for."
NUM_FILES = 4
"""The corpus is in so many files: most peers give each worker files of its own."""

T = TypeVar("T")

Found = dict[str, Any]
"""What a program printed, with ``wall_seconds``, ``cpu_seconds`` and ``peak_bytes``; or ``cannot`` or ``failed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to measure: what the row is called, and what `Frame.call` is asked for."""

    label: str
    peer: str
    case: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of a table.

    Args:
        runs: what each repetition found. The table shows the median of a number, with the least and the greatest, and
            anything else as it was found first. A run with ``cannot`` or ``failed`` shows that sentence.
    """

    label: str
    runs: list[Found]

    @property
    def reason(self) -> str | None:
        """Why there are no figures."""
        reasons = [f"{key}: {run[key]}" for run in self.runs for key in ("cannot", "failed") if run.get(key)]
        return reasons[0] if reasons else None

    @property
    def versions(self) -> dict[str, str]:
        return next((run["versions"] for run in self.runs if "versions" in run), {})

    def median(self, key: str) -> float | None:
        """Of the runs that have this figure."""
        values = [run[key] for run in self.runs if isinstance(run.get(key), int | float)]
        return statistics.median(values) if values and not self.reason else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table with what one needs to read it.

    Args:
        paragraphs: how it was measured.
        columns: the key of a figure in what was found, and the head of its column.
        notes: what the figures say, each one sentence or two.
        plot: the column that is drawn as bars, if any.
    """

    title: str
    paragraphs: list[str]
    columns: dict[str, str]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    plot: str | None = None


@dataclass(kw_only=True)
class Frame:
    """What a section is given.

    Args:
        work: scratch; a section makes folders of its own below it, and removes what is large.
        tokenizer: a folder with ``tokenizer.json``.
        megabytes: of text in the corpus; less where this machine has less.
        limit: seconds that one call may take.
        peers: call these alone (the first word of a program's name); None: all. `NOT_ASKED` is what the others say.
    """

    quick: bool
    work: Path
    repeats: int = 3
    tokenizer: Path = ROOT / "recipes" / "tokenizer"
    environments: Environments = field(default_factory=Environments)
    megabytes: float = 16.0
    limit: float = 300.0
    peers: frozenset[str] | None = None

    @cached_property
    def _texts(self) -> Path:
        folder = self.work / "texts"
        made = subprocess.run(
            [sys.executable, "-m", "benchmark.peers.corpus", str(folder), str(self.megabytes), str(NUM_FILES)],
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
        )
        self.text_facts: dict[str, Any] = json.loads(made.stdout)
        return folder

    def texts(self) -> Path:
        """A folder of `NUM_FILES` uncompressed JSON Lines files with ``text``, of about the same size; made once.

        Then `text_facts` has its ``documents`` and ``text_bytes``.
        """
        return self._texts

    def call(
        self, peer: str, case: str, settings: Mapping[str, Any], *, limit: float | None = None, killed: bool = False
    ) -> Found:
        """Run one case of ``programs/PEER.py`` as a process of its own, and measure it.

        Args:
            settings: given to the program as JSON. ``encoder: "1.x"`` puts that version of `tokenizers` first.
            limit: seconds, after which the process and its group get SIGKILL; default: that of the frame.
            killed: the limit is what is tried, not a failure: then ``killed`` says whether it came to that.

        Returns:
            The JSON object that the program printed last, with ``wall_seconds``, ``cpu_seconds`` (user and system, of
            it and all its descendants) and ``peak_bytes`` (of the largest process); or ``failed`` with the last line of
            stderr.
            ``exit_code`` and ``stderr`` are there in any case, but for a peer that is not installed.
        """
        if self.peers is not None and peer.partition("_")[0] not in self.peers:
            return {"cannot": NOT_ASKED}
        home = self.work / "home"
        home.mkdir(parents=True, exist_ok=True)
        environment = {"HF_HOME": str(home), "TMPDIR": str(home), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        environment["PYTHONDONTWRITEBYTECODE"] = ""  # or each process compiles its peer again
        seconds = self.limit if limit is None else limit
        try:
            python = self.environments.python(peer)
            if settings.get("encoder") == "1.x":
                environment["PYTHONPATH"] = self.environments.newer_tokenizers()
        except MissingError as error:
            return {"cannot": str(error)}
        # a small process in between: it waits for all descendants, and none of those that a section started
        program = [python, "-m", f"{PROGRAMS}.{peer}", case, json.dumps(settings, default=str)]
        measured = subprocess.run(
            [sys.executable, "-m", "benchmark.processes", str(seconds), *program],
            cwd=ROOT,
            env=os.environ | environment,
            check=True,
            stdout=subprocess.PIPE,
        )
        cost = json.loads(measured.stdout)
        if "problem" not in cost:
            return json.loads(last_line(cost["stdout"])) | cost | {"exit_code": 0}
        if cost["exit_code"] == -9 and killed:
            return {"exit_code": -9, "killed": True, "stderr": cost["problem"]}
        said = f"it took more than {seconds:.0f} s" if cost["exit_code"] == -9 else last_line(cost["problem"])
        return {"exit_code": cost["exit_code"], "failed": said, "stderr": cost["problem"]}

    def turns(
        self, cases: Iterable[Case], finish: Callable[[Case, Found], Found] = lambda _, found: found
    ) -> list[Row]:
        """All cases, one after another, and then all again: A B C A B C. One that can't is not tried again.

        Args:
            finish: called with what a run found that did not fail; what it returns is kept.
        """
        rows = [(case, Row(label=case.label, runs=[])) for case in cases]
        for repeat in range(self.repeats):
            for case, row in rows:
                if row.reason is None:
                    found = self.call(case.peer, case.case, case.settings)
                    row.runs.append(found if "failed" in found or "cannot" in found else finish(case, found))
                    log(f"{repeat + 1}/{self.repeats}  {case.label}: {row.reason or _seconds(row.runs[-1])}")
        return [row for _, row in rows]


def side_by_side(works: Sequence[Callable[[], T]]) -> list[T]:
    """What each returns, two at a time: for calls of which no time is shown."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(pool.map(lambda work: work(), works))


def log(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _seconds(found: Found) -> str:
    return f"{found['wall_seconds']:.1f} s"
