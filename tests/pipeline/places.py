"""Small builds, and what they leave in their directory."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.pipeline.inputs import jsonl
from tokshard import build_corpus
from tokshard.format import names
from tokshard.pipeline.progress import Report, StageStarted

TEXTS = [f"text {number}" for number in range(40)]
SPLIT = {"validation_fraction": 0.25}


def write(path: Path, texts: Sequence[str]) -> Path:
    """A file of JSON lines."""
    path.write_bytes(jsonl([{"text": text} for text in texts]))
    return path


def build(place: Path, *sources: Path, **options: Any) -> Path:
    """Build into ``out`` of a place, in this process."""
    settings = {"tokenizer": place / "tok", "out": place / "out", "workers": 1}
    return Path(build_corpus(sources or [place / "a.jsonl"], **{**settings, **options}).directory)


def files(directory: Path) -> dict[str, str]:
    """Every file below a directory, links not followed, but for build reports, which are not pure."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != names.REPORT
    }


class StoppedError(Exception):
    """Ends a build where a kill would."""


def at(kind: type, act: Callable[[Any], object], *, number: int = 1, stage: str = "") -> Callable[[Report], None]:
    """An observer that acts at a report of a kind, the first one or another, in a stage or in any."""
    stages, seen = [""], itertools.count(1)

    def observe(report: Report) -> None:
        if isinstance(report, StageStarted):
            stages.append(report.name)
        if isinstance(report, kind) and stage in ("", stages[-1]) and next(seen) == number:
            act(report)

    return observe


def interrupt(_: object) -> None:
    """Ctrl-C."""
    raise KeyboardInterrupt
