"""What commands leave and say, in a form in which two of them can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from tests.contract.faults import Outcome
from tokshard.format import names

State = dict[str, str]
"""Path to SHA-256."""


def build_words(sources: Sequence[Path | str], out: Path, tokenizer: Path, *options: str) -> list[str]:
    """The command of a build."""
    return ["build", *map(str, sources), "--out", str(out), "--tokenizer", str(tokenizer), "--quiet", *options]


def state(out: Path) -> State:
    """Everything in a directory but the reports, which are not pure."""
    found = {str(path.relative_to(out)): path for path in out.rglob("*")}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
        for name, path in sorted(found.items())
        if path.name != names.REPORT
    }


def messages(outcome: Outcome, out: Path) -> list[str]:
    """The error and the hint of a command, as one says them that writes into ``OUT``.

    Inputs that are left out are not among them: the run that finds one names it.
    """
    said = outcome.errors.replace(str(out), "OUT")
    said = said.replace("remove OUT and run the jobs again", "start over with --force")  # jobs have no --force
    lines = said.splitlines()
    return [line for line in lines if line.startswith(("error: ", "hint: "))]


def shards(out: Path) -> list[Path]:
    """All shards that a reader could see, in order."""
    return sorted(path for path in out.rglob("shard-*") if names.is_shard_name(path.name))
