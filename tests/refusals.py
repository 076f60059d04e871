"""Tables of what is refused: a call, the problem line, the hint.

A room's table is `REFUSALS` in its ``test_refusals.py``. The page of error messages is made from all of them:
``python -m tests.refusals`` writes it.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tokshard import errors
from tokshard.cli import main
from tokshard.errors import TokshardError

Call = Callable[[Path], Any]


@dataclass(frozen=True)
class Refusal:
    """One call that is refused.

    Args:
        what: is refused, in a few words.
        call: is given an empty directory, which is the current one, too. It raises the error, or returns what
            `tokshard` returns.
        error: the class of the error, exactly; for a command line, its exit code.
        problem: the whole line. ``DIR`` stands for the directory, ``*`` for what may differ from run to run.
        hint: the whole line, "" for a plain error of Python, which has none.
    """

    what: str
    call: Call
    error: type[BaseException] | int
    problem: str
    hint: str = ""


@dataclass(frozen=True)
class Said:
    """How a command line ended."""

    exit_code: int
    errors: str

    @property
    def problem(self) -> str:
        return self._line("error: ")

    @property
    def hint(self) -> str:
        return self._line("hint: ")

    def _line(self, label: str) -> str:
        return next((line.removeprefix(label) for line in self.errors.splitlines() if line.startswith(label)), "")


def tokshard(*words: object) -> Said:
    """Run a command line in this process."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        exit_code = main.run([str(word) for word in words])
    return Said(exit_code, errors.getvalue())


def said_in(page: Path, calls: Mapping[str, Call]) -> list[Refusal]:
    """Refusals whose messages are in a text: for each call its name, the error with the problem, and the hint, if any.

    For a command line, its exit code stands for the error.
    """
    said = {}
    for entry in page.read_text(encoding="utf-8").split("\n\n"):
        what, problem, *hint = entry.strip("\n").split("\n    ")
        said[what] = problem.split(": ", 1), "".join(hint)
    assert said.keys() == calls.keys(), f"{page} has other refusals: {sorted(said.keys() ^ calls.keys())}"
    return [
        Refusal(what, calls[what], int(name) if name.isdigit() else _error(name), problem, hint)
        for what, ((name, problem), hint) in said.items()
    ]


def _error(name: str) -> type[BaseException]:
    """An error of tokshard, or of Python."""
    found: type[BaseException] = getattr(errors, name, None) or getattr(builtins, name)
    return found


def refused(refusals: Sequence[Refusal]) -> pytest.MarkDecorator:
    """Parametrize a test with the rows of a table; it calls `check`."""
    names = [each.what for each in refusals]
    assert len({*names}) == len(names), "two rows have one name"
    return pytest.mark.parametrize("refusal", [pytest.param(each, id=each.what) for each in refusals])


def check(refusal: Refusal, directory: Path) -> None:
    """Make the call, and compare what is said, to the last character."""
    with contextlib.chdir(directory):
        if isinstance(refusal.error, int):
            said = refusal.call(directory)
            found: tuple[Any, str, str] = said.exit_code, said.problem, said.hint
        else:
            with pytest.raises(refusal.error) as caught:
                refusal.call(directory)
            error = caught.value
            is_ours = isinstance(error, TokshardError)
            found = type(error), error.problem if is_ours else str(error), error.hint if is_ours else ""
    kind, problem, hint = found
    problem, hint = (text.replace(str(directory), "DIR") for text in (problem, hint))
    assert kind == refusal.error
    assert re.fullmatch(pattern(refusal.problem), problem), problem
    assert re.fullmatch(pattern(refusal.hint), hint), hint


def pattern(text: str) -> str:
    """A regular expression for a text in which ``*`` stands for anything."""
    return ".*".join(map(re.escape, text.split("*")))


# the page of error messages

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "recipes" / "errors.md"
ROOMS = {
    "cli": "The command line",
    "pipeline": "Building, importing and copying",
    "inspect": "Looking at corpora and plans",
    "trainer": "Training",
    "run_files": "Files that describe a job, and its checkpoints",
    "interop": "Files of other tools",
    "runtime": "Plans and loaders",
    "format": "Corpora",
    "store": "Disks, buckets and web servers",
}
HEAD = """\
# What error messages mean

Each error of tokshard has a line that says what is wrong, and a hint that says what to do. These are most of them, as
the tests of each part of tokshard compare them; … stands for what differs. Exit codes: 2 if the command line is wrong,
1 if something else is.

`python -m tests.refusals` writes this page from the tables of the tests.
"""


def tables() -> dict[str, list[Refusal]]:
    """The rows of all tables, by room."""
    found: dict[str, list[Refusal]] = {room: [] for room in ROOMS}
    for path in sorted(ROOT.glob("tests/*/test_refusals*.py")):
        module = importlib.import_module(f"tests.{path.parent.name}.{path.stem}")
        found.setdefault(path.parent.name, []).extend(module.REFUSALS)
    return found


def page() -> str:
    """The page: what has no hint is no error of tokshard, and not there. Equal problems share a row."""
    text = HEAD
    for room, refusals in tables().items():
        rows: dict[tuple[str, str], list[str]] = {}
        for row in refusals:
            if row.hint:
                rows.setdefault((row.problem, row.hint), []).append(row.what)
        if rows:
            text += f"\n## {ROOMS.get(room, room)}\n\n| what it says | what is refused | what to do |\n|---|---|---|\n"
            for (problem, hint), what in sorted(rows.items()):
                text += f"| {_code(problem)} | {_plain('; '.join(what))} | {_code(hint)} |\n"
    return text


def _shown(text: str) -> str:
    """With an ellipsis for what differs; a cell of a table has no bar and no line break, and shows a zero byte."""
    shown = text.replace("DIR", "…").replace("*", "…").replace("\n", " ").replace("\0", "\\0")
    return re.sub("…+", "…", shown).strip().replace("|", "\\|")


def _code(text: str) -> str:
    """A span of code: its fence is longer than any row of backticks in it."""
    shown = _shown(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    space = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{space}{shown}{space}{fence}"


def _plain(text: str) -> str:
    return re.sub(r"([<_\[\]`])", r"\\\1", _shown(text))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
