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
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.contract.commands import DEDUP, Bench, messages, shards, state
from tests.contract.faults import Fault, Launcher, Outcome
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
        return [*found, *(DEDUP if self.dedup else ())]

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


LIMITS = (0.2, 0.4, 0.6, 0.8, 1.0)
THEMES: dict[str, dict[str, Any]] = {
    "a limit": {"limits": LIMITS},
    "bad records": {"letters": "ddrx", "limits": (None, *LIMITS)},
    "too many bad records": {"letters": "ddx", "limits": (None, *LIMITS), "allowed": (0.0, 0.3, 0.6, 1.0)},
    "damage": {"letters": "dddx", "damage": True},
    "damage and a limit": {"damage": True, "limits": LIMITS},
    "duplicates": {"letters": "drr-", "dedup": True, "limits": (None, None, 0.4)},
    "duplicates and damage": {"letters": "drr", "dedup": True, "damage": True},
    "everything": {
        "letters": "dddr-x",
        "damage": True,
        "dedup": True,
        "limits": (None, *LIMITS),
        "allowed": (None, 0.0, 0.5, 1.0),
    },
}
"""What happens in a case: the arguments of `cases`."""


@st.composite
def sources(draw: st.DrawFn, letters: str, *, damage: bool) -> Source:
    kind = draw(st.sampled_from([LINES, STREAM, LINES, STREAM, STREAM, *([BROKEN] if damage else [])]))
    if kind == BROKEN:
        return Source(BROKEN, "")
    num_records = draw(st.sampled_from([7, 11, 9, 4, 1]))
    records = draw(st.lists(st.sampled_from(letters), min_size=num_records, max_size=num_records).map("".join))
    is_damaged = kind == STREAM and damage and draw(st.booleans())
    return Source(kind, records, is_damaged, draw(st.sampled_from([200, 200, 60])))


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    letters: str = "ddddr-",
    damage: bool = False,
    limits: Sequence[float | None] = (None,),
    allowed: Sequence[float | None] = (None,),
    dedup: bool = False,
) -> Case:
    """Cases.

    Args:
        letters: the kinds of records.
        damage: whether sources may be damaged; they are left out then, or not.
        limits: parts of all documents that a limit lets through; None: no limit.
        allowed: parts of the bad records.
    """
    num_sources = draw(st.sampled_from([2, 3, 1, 4]))
    found = draw(st.lists(sources(letters, damage=damage), min_size=num_sources, max_size=num_sources))
    records = "".join(source.records for source in found)
    num_documents, num_bad = records.count(DOCUMENT) + records.count(REPEATED), records.count(BAD)
    limit, most = draw(st.sampled_from(limits)), draw(st.sampled_from(allowed))
    return Case(
        sources=tuple(found),
        limit=None if limit is None else max(1, round(limit * num_documents)),
        skips_records=most is not None or draw(st.sampled_from([True, True, False])),
        skips_sources=damage and draw(st.sampled_from([True, True, True, False])),
        max_bad_records=None if most is None else round(most * num_bad),
        dedup=dedup,
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


EXECUTORS = st.sampled_from(["local 1", "local 2", "local 2", "local 2", "local 3", "array of 3", "array at once"])
HISTORIES = st.lists(st.tuples(EXECUTORS, ORDERS, STOPS, st.none() | st.integers(0, 20)), max_size=2)
"""Runs that may not come to their end: by whom, in which order, what stops them, which shard is gone then."""


class Ordered(Bench):
    """A place where builds of cases are compared."""

    def begin_case(self, case: Case) -> Outcome:
        """Write the sources of a case, and build it by one process: how that ends is what the model says."""
        self.clear()
        shutil.rmtree(self.place / "sources", ignore_errors=True)
        self.words = self.build_words(case.write(self.place / "sources"), *case.options)
        alone = self.run([*self.words, "--workers", "1"])
        found = expected(case)
        if isinstance(found, str):
            assert alone.exit_code == 1, alone.errors
            assert found in messages(alone, self.out)[0]
        elif found is not None:
            assert alone.exit_code == 0, alone.errors
            with open_corpus(self.out) as corpus:
                assert texts_of(corpus) == found
        if alone.exit_code == 0:
            assert verify_corpus(self.out).problems == ()
        self.expected = state(self.out)
        self.clear()
        return alone

    def go(self, executor: str, faults: Sequence[Fault]) -> Outcome:
        kind, *_, number = executor.split()
        if kind == "local":
            return self.run([*self.words, "--workers", number], faults)
        if number == "once":
            return self.array(self.words, 3)[-1]
        return self.run_by(executor, self.words, faults[-1], victim=len(faults) % 4)

    def lose(self, number: int | None) -> None:
        """Remove one of the shards of an unfinished build."""
        found = shards(self.out)
        if number is not None and found and not (self.out / names.MANIFEST).exists():
            found[number % len(found)].unlink()

    def check_ended(self, done: Outcome, alone: Outcome) -> None:
        """A build ended as the one by one process did."""
        assert (done.exit_code, messages(done, self.out)) == (alone.exit_code, messages(alone, self.out))
        if done.exit_code == 0:
            assert state(self.out) == self.expected


@pytest.fixture(scope="module")
def bench(launcher: Launcher, byte_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Ordered:
    return Ordered(launcher, tmp_path_factory.mktemp("bench"), byte_tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("theme", THEMES)
@settings(
    max_examples=examples(5),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data(), history=HISTORIES, executor=EXECUTORS, order=ORDERS)
def test_whatever_ends_when_and_was_killed_or_lost_before_a_build_ends_as_one_in_order(
    bench: Ordered, theme: str, data: st.DataObject, history: list[Any], executor: str, order: tuple[Fault, ...]
) -> None:
    alone = bench.begin_case(data.draw(cases(**THEMES[theme]), label="case"))
    for other, slow, stop, lost in history:
        bench.go(other, [*slow, stop])
        bench.lose(lost)
    bench.check_ended(bench.go(executor, order), alone)


def test_what_a_stream_left_no_room_for_is_in_the_corpus_when_the_stream_is_left_out(bench: Ordered) -> None:
    """The last source was cut at the limit while the stream counted. Then a part of the stream has to be read again."""
    case = Case((Source(STREAM, "d" * 4), Source(LINES, "d" * 6)), limit=6, skips_sources=True)
    bench.begin_case(case)
    broken = replace(case, sources=(replace(case.sources[0], is_damaged=True), case.sources[1]))
    words = [*bench.words, "--workers", "1"]
    assert bench.run(words, Fault(on=r"open .*manifest\.json")).exit_code == -9
    assert sum(shard(1) in path.name for path in shards(bench.out)) == 1
    lost = [path for path in shards(bench.out) if shard(0, 1) in path.name]
    assert lost
    for path in lost:
        path.unlink()
    source = Path(words[1])
    before = os.stat(source)
    shutil.rmtree(bench.place / "later", ignore_errors=True)
    source.write_bytes(broken.write(bench.place / "later")[0].read_bytes())
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))  # a disk that forgets changes no time
    done = bench.run(words)
    assert done.exit_code == 0, done.errors
    with open_corpus(bench.out) as corpus:
        assert texts_of(corpus) == expected(broken) == [case.text(1, number) for number in range(6)]
