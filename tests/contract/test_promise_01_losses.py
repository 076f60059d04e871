"""Promise 1 where workers die: one that is lost costs one more run of what it did, and a second one ends the build."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.contract import small
from tests.contract.faults import Fault, Launcher, Outcome
from tests.contract.outcomes import State, build_words, messages, shards, state
from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tests.examples import crossed
from tokshard.format import names

pytestmark = pytest.mark.timeout(300)

KINDS = {"lines.jsonl": bytes, "stream.jsonl.gz": lambda lines: gzip.compress(lines, 0, mtime=0)}
OPTIONS = {"plain": (), "dedup": ("--dedup", "exact"), "limit": ("--max-documents", "25")}


@dataclass
class Bench:
    """A place where one command loses workers."""

    launcher: Launcher
    place: Path
    tokenizer: Path
    references: dict[tuple[str, ...], State] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        return self.place / "out"

    def words(self, kind: str, *options: str) -> list[str]:
        """A build of two inputs: a stream that is the only one is read and written by the first process."""
        sources = [self.place / kind, self.place / f"second-{kind}"]
        return build_words(sources, self.out, self.tokenizer, "--task-bytes", "512", *options)

    def run(self, words: list[str], *, workers: int = 2, fault: Fault | None = None, stdin: bytes = b"") -> Outcome:
        found = [*words, "--workers", str(workers)]
        return self.launcher.start(found, out=self.out, fault=fault, stdin=stdin).end()

    def clear(self) -> None:
        for folder in (self.out, self.launcher.directory):
            shutil.rmtree(folder, ignore_errors=True)

    def reference(self, words: list[str]) -> State:
        """What one process makes that nothing happens to."""
        if tuple(words) not in self.references:
            self.clear()
            done = self.run(words, workers=1)
            assert done.exit_code == 0, done.errors
            self.references[tuple(words)] = state(self.out)
        self.clear()
        return self.references[tuple(words)]


@pytest.fixture(scope="module")
def bench(launcher: Launcher, byte_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    place = tmp_path_factory.mktemp("place")
    rng = random.Random(1)
    texts = [f"text {rng.randrange(30)}" for _ in range(40)]
    lines = b"".join(json.dumps({"text": text}).encode().ljust(99) + b"\n" for text in texts)
    for kind, pack in KINDS.items():
        for name in (kind, f"second-{kind}"):
            (place / name).write_bytes(pack(lines))
    write_corpus(
        place / "corpus", documents_of([1 + 7 * n % 29 for n in range(40)]), tokenizer=TINY_TOKENIZER, shard_tokens=60
    )
    return Bench(launcher, place, byte_tokenizer)


SHARD = r"open .*/\.shard-00-0000000-000002-"
"""A step in the middle of a task or segment, with a part of a file on disk."""


@pytest.mark.slow
@crossed("kind, name", KINDS, OPTIONS)
def test_a_task_whose_worker_dies_runs_again_on_another(bench: Bench, kind: str, name: str) -> None:
    words = bench.words(kind, *OPTIONS[name])
    reference = bench.reference(words)
    done = bench.run(words, fault=Fault(on=SHARD, act="die"))
    assert done.exit_code == 0, done.errors
    assert sum(step.startswith("open") and "shard-00-0000000-000002-" in step for step in done.steps) >= 2
    assert state(bench.out) == reference


@pytest.mark.slow
@pytest.mark.parametrize("step", ["hashing", "finding"])
def test_a_task_of_the_search_for_duplicates_whose_worker_dies_runs_again(bench: Bench, step: str) -> None:
    words = bench.words("lines.jsonl", "--dedup", "exact")
    reference = bench.reference(words)
    on = {"hashing": small.HASHES, "finding": small.MERGED_HASHES}[step]
    done = bench.run(words, fault=Fault(on=on, act="die"))
    assert done.exit_code == 0, done.errors
    assert state(bench.out) == reference


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_task_that_costs_a_second_worker_ends_the_build_and_the_next_run_continues(bench: Bench, kind: str) -> None:
    words = bench.words(kind)
    reference = bench.reference(words)
    ended = bench.run(words, fault=Fault(on=SHARD, times=2, act="die"))
    assert ended.exit_code == 1, ended.errors
    problem, hint = messages(ended, bench.out)
    assert "was killed by SIGKILL while it read" in problem
    assert str(bench.place / kind) in problem
    assert hint.startswith("hint: run the same command again: finished tasks are kept")
    assert not (bench.out / names.MANIFEST).exists()
    # a task that the end stopped between its shard and its receipt runs again
    done = {path.stem for path in bench.out.glob(f"{names.WORK}/{small.RECEIPTS}/*")}
    kept = {
        path.name: path.stat().st_mtime_ns for path in shards(bench.out) if any(f"-{key}-" in path.name for key in done)
    }
    assert kept
    assert bench.run(words).exit_code == 0
    assert state(bench.out) == reference
    assert {name: (bench.out / name).stat().st_mtime_ns for name in kept} == kept


def test_losses_of_different_tasks_end_no_build(bench: Bench) -> None:
    words = bench.words("lines.jsonl")
    reference = bench.reference(words)
    losses = [Fault(on=rf"open .*/\.shard-00-0000000-00000{segment}-", act="die") for segment in range(4)]
    done = bench.launcher.start([*words, "--workers", "2"], out=bench.out, fault=losses).end()
    assert done.exit_code == 0, done.errors
    assert state(bench.out) == reference


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [(), ("--shuffle", "7")], ids=["in order", "shuffled"])
def test_a_task_of_a_copy_whose_worker_dies_runs_again_once(bench: Bench, shuffle: tuple[str, ...]) -> None:
    words = ["copy", str(bench.place / "corpus"), "--out", str(bench.out), "--shard-tokens", "40", *shuffle]
    reference = bench.reference(words)
    fault = Fault(on=r"open .*/\.shard-", act="die")
    assert bench.run(words, fault=fault).exit_code == 0
    assert state(bench.out) == reference
    bench.clear()
    again = replace(fault, on=r"open .*/\.shard-00-0000001-", times=2)
    ended = bench.run(words, fault=again)
    assert ended.exit_code == 1
    assert "was killed by SIGKILL" in messages(ended, bench.out)[0]
    assert bench.run(words).exit_code == 0
    assert state(bench.out) == reference


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 4])
def test_what_can_be_read_once_only_costs_two_workers_at_most(bench: Bench, times: int) -> None:
    """The first process reads and writes it. A chunk of which two workers die cannot be read again."""
    words = [*build_words(["-"], bench.out, bench.tokenizer, "--task-bytes", "512"), "--format", "jsonl"]
    content = (bench.place / "lines.jsonl").read_bytes()
    bench.clear()
    assert bench.run(words, stdin=content).exit_code == 0
    reference = state(bench.out)
    bench.clear()
    loads_the_tokenizer = r"read .*/\.tokshard-build/tokenizer\.json"
    ended = bench.run(words, stdin=content, fault=Fault(on=loads_the_tokenizer, times=times, act="die", reads=True))
    if times > 1:
        assert ended.exit_code == 1, ended.errors
        problem, hint = messages(ended, bench.out)
        assert "was killed by SIGKILL" in problem
        assert hint.startswith("hint: start over with --force")
        ended = bench.run([*words, "--force"], stdin=content)
    assert ended.exit_code == 0, ended.errors
    assert state(bench.out) == reference
