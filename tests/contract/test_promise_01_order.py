"""Promise 1: whatever runs when, fails, is killed or lost, a build ends as one process does that runs in order.

What that is, a model of twenty lines says from the records; and a build by one process that nothing happens to.
"""

from __future__ import annotations

import bz2
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.contract.arrays import Words, run_array
from tests.contract.faults import Fault, Launcher, Outcome, Running
from tests.contract.outcomes import build_words, messages, shards, state
from tests.examples import examples
from tests.pipeline.inputs import texts_of
from tokshard.format import names
from tokshard.format.opening import open_corpus
from tokshard.inspect.verify.verification import verify_corpus

pytestmark = pytest.mark.timeout(900)

DOCUMENT, REPEATED, EMPTY, BAD = "d", "r", "-", "x"
"""What a record is: a text of its own, a text that others have, too, none, or malformed."""

LINES, STREAM, BROKEN = "jsonl", "jsonl.bz2", "parquet"
"""What a source is: lines that can be cut anywhere, a stream, or a table without a footer."""


@dataclass(frozen=True)
class Source:
    """A source, one character per record.

    Args:
        is_damaged: its end is; only a stream can be.
        line_bytes: of each record.
    """

    kind: str
    records: str
    is_damaged: bool = False
    line_bytes: int = 200


@dataclass(frozen=True)
class Case:
    """A build: its sources and its options."""

    sources: tuple[Source, ...]
    limit: int | None = None
    skips_records: bool = False
    skips_sources: bool = False
    max_bad_records: int | None = None
    dedup: bool = False
    task_bytes: int = 512

    @property
    def options(self) -> list[str]:
        found = ["--task-bytes", str(self.task_bytes), "--shard-tokens", "600"]
        found += ["--max-documents", str(self.limit)] if self.limit else []
        found += ["--on-bad-record", "skip"] if self.skips_records else []
        found += ["--on-bad-source", "skip"] if self.skips_sources else []
        found += ["--max-bad-records", str(self.max_bad_records)] if self.max_bad_records is not None else []
        return found + (["--dedup", "exact"] if self.dedup else [])

    def text(self, source: int, number: int) -> str:
        """The text of a record."""
        if self.sources[source].records[number] == REPEATED:
            return f"repeated {number % 3}"
        return f"record {number} of source {source}"

    def write(self, directory: Path) -> list[Path]:
        """Write the sources."""
        directory.mkdir(parents=True)
        return [self._write(directory, index, source) for index, source in enumerate(self.sources)]

    def _write(self, directory: Path, index: int, source: Source) -> Path:
        path = directory / f"{index}.{source.kind}"
        lines = [self._line(index, number) for number in range(len(source.records))]
        if source.kind == STREAM:  # one after another, so that what comes before the damage is read before it is met
            lines = [bz2.compress(line) for line in lines]
            if source.is_damaged:
                lines[-1] = lines[-1][:-3] + bytes([lines[-1][-3] ^ 1]) + lines[-1][-2:]
        path.write_bytes(b"PAR1 no footer" if source.kind == BROKEN else b"".join(lines))
        return path

    def _line(self, index: int, number: int) -> bytes:
        source = self.sources[index]
        what = source.records[number]
        text = "" if what == EMPTY else self.text(index, number)
        line = b"!" if what == BAD else json.dumps({"text": text}).encode()
        noise = hashlib.shake_128(b"%d %d" % (index, number)).hexdigest(source.line_bytes).encode()
        return b'%s "pad": "%s"}\n' % (line.rstrip(b"}") + b"," * (what != BAD), noise[: source.line_bytes - len(line)])


# the model


class FailureError(Exception):
    """How a build ends with an error: a part of its message."""


class LeftOutError(Exception):
    """An input is left out."""


class UnknownError(Exception):
    """The model cannot say, because it depends on how much is read at once."""


def expected(case: Case) -> list[str] | str | None:
    """The texts of the corpus, or a part of the error; None where the model cannot say."""
    if case.max_bad_records is not None and any(source.is_damaged or source.kind == BROKEN for source in case.sources):
        return None  # whether bad records or damage come first depends on where tasks end
    left_out: set[int] = set()
    while True:
        try:
            if case.dedup:
                in_order(replace(case, limit=None), left_out)  # all texts are hashed, whatever the limit
            return in_order(case, left_out) or "no document was written"
        except LeftOutError as found:
            left_out.add(found.args[0])
        except FailureError as failure:
            return str(failure)
        except UnknownError:
            return None


def in_order(case: Case, left_out: set[int]) -> list[str]:
    """Read all records in order; the texts that stay."""
    texts: list[str] = []
    num_bad = 0
    for index, number, what, source in _records(case, left_out):
        if what is None:
            if case.skips_sources:
                raise LeftOutError(index)
            raise FailureError(f"{index}.{source.kind} is damaged: ")
        if what == BAD:
            num_bad += 1
            if not case.skips_records:
                raise (
                    UnknownError
                    if source.is_damaged
                    else FailureError(f"{index}.{source.kind}, line {number + 1}: malformed")
                )
        if what in (DOCUMENT, REPEATED) and not (case.dedup and case.text(index, number) in texts):
            texts.append(case.text(index, number))
            if len(texts) == case.limit:
                if source.is_damaged:
                    raise UnknownError
                break
    if case.max_bad_records is not None and num_bad > case.max_bad_records:
        raise FailureError(f"and --max-bad-records allows {case.max_bad_records}")
    return texts


def _records(case: Case, left_out: set[int]) -> Iterator[tuple[int, int, str | None, Source]]:
    """Source, number and kind of all records in order; None for damage."""
    for index, source in enumerate(case.sources):
        if index not in left_out:
            yield from ((index, number, what, source) for number, what in enumerate(source.records))
            if source.is_damaged or source.kind == BROKEN:
                yield index, -1, None, source


# cases; sizes and limits are sampled rather than drawn, because most cases should be large enough to be of interest


@dataclass(frozen=True, kw_only=True)
class Theme:
    """What happens in a case.

    Args:
        letters: the kinds of records.
        damage: whether sources may be damaged; they are left out then, or not.
        limits: parts of all documents that a limit lets through; None: no limit.
        max_bad_records: parts of the bad records that are allowed.
    """

    letters: str = "ddddr-"
    damage: bool = False
    limits: tuple[float | None, ...] = (None,)
    max_bad_records: tuple[float | None, ...] = (None,)
    dedup: bool = False


LIMITS = (0.2, 0.4, 0.6, 0.8, 1.0)
THEMES = {
    "a limit": Theme(limits=LIMITS),
    "bad records": Theme(letters="ddrx", limits=(None, *LIMITS)),
    "too many bad records": Theme(letters="ddx", limits=(None, *LIMITS), max_bad_records=(0.0, 0.3, 0.6, 1.0)),
    "damage": Theme(letters="dddx", damage=True),
    "damage and a limit": Theme(damage=True, limits=LIMITS),
    "duplicates": Theme(letters="drr-", dedup=True, limits=(None, None, 0.4)),
    "duplicates and damage": Theme(letters="drr", dedup=True, damage=True),
    "everything": Theme(
        letters="dddr-x", damage=True, dedup=True, limits=(None, *LIMITS), max_bad_records=(None, 0.0, 0.5, 1.0)
    ),
}


@st.composite
def sources(draw: st.DrawFn, theme: Theme) -> Source:
    kind = draw(st.sampled_from([LINES, STREAM, LINES, STREAM, STREAM, *([BROKEN] if theme.damage else [])]))
    if kind == BROKEN:
        return Source(BROKEN, "")
    num_records = draw(st.sampled_from([7, 11, 9, 4, 1]))
    records = draw(st.lists(st.sampled_from(theme.letters), min_size=num_records, max_size=num_records).map("".join))
    is_damaged = kind == STREAM and theme.damage and draw(st.booleans())
    return Source(kind, records, is_damaged, draw(st.sampled_from([200, 200, 60])))


@st.composite
def cases(draw: st.DrawFn, theme: Theme) -> Case:
    num_sources = draw(st.sampled_from([2, 3, 1, 4]))
    found = draw(st.lists(sources(theme), min_size=num_sources, max_size=num_sources))
    records = "".join(source.records for source in found)
    num_documents, num_bad = records.count(DOCUMENT) + records.count(REPEATED), records.count(BAD)
    limit, most = draw(st.sampled_from(theme.limits)), draw(st.sampled_from(theme.max_bad_records))
    skips_records = most is not None or draw(st.sampled_from([True, True, False]))
    return Case(
        sources=tuple(found),
        limit=None if limit is None else max(1, round(limit * num_documents)),
        skips_records=skips_records,
        skips_sources=theme.damage and draw(st.sampled_from([True, True, True, False])),
        max_bad_records=None if most is None else round(most * num_bad),
        dedup=theme.dedup,
        task_bytes=draw(st.sampled_from([512, 512, 1024])),
    )


def shard(source: int, segment: int | None = None) -> str:
    """A pattern of the shards of a source, or of one of its segments."""
    return f"shard-00-{source:07d}-" + ("" if segment is None else f"{segment:06d}-")


@st.composite
def holds(draw: st.DrawFn) -> Fault:
    """A segment that waits until a later one, or one of a later source, is done, if it comes to that."""
    source, segment = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    later = draw(st.sampled_from([shard(source, segment + 1), shard(source + 1), shard(source + 2)]))
    return Fault(on=f"open .*{shard(source, segment)}", until=f"replace .*{later}", act="hold", lingers=0.3)


PAUSES = st.builds(
    Fault,
    pauses=st.sampled_from([0.01, 0.03]),
    pause_share=st.sampled_from([0.1, 0.5]),
    pause_on=st.sampled_from([r"open .*/\.?shard-", small.RECEIPT, "replace", ""]),
    seed=st.integers(0, 1 << 30),
)
"""What makes workers slow at drawn steps, and so ends tasks in another order."""

ORDERS = st.lists(PAUSES | holds(), min_size=1, max_size=3).map(tuple)
"""In which order tasks end."""

STOPS = st.builds(
    Fault,
    act=st.sampled_from(["kill", "kill", "orphan", "die", "error"]),
    at=st.integers(1, 150),
    is_after=st.booleans(),
)


@dataclass(frozen=True)
class Run:
    """One run of the command of a build that does not come to its end, or perhaps.

    Args:
        loses: which of the shards, if any, is gone after it.
    """

    workers: int
    order: tuple[Fault, ...]
    stop: Fault
    loses: int | None = None


WORKERS = st.sampled_from([1, 2, 2, 2, 3])
HISTORIES = st.lists(
    st.builds(Run, workers=WORKERS, order=ORDERS, stop=STOPS, loses=st.none() | st.integers(0, 20)), max_size=2
)


class Bench:
    """A place where builds of cases are compared."""

    def __init__(self, launcher: Launcher, directory: Path, tokenizer: Path) -> None:
        self.launcher, self.directory, self.tokenizer = launcher, directory, tokenizer
        self.out, self.reference = directory / "out", directory / "reference"

    def begin(self, case: Case) -> tuple[list[Path], Outcome]:
        """Write the sources of a case, and build it by one process: how that ends is what the model says."""
        for folder in (self.directory, self.launcher.directory):
            shutil.rmtree(folder, ignore_errors=True)
        paths = case.write(self.directory / "sources")
        alone = self.build(case, paths, self.reference, workers=1)
        found = expected(case)
        if isinstance(found, str):
            assert alone.exit_code == 1, alone.errors
            assert found in messages(alone, self.reference)[0]
        elif found is not None:
            assert alone.exit_code == 0, alone.errors
            with open_corpus(self.reference) as corpus:
                assert texts_of(corpus) == found
        if alone.exit_code == 0:
            assert verify_corpus(self.reference).problems == ()
        return paths, alone

    def words(self, case: Case, paths: Sequence[Path], out: Path, workers: int) -> list[str]:
        return build_words(paths, out, self.tokenizer, *case.options, "--workers", str(workers))

    def build(
        self, case: Case, paths: Sequence[Path], out: Path, *, workers: int, faults: Sequence[Fault] = ()
    ) -> Outcome:
        return self.launcher.start(self.words(case, paths, out, workers), out=out, fault=faults or None).end()

    def lose(self, number: int | None) -> None:
        """Remove one of the shards of an unfinished build."""
        found = shards(self.out)
        if number is not None and found and not (self.out / names.MANIFEST).exists():
            found[number % len(found)].unlink()

    def check(self, done: Outcome, alone: Outcome) -> None:
        """A build ended as the one by one process did."""
        assert (done.exit_code, messages(done, self.out)) == (alone.exit_code, messages(alone, self.reference))
        if done.exit_code == 0:
            assert state(self.out) == state(self.reference)


@pytest.fixture(scope="module")
def bench(launcher: Launcher, byte_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(launcher, tmp_path_factory.mktemp("bench") / "place", byte_tokenizer)


real_processes = settings(
    max_examples=examples(4),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.slow
@pytest.mark.parametrize("theme", THEMES)
@settings(real_processes)
@given(data=st.data(), history=HISTORIES, workers=WORKERS, order=ORDERS)
def test_whatever_ends_when_and_was_killed_or_lost_before_a_build_ends_as_one_in_order(
    bench: Bench, theme: str, data: st.DataObject, history: list[Run], workers: int, order: tuple[Fault, ...]
) -> None:
    case = data.draw(cases(THEMES[theme]), label="case")
    paths, alone = bench.begin(case)
    for run in history:
        bench.build(case, paths, bench.out, workers=run.workers, faults=(*run.order, run.stop))
        bench.lose(run.loses)
    bench.check(bench.build(case, paths, bench.out, workers=workers, faults=order), alone)


class Jobs:
    """Runs the jobs of an array: in which order, whether at once, and what happens to the first few."""

    def __init__(self, bench: Bench, order: Sequence[int], *, are_at_once: bool, faults: Sequence[Fault] = ()) -> None:
        self.bench, self.order, self.are_at_once, self.faults = bench, order, are_at_once, list(faults)

    def __call__(self, commands: Sequence[Words]) -> list[Outcome]:
        if len(commands) > 1:
            commands = [commands[index] for index in self.order]
        if self.are_at_once:
            return [running.end() for running in list(map(self._start, commands))]
        return [self._start(words).end() for words in commands]

    def _start(self, words: Words) -> Running:
        fault = self.faults.pop(0) if self.faults else None
        return self.bench.launcher.start(words, out=self.bench.out, fault=fault)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["a limit", "bad records", "damage and a limit", "duplicates and damage"])
@settings(real_processes, max_examples=examples(3))
@given(
    data=st.data(),
    order=st.permutations(range(3)),
    are_at_once=st.booleans(),
    stops=st.lists(STOPS | PAUSES, max_size=5),
)
def test_an_array_of_jobs_ends_as_one_process_in_whichever_order_they_run_and_whatever_stopped_one_before(
    bench: Bench, theme: str, data: st.DataObject, order: list[int], are_at_once: bool, stops: list[Fault]
) -> None:
    case = data.draw(cases(THEMES[theme]), label="case")
    paths, alone = bench.begin(case)
    words = bench.words(case, paths, bench.out, workers=1)
    if stops:
        run_array(words, bench.out, Jobs(bench, order, are_at_once=are_at_once, faults=stops))
    bench.check(run_array(words, bench.out, Jobs(bench, order, are_at_once=are_at_once)), alone)


# the same in examples that can be read


def held(source: int, until: str, segment: int | None = None) -> Fault:
    """A worker that writes nothing of a source, or of a segment, until a moment after another shard is there."""
    return Fault(on=f"open .*{shard(source, segment)}", until=f"replace .*{until}", act="wait", lingers=0.1)


def lines(records: str) -> Source:
    """Two records are more than a task reads."""
    return Source(LINES, records, line_bytes=300)


def test_bad_records_behind_the_document_that_reaches_the_limit_do_not_count(bench: Bench) -> None:
    """The second source is done first, and read to its end: it may write three documents as long as none is there."""
    case = Case((lines("dd"), lines("dxxx")), limit=3, skips_records=True, max_bad_records=0)
    paths, alone = bench.begin(case)
    assert alone.exit_code == 0
    bench.check(bench.build(case, paths, bench.out, workers=2, faults=[held(0, shard(1))]), alone)


def test_a_failure_behind_the_document_that_reaches_the_limit_does_not_count(bench: Bench) -> None:
    case = Case((lines("dd"), lines("ddddx")), limit=3)
    paths, alone = bench.begin(case)
    assert alone.exit_code == 0
    bench.check(bench.build(case, paths, bench.out, workers=2, faults=[held(0, shard(1, 1))]), alone)


def test_the_lowest_failure_counts_however_late_it_comes(bench: Bench) -> None:
    case = Case((lines("dddx"), lines("dddddx")), task_bytes=1024)
    paths, alone = bench.begin(case)
    assert "0.jsonl, line 4" in alone.errors
    bench.check(bench.build(case, paths, bench.out, workers=2, faults=[held(0, shard(1, 0))]), alone)


@pytest.mark.slow
def test_what_a_stream_gave_before_its_damage_is_left_out_with_it(bench: Bench) -> None:
    case = Case(
        (Source(LINES, "ddd"), Source(STREAM, "d" * 9, is_damaged=True), Source(LINES, "d")), skips_sources=True
    )
    paths, alone = bench.begin(case)
    assert [number for number in (0, 1, 2) if any(shard(number) in step for step in alone.steps)] == [0, 1, 2]
    assert not [path for path in shards(bench.reference) if shard(1) in path.name]
    bench.check(bench.build(case, paths, bench.out, workers=3), alone)


def test_what_a_stream_left_no_room_for_is_in_the_corpus_when_the_stream_is_left_out(bench: Bench) -> None:
    """The last source was cut at the limit while the stream counted. Then a part of the stream has to be read again."""
    case = Case((Source(STREAM, "d" * 4), Source(LINES, "d" * 6)), limit=6, skips_sources=True)
    paths, _ = bench.begin(case)
    broken = replace(case, sources=(replace(case.sources[0], is_damaged=True), case.sources[1]))
    killed = bench.build(case, paths, bench.out, workers=1, faults=[Fault(on=r"open .*manifest\.json")])
    assert killed.exit_code == -9
    assert sum(shard(1) in path.name for path in shards(bench.out)) == 1
    lost = [path for path in shards(bench.out) if shard(0, 1) in path.name]
    assert lost
    for path in lost:
        path.unlink()
    before = os.stat(paths[0])
    (bench.directory / "later").mkdir()
    paths[0].write_bytes(broken.write(bench.directory / "later" / "sources")[0].read_bytes())
    os.utime(paths[0], ns=(before.st_atime_ns, before.st_mtime_ns))  # a disk that forgets changes no time
    done = bench.build(case, paths, bench.out, workers=1)
    assert done.exit_code == 0, done.errors
    with open_corpus(bench.out) as corpus:
        assert texts_of(corpus) == expected(broken) == [case.text(1, number) for number in range(6)]
