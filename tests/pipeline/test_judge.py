"""The judge: receipts in any order come to what a run in order comes to.

A stage is made up here: inputs are strings of records, and tasks read them as those of a build do.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.inputs import write_byte_tokenizer
from tests.pipeline.places import TEXTS, write
from tokshard.pipeline.executors.base import Ended, Event, Usage
from tokshard.pipeline.judge import BadRecordLimit, Judge, TooManyBadRecords
from tokshard.pipeline.options import BuildOptions
from tokshard.pipeline.progress import Report
from tokshard.pipeline.request import Build
from tokshard.pipeline.resolve import resolve
from tokshard.pipeline.sources.division import Span
from tokshard.pipeline.tasks.planning import AnyTask, Run, StreamTask, Task
from tokshard.pipeline.tasks.running import Stage
from tokshard.pipeline.work import RunsTasks
from tokshard.pipeline.workspace.receipts import Failure, OutputCounts, Receipt, SourceCounts

GROUP, DIVIDED, STREAM = "group", "divided", "stream"
DAMAGE = "!"
MAX_INPUTS = 6


@dataclass(frozen=True)
class Content:
    """An input: the chunks of each segment, of records: ``d`` a document, ``x`` a bad one, ``e`` an empty one."""

    kind: str
    segments: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Rules:
    limit: int | None
    is_skipping: bool
    is_leaving_out: bool
    max_bad: BadRecordLimit | None = None


@dataclass(frozen=True)
class Outcome:
    """What a stage comes to: its failure, with the input; or what it writes and leaves out."""

    failure: tuple[str, int] | None
    documents: int = 0
    bad: int = 0
    left_out: frozenset[int] = frozenset()


chunks = st.one_of(st.text("ddde", min_size=1, max_size=4), st.text("ddxe", min_size=1, max_size=4), st.just(DAMAGE))
segments = st.lists(chunks, max_size=3).map(
    lambda found: tuple(found[: found.index(DAMAGE) + 1] if DAMAGE in found else found)
)
contents = st.one_of(
    st.builds(Content, st.just(GROUP), st.tuples(segments)),
    st.builds(Content, st.sampled_from([DIVIDED, STREAM]), st.lists(segments, min_size=1, max_size=4).map(tuple)),
)
all_inputs = st.lists(contents, min_size=1, max_size=MAX_INPUTS)
limits = st.one_of(st.none(), st.integers(1, 25))
rules = st.builds(Rules, limit=limits, is_skipping=st.booleans(), is_leaving_out=st.booleans())
bad_limits = st.one_of(
    st.builds(BadRecordLimit, count=st.integers(0, 4)),
    st.builds(BadRecordLimit, share=st.fractions(0, 1, max_denominator=8)),
)
rules_with_bad_limits = st.builds(
    Rules, limit=limits, is_skipping=st.just(value=True), is_leaving_out=st.booleans(), max_bad=bad_limits
)


def plan(inputs: Sequence[Content]) -> list[AnyTask]:
    """Up to three consecutive inputs of groups in one task, each part of a divided one in a task of its own."""
    tasks: list[AnyTask] = []
    index = 0
    while index < len(inputs):
        found, stop = inputs[index], index + 1
        if found.kind == GROUP:
            stop = index + len(list(takewhile(lambda one: one.kind == GROUP, inputs[index : index + 3])))
            tasks.append(Task(key=(index, 0), stop=stop))
        elif found.kind == STREAM:
            tasks.append(StreamTask(key=(index, 0)))
        else:
            tasks += [
                Task(key=(index, number), stop=stop, span=Span(number, number + 1))
                for number in range(len(found.segments))
            ]
        index = stop
    return tasks


# what tasks leave


class StoppedError(Exception):
    """A task met a bad record that is not to be skipped, or damage."""

    def __init__(self, kind: str, source: int) -> None:
        super().__init__(kind, source)
        self.failure = Failure(kind="input" if kind == "input" else "record", problem="it is bad", source=source)


class Reading:
    """What one run of a task has read up to now."""

    def __init__(self, room: int | None, rule: Rules) -> None:
        self.room, self.rule = room, rule
        self.documents = self.records = self.bad = 0

    @property
    def is_full(self) -> bool:
        return self.room is not None and self.documents >= self.room

    def take(self, source: int, chunk: str) -> None:
        if chunk == DAMAGE:
            raise StoppedError("input", source)
        if self.room is not None and chunk.count("d") >= self.room - self.documents:
            places = [place for place, record in enumerate(chunk) if record == "d"]
            chunk = chunk[: places[self.room - self.documents - 1] + 1]
        self.documents += chunk.count("d")
        if "x" in chunk and not self.rule.is_skipping:
            raise StoppedError("record", source)
        self.records += len(chunk)
        self.bad += chunk.count("x")

    def receipt(self, key: tuple[int, int], **facts: object) -> Receipt:
        counts = SourceCounts(key[0], self.records, self.documents)
        return Receipt(
            key=key,
            **{"max_documents": self.room, "most_documents": self.documents, "num_rejects": self.bad, **facts},
            outputs=[OutputCounts(sources=[counts])],
        )

    def failed(self, key: tuple[int, int], error: StoppedError, most: int = 0) -> Receipt:
        most = max(most, self.documents)
        return Receipt(key=key, failure=error.failure, max_documents=self.room, most_documents=most)


def run_task(run: Run, inputs: Sequence[Content], rule: Rules) -> Iterator[Receipt]:
    """The receipts of a task, in order."""
    if isinstance(run.task, StreamTask):
        yield from _run_stream(run, inputs, rule)
        return
    assert isinstance(run.task, Task)
    left_out, most = dict[int, str](), 0
    while True:
        reading = Reading(run.max_documents, rule)
        try:
            for index in run.task.inputs:
                part = inputs[index].segments[run.task.key[1]]
                for chunk in part if index not in left_out else ():
                    if not reading.is_full:
                        reading.take(index, chunk)
        except StoppedError as error:
            if error.failure.kind == "record" or not run.task.is_group or not rule.is_leaving_out:
                yield reading.failed(run.task.key, error, most)
                return
            left_out[error.failure.source] = "it is bad"
            most = max(most, reading.documents)
        else:
            yield reading.receipt(run.task.key, left_out=left_out, most_documents=max(most, reading.documents))
            return


def _run_stream(run: Run, inputs: Sequence[Content], rule: Rules) -> Iterator[Receipt]:
    index, room = run.task.key[0], run.max_documents
    found = inputs[index].segments
    for number in range(run.num_done, len(found)):
        reading = Reading(room, rule)
        is_last = number == len(found) - 1
        try:
            for chunk in found[number]:
                if not reading.is_full:
                    reading.take(index, chunk)
            if not is_last and not reading.is_full and found[number + 1][:1] == (DAMAGE,):
                raise StoppedError("input", index)  # whether more follows is only known when it is read
        except StoppedError as error:
            yield reading.failed((index, number), error)
            return
        yield reading.receipt((index, number), is_last=is_last and not reading.is_full)
        room = None if room is None else room - reading.documents
        if room == 0:
            return


# what they come to


def expected(inputs: Sequence[Content], rule: Rules) -> Outcome:
    """The outcome of one walk over the records, without tasks and receipts."""
    documents = bad = 0
    left_out: set[int] = set()
    for index, found in enumerate(inputs):
        before = documents, bad
        for record in "".join(chunk for segment in found.segments for chunk in segment):
            if documents == rule.limit:
                break
            if record == DAMAGE and rule.is_leaving_out:
                left_out.add(index)
                documents, bad = before
                break
            if record == DAMAGE or (record == "x" and not rule.is_skipping):
                return Outcome(("input" if record == DAMAGE else "record", index))
            documents, bad = documents + (record == "d"), bad + (record == "x")
    return Outcome(None, documents, bad, frozenset(left_out))


def judge_of(inputs: Sequence[Content], rule: Rules) -> Judge:
    return Judge(tasks=plan(inputs), limit=rule.limit, max_bad_records=rule.max_bad, is_leaving_out=rule.is_leaving_out)


def outcome(judge: Judge, inputs: Sequence[Content], rule: Rules) -> Outcome:
    """The outcome by a judge, when what has to run again has done so."""
    while judge.rerun is not None:
        for receipt in run_task(judge.rerun, inputs, rule):
            judge.add(receipt)
    assert judge.is_done
    if isinstance(judge.failure, TooManyBadRecords):
        return Outcome((f"bad records: {judge.failure}", judge.failure.key[0]))
    if judge.failure is not None:
        assert judge.failure.failure is not None
        return Outcome((judge.failure.failure.kind, judge.failure.failure.source))
    documents = sum(receipt.documents for receipt in judge.counted)
    bad = sum(receipt.num_rejects for receipt in judge.counted)
    return Outcome(None, documents, bad, frozenset(judge.left_out))


def in_order(inputs: Sequence[Content], rule: Rules) -> Outcome:
    """The outcome of a run without workers: each task has the room that is left."""
    judge = judge_of(inputs, rule)
    for task in judge.tasks:
        if not judge.is_over(task):
            for receipt in run_task(Run(task=task, max_documents=judge.room), inputs, rule):
                judge.add(receipt)
            assert judge.rerun is None
    return outcome(judge, inputs, rule)


class KilledError(Exception):
    """Ends a run."""


class AnyOrder:
    """An executor whose workers end their tasks in any order, and which may be killed after any receipt."""

    usage = Usage()

    def __init__(self, inputs: Sequence[Content], rule: Rules, draw: st.DataObject, *, can_be_killed: bool) -> None:
        self._inputs, self._rule, self._draw, self._can_be_killed = inputs, rule, draw, can_be_killed
        self._running: dict[AnyTask, Iterator[Receipt]] = {}
        self.num_workers = draw.draw(st.integers(1, 4), label="workers")
        self.run_mapped = self._map if draw.draw(st.booleans(), label="streams are mapped") else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def has_room(self) -> bool:
        return len(self._running) < self.num_workers

    def submit(self, run: Run) -> None:
        self._running[run.task] = run_task(run, self._inputs, self._rule)

    def events(self) -> Iterator[Event]:
        self._perhaps_die()
        task = self._draw.draw(st.sampled_from(list(self._running)), label="next")
        receipt = next(self._running[task], None)
        if receipt is None:
            del self._running[task]
        yield Ended(task) if receipt is None else receipt

    def _map(self, run: Run) -> Iterator[Receipt]:
        assert not self._running, "all workers are needed"
        for receipt in run_task(run, self._inputs, self._rule):
            yield receipt
            self._perhaps_die()

    def _perhaps_die(self) -> None:
        if self._can_be_killed and self._draw.draw(st.integers(0, 9), label="0: killed") == 0:
            raise KilledError


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """A build of as many inputs as a stage may have, which are not read."""
    place = tmp_path_factory.mktemp("build")
    sources = [str(write(place / f"{number}.jsonl", TEXTS)) for number in range(MAX_INPUTS)]
    tokenizer = write_byte_tokenizer(place / "tok")
    return resolve(sources, BuildOptions(tokenizer=str(tokenizer), out=str(place / "out")))[0]


def interleaved(build: Build, inputs: Sequence[Content], rule: Rules, draw: st.DataObject) -> Outcome:
    """The outcome of runs whose workers end their tasks in any order, and which are killed and begun again."""
    left: dict[tuple[int, int], Receipt] = {}
    for can_be_killed in (True, True, False):
        judge = judge_of(inputs, rule)
        for receipt in draw.draw(st.permutations(sorted(left.values(), key=lambda one: one.key)), label="left"):
            judge.add(receipt)

        def keep(report: Report) -> None:
            if isinstance(report, Receipt) and report.failure is None:
                left[report.key] = report

        executor = functools.partial(AnyOrder, inputs, rule, draw, can_be_killed=can_be_killed)
        stage = Stage(name="write", tasks=judge.tasks)
        run = RunsTasks(make_executor=lambda *_, make=executor: make(), observer=keep)
        with contextlib.suppress(KilledError):
            run.tasks(build, stage, list(judge.missing()), judge)
    return outcome(judge, inputs, rule)


@given(inputs=all_inputs, rule=rules)
def test_a_run_in_order_comes_to_what_a_walk_over_the_records_does(inputs, rule):
    assert in_order(inputs, rule) == expected(inputs, rule)


@given(inputs=all_inputs, rule=rules, draw=st.data())
def test_any_order_of_receipts_and_kills_comes_to_what_a_run_in_order_does(inputs, rule, draw, build):
    assert interleaved(build, inputs, rule, draw) == expected(inputs, rule)


@given(inputs=all_inputs, rule=rules_with_bad_limits, draw=st.data())
def test_bad_records_are_too_many_at_the_same_task_in_any_order(inputs, rule, draw, build):
    assert interleaved(build, inputs, rule, draw) == in_order(inputs, rule)


@given(inputs=all_inputs, rule=rules, first=st.integers(1, 25), second=st.integers(1, 25))
def test_a_receipt_holds_for_another_room_only_if_the_task_comes_to_the_same_there(inputs, rule, first, second):
    for task in plan(inputs):
        for room, other in ((first, second), (first, None), (None, first)):
            found, again = (next(run_task(Run(task=task, max_documents=most), inputs, rule)) for most in (room, other))
            if found.holds_for(other):
                same = ("failure", "documents", "records_read", "num_rejects", "left_out", "is_last")
                assert [getattr(found, name) for name in same] == [getattr(again, name) for name in same]


def test_a_receipt_holds_for_the_room_that_it_had():
    for room in (None, 3):
        assert Receipt(key=(0, 0), max_documents=room, most_documents=3).holds_for(room)


def test_a_task_behind_the_lowest_failure_is_over_and_one_before_it_is_not():
    tasks = [Task(key=(index, 0), stop=index + 1) for index in range(3)]
    judge = Judge(tasks=tasks)
    judge.add(Receipt(key=(1, 0), failure=Failure(kind="record", problem="it is bad", source=1)))
    assert [judge.is_over(task) for task in tasks] == [False, False, True]
    assert [task.key for task in judge.missing()] == [(0, 0)]
    assert not judge.is_done


def counting(*keys: tuple[int, int], documents: int = 0, bad: int = 0, is_last: bool = True) -> list[Receipt]:
    """Receipts of which each counts so many documents and bad records."""
    return [
        Receipt(
            key=key,
            is_last=is_last,
            outputs=[OutputCounts(sources=[SourceCounts(key[0], documents + bad, documents)])],
            num_rejects=bad,
        )
        for key in keys
    ]


def test_no_task_can_matter_behind_the_one_that_reaches_the_limit():
    tasks = [Task(key=(index, 0), stop=index + 1) for index in range(3)]
    judge = Judge(tasks=tasks, limit=4)
    for receipt in counting((0, 0), (1, 0), documents=2):
        judge.add(receipt)
    assert (judge.is_full, judge.is_done, judge.rerun, judge.is_over(tasks[2])) == (True, True, None, True)
    assert list(judge.missing()) == []


def test_all_segments_of_a_stream_are_left_out_with_it():
    judge = Judge(tasks=[StreamTask(key=(0, 0)), Task(key=(1, 0), stop=2)], limit=9, is_leaving_out=True)
    for receipt in counting((0, 0), (0, 1), documents=3, is_last=False):
        judge.add(receipt)
    assert judge.room == 3
    judge.add(Receipt(key=(0, 2), failure=Failure(kind="input", problem="it is damaged", source=0)))
    assert (judge.room, judge.left_out, judge.counted) == (9, {0: "it is damaged"}, [])


def test_the_task_with_which_bad_records_are_too_many_ends_the_stage():
    tasks = [Task(key=(index, 0), stop=index + 1) for index in range(4)]
    judge = Judge(tasks=tasks, max_bad_records=BadRecordLimit(count=3))
    for receipt in counting((0, 0), (1, 0), bad=2):
        judge.add(receipt)
    assert judge.failure == TooManyBadRecords(key=(1, 0), before=2, bad=4, records=4)
    assert (judge.is_done, judge.is_over(tasks[2]), list(judge.missing())) == (True, True, [])
