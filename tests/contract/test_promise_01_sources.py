"""Promise 1 where a source changes or goes while it is read: it is named, or left out whole; nothing of it counts."""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.contract.commands import DEDUP, Bench, Command, messages
from tests.contract.faults import Fault, Outcome
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

WRITES = r"open .*/\.shard-"
"""The first step of a task that writes: a part of its source was read, and another was not."""

LEFT_OUT = ("--on-bad-source", "skip")


def write(bench: Bench, kind: str) -> Path:
    """One of the sources."""
    path = bench.place / kind
    path.write_bytes(KINDS[kind]())
    return path


def words(bench: Bench, *given: Path | str) -> tuple[str, ...]:
    """A build of small tasks."""
    return bench.build_words(given, "--task-bytes", "512", "--shard-tokens", "900", "--text-unit", "line")


def build(bench: Bench, *given: Path | str, workers: int = 1, fault: Fault | None = None) -> Outcome:
    return bench.run([*words(bench, *given), "--workers", str(workers)], fault)


SOME = [(kind, "is written anew", ()) for kind in KINDS]
SOME += [("lines.jsonl", "goes", ()), ("stream.jsonl.gz", "grows", ()), ("stream.jsonl.gz", "goes", DEDUP)]
SOME += [(kind, "is written anew", ("--max-documents", "2")) for kind in ("lines.jsonl", "stream.jsonl.gz")]
REST = [case for case in itertools.product(KINDS, CHANGES, ((), DEDUP)) if case not in SOME]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "change", "options"), [*SOME, *(pytest.param(*case, marks=pytest.mark.soak) for case in REST)]
)
def test_a_source_that_changes_while_it_is_read_is_named_and_the_build_continues_when_it_is_put_back(
    bench: Bench, tmp_path: Path, kind: str, change: str, options: tuple[str, ...]
) -> None:
    source = write(bench, kind)
    command = Command(words(bench, source, *options))
    bench.steps(command)
    bench.clear()
    shutil.copy2(source, tmp_path / "kept")
    begun = small.HASHES if options == DEDUP else WRITES
    changes = Fault(on=begun, act="run", command=CHANGES[change].format(source))
    changed = bench.run([*command.words, "--workers", "1"], changes)
    assert changed.exit_code == 1, changed.errors
    problem, hint = messages(changed, bench.out)
    expected = "cannot be read: No such file or directory" if change == "goes" else "was modified since the build began"
    assert str(source) in problem
    assert expected in problem or (change == "grows" and "is damaged" in problem)
    assert hint
    assert not (bench.out / names.MANIFEST).exists()
    shutil.copy2(tmp_path / "kept", source)
    bench.check(command)


# after it was hashed


def texts_when_one_goes(bench: Bench, held: list[list[str]], which: int, fault: Fault, *, workers: int) -> list[str]:
    """The texts of a corpus without duplicates of which a source goes at some moment."""
    sources = []
    for number, texts in enumerate(held):
        path = bench.place / f"{number}.jsonl"
        path.write_bytes(b"".join(json.dumps({"text": text}).encode().ljust(99) + b"\n" for text in texts))
        sources.append(path)
    gone = replace(fault, act="run", command=f"rm -f {sources[which]}")
    done = build(bench, *sources, *DEDUP, *LEFT_OUT, workers=workers, fault=gone)
    assert done.exit_code == 0, done.errors
    with open_corpus(bench.out) as corpus:
        return texts_of(corpus)


REPEATED = [f"repeated {number}" for number in range(6)]
GOES = {
    # what was already written without it is written again
    "a text stays where it is found next": [
        [f"a {number}" for number in range(6)],
        REPEATED,
        ["c", *REPEATED, "c again"],
    ],
    # as many sources are left as one task merges: the task is called as before, and merges other rows
    "duplicates are looked for again among those that are left": [
        ["x", "y"] * 3,
        ["one", "x"] * 3,
        ["two", "three"] * 3,
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("held", GOES.values(), ids=GOES)
def test_when_a_source_goes_that_was_hashed(bench: Bench, held: list[list[str]], workers: int) -> None:
    found = texts_when_one_goes(bench, held, 1, Fault(on=WRITES), workers=workers)
    without, whole = (list(dict.fromkeys(itertools.chain(*texts))) for texts in ([held[0], held[2]], held))
    # one of two workers may have opened the source before the other began to write
    assert found == without or (workers == 2 and found == whole)


several_texts = st.lists(st.sampled_from("abcdefgh"), min_size=6, max_size=12)


@settings(
    max_examples=1 + examples(13),  # the first one is the simplest
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    held=st.lists(several_texts, min_size=2, max_size=4),
    which=st.integers(0, 3),
    workers=st.sampled_from([1, 2]),
    at=st.integers(20, 160),
)
def test_a_source_that_goes_at_any_moment_is_in_the_corpus_whole_or_not_at_all(
    bench: Bench, held: list[list[str]], which: int, workers: int, at: int
) -> None:
    bench.clear()
    gone = which % len(held)
    found = texts_when_one_goes(bench, held, gone, Fault(at=at), workers=workers)
    without = [text for number, texts in enumerate(held) if number != gone for text in texts]
    assert found in [list(dict.fromkeys(every)) for every in ([text for texts in held for text in texts], without)]
