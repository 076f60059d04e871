"""A build ends as if one process had run its tasks in order, whatever fails, stops or is lost, and whenever it does.

tests/contract/test_promise_02_builder.py shows that what one process writes is right, and test_damage.py that what is
damaged is left out. For processes that are killed, tests/contract/test_promise_01_product.py shows the same as here.
"""

from __future__ import annotations

import bz2
import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.contract.commands import shards
from tests.examples import examples
from tests.pipeline.arrays import commit_corpus, run_job
from tests.pipeline.inputs import texts_of, write_byte_tokenizer
from tests.pipeline.places import StoppedError, files
from tokshard import build_corpus, open_corpus
from tokshard.errors import TokshardError
from tokshard.format import names
from tokshard.pipeline import build as local
from tokshard.pipeline.executors.base import Ended, Event, WorkerUsage
from tokshard.pipeline.judge import Judge
from tokshard.pipeline.request import Build
from tokshard.pipeline.sources.division import Span
from tokshard.pipeline.tasks.planning import AnyTask, Run, StreamTask, Task
from tokshard.pipeline.tasks.running import Stage, TaskRunner
from tokshard.pipeline.workspace.receipts import Failure, Receipt

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
    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"task_bytes": self.task_bytes, "shard_tokens": 600, "max_documents": self.limit}
        found |= {"on_bad_record": "skip" if self.skips_records else "fail"}
        found |= {"on_bad_source": "skip" if self.skips_sources else "fail"}
        return found | {"max_bad_records": self.max_bad_records, "dedup": "exact" if self.dedup else "none"}

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


# who runs the tasks


class AnyOrder:
    """An executor whose workers end their tasks in any order; what is drawn may stop it after any receipt."""

    usage = WorkerUsage()

    def __init__(self, build: Build, stage: Stage, draw: st.DataObject, *, may_stop: bool) -> None:
        self._build, self._stage, self._draw, self._may_stop = build, stage, draw, may_stop
        self._running: dict[AnyTask, Iterator[Receipt]] = {}
        self.num_workers = draw.draw(st.integers(1, 4), label="workers")
        self.run_shared = self._shared if draw.draw(st.booleans(), label="streams are shared") else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def has_room(self) -> bool:
        return len(self._running) < self.num_workers

    def submit(self, run: Run) -> None:
        self._running[run.task] = self._run(run)

    def events(self) -> Iterator[Event]:
        task = self._draw.draw(st.sampled_from(list(self._running)), label="next")
        receipt = next(self._running[task], None)
        if receipt is None:
            del self._running[task]
        yield Ended(task) if receipt is None else receipt
        self._perhaps_stop()

    def _run(self, run: Run) -> Iterator[Receipt]:
        return TaskRunner(self._build, self._stage, lambda _: None).run(run)

    def _shared(self, run: Run) -> Iterator[Receipt]:
        assert not self._running, "all workers are needed"
        for receipt in self._run(run):
            yield receipt
            self._perhaps_stop()

    def _perhaps_stop(self) -> None:
        if self._may_stop and self._draw.draw(st.integers(0, 9), label="0: stopped") == 0:
            raise StoppedError


@contextlib.contextmanager
def any_order(draw: st.DataObject, *, may_stop: bool) -> Iterator[None]:
    """Builds of this process run their tasks so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_local", lambda build, stage, *_: AnyOrder(build, stage, draw, may_stop=may_stop))
        yield


@dataclass(frozen=True)
class Place:
    """Where a case is built."""

    path: Path
    sources: list[Path]
    case: Case

    @classmethod
    def of(cls, path: Path, case: Case) -> Place:
        write_byte_tokenizer(path / "tok")
        return cls(path, case.write(path / "sources"), case)

    def build(self, out: str, *, num_jobs: int = 0) -> None:
        """Build alone, or as an array of jobs, one after another; any of them may fail or stop."""
        options = {"tokenizer": self.path / "tok", "workers": 1, "out": self.path / out, **self.case.options}
        if not num_jobs:
            build_corpus(self.sources, **options)
            return
        for index in range(num_jobs):
            with contextlib.suppress(TokshardError, StoppedError):
                run_job(list(map(str, self.sources)), job_index=index, num_jobs=num_jobs, **options)
        commit_corpus(self.path / out)

    def ended(self, out: str, **how: int) -> Any:
        """How a build ends: its files, or its error."""
        try:
            self.build(out, **how)
        except TokshardError as error:
            said = f"{error.problem}\n{error.hint}".replace(str(self.path / out), "OUT")
            return said.replace("remove OUT and run the jobs again", "start over with --force")  # jobs have no --force
        return files(self.path / out)

    def lose(self, number: int | None) -> None:
        """Remove a shard of an unfinished build, or a file that a task left for later stages."""
        found = [*shards(self.path / "out"), *sorted((self.path / "out").rglob("files/*.bin"))]
        if number is not None and found and not (self.path / "out" / names.MANIFEST).exists():
            found[number % len(found)].unlink()


NUM_JOBS = st.sampled_from([0, 0, 0, 3])
RUNS = st.lists(st.tuples(NUM_JOBS, st.none() | st.integers(0, 20)), max_size=2)
"""Runs that may not come to their end: of how many jobs, and which file is gone then."""


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    small.shrink(monkeypatch.setattr, **small.TINY)


@pytest.mark.parametrize("theme", THEMES)
@settings(max_examples=examples(80))
@given(data=st.data(), before=RUNS, num_jobs=NUM_JOBS)
def test_whatever_ends_when_and_was_stopped_or_lost_before_a_build_ends_as_one_in_order(
    theme: str,
    data: st.DataObject,
    before: list[tuple[int, int | None]],
    num_jobs: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    case = data.draw(cases(**THEMES[theme]), label="case")
    place = Place.of(tmp_path_factory.mktemp("place"), case)
    alone = place.ended("alone")
    for jobs, lost in before:
        with any_order(data, may_stop=True), contextlib.suppress(TokshardError, StoppedError):
            place.build("out", num_jobs=jobs)
        place.lose(lost)
    with any_order(data, may_stop=False):
        assert place.ended("out", num_jobs=num_jobs) == alone


def test_what_a_stream_left_no_room_for_is_in_the_corpus_when_the_stream_is_left_out(tmp_path: Path) -> None:
    """The last source was cut at the limit while the stream counted. Then a part of the stream has to be read again."""
    case = Case((Source(STREAM, "d" * 4), Source(LINES, "d" * 6)), limit=6, skips_sources=True)
    broken = replace(case, sources=(replace(case.sources[0], is_damaged=True), case.sources[1]))
    place = Place.of(tmp_path, case)
    with small.stopped_before_the_corpus(StoppedError()), pytest.raises(StoppedError):
        place.build("out")
    written = [path.name[9:23] for path in shards(tmp_path / "out")]
    assert written.count("0000001-000000") == 1
    next(path for path in shards(tmp_path / "out") if "0000000-000001" in path.name).unlink()
    stream, before = place.sources[0], os.stat(place.sources[0])
    stream.write_bytes(broken.write(tmp_path / "later")[0].read_bytes())
    os.utime(stream, ns=(before.st_atime_ns, before.st_mtime_ns))  # a disk that forgets changes no time
    place.build("out")
    with open_corpus(tmp_path / "out") as corpus:
        assert texts_of(corpus) == [case.text(1, number) for number in range(6)]


def test_what_failed_in_an_input_that_is_left_out_then_keeps_no_later_task_from_running() -> None:
    tasks = [
        Task(key=(0, 0), stop=1, span=Span(0, 9)),
        Task(key=(0, 1), stop=1, span=Span(9)),
        Task(key=(1, 0), stop=2),
    ]
    judge = Judge(tasks=tasks, is_leaving_out=True)
    judge.add(Receipt(key=(0, 1), failure=Failure(kind="record", source=0, problem="bad")))
    assert judge.is_pointless(tasks[2]), "so far, the build fails"
    judge.add(Receipt(key=(0, 0), failure=Failure(kind="input", source=0, problem="damaged")))
    assert [*judge.missing()] == tasks[2:]


def test_a_stream_goes_on_after_its_segments_that_have_a_receipt() -> None:
    tasks = [Task(key=(0, 0), stop=1), StreamTask(key=(1, 0))]
    judge = Judge(tasks=tasks)
    for number in range(2):
        judge.add(Receipt(key=(1, number), is_last=False))
    assert judge.next_run(tasks[1]).num_done == 2
    assert [*judge.missing()] == tasks
    judge.add(Receipt(key=(1, 2)))
    assert [*judge.missing()] == tasks[:1]
