"""A build shared by the jobs of an array: which commands that takes. The one place that knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

Words = Sequence[str]
"""A command, without the name of the program."""


class Ended(Protocol):
    """How a command ended."""

    @property
    def exit_code(self) -> int: ...


RunAll = Callable[[Sequence[Words]], Sequence[Any]]
"""Runs commands that do not wait for each other, in any order or at once, and says how each `Ended`."""


def run_array(words: Words, out: Path, run_all: RunAll, *, jobs: int = 3) -> Any:
    """Run a build, an import or a copy as an array of jobs, and make its corpus.

    Args:
        words: the command of one process that does it all.
        run_all: how the jobs run.

    Returns:
        how the command ended that decides, as the process that does it all would end.
    """
    run_all([job_words(words, index, jobs) for index in range(jobs)])
    (committed,) = run_all([commit_words(out)])
    return committed


def job_words(words: Words, index: int, jobs: int) -> list[str]:
    """The command of one job."""
    return [*words, "--job-index", str(index), "--num-jobs", str(jobs)]


def commit_words(out: Path) -> list[str]:
    """The command that makes the corpus when all jobs have ended."""
    return ["commit", str(out)]


def one_after_another(run: Callable[[Words], Ended]) -> RunAll:
    """Runs commands in their order."""
    return lambda commands: [run(words) for words in commands]
