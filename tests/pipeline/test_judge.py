"""The judge: receipts in any order come to what a run in order comes to.

A stage is made up here: inputs are strings of records, and tasks read them as those of a build do.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Self

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.pipeline.inputs import write_byte_tokenizer
from tests.pipeline.places import TEXTS, write
from tokshard.pipeline.executors.base import Ended, Event, WorkerUsage
from tokshard.pipeline.judge import Judge
from tokshard.pipeline.options import BadRecordLimit, BuildOptions
from tokshard.pipeline.progress import Report
from tokshard.pipeline.request import Build
from tokshard.pipeline.resolve import resolve
from tokshard.pipeline.sources.division import Span
from tokshard.pipeline.tasks.planning import AnyTask, Run, StreamTask, Task
from tokshard.pipeline.tasks.running import Stage
from tokshard.pipeline.work import BuildRun
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
limits = st.sampled_from([None, *range(1, 9)])  # of the few documents that such inputs hold
rules = st.builds(Rules, limit=limits, is_skipping=st.booleans(), is_leaving_out=st.booleans())
bad_limits = st.one_of(st.integers(0, 4), st.fractions(0, 1, max_denominator=8))
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


def read(
    key: tuple[int, int],
    chunks: Sequence[tuple[int, str]],
    room: int | None,
    rule: Rules,
    *,
    left_out: Sequence[int] = (),
    most: int = 0,
) -> Receipt:
    """The receipt of chunks, each with its input, that are read up to the end, to the room, or to a failure."""
    documents = records = bad = 0
    for source, chunk in chunks:
        if source in left_out or documents == room:
            continue
        if room is not None and chunk.count("d") >= room - documents:
            places = [place for place, record in enumerate(chunk) if record == "d"]
            chunk = chunk[: places[room - documents - 1] + 1]  # noqa: PLW2901
        documents += chunk.count("d")
        most = max(most, documents)
        kind = "input" if chunk == DAMAGE else "record" if "x" in chunk and not rule.is_skipping else None
        if kind is not None:
            failure = Failure(kind=kind, problem="it is bad", source=source)
            return Receipt(key=key, failure=failure, max_documents=room, most_documents=most)
        records += len(chunk)
        bad += chunk.count("x")
    return Receipt(
        key=key,
        max_documents=room,
        most_documents=most,
        num_rejects=bad,
        left_out=dict.fromkeys(left_out, "it is bad"),
        outputs=[OutputCounts(sources=[SourceCounts(key[0], records, documents)])],
    )


def run_task(run: Run, inputs: Sequence[Content], rule: Rules) -> Iterator[Receipt]:
    """The receipts of a task, in order."""
    (index, number), room = run.task.key, run.max_documents
    if isinstance(run.task, Task):
        chunks = [(source, chunk) for source in run.task.inputs for chunk in inputs[source].segments[number]]
        found = read(run.task.key, chunks, room, rule)
        left_out: list[int] = []
        while run.task.is_group and rule.is_leaving_out and found.failure is not None and found.failure.kind == "input":
            left_out.append(found.failure.source)
            found = read(run.task.key, chunks, room, rule, left_out=left_out, most=found.most_documents)
        yield found
        return
    segments = inputs[index].segments
    for number in range(run.num_done, len(segments)):
        # whether more follows is only known when it is read
        after = segments[number + 1][:1] if number + 1 < len(segments) else ()
        chunks = [(index, chunk) for chunk in (*segments[number], *(after if after == (DAMAGE,) else ()))]
        found = read((index, number), chunks, room, rule)
        yield msgspec.structs.replace(found, is_last=number == len(segments) - 1 and found.documents != room)
        room = None if room is None else room - found.documents
        if found.failure is not None or room == 0:
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


def judge_of(inputs: Sequence[Content], rule: Rules, known: Collection[int] = ()) -> Judge:
    """The judge of a stage before it begins.

    Args:
        known: inputs that an earlier stage left out.
    """
    return Judge(
        tasks=plan(inputs),
        limit=rule.limit,
        max_bad_records=rule.max_bad,
        is_leaving_out=rule.is_leaving_out,
        left_out=dict.fromkeys(known, "it is bad"),
    )


def outcome(judge: Judge, inputs: Sequence[Content], rule: Rules) -> Outcome:
    """The outcome by a judge, when what has to run again has done so."""
    while judge.rerun is not None:
        for receipt in run_task(judge.rerun, inputs, rule):
            judge.add(receipt)
    assert judge.is_done
    if judge.failure is not None and judge.failure.failure is None:
        return Outcome((f"bad records: {judge.bad} of {judge.records}", judge.failure.key[0]))
    if judge.failure is not None:
        assert judge.failure.failure is not None
        return Outcome((judge.failure.failure.kind, judge.failure.failure.source))
    documents = sum(receipt.documents for receipt in judge.counted)
    bad = sum(receipt.num_rejects for receipt in judge.counted)
    return Outcome(None, documents, bad, frozenset(judge.left_out))


def in_order(inputs: Sequence[Content], rule: Rules, known: Collection[int] = ()) -> Outcome:
    """The outcome of a run without workers: each task has the room that is left, and nothing runs in vain."""
    judge = judge_of(inputs, rule, known)
    for task in judge.tasks:
        assert (task in [*judge.missing()]) != judge.is_pointless(task)
        if not judge.is_pointless(task):
            for receipt in run_task(Run(task=task, max_documents=judge.room), inputs, rule):
                judge.add(receipt)
            assert judge.rerun is None
        if judge.failure is not None:
            assert list(judge.missing()) == []
    return outcome(judge, inputs, rule)


class KilledError(Exception):
    """Ends a run."""


class AnyOrder:
    """An executor whose workers end their tasks in any order, and which may be killed after any receipt."""

    usage = WorkerUsage()

    def __init__(self, inputs: Sequence[Content], rule: Rules, draw: st.DataObject, *, can_be_killed: bool) -> None:
        self._inputs, self._rule, self._draw, self._can_be_killed = inputs, rule, draw, can_be_killed
        self._running: dict[AnyTask, Iterator[Receipt]] = {}
        self.num_workers = draw.draw(st.integers(1, 4), label="workers")
        self.run_shared = self._map if draw.draw(st.booleans(), label="streams are mapped") else None

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
        run = BuildRun(make_executor=lambda *_, make=executor: make(), observer=keep)
        with contextlib.suppress(KilledError):
            run.tasks(build, stage, list(judge.missing()), judge)
    return outcome(judge, inputs, rule)


@settings(max_examples=examples(600))
@given(inputs=all_inputs, rule=rules, draw=st.data())
def test_any_order_of_receipts_and_kills_comes_to_what_a_walk_over_the_records_does(inputs, rule, draw, build):
    found = in_order(inputs, rule)
    assert found == expected(inputs, rule)
    assert in_order(inputs, rule, known=found.left_out) == found
    assert interleaved(build, inputs, rule, draw) == expected(inputs, rule)


@settings(max_examples=examples(600))
@given(inputs=all_inputs, rule=rules_with_bad_limits, draw=st.data())
def test_bad_records_are_too_many_at_the_same_task_in_any_order(inputs, rule, draw, build):
    assert interleaved(build, inputs, rule, draw) == in_order(inputs, rule)


@given(inputs=all_inputs, rule=rules, first=st.integers(1, 25), second=st.integers(1, 25))
def test_a_receipt_holds_for_another_room_only_if_the_task_comes_to_the_same_there(inputs, rule, first, second):
    same = ("failure", "documents", "records_read", "num_rejects", "left_out", "is_last")
    for task in plan(inputs):
        for room, other in ((first, second), (first, None), (None, first), (None, None), (first, first)):
            found, again = (next(run_task(Run(task=task, max_documents=most), inputs, rule)) for most in (room, other))
            assert room != other or found.holds_for(other)
            if found.holds_for(other):
                assert [getattr(found, name) for name in same] == [getattr(again, name) for name in same]
