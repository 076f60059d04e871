"""Promise 1 of a copy: the same bytes for any workers and crashes. What was done before a kill is not done again."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.contract.faults import Fault, Launcher, Outcome, kills
from tests.contract.outcomes import State, state
from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tokshard.inspect.verify.verification import verify_corpus

OPTIONS = {
    "in order": (),
    "shuffled": ("--shuffle", "17"),
    "a part": ("--max-tokens", "15", "--where", "lang=en"),
}


@dataclass
class Desk:
    """A place where one corpus is copied."""

    launcher: Launcher
    corpus: Path
    out: Path
    references: dict[tuple[str, ...], tuple[State, list[str]]] = field(default_factory=dict)

    def copy(self, *options: str, workers: int = 1, fault: Fault | None = None) -> Outcome:
        words = (str(self.corpus), "--shard-tokens", "60", *options, "--workers", str(workers))
        return self.launcher.run("copy", *words, out=self.out, fault=fault)

    def receipts(self) -> set[str]:
        """Of the tasks that are done."""
        return {str(path) for path in self.out.rglob("receipts/*.receipt")}

    def clear(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.rmtree(self.launcher.directory, ignore_errors=True)

    def reference(self, options: tuple[str, ...]) -> tuple[State, list[str]]:
        """What an undisturbed copy leaves, and its steps."""
        if options not in self.references:
            self.clear()
            done = self.copy(*options)
            assert done.exit_code == 0, done.errors
            assert verify_corpus(str(self.out)).is_ok
            self.references[options] = (state(self.out), done.steps)
        return self.references[options]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    directory = tmp_path_factory.mktemp("desk")
    lengths = [1 + 7 * index % 29 for index in range(40)]
    languages = ["en", "fr"] * (len(lengths) // 2)
    source = Source(documents=documents_of(lengths), path="a.jsonl", metadata={"lang": languages})
    corpus = write_corpus(
        directory / "corpus", sources=[source], columns={"lang": "string"}, tokenizer=TINY_TOKENIZER, shard_tokens=100
    )
    with Launcher(directory / "runs") as launcher:
        yield Desk(launcher, corpus, directory / "out")


def check_killed(desk: Desk, options: tuple[str, ...], fault: Fault, *, workers: int) -> None:
    expected, _ = desk.reference(options)
    desk.clear()
    killed = desk.copy(*options, fault=fault)
    assert killed.exit_code == -9
    done = desk.receipts()
    again = desk.copy(*options, workers=workers)
    assert again.exit_code == 0, f"{again.errors}\n{killed.steps[-1]}"
    assert state(desk.out) == expected, killed.steps[-1]
    repeated = {step.partition(" -> ")[2] for step in again.steps if step.startswith("replace ")} & done
    assert not repeated, killed.steps[-1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [OPTIONS["shuffled"], OPTIONS["a part"]], ids=["shuffled", "a part"])
def test_two_workers_copy_as_one_does(desk: Desk, options: tuple[str, ...]) -> None:
    expected, _ = desk.reference(options)
    desk.clear()
    done = desk.copy(*options, workers=2)
    assert done.exit_code == 0, done.errors
    assert state(desk.out) == expected


@pytest.mark.slow
@pytest.mark.parametrize("options", [OPTIONS["in order"], OPTIONS["shuffled"]], ids=["in order", "shuffled"])
def test_a_copy_killed_at_some_steps_and_run_again_gives_the_same_bytes(desk: Desk, options: tuple[str, ...]) -> None:
    _, steps = desk.reference(options)
    for number, fault in enumerate(random.Random(0).sample(kills(steps), 3)):
        check_killed(desk, options, fault, workers=2 if number == 0 else 1)


@pytest.mark.soak
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_copy_killed_at_any_step_and_run_again_gives_the_same_bytes(desk: Desk, options: tuple[str, ...]) -> None:
    _, steps = desk.reference(options)
    for number, fault in enumerate(kills(steps)):
        check_killed(desk, options, fault, workers=1 if number % 20 else 2)
