"""Promise 1 where a source changes or goes while it is read: it is named, or left out whole; nothing of it counts."""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.contract.faults import Fault, Launcher, Outcome
from tests.contract.outcomes import State, build_words, messages, state
from tests.examples import examples
from tests.pipeline import inputs
from tests.pipeline.inputs import texts_of
from tokshard.format import names
from tokshard.format.opening import open_corpus

pytestmark = pytest.mark.timeout(600)

RECORDS = [{"text": f"text {number} " + "abcdefgh" * 10} for number in range(30)]
LINES = inputs.jsonl(RECORDS)
KINDS: dict[str, Callable[[], bytes]] = {
    "lines.jsonl": lambda: LINES,
    "stream.jsonl.gz": lambda: gzip.compress(LINES, 0, mtime=0),
    "stream.jsonl.zst": lambda: inputs.frames(LINES, zstandard.compress, 15),
    "stream.csv": lambda: inputs.csv_bytes(RECORDS),
    "members.tar": lambda: inputs.tar_bytes(inputs.json_members(RECORDS, 3)),
    "table.parquet": lambda: inputs.parquet_bytes(inputs.table(RECORDS), 3),
    "batches.arrow": lambda: inputs.arrow_bytes(inputs.table(RECORDS), 3),
    "text.txt": lambda: "".join(record["text"] + "\n" for record in RECORDS).encode(),
}
"""Sources of a few tasks each, whatever can be cut."""

CHANGES = {
    "goes": "rm {0}",
    "is written anew": "cp {0} {0}.new && mv {0}.new {0}",
    "grows": "printf x >> {0}",
}
"""What becomes of a source, as a shell does it."""


@dataclass
class Bench:
    """A place where a source is built again and again: its path is a part of the corpus."""

    launcher: Launcher
    place: Path
    tokenizer: Path
    references: dict[tuple[str, ...], State] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        return self.place / "out"

    def write(self, kind: str) -> Path:
        """One of the sources."""
        path = self.place / kind
        path.write_bytes(KINDS[kind]())
        return path

    def clear(self) -> None:
        for folder in (self.out, self.launcher.directory):
            shutil.rmtree(folder, ignore_errors=True)

    def build(self, *words: Path | str, workers: int = 1, fault: Fault | None = None) -> Outcome:
        """Run a build of small tasks."""
        small = ("--task-bytes", "512", "--shard-tokens", "900", "--text-unit", "line", "--workers", str(workers))
        return self.launcher.start(
            build_words(words, self.out, self.tokenizer, *small), out=self.out, fault=fault
        ).end()

    def reference(self, *words: Path | str, fault: Fault | None = None) -> State:
        """What a build by one process makes."""
        key = (*map(str, words), *([fault.command] if fault else []))
        if key not in self.references:
            self.clear()
            done = self.build(*words, fault=fault)
            assert done.exit_code == 0, done.errors
            self.references[key] = state(self.out)
        return self.references[key]


@pytest.fixture(scope="module")
def bench(launcher: Launcher, byte_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(launcher, tmp_path_factory.mktemp("place"), byte_tokenizer)


WRITES = r"open .*/\.shard-"
"""The first step of a task that writes: a part of its source was read, and another was not."""

WRITTEN, HASHED = (), ("--dedup", "exact")
SOME = [(kind, "is written anew", WRITTEN) for kind in KINDS]
SOME += [("lines.jsonl", "goes", WRITTEN), ("stream.jsonl.gz", "grows", WRITTEN), ("stream.jsonl.gz", "goes", HASHED)]
REST = [case for case in itertools.product(KINDS, CHANGES, (WRITTEN, HASHED)) if case not in SOME]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "change", "options"), [*SOME, *(pytest.param(*case, marks=pytest.mark.soak) for case in REST)]
)
def test_a_source_that_changes_while_it_is_read_is_named_and_the_build_continues_when_it_is_put_back(
    bench: Bench, tmp_path: Path, kind: str, change: str, options: tuple[str, ...]
) -> None:
    source = bench.write(kind)
    reference = bench.reference(source, *options)
    bench.clear()
    shutil.copy2(source, tmp_path / "kept")
    begun = small.HASHES if options else WRITES
    changed = bench.build(source, *options, fault=Fault(on=begun, act="run", command=CHANGES[change].format(source)))
    assert changed.exit_code == 1, changed.errors
    problem, hint = messages(changed, bench.out)
    expected = "cannot be read: No such file or directory" if change == "goes" else "was modified since the build began"
    assert str(source) in problem
    assert expected in problem or (change == "grows" and "is damaged" in problem)
    assert hint
    assert not (bench.out / names.MANIFEST).exists()
    shutil.copy2(tmp_path / "kept", source)
    assert bench.build(source, *options).exit_code == 0
    assert state(bench.out) == reference


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lines.jsonl", "stream.jsonl.zst"])
def test_a_source_that_goes_while_it_is_read_is_left_out_whole_if_that_is_asked_for(bench: Bench, kind: str) -> None:
    source, other = bench.write(kind), bench.write("text.txt")
    skip = ("--on-bad-source", "skip")
    gone = Fault(at=1, act="run", command=f"rm {source}")
    without = bench.reference(source, other, *skip, fault=gone)
    bench.clear()
    bench.write(kind)
    done = bench.build(source, other, *skip, workers=2, fault=replace(gone, at=0, on=WRITES))
    assert done.exit_code == 0, done.errors
    assert f"left out: {source} cannot be read: No such file or directory" in done.errors
    assert state(bench.out) == without


# after it was hashed


def texts(bench: Bench) -> list[str]:
    with open_corpus(bench.out) as corpus:
        return texts_of(corpus)


def lines(path: Path, *found: str) -> Path:
    """Lines of 100 bytes."""
    path.write_bytes(b"".join(json.dumps({"text": text}).encode().ljust(99) + b"\n" for text in found))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_text_stays_where_it_is_found_next_when_the_source_that_had_it_first_goes(bench: Bench, workers: int) -> None:
    """What was already written without it is written again."""
    repeated = [f"repeated {number}" for number in range(6)]
    sources = [
        lines(bench.place / "a.jsonl", *(f"a {number}" for number in range(6))),
        lines(bench.place / "b.jsonl", *repeated),
        lines(bench.place / "c.jsonl", "c", *repeated, "c again"),
    ]
    skip = ("--dedup", "exact", "--on-bad-source", "skip")
    bench.clear()
    # what it has after others was written, and it was hashed
    gone = Fault(on=WRITES, act="run", command=f"rm -f {sources[1]}")
    done = bench.build(*sources, *skip, workers=workers, fault=gone)
    assert done.exit_code == 0, done.errors
    assert texts(bench) == [*(f"a {number}" for number in range(6)), "c", *repeated, "c again"]


def test_duplicates_are_looked_for_again_among_the_sources_that_are_left_when_one_goes(bench: Bench) -> None:
    """As many sources are left as one task merges, so that the task is called as before and merges other rows."""
    sources = [
        lines(bench.place / "a.jsonl", *("x", "y") * 3),
        lines(bench.place / "b.jsonl", *("one", "x") * 3),
        lines(bench.place / "c.jsonl", *("two", "three") * 3),
    ]
    bench.clear()
    gone = Fault(on=WRITES, act="run", command=f"rm -f {sources[1]}")
    done = bench.build(*sources, "--dedup", "exact", "--on-bad-source", "skip", fault=gone)
    assert done.exit_code == 0, done.errors
    assert texts(bench) == ["x", "y", "two", "three"]


several_texts = st.lists(st.sampled_from("abcdefgh"), min_size=6, max_size=12)


@settings(
    max_examples=examples(13),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    found=st.lists(several_texts, min_size=2, max_size=4),
    which=st.integers(0, 3),
    workers=st.sampled_from([1, 2]),
    at=st.integers(20, 160),
)
def test_a_source_that_goes_at_any_moment_is_in_the_corpus_whole_or_not_at_all(
    bench: Bench, found: list[list[str]], which: int, workers: int, at: int
) -> None:
    def write() -> list[Path]:
        bench.clear()
        return [lines(bench.place / f"{number}.jsonl", *some) for number, some in enumerate(found)]

    gone = which % len(found)
    sources = write()
    fault = Fault(at=at, act="run", command=f"rm -f {sources[gone]}")
    done = bench.build(*sources, "--dedup", "exact", "--on-bad-source", "skip", workers=workers, fault=fault)
    assert done.exit_code == 0, done.errors
    without = [text for number, some in enumerate(found) if number != gone for text in some]
    everything = [text for some in found for text in some]
    assert texts(bench) in (list(dict.fromkeys(everything)), list(dict.fromkeys(without)))
