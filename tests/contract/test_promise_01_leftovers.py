"""Promise 1 where files of an unfinished build are lost or damaged: made again, or named with a way out that works."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract import small
from tests.contract.faults import Fault, Launcher, Outcome
from tests.contract.outcomes import State, build_words, messages, shards, state
from tests.contract.test_promise_01_faults import write_sources
from tests.examples import some
from tokshard.format import names

pytestmark = pytest.mark.timeout(600)

OPTIONS = (
    *("--dedup", "exact", "--validation-fraction", "0.3", "--on-bad-record", "skip", "--on-bad-source", "skip"),
    *("--task-bytes", "1024", "--shard-tokens", "1200"),
)


@dataclass
class Begun:
    """A build that was killed just before its first manifest.

    Args:
        kept: what it left.
        reference: what it makes in the end.
        steps: in which it does, if nothing happens to it.
    """

    launcher: Launcher
    words: list[str]
    out: Path
    kept: Path
    reference: State
    steps: list[str]

    def run(self, *more: str, fault: Fault | None = None) -> Outcome:
        return self.launcher.start([*self.words, *more], out=self.out, fault=fault).end()

    def clear(self) -> None:
        for folder in (self.out, self.launcher.directory):
            shutil.rmtree(folder, ignore_errors=True)

    def put_back(self) -> None:
        self.clear()
        shutil.copytree(self.kept, self.out)

    def kinds(self) -> Iterator[Path]:
        """One file of each kind that it left."""
        found: dict[str, Path] = {}
        for path in sorted(self.kept.rglob("*")):
            if path.is_file():
                name = str(path.relative_to(self.kept))
                found.setdefault(re.sub("[0-9]+", "N", name), Path(name))
        yield from found.values()


@pytest.fixture(scope="module")
def begun(launcher: Launcher, byte_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Begun:
    place = tmp_path_factory.mktemp("place")
    sources = write_sources(place / "sources", documents=20)
    words = build_words(sources, place / "out", byte_tokenizer, *OPTIONS, "--workers", "1")
    build = Begun(launcher, words, place / "out", place / "kept", {}, [])
    done = build.run()
    assert done.exit_code == 0
    build.reference, build.steps = state(build.out), done.steps
    build.clear()
    assert build.run(fault=Fault(on=r"open .*/\.manifest\.json")).exit_code == -9
    shutil.copytree(build.out, build.kept)
    return build


WAYS = {
    "gone": lambda _: None,
    "short": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "garbage": lambda content: b"x" * len(content),
}


def damage(path: Path, how: str) -> None:
    content = WAYS[how](path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)


def may_be_garbage(path: Path) -> bool:
    """Whether the content of a file is looked at before it is used: those of the largest are not read again."""
    return not names.is_shard_name(path.name) and path.suffix != ".bin"


def check_way_out(build: Begun, path: Path, what: str) -> None:
    """Run a build, of which a file is damaged or gone, to its end, as its messages say."""
    for _ in range(3):
        done = build.run()
        if done.exit_code == 0:
            assert state(build.out) == build.reference, what
            return
        problem, hint = messages(done, build.out)
        assert path.name in problem or not (build.out / path).exists(), f"{what}: {problem}"
        if hint.startswith("hint: delete that file"):
            (build.out / path).unlink()
        elif not hint.startswith("hint: run the same command again"):
            break
    else:
        pytest.fail(f"{what}: {problem}: the hint does not help: {hint}")
    if "--force" in hint:
        assert build.run("--force").exit_code == 0, what
    else:  # nothing says any more that the files are those of a build
        assert re.search("^hint: (remove OUT|move it away)", hint), f"{what}: {hint}"
        build.clear()
        assert build.run().exit_code == 0, what
    assert state(build.out) == build.reference, what


@pytest.mark.slow
@some("how", ["short", "gone"])
def test_receipts_and_what_they_promise_are_made_again_or_named_if_they_are_damaged_between_two_runs(
    begun: Begun, how: str
) -> None:
    paths = [path for path in begun.kinds() if re.search(small.PROMISED, str(path))]
    assert len(paths) >= 8
    for path in paths:
        check_damaged(begun, path, how)


@pytest.mark.soak
@pytest.mark.parametrize("how", WAYS)
def test_every_file_is_made_again_or_named_if_it_is_damaged_between_two_runs(begun: Begun, how: str) -> None:
    for path in begun.kinds():
        if how != "garbage" or may_be_garbage(path):
            check_damaged(begun, path, how)


def check_damaged(begun: Begun, path: Path, how: str) -> None:
    begun.put_back()
    damage(begun.out / path, how)
    check_way_out(begun, path, f"{path} {how}")


def test_a_list_of_bad_records_that_is_garbage_is_named_and_made_again(begun: Begun) -> None:
    path = next(path for path in begun.kinds() if path.match(f"{names.WORK}/{small.REJECTS}/*.jsonl"))
    check_damaged(begun, path, "garbage")


def test_a_build_that_is_killed_between_its_two_manifests_has_no_corpus_to_train_on_yet(begun: Begun) -> None:
    begun.put_back()
    killed = begun.run(fault=Fault(on=r"replace .*/manifest\.json", is_after=True))
    assert killed.exit_code == -9
    assert [path.parent.name for path in begun.out.rglob(names.MANIFEST)] == [names.VALIDATION]
    assert begun.run().exit_code == 0
    assert state(begun.out) == begun.reference


def test_what_is_of_no_corpus_is_gone_before_its_manifest_is_there(begun: Begun) -> None:
    begun.put_back()
    shard = next((begun.out / names.VALIDATION).glob("shard-*"))
    left = shard.with_name(shard.name.replace("shard-0", "shard-9", 1))  # as a task leaves one that lies behind a limit
    assert names.is_shard_name(left.name)
    hashes = left.with_name(names.HASHES)  # only the corpus for training has them
    for path in (left, hashes):
        shutil.copy(shard, path)
    assert begun.run(fault=Fault(on=r"replace .*/manifest\.json", is_after=True)).exit_code == -9
    assert (left.parent / names.MANIFEST).exists()
    assert not left.exists()
    assert not hashes.exists()


COMMITTING = r"open .*/\.shards\.arrow"
"""A step of a build whose tasks are done."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["rm {0}", "truncate -s 8 {0}", "cp {0} {0}.new && printf x >> {0}.new && mv {0}.new {0}"]
)
def test_a_build_whose_shard_is_lost_before_its_end_does_not_say_that_it_is_complete(
    begun: Begun, command: str
) -> None:
    begun.put_back()
    shard = shards(begun.kept)[0].relative_to(begun.kept)
    lost = begun.run(fault=Fault(on=COMMITTING, act="run", command=command.format(begun.out / shard)))
    assert lost.exit_code == 1, lost.errors
    problem, hint = messages(lost, begun.out)
    assert str(shard) in problem
    assert "since its task was done" in problem
    assert hint == "hint: run the same command again: the task that wrote it runs again"
    assert not list(begun.out.rglob(names.MANIFEST))
    assert begun.run().exit_code == 0
    assert state(begun.out) == begun.reference


@pytest.mark.parametrize("folder", [small.REJECTS, small.RECEIPTS])
def test_what_goes_while_a_build_ends_is_named_and_made_again(begun: Begun, folder: str) -> None:
    begun.put_back()
    lost = begun.run(fault=Fault(on=COMMITTING, act="run", command=f"rm -r {begun.out / names.WORK / folder}"))
    assert lost.exit_code == 1, lost.errors
    problem, hint = messages(lost, begun.out)
    assert f"{names.WORK}/{folder}/" in problem
    assert hint.startswith("hint: run the same command again")
    assert begun.run().exit_code == 0
    assert state(begun.out) == begun.reference


@pytest.mark.slow
@pytest.mark.parametrize("command", ["rm {0}/*.bin", "truncate -s 4 {0}/*.bin"])
def test_hashes_and_duplicates_that_go_before_they_are_used_are_named_and_made_again(
    begun: Begun, command: str
) -> None:
    for stage, folder in (("hash", small.HASHED), ("find", small.FOUND)):
        begun.clear()
        where = begun.out / names.WORK / folder
        at = max(at for at, step in enumerate(begun.steps, 1) if re.search(rf"replace .*/{stage}/receipts/", step))
        lost = begun.run(fault=Fault(at=at, is_after=True, act="run", command=command.format(where)))
        assert lost.exit_code == 1, lost.errors
        problem, hint = messages(lost, begun.out)
        assert f"{folder}/" in problem
        assert hint.startswith("hint: run the same command again")
        assert begun.run().exit_code == 0
        assert state(begun.out) == begun.reference
