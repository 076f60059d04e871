"""Promise 1 where files of an unfinished build are lost or damaged: made again, or named with a way out that works."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract import small
from tests.contract.commands import Bench, Command, commit_words, job_words, messages, shards
from tests.contract.faults import Fault
from tests.contract.table import TOGETHER, Table
from tests.examples import some
from tokshard.format import names

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Stopped:
    """A command that one process ran until it was killed.

    Args:
        kept: a copy of what it left.
    """

    bench: Bench
    command: Command
    kept: Path

    @property
    def out(self) -> Path:
        return self.bench.out

    def put_back(self) -> None:
        self.bench.clear()
        shutil.copytree(self.kept, self.out)

    def check(self, what: object = "") -> None:
        self.bench.check(self.command, what)

    def kinds(self) -> Iterator[Path]:
        """One file of each kind that it left."""
        found: dict[str, Path] = {}
        for path in sorted(self.kept.rglob("*")):
            if path.is_file():
                name = str(path.relative_to(self.kept))
                found.setdefault(re.sub("[0-9]+", "N", name), Path(name))
        yield from found.values()

    def check_way_out(self, path: Path, what: str) -> None:
        """Run a build, of which a file is damaged or gone, to its end, as its messages say."""
        for _ in range(3):
            done = self.bench.run([*self.command.words, "--workers", "1"])
            if done.exit_code == 0:
                break
            problem, hint = messages(done, self.out)
            assert path.name in problem or not (self.out / path).exists(), f"{what}: {problem}"
            if hint.startswith("hint: delete that file"):
                (self.out / path).unlink()
            elif "--force" in hint:
                assert self.bench.run([*self.command.words, "--force", "--workers", "1"]).exit_code == 0, what
            elif not hint.startswith("hint: run the same command again"):
                # nothing says any more that the files are those of a build
                assert re.search("^hint: (remove OUT|move it away)", hint), f"{what}: {hint}"
                self.bench.clear()
        self.check(what)


def stopped(bench: Bench, command: Command, fault: Fault, kept: Path) -> Stopped:
    """Kill a command."""
    bench.steps(command)
    bench.begin(command)
    assert bench.run([*command.words, "--workers", "1"], fault).exit_code == -9
    shutil.copytree(bench.out, kept)
    return Stopped(bench, command, kept)


@pytest.fixture(scope="module")
def begun(table: Table) -> Stopped:
    """A build that was killed just before its first manifest."""
    before = Fault(on=r"open .*/\.manifest\.json")
    return stopped(table, table.command("build", TOGETHER), before, table.place / "begun")


@pytest.fixture(scope="module")
def uncommitted(table: Table) -> Stopped:
    """The same build by the only job of an array, which has ended."""
    command = table.command("build", TOGETHER)
    table.steps(command)
    table.begin(command)
    assert table.run(job_words(command.words, 0, 1)).exit_code == 0
    shutil.copytree(table.out, table.place / "uncommitted")
    return Stopped(table, command, table.place / "uncommitted")


WAYS: dict[str, Callable[[bytes], bytes | None]] = {
    "short": lambda content: content[: len(content) // 2],
    "gone": lambda _: None,
    "empty": lambda _: b"",
    "garbage": lambda content: b"x" * len(content),
}


def check_damaged(begun: Stopped, path: Path, how: str) -> None:
    begun.put_back()
    content = WAYS[how]((begun.out / path).read_bytes())
    (begun.out / path).unlink()
    if content is not None:
        (begun.out / path).write_bytes(content)
    begun.check_way_out(path, f"{path} {how}")


@pytest.mark.slow
@some("how, which", [("short", small.PROMISED), ("garbage", small.REJECTS), *((how, "") for how in WAYS)], default=2)
def test_every_file_is_made_again_or_named_if_it_is_damaged_between_two_runs(
    begun: Stopped, how: str, which: str
) -> None:
    paths = [path for path in begun.kinds() if re.search(which, str(path))]
    assert len(paths) >= (8 if how == "short" else 1)
    for path in paths:
        is_read_once = names.is_shard_name(path.name) or path.suffix == ".bin"
        if how != "garbage" or not is_read_once:
            check_damaged(begun, path, how)


SAVED = ["build.json", "inputs.arrow", "tasks.msgpack", "tokenizer.json", f"{small.REJECTS}/*.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("saved", SAVED)
def test_a_flipped_bit_in_what_an_unfinished_build_saved_is_reported_or_changes_nothing(
    uncommitted: Stopped, saved: str, dice: random.Random
) -> None:
    bench, reported = uncommitted.bench, 0
    for number in range(8):
        uncommitted.put_back()
        path = next((bench.out / names.WORK).glob(saved))
        content = bytearray(path.read_bytes())
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        path.write_bytes(content)
        job = job_words(uncommitted.command.words, 0, 1)
        done = bench.run(job if number % 2 else commit_words(bench.out))
        reported += done.exit_code
        if done.exit_code:
            problem, hint = messages(done, bench.out)
            assert (done.exit_code, path.name in problem, hint[:6]) == (1, True, "hint: "), problem
        elif number % 2 == 0:
            uncommitted.check()
    assert reported >= 2, "Arrow pads a table, and no reader looks there"


def test_a_build_that_is_killed_between_its_two_manifests_has_no_corpus_to_train_on_and_nothing_that_is_of_none(
    begun: Stopped,
) -> None:
    begun.put_back()
    shard = next((begun.out / names.VALIDATION).glob("shard-*"))
    left = shard.with_name(shard.name.replace("shard-0", "shard-9", 1))  # as a task leaves one that lies behind a limit
    assert names.is_shard_name(left.name)
    hashes = left.with_name(names.HASHES)  # only the corpus for training has them
    for path in (left, hashes):
        shutil.copy(shard, path)
    between = Fault(on=r"replace .*/manifest\.json", is_after=True)
    assert begun.bench.run([*begun.command.words, "--workers", "1"], between).exit_code == -9
    assert [path.parent.name for path in begun.out.rglob(names.MANIFEST)] == [names.VALIDATION]
    assert not left.exists()
    assert not hashes.exists()
    begun.check()


GOES = [
    *[(stage, f"{names.WORK}/{files}/*.bin", how) for stage, files in small.FILES_OF.items() for how in ("rm", "cut")],
    *[("write", "SHARD", how) for how in ("rm", "cut", "grow")],
    *[("write", f"{names.WORK}/{folder}/*", "rm") for folder in (small.REJECTS, small.RECEIPTS)],
]
"""A stage, what goes or changes when it is done, and how."""

SHELL = {"rm": "rm {0}", "cut": "truncate -s 4 {0}", "grow": "cp {0} {0}.new && printf x >> {0}.new && mv {0}.new {0}"}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "files", "how"), GOES)
def test_what_goes_while_a_build_runs_is_named_and_made_again(begun: Stopped, stage: str, files: str, how: str) -> None:
    bench, command = begun.bench, begun.command
    shard = str(shards(begun.kept)[0].relative_to(begun.kept))
    steps, receipt = bench.steps(command), rf"replace .*/{stage}/receipts/"
    at = max(at for at, step in enumerate(steps, 1) if re.search(receipt, step))
    lost = str(begun.out / files.replace("SHARD", shard))
    bench.clear()
    ended = bench.run(
        [*command.words, "--workers", "1"], Fault(at=at, is_after=True, act="run", command=SHELL[how].format(lost))
    )
    assert ended.exit_code == 1, ended.errors
    problem, hint = messages(ended, bench.out)
    assert (shard if "SHARD" in files else f"/{files.split('/', 1)[1].rpartition('/')[0]}/") in problem
    assert "SHARD" not in files or "since its task was done" in problem
    assert hint.startswith("hint: run the same command again")
    assert not list(bench.out.rglob(names.MANIFEST))
    begun.check()
