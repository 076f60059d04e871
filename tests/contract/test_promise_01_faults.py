"""Promise 1 at every step on disk: a build that is stopped there, in whatever way, is right when it is run again."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import zstandard

from tests.contract import builds
from tests.contract.faults import Fault, Launcher, Outcome, is_refused, kills
from tokshard.format import names
from tokshard.inspect.verify.verification import verify_corpus

pytestmark = pytest.mark.timeout(900)

State = dict[str, str]

SKIP = ("--on-bad-source", "skip", "--on-bad-record", "skip")
OPTIONS = {
    "none": (),
    "dedup": ("--dedup", "exact"),
    "split": ("--validation-fraction", "0.2"),
    "lengths": ("--min-tokens", "40", "--max-tokens", "300"),
    "limit": ("--max-documents", "130"),
    "all": (
        *("--dedup", "exact", "--validation-fraction", "0.2", "--min-tokens", "40", "--max-tokens", "300"),
        *("--max-documents", "120"),
    ),
}
"""All of them leave out damaged inputs and bad records."""


@dataclass
class Workshop:
    """A place for builds of a few kilobytes, all from the same sources, and what is expected of them."""

    launcher: Launcher
    sources: Sequence[str]
    tokenizer: Path
    out: Path
    references: dict[tuple[str, ...], tuple[State, list[str]]]

    def build(self, *options: str, workers: int = 1, fault: Fault | None = None) -> Outcome:
        """Run one build of the sources into `out`."""
        small = ("--tokenizer", str(self.tokenizer), "--task-bytes", "2048", "--shard-tokens", "1200")
        return self.launcher.build(
            self.sources, self.out, *small, *SKIP, *options, "--workers", str(workers), fault=fault
        )

    def reference(self, options: tuple[str, ...]) -> State:
        """What an undisturbed build makes."""
        return self._reference(options)[0]

    def steps(self, options: tuple[str, ...]) -> list[str]:
        """In which steps it does."""
        return self._reference(options)[1]

    def num_steps(self, options: tuple[str, ...]) -> int:
        """In how many."""
        return len(self.steps(options))

    def _reference(self, options: tuple[str, ...]) -> tuple[State, list[str]]:
        if options not in self.references:
            self.clear()
            done = self.build(*options)
            assert done.exit_code == 0, done.errors
            assert "Traceback" not in done.errors, done.errors  # such as those of Arrow, which go by Python
            splits = [path for name in (names.TRAIN, names.VALIDATION) if (path := self.out / name).exists()]
            assert [problem for split in splits or [self.out] for problem in verify_corpus(split).problems] == []
            self.references[options] = (self.state(), done.steps)
            self.clear()
        return self.references[options]

    def state(self) -> State:
        """Everything in `out` but the reports, which are not pure."""
        found = {str(path.relative_to(self.out)): path for path in self.out.rglob("*")}
        return {
            name: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
            for name, path in sorted(found.items())
            if path.name != names.REPORT
        }

    def clear(self) -> None:
        """Remove everything but the sources and the references."""
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.rmtree(self.launcher.directory, ignore_errors=True)

    def check(self, options: tuple[str, ...], *, workers: int = 1, what: object = "") -> None:
        """Run a build to its end: it has to be what an undisturbed one is."""
        done = self.build(*options, workers=workers)
        assert done.exit_code == 0, f"{done.errors}\n{what}"
        assert self.state() == self.reference(options), what


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with Launcher(tmp_path_factory.mktemp("launcher") / "runs") as launcher:
        yield launcher


@pytest.fixture(scope="module")
def workshop(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Small and cut inputs, a stream, texts that come twice, bad records, and damage in every kind of input."""
    directory = tmp_path_factory.mktemp("workshop")
    return Workshop(
        launcher, write_sources(directory / "sources"), write_tokenizer(directory), directory / "out", references={}
    )


def write_tokenizer(directory: Path) -> Path:
    """The quickstart's tokenizer without merges: it costs nothing to load."""
    content = json.loads((builds.TOKENIZER / "tokenizer.json").read_text())
    model = content["model"]
    model["vocab"], model["merges"] = {token: index for token, index in model["vocab"].items() if index <= 256}, []
    (directory / "tokenizer.json").write_text(json.dumps(content))
    shutil.copy(builds.TOKENIZER / "tokenizer_config.json", directory)
    return directory


def lines(seed: int, count: int, words: int) -> list[bytes]:
    rng = random.Random(seed)
    return [json.dumps({"text": builds.text(rng, rng.randint(1, 2 * words))}).encode() + b"\n" for _ in range(count)]


def write_sources(directory: Path, *, documents: int = 60) -> list[str]:
    """Inputs of every kind.

    Args:
        documents: of each of the two longest.
    """
    directory.mkdir()
    plain, streamed, others = lines(1, documents, 12), lines(2, documents, 12), lines(3, documents * 2 // 3, 12)
    twice = [*plain[::3], *lines(4, 5, 12)]
    random.Random(5).shuffle(twice)
    bad = [b'{"text": 7}\n', b"{\n", b'{"text": ""}\n']
    mixed = [line for number, good in enumerate(others) for line in (bad[number % 3], good)[number % 4 > 0 :]]
    zstd = zstandard.ZstdCompressor(write_checksum=True).compress(b"".join(streamed))
    contents = {
        "truncated.jsonl.gz": gzip.compress(b"".join(streamed), 1, mtime=0)[:-10],
        "small-0.jsonl": b"".join(lines(6, 4, 5)),
        "no-footer.parquet": b"PAR1 no footer",
        "small-1.jsonl": b"".join(lines(7, 4, 5)),
        "mixed.jsonl": b"".join(mixed),
        "plain.jsonl": b"".join(plain),
        "corrupt.jsonl.zst": zstd[:-1] + bytes([zstd[-1] ^ 1]),
        "stream.jsonl.zst": zstd,
        "twice.jsonl": b"".join(twice),
    }
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return [str(directory / name) for name in contents]


@pytest.fixture
def shop(workshop: Workshop) -> Iterator[Workshop]:
    """The workshop, empty."""
    workshop.clear()
    yield workshop
    workshop.clear()


def stops(shop: Workshop, options: tuple[str, ...], act: str, at: Iterable[int]) -> Iterator[Outcome]:
    """Builds by one worker, each stopped before one of the steps."""
    for step in at:
        shop.clear()
        yield shop.build(*options, fault=Fault(at=step, act=act))


every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.mark.soak
@every_option
def test_any_number_of_workers_makes_the_same_of_the_small_sources(shop: Workshop, options: tuple[str, ...]) -> None:
    shop.check(options, workers=3)


# one stop


@pytest.mark.slow
@pytest.mark.parametrize("name", [names.TOKENIZER, names.REPORT, names.MANIFEST])
def test_a_build_killed_while_it_writes_a_file_of_the_corpus_leaves_nothing_beside_it(
    shop: Workshop, name: str
) -> None:
    killed = shop.build(fault=Fault(on=rf"open .*(?<!/\.tokshard-build)/\.{name}\.", is_after=True))
    assert killed.exit_code == -9
    shop.check(())


@pytest.mark.slow
@every_option
def test_a_build_killed_at_some_steps_and_run_again_gives_the_same_bytes(
    shop: Workshop, options: tuple[str, ...]
) -> None:
    for fault in random.Random(0).sample(kills(shop.steps(options)), 1):
        check_killed(shop, options, fault)


def kills_of_duplicates(shop: Workshop) -> list[Fault]:
    """Kills of a build that looks for duplicates, while it does that and makes it durable."""
    steps = shop.steps(OPTIONS["dedup"])
    stages = {stage for step in steps for stage in re.findall(r"/(hash|join-[0-9]+|find)/files/", step)}
    assert {"hash", "join-1", "find"} <= stages, "it joins hashes and looks for duplicates in them"
    is_found = [bool(re.search(r"/(join-[0-9]+|find)/|/\.[0-9]{7}-[0-9]{6}\.bin", step)) for step in steps]
    return [fault for fault in kills(steps) if is_found[fault.at - 1]]


@pytest.mark.slow
def test_a_build_killed_at_some_steps_of_the_search_for_duplicates_gives_the_same_bytes(shop: Workshop) -> None:
    for fault in random.Random(0).sample(kills_of_duplicates(shop), 3):
        check_killed(shop, OPTIONS["dedup"], fault)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@every_option
def test_a_build_killed_at_any_step_and_run_again_gives_the_same_bytes(
    shop: Workshop, options: tuple[str, ...]
) -> None:
    for number, fault in enumerate(kills(shop.steps(options))):
        check_killed(shop, options, fault, workers=1 if number % 20 else 2)


def check_killed(shop: Workshop, options: tuple[str, ...], fault: Fault, *, workers: int = 1) -> None:
    """Kill a build by one worker, and run it again."""
    shop.clear()
    killed = shop.build(*options, fault=fault)
    assert killed.exit_code == -9
    shop.check(options, workers=workers, what=(fault, killed.steps[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_fails_once_is_a_clear_error_and_the_next_run_continues(shop: Workshop, workers: int) -> None:
    options = OPTIONS["limit"]
    failed = shop.build(*options, workers=workers, fault=Fault(on="replace .*shard-00-0000004", act="error"))
    assert failed.exit_code == 1, failed.errors
    check_ending(failed, "error")
    shop.check(options, workers=workers, what=failed.errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "exit_code"), [("EIO", 1), ("EROFS", 1), ("ESTALE", 1), ("EINVAL", 0), ("ENOTSUP", 0)]
)
def test_a_folder_that_the_disk_cannot_sync_ends_a_build_and_one_that_no_file_system_syncs_does_not(
    shop: Workshop, error: str, exit_code: int
) -> None:
    folder = Path(next(step.partition(" -> ")[2] for step in shop.build().steps if "/receipts/" in step)).parent
    shop.clear()
    ended = shop.build(fault=Fault(on=f"fsync {folder}$", act="error", error=error, times=100))
    assert ended.exit_code == exit_code, ended.errors
    check_ending(ended, "error")
    shop.check((), what=error)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("act", ["error", "full"])
@every_option
def test_a_step_that_fails_is_a_clear_error_or_of_no_account_and_the_next_run_continues(
    shop: Workshop, options: tuple[str, ...], act: str
) -> None:
    # a full disk is noticed where it refuses something
    at = [at for at, step in enumerate(shop.steps(options), 1) if act == "error" or is_refused(step)]
    for failed in stops(shop, options, act, at):
        check_ending(failed, act)
        if failed.exit_code == 0:  # what remains of the work folder is removed by the next run
            corpora = {name: sha for name, sha in shop.state().items() if not name.startswith(names.WORK)}
            assert corpora == shop.reference(options), failed.errors
        shop.check(options, what=failed.errors)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("act", ["SIGINT", "SIGTERM"])
@every_option
def test_a_build_interrupted_at_any_step_and_run_again_gives_the_same_bytes(
    shop: Workshop, options: tuple[str, ...], act: str
) -> None:
    for stopped in stops(shop, options, act, range(1 + (act == "SIGTERM"), shop.num_steps(options) + 1, 2)):
        check_ending(stopped, act)
        shop.check(options, what=stopped.steps[-1])


def check_ending(outcome: Outcome, act: str) -> None:
    """Whether a build ends as it should when something happens to it, or did not come so far."""
    allowed = {"kill": {-9, 0}, "orphan": {-9, 0}, "error": {0, 1}, "full": {0, 1}, "SIGINT": {130, 0}}
    assert outcome.exit_code in allowed.get(act, {143, 0}), outcome.errors
    assert "internal: " not in outcome.errors
    if outcome.exit_code == 1:
        assert "error: cannot write to " in outcome.errors


# what reaches the disk, and in which order


@pytest.mark.parametrize("options", [OPTIONS["none"], OPTIONS["all"]], ids=["none", "all"])
def test_every_file_is_durable_before_it_is_renamed_and_its_name_before_the_next_step(
    shop: Workshop, options: tuple[str, ...]
) -> None:
    steps = [step.partition(" ")[::2] for step in shop.build(*options).steps]
    replaced = [(at, *paths.split(" -> ")) for at, (kind, paths) in enumerate(steps) if kind == "replace"]
    assert len(replaced) > 40
    for at, partial, final in replaced:
        opened = max(before for before, step in enumerate(steps[:at]) if step == ("open", partial))
        assert ("fsync", partial) in steps[opened:at], final
        assert steps[at + 1] == ("fsync", str(Path(final).parent)), final
    finals = [final for *_, final in replaced]
    assert Path(finals[-1]).name == names.MANIFEST


def test_a_receipt_comes_after_all_that_it_promises(shop: Workshop) -> None:
    steps = shop.build(*OPTIONS["all"]).steps
    finals = [Path(step.partition(" -> ")[2]) for step in steps if step.startswith("replace ")]
    promised = 0
    for receipt in (path for path in finals if path.parent.name == "receipts"):
        stage, key = receipt.parents[1], receipt.stem
        files = {stage / "rejects" / f"{key}.jsonl", stage / "files" / f"{key}.bin"}
        if stage.name == "write":
            files |= {path for path in finals if names.is_shard_name(path.name) and f"-{key}-" in path.name}
        times = [at for at, path in enumerate(finals) if path in files]
        receipts = [at for at, path in enumerate(finals) if path == receipt]
        promised += len(times)
        assert max(times, default=-1) < max(receipts), receipt
    assert promised > 20


# starting over


def test_starting_over_killed_when_a_shard_is_gone_may_go_on_without_force(shop: Workshop) -> None:
    """The receipts have to be gone before the shards that they stand for."""
    assert shop.build(fault=Fault(at=shop.num_steps(()) - 60)).exit_code == -9
    killed = shop.build("--force", fault=Fault(on="unlink .*/shard-", is_after=True))
    assert killed.exit_code == -9
    shop.check(())


def test_a_work_folder_without_what_was_asked_for_belongs_to_no_build(shop: Workshop) -> None:
    shop.build(fault=Fault(at=shop.num_steps(()) - 60))
    (shop.out / names.WORK / "build.json").unlink()
    before = shop.state()
    for force in ([], ["--force"]):
        refused = shop.build(*force)
        assert refused.exit_code == 2
        assert "was not made by a build" in refused.errors
    assert shop.state() == before


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [OPTIONS["none"], OPTIONS["all"]], ids=["none", "all"])
@pytest.mark.parametrize("share", [0.7, 0.95, 1.0])
def test_starting_over_killed_at_any_step_may_go_on_without_force(
    shop: Workshop, tmp_path: Path, options: tuple[str, ...], share: float
) -> None:
    steps = shop.num_steps(options)
    shop.build(*options, fault=Fault(at=int(share * steps)) if share < 1 else None)
    shutil.copytree(shop.out, tmp_path / "begun")
    for at in range(1, 120):
        shop.clear()
        shutil.copytree(tmp_path / "begun", shop.out)
        killed = shop.build(*options, "--force", fault=Fault(at=at))
        assert killed.exit_code == -9
        again = shop.build(*options)
        if again.exit_code == 2:  # one of two corpora is gone, and nothing says why
            assert "or --force to start over" in again.errors
            again = shop.build(*options, "--force")
        assert again.exit_code == 0
        assert shop.state() == shop.reference(options), killed.steps[-1]


# workers that outlive their coordinator


@pytest.fixture
def twelve(shop: Workshop, tmp_path: Path) -> Workshop:
    """A workshop with one input of three tasks of four documents."""
    source = tmp_path / "twelve.jsonl"
    source.write_bytes(b"".join(line.strip().ljust(511) + b"\n" for line in lines(8, 12, 8)))
    return Workshop(shop.launcher, [str(source)], shop.tokenizer, shop.out, references={})


@pytest.mark.slow
def test_a_worker_that_outlives_its_build_changes_nothing_of_the_next(twelve: Workshop) -> None:
    """It was given more documents to write than a build in order gives it, because nothing was done before."""
    options = ("--max-documents", "6")
    twelve.reference(options)
    # one worker is slow with the first task; when another is about to leave the receipt of the second, the build dies
    receipt = r"open .*/\.0000000-000001\.receipt"
    slow = {"pauses": 0.8, "pause_on": "open .*shard-00-0000000-000000"}
    killed = twelve.build(*options, workers=2, fault=Fault(on=receipt, act="orphan", lingers=0.5, outlives=3, **slow))
    assert killed.exit_code == -9
    # the next build has done that task in another way, and is about to read the receipts, when the worker continues
    done = twelve.build(*options, fault=Fault(pauses=1, pause_on=r"open .*/\.shards\.arrow", in_coordinator=True))
    killed.wait()
    assert done.exit_code == 0, done.errors
    assert twelve.state() == twelve.reference(options)


# anything


def meet_with_anything(shop: Workshop, rng: random.Random) -> None:
    """Builds that end in some ways; the last one is right, or was refused."""
    shop.clear()
    options = rng.choice(list(OPTIONS.values()))
    reference, steps = shop.reference(options), shop.num_steps(options)
    history: list[str] = []
    groups: list[Outcome] = []
    others = 0
    for _ in range(rng.randint(1, 3)):
        workers = rng.choice([1, 1, 1, 2, 3])
        fault = any_fault(rng, steps, workers)
        is_other, is_forced = rng.random() < 0.15, rng.random() < 0.15
        others += is_other
        chosen = rng.choice(list(OPTIONS.values())) if is_other else options
        outcome = shop.build(*chosen, *(["--force"] if is_forced else []), workers=workers, fault=fault)
        groups.append(outcome)
        history.append(f"{chosen} workers={workers} {is_forced=} {fault} -> {outcome.exit_code} {outcome.errors}")
        if not (others and outcome.exit_code == 2 and "belongs to another build" in outcome.errors):
            check_ending(outcome, fault.act)
    what = "\n".join(history)
    done = shop.build(*options, workers=rng.choice([1, 1, 2]))
    if done.exit_code == 2 and (others or "is_forced=True" in what):
        assert "belongs to another build" in done.errors
        done = shop.build(*options, "--force")
    for group in groups:
        group.wait()
    assert done.exit_code == 0, f"{what}\n{done.errors}"
    assert shop.state() == reference, what


@pytest.mark.slow
def test_a_build_that_met_with_anything_is_right_in_the_end_or_refused(shop: Workshop) -> None:
    for number in range(2):  # `make soak` tries thousands
        meet_with_anything(shop, random.Random(f"0 {number}"))


def any_fault(rng: random.Random, steps: int, workers: int) -> Fault:
    """A way in which a build may end, somewhere on its way, with the pauses of a busy machine."""
    act = rng.choice(["kill", "kill", "kill", "error", "full", "SIGINT", "SIGTERM"])
    if workers == 1:
        return Fault(act=act, at=rng.randint(1, steps), is_after=rng.random() < 0.5)
    return Fault(
        act=rng.choice([act, "orphan"]),
        at=rng.randint(1, steps),
        is_after=rng.random() < 0.5,
        lingers=rng.choice([0, 0, 0.2]),
        pauses=rng.choice([0.05, 0.2, 0.5]),
        pause_share=rng.choice([0, 0.05, 0.2]),
        pause_on=rng.choice(["", "receipts", ".arrow", "shard-"]),
        seed=rng.randint(0, 1 << 30),
        outlives=1.0,
    )
