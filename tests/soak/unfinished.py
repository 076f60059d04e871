"""Trials that change a file of a build, an import or a copy that was stopped, and then let it go on."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from tests.contract import small
from tests.contract.arrays import commit_words, job_words
from tests.contract.faults import Fault, Launcher
from tests.contract.outcomes import State, state
from tests.contract.test_promise_01_product import Table
from tests.soak.corpora import check_words, run
from tests.soak.kills import table_of
from tests.soak.kinds import Try
from tests.soak.mutations import other_bytes
from tokshard.format import names
from tokshard.inspect.verify.verification import verify_corpus

CELLS = [
    *[("build", option) for option in ("plain", "dedup", "bad records skipped", "append", "split", "limit")],
    ("build", "damaged source skipped"),
    *[("import", option) for option in ("plain", "bad records skipped", "append")],
    ("copy", "plain"),
    ("copy --shuffle", "plain"),
]
MOMENTS = (0.15, 0.4, 0.6, 0.8, 0.95)
"""Parts of all steps after which one process is killed."""
JOBS = 3
SEEDS = 50
"""Seeds in a row that share a cell, which takes a few seconds to make."""


@dataclass(frozen=True)
class Stopped:
    """What a command left that was stopped.

    Args:
        path: a copy of its directory.
        out: where that directory has to be.
        commands: those that make the corpus of it.
        whole: what they make.
    """

    name: str
    path: Path
    out: Path
    commands: Sequence[Sequence[str]]
    whole: State


def prepare(folder: Path, stack: ExitStack) -> Try:
    """Commands are stopped early and late, and arrays of jobs before some of their jobs, when a seed asks for them."""
    warnings.simplefilter("ignore")
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # nothing is killed in this process
    small.shrink(**small.TINY)
    (folder / "stopped").mkdir()
    table = table_of(folder, stack.enter_context(Launcher(folder / "runs")))
    stopped = cache(lambda kind, option: list(stop_all(table, folder / "stopped", kind, option)))

    def try_(seed: int) -> str:
        rng = random.Random(f"unfinished {seed}")
        return attempt(rng, rng.choice(stopped(*CELLS[seed // SEEDS % len(CELLS)])))

    return try_


def stop_all(table: Table, folder: Path, kind: str, option: str) -> Iterator[Stopped]:
    """Stop the command of a cell at every moment."""
    whole, steps = table.reference(kind, option)
    command = table.command(kind, option)
    alone = [*command, "--workers", "1"]
    jobs = [job_words(alone, index, JOBS) for index in range(JOBS)]
    keep = partial(_keep, table.out, folder, f"{kind} {option}", whole)
    for moment in MOMENTS:
        table.begin(kind, option)
        table.run(alone, Fault(at=1 + int(moment * len(steps))))
        if (table.out / names.WORK).exists():
            yield keep(str(moment), [alone])
    for num_done in (1, JOBS) if kind in ("build", "import") else ():
        table.begin(kind, option)
        for words in jobs[:num_done]:
            table.run(words)
        yield keep(f"{num_done} jobs", [*jobs[num_done:], commit_words(table.out)])


def _keep(out: Path, folder: Path, name: str, whole: State, moment: str, commands: Sequence[Sequence[str]]) -> Stopped:
    path = folder / f"{name} {moment}"
    shutil.copytree(out, path)
    return Stopped(f"{name} {moment}", path, out, commands, whole)


def attempt(rng: random.Random, stopped: Stopped) -> str:
    """Change a file and go on: refused in words, the same corpus, or one in which `verify` finds that file."""
    shutil.rmtree(stopped.out, ignore_errors=True)
    shutil.copytree(stopped.path, stopped.out)
    files = sorted(path for path in stopped.out.rglob("*") if path.is_file() and path.name != names.REPORT)
    path = rng.choice(files)
    act = rng.choice(list(ACTS))
    content = ACTS[act](rng, path, files)
    what = f"{stopped.name}: {act} {path.relative_to(stopped.out)}"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    for words in stopped.commands:
        exit_code, errors = run(list(words))
        assert exit_code in (0, 1, 2), f"{what}: {exit_code} {errors}"
        assert "internal: " not in errors, f"{what}: {errors}"
        if exit_code:
            check_words(errors, None)
            assert "error: " in errors, f"{what}: {errors}"
            return "refused"
    if state(stopped.out) == stopped.whole:
        return "the same corpus"
    assert is_found(stopped.out, path), f"{what}: another corpus, and verify finds nothing at {path.name}"
    return "found by verify"


def is_found(out: Path, path: Path) -> bool:
    """Whether `verify` names a file."""
    corpora = [found for name in ("", names.TRAIN, names.VALIDATION) if (found := out / name / names.MANIFEST).exists()]
    problems = [problem for corpus in corpora for problem in verify_corpus(corpus.parent).problems]
    return path.name in {Path(problem.file or "").name for problem in problems}


def other_file(rng: random.Random, path: Path, files: Sequence[Path]) -> bytes:
    """The content of another file, if there can be one of the same kind."""
    alike = [file for file in files if file.suffix == path.suffix and file != path]
    return rng.choice(alike or files).read_bytes()


ACTS: dict[str, Callable[[random.Random, Path, Sequence[Path]], bytes | None]] = {
    "other bytes of": lambda rng, path, files: other_bytes(rng, path.read_bytes()),
    "more bytes of": lambda rng, path, files: other_bytes(rng, other_bytes(rng, path.read_bytes())),
    "no": lambda rng, path, files: None,
    "another's": other_file,
    "an empty": lambda rng, path, files: b"",
}
