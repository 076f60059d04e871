"""Commands that write a corpus: their words, alone and as an array of jobs, and what they leave and say."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.contract.faults import Fault, Launcher, Outcome, Running
from tokshard.format import names

Words = Sequence[str]
"""A command, without the name of the program."""

State = dict[str, str]
"""Path to SHA-256."""

DEDUP = ("--dedup", "exact")
SKIP = ("--on-bad-record", "skip", "--on-bad-source", "skip")


@dataclass(frozen=True)
class Command:
    """A build, an import or a copy.

    Args:
        words: without its workers.
        base: the command whose corpus is there before, if one is.
    """

    words: tuple[str, ...]
    base: tuple[str, ...] = ()


def build_words(sources: Sequence[Path | str], out: Path, tokenizer: Path, *options: str) -> tuple[str, ...]:
    """A build."""
    return ("build", *map(str, sources), "--out", str(out), "--tokenizer", str(tokenizer), "--quiet", *options)


def job_words(words: Words, index: int, jobs: int) -> list[str]:
    """One job of an array."""
    return [*words, "--workers", "1", "--job-index", str(index), "--num-jobs", str(jobs)]


def commit_words(out: Path) -> list[str]:
    """The command that makes the corpus when all jobs have ended."""
    return ["commit", str(out)]


@dataclass
class Bench:
    """A place where commands write into one directory."""

    launcher: Launcher
    place: Path
    tokenizer: Path
    ray_address: str = ""
    _references: dict[Command, tuple[State, list[str]]] = field(default_factory=dict)
    _bases: dict[tuple[str, ...], Path] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        return self.place / "out"

    def build_words(self, sources: Sequence[Path | str], *options: str) -> tuple[str, ...]:
        """A build into this place."""
        return build_words(sources, self.out, self.tokenizer, *options)

    def clear(self) -> None:
        """Remove what commands have left."""
        for folder in (self.out, self.launcher.directory):
            shutil.rmtree(folder, ignore_errors=True)

    def begin(self, command: Command) -> None:
        """The directory as it is before a command."""
        self.clear()
        if command.base:
            if command.base not in self._bases:
                done = self.run([*command.base, "--workers", "1"])
                assert done.exit_code == 0, done.errors
                self._bases[command.base] = self.place / f"base {len(self._bases)}"
                shutil.copytree(self.out, self._bases[command.base])
            else:
                shutil.copytree(self._bases[command.base], self.out)

    def start(self, words: Words, fault: Fault | Sequence[Fault] | None = None, *, stdin: bytes = b"") -> Running:
        address = self.ray_address if "--ray" in words else ""
        return self.launcher.start(["tokshard", *words], out=self.out, fault=fault, stdin=stdin, ray_address=address)

    def run(self, words: Words, fault: Fault | Sequence[Fault] | None = None, *, stdin: bytes = b"") -> Outcome:
        """Run a command, until the last of its processes is gone."""
        done = self.start(words, fault, stdin=stdin).end()
        done.wait()
        return done

    def run_by(self, executor: str, words: Words, fault: Fault | None = None, *, victim: int = 1) -> Outcome:
        """Run a command.

        Args:
            executor: ``local N``: N workers; ``array of N``: jobs, one after another, and the commit, whose outcome
                counts; ``ray``.
            fault: happens to the command; of an array, to the job `victim`, or to the commit, which comes last.
        """
        if executor == "ray":
            return self.run([*words, "--ray"], fault)
        kind, *_, number = executor.split()
        if kind == "local":
            return self.run([*words, "--workers", number], fault)
        commands = [job_words(words, index, int(number)) for index in range(int(number))] + [commit_words(self.out)]
        outcomes = [self.run(each, fault if index == victim else None) for index, each in enumerate(commands)]
        return outcomes[-1]

    def reference(self, command: Command) -> tuple[State, list[str]]:
        """What one process makes that nothing happens to, and its steps."""
        if command not in self._references:
            self.begin(command)
            done = self.run([*command.words, "--workers", "1"])
            assert done.exit_code == 0, done.errors
            self._references[command] = (state(self.out), done.steps)
        return self._references[command]

    def steps(self, command: Command) -> list[str]:
        """The steps of one process that nothing happens to."""
        return self.reference(command)[1]

    def check(self, command: Command, what: object = "", executor: str = "local 1") -> Outcome:
        """Run a command to its end: what it leaves is what one process makes that nothing happens to."""
        expected, _ = self._references[command]
        done = self.run_by(executor, command.words)
        assert done.exit_code == 0, f"{what}: {done.errors}"
        assert state(self.out) == expected, what
        return done


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
    return [line for line in said.splitlines() if line.startswith(("error: ", "hint: "))]


def shards(out: Path) -> list[Path]:
    """All shards that a reader could see, in order."""
    return sorted(path for path in out.rglob("shard-*") if names.is_shard_name(path.name))


def corpora(out: Path) -> list[Path]:
    """The finished corpora of a directory."""
    return [place for place in (out, out / names.TRAIN, out / names.VALIDATION) if (place / names.MANIFEST).exists()]
