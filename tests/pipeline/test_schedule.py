"""The schedule reaches the outcome of a run in order, whatever runs when, ends when, and was done before."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokshard.errors import BadSourceError
from tokshard.pipeline.failures import BadInputError
from tokshard.pipeline.sources.division import Indivisible, Whole
from tokshard.pipeline.tasks.bad_record_limit import BadRecordLimit
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task, plan_tasks
from tokshard.pipeline.tasks.schedule import Cut, Policy, Schedule
from tokshard.pipeline.workspace.receipts import OutputCounts, Receipt, SourceCounts

DOCUMENT, LEFT_OUT, FAILURE, DAMAGE = "d", "-", "!", "~"
"""What a record becomes; reading stops at a failure and at damage."""


class RecordError(Exception):
    """The failure at a record of a task."""


@dataclass(frozen=True)
class Work:
    """The tasks of a made-up build: per key its records; segments of a stream that hold no record are left out."""

    tasks: Sequence[Task | StreamTask]
    records: dict[Key, str]

    def keys_of(self, task: Task | StreamTask) -> list[Key]:
        return [
            key for key in self.records if key[0] == task.key[0] and (isinstance(task, StreamTask) or key == task.key)
        ]

    def run(self, key: Key, cap: int | None) -> Receipt | RecordError | BadInputError:
        """What a runner does with a task or segment that may write `cap` documents."""
        documents = read = 0
        for record in self.records[key]:
            if cap is not None and documents >= cap:
                break
            if record == FAILURE:
                return RecordError(key, read)
            if record == DAMAGE:
                return BadInputError(key[0], BadSourceError("damaged", hint="leave it out"))
            documents += record == DOCUMENT
            read += 1
        (task,) = (task for task in self.tasks if key in self.keys_of(task))
        keys = self.keys_of(task)
        place = keys.index(key)
        return Receipt(
            key=key,
            previous=keys[place - 1][1] if isinstance(task, StreamTask) and place else None,
            is_last=key == keys[-1],
            cap=cap,
            input_bytes=read,
            outputs=[OutputCounts(sources=[SourceCounts(index=key[0], records_read=read, documents=documents)])],
            num_rejects=0,
        )


Outcome = tuple[list[tuple[Key, int, int]], tuple[Key, int] | None]
"""Per key of the corpus its documents and records read; or the key and record of the failure that decides."""


def run_in_order(work: Work, limit: int | None) -> Outcome:
    done, written = [], 0
    for key in work.records:
        if limit is not None and written >= limit:
            break
        result = work.run(key, None if limit is None else limit - written)
        assert not isinstance(result, BadInputError)
        if isinstance(result, RecordError):
            return [], result.args
        written += result.documents
        done.append((key, result.documents, result.input_bytes))
    return done, None


@dataclass
class Reading:
    """A stream under way: segments that are left, and who reads them.

    Args:
        is_whole: one worker has the whole stream and counts its room down, else any worker takes the next segment.
    """

    keys: list[Key]
    is_whole: bool
    cap: int | None
    num_running: int = 0


@dataclass
class Executors:
    """Workers that take tasks and end them in any order that `choose` says, as the real ones do."""

    work: Work
    schedule: Schedule
    num_workers: int
    choose: st.DataObject
    running: list[tuple[Task | StreamTask, Key, int | None]] = field(default_factory=list)
    streams: dict[StreamTask, Reading] = field(default_factory=dict)

    def run(self) -> None:
        while self.schedule.goes_on():
            can_start = len(self.running) < self.num_workers and self._has_work()
            if can_start and (not self.running or self.choose.draw(st.booleans(), label="start another")):
                self._start()
            else:
                assert self.running, "nothing runs, nothing can start, and it is not over"
                place = self.choose.draw(st.integers(0, len(self.running) - 1), label="which ends")
                self._end(*self.running.pop(place))

    def _has_work(self) -> bool:
        return any(map(self._can_start, self.streams.values())) or self.schedule.peek() is not None

    def _can_start(self, reading: Reading) -> bool:
        if reading.is_whole:
            return bool(reading.keys) and not reading.num_running
        return bool(reading.keys) and self.schedule.is_wanted(reading.keys[0])

    def _start(self) -> None:
        stream = next((stream for stream, reading in self.streams.items() if self._can_start(reading)), None)
        if stream is None:
            task = self.schedule.take()
            assert task is not None
            if isinstance(task, Task):
                self.running.append((task, task.key, self.schedule.cap))
                return
            done = self.schedule.done_segments(task)
            keys = [key for key in self.work.keys_of(task) if key[1] not in done]
            self.streams[task] = Reading(keys, self.choose.draw(st.booleans(), label="whole"), self.schedule.cap)
            stream = task
        reading = self.streams[stream]
        reading.num_running += 1
        self.running.append((stream, reading.keys.pop(0), reading.cap if reading.is_whole else self.schedule.cap))

    def _end(self, task: Task | StreamTask, key: Key, cap: int | None) -> None:
        result = self.work.run(key, cap)
        if isinstance(result, Exception):
            self.schedule.failed(key, result)
        else:
            self.schedule.finished(result)
        if isinstance(task, Task):
            self.schedule.released(task)
            return
        reading = self.streams[task]
        reading.num_running -= 1
        if reading.is_whole:
            if isinstance(result, Exception):
                reading.keys = []
            elif reading.cap is not None:
                reading.cap -= result.documents
                reading.keys = reading.keys if reading.cap > 0 else []
        elif reading.keys and not self.schedule.is_wanted(reading.keys[0]):
            reading.keys = []
        if not reading.keys and not reading.num_running:
            del self.streams[task]
            self.schedule.released(task)


def outcome_of(work: Work, schedule: Schedule, documents: dict[Key, Receipt]) -> Outcome:
    """What the pipeline makes of a schedule that is over."""
    failure, cut = schedule.error, schedule.boundary()
    if cut is not None:
        result = work.run(cut.key, cut.cap)
        assert not isinstance(result, BadInputError)
        if isinstance(result, RecordError):
            return [], result.args
        documents[cut.key] = result
        schedule.finished(result)
    if failure is not None and not schedule.is_limit_reached:
        return [], failure[1].args
    return [(key, documents[key].documents, documents[key].input_bytes) for key in schedule.in_order()], None


class Recording(Schedule):
    """A schedule whose receipts can be looked at."""

    @property
    def receipts(self) -> dict[Key, Receipt]:
        return self._receipts


records = st.text(alphabet=[DOCUMENT, DOCUMENT, DOCUMENT, LEFT_OUT, FAILURE], max_size=6)
good_records = st.text(alphabet=[DOCUMENT, LEFT_OUT], max_size=6)


@st.composite
def works(draw: st.DrawFn) -> Work:
    tasks: list[Task | StreamTask] = []
    found: dict[Key, str] = {}
    first = 0
    some_records = draw(st.sampled_from([records, good_records]))
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.booleans()):
            task: Task | StreamTask = Task(key=(first, 0), parts=((first, Whole()),))
            found[task.key] = draw(some_records)
        else:
            task = StreamTask(key=(first, 0))
            for segment in sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=4))):
                found[first, segment] = draw(some_records)
        tasks.append(task)
        first += draw(st.integers(1, 3))
    return Work(tasks, found)


@st.composite
def works_with_limits(draw: st.DrawFn) -> tuple[Work, int | None]:
    """Half of the limits fall inside of the documents that there are."""
    work = draw(works())
    documents = sum(found.count(DOCUMENT) for found in work.records.values())
    return work, draw(st.none() | st.integers(1, documents + 1) | st.integers(1, documents + 1))


cases = works_with_limits()


@settings(max_examples=300)
@given(case=cases, num_workers=st.integers(1, 4), choose=st.data())
def test_any_interleaving_reaches_the_outcome_of_a_run_in_order(case, num_workers, choose):
    work, limit = case
    schedule = Recording(work.tasks, [], limit)
    Executors(work, schedule, num_workers, choose).run()
    assert outcome_of(work, schedule, schedule.receipts) == run_in_order(work, limit)


@settings(max_examples=300)
@given(case=cases, kills=st.lists(st.integers(0, 6), max_size=3), choose=st.data())
def test_a_build_that_was_killed_and_run_again_reaches_the_same_outcome(case, kills, choose):
    work, limit = case
    receipts: dict[Key, Receipt] = {}
    for ends_before_the_kill in kills:
        schedule = Recording(work.tasks, receipts.values(), limit)
        executors = Executors(work, schedule, choose.draw(st.integers(1, 3)), choose)
        original, left = executors._end, ends_before_the_kill

        def end(*arguments, original=original):
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            original(*arguments)

        executors._end = end
        with contextlib.suppress(KeyboardInterrupt):
            executors.run()
        receipts = dict(schedule.receipts)
    schedule = Recording(work.tasks, receipts.values(), limit)
    Executors(work, schedule, 2, choose).run()
    assert outcome_of(work, schedule, schedule.receipts) == run_in_order(work, limit)


def run_in_order_without_damage(work: Work, limit: int | None) -> tuple[set[int], Outcome]:
    """Whenever damage is met, start over without its input."""
    bad: set[int] = set()
    while True:
        left = Work(work.tasks, {key: found for key, found in work.records.items() if key[0] not in bad})
        try:
            return bad, run_in_order(left, limit)
        except AssertionError:
            written = 0
            for key in left.records:
                result = left.run(key, None if limit is None else limit - written)
                if isinstance(result, BadInputError):
                    bad.add(key[0])
                    break
                assert isinstance(result, Receipt)
                written += result.documents


damaged_works = st.text(alphabet=[DOCUMENT, DOCUMENT, DOCUMENT, LEFT_OUT, DAMAGE], max_size=6)
worse_works = st.text(alphabet=[DOCUMENT, DOCUMENT, DOCUMENT, LEFT_OUT, DAMAGE, FAILURE], max_size=6)


@st.composite
def damaged_cases(draw: st.DrawFn) -> tuple[Work, int | None]:
    work = draw(works())
    some_records = draw(st.sampled_from([damaged_works, worse_works]))
    found = {key: draw(some_records) for key in work.records}
    documents = sum(records.count(DOCUMENT) for records in found.values())
    return Work(work.tasks, found), draw(st.none() | st.integers(1, documents + 1) | st.integers(1, documents + 1))


@settings(max_examples=500)
@given(case=damaged_cases(), num_workers=st.integers(1, 4), choose=st.data())
def test_leaving_out_damaged_inputs_reaches_the_outcome_of_a_run_in_order(case, num_workers, choose):
    work, limit = case
    bad: set[int] = set()
    policy = Policy(on_bad_input=lambda damage: bad.add(damage.source))
    schedule = Recording(work.tasks, [], limit, policy)
    Executors(work, schedule, num_workers, choose).run()
    assert (bad, outcome_of(work, schedule, schedule.receipts)) == run_in_order_without_damage(work, limit)


@settings(max_examples=300)
@given(case=damaged_cases(), ends_before_the_kill=st.integers(0, 8), choose=st.data())
def test_leaving_out_damaged_inputs_goes_on_after_a_kill(case, ends_before_the_kill, choose):
    work, limit = case
    bad: set[int] = set()
    policy = Policy(on_bad_input=lambda damage: bad.add(damage.source))
    schedule = Recording(work.tasks, [], limit, policy)
    executors = Executors(work, schedule, choose.draw(st.integers(1, 3)), choose)
    original, left = executors._end, ends_before_the_kill

    def end(*arguments):
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        original(*arguments)

    executors._end = end
    with contextlib.suppress(KeyboardInterrupt):
        executors.run()
    schedule = Recording(work.tasks, list(schedule.receipts.values()), limit, policy, set(bad))
    Executors(work, schedule, 2, choose).run()
    assert (bad, outcome_of(work, schedule, schedule.receipts)) == run_in_order_without_damage(work, limit)


@given(case=cases, choose=st.data())
def test_no_task_starts_after_the_limit_or_behind_a_failure(case, choose):
    work, limit = case
    schedule = Recording(work.tasks, [], limit)
    executors = Executors(work, schedule, 3, choose)
    original = executors._start

    def start():
        assert not schedule.is_limit_reached
        before = list(executors.running)
        original()
        (stream, key, _) = executors.running[len(before) :][0]
        reads_on = stream in executors.streams and executors.streams[stream].is_whole
        assert reads_on or all(key <= failed for failed in work.records if failed in schedule._failures)

    executors._start = start
    executors.run()


# the same in examples that can be read


def task(first: int) -> Task:
    return Task(key=(first, 0), parts=((first, Whole()),))


def test_a_failure_behind_the_limit_is_none():
    work = Work([task(0), task(1)], {(0, 0): "dd", (1, 0): "d!"})
    schedule = Schedule(work.tasks, [], 3)
    assert (schedule.take(), schedule.take()) == tuple(work.tasks)
    schedule.failed((1, 0), RecordError())  # it was given room for 3, and met the failure behind its first document
    schedule.released(work.tasks[1])
    assert not schedule.is_over
    schedule.finished(work.run((0, 0), 3))
    schedule.released(work.tasks[0])
    assert schedule.is_over
    assert schedule.boundary() == Cut((1, 0), 1)
    schedule.finished(work.run((1, 0), 1))
    assert schedule.is_limit_reached
    assert schedule.error is None
    assert schedule.in_order() == [(0, 0), (1, 0)]


def test_a_task_that_read_on_behind_the_last_wanted_document_runs_again():
    work = Work([task(0), task(1)], {(0, 0): "dd", (1, 0): "d--"})
    schedule = Schedule(work.tasks, [work.run((0, 0), 3), work.run((1, 0), 3)], 3)
    assert schedule.is_over
    assert schedule.boundary() == Cut((1, 0), 1)


def test_the_lowest_failure_decides_once_all_before_it_are_done():
    tasks = [task(0), task(1), task(2)]
    schedule = Schedule(tasks, [], None)
    for _ in tasks:
        schedule.take()
    schedule.failed((2, 0), RecordError("third"))
    schedule.released(tasks[2])
    assert not schedule.is_over
    schedule.failed((1, 0), RecordError("second"))
    schedule.released(tasks[1])
    assert not schedule.is_over
    schedule.finished(Work(tasks, {(0, 0): "d"}).run((0, 0), None))
    schedule.released(tasks[0])
    assert schedule.is_over
    assert schedule.error is not None
    assert schedule.error[0] == (1, 0)


@pytest.mark.parametrize("limit", [None, 5])
def test_a_build_without_tasks_is_over_at_once(limit):
    schedule = Schedule([], [], limit)
    assert schedule.is_over
    assert (schedule.take(), schedule.error, schedule.boundary(), schedule.in_order()) == (None, None, None, [])


def test_bad_records_behind_the_document_that_reaches_the_limit_do_not_count():
    work = Work([task(0), task(1)], {(0, 0): "d", (1, 0): "d--"})
    policy = Policy(max_bad_records=BadRecordLimit(count=1))
    schedule = Schedule(work.tasks, [work.run((0, 0), 2)], 2, policy)
    schedule.finished(msgspec.structs.replace(work.run((1, 0), 2), num_rejects=2))
    assert schedule.is_limit_reached
    assert schedule.error is None
    assert schedule.boundary() == Cut((1, 0), 1)


def test_damaged_inputs_that_are_found_together_are_left_out_together():
    group = Task(key=(0, 0), parts=tuple((index, Whole()) for index in range(4)))
    bad: list[int] = []
    schedule = Schedule([group], [], None, Policy(on_bad_input=lambda damage: bad.append(damage.source)))
    schedule.take()
    damage = [BadInputError(index, BadSourceError("damaged", hint="leave it out")) for index in (1, 3)]
    schedule.failed((0, 0), BadInputError(1, damage[0].error, (damage[1],)))
    schedule.released(group)
    assert schedule.goes_on()
    assert bad == [1, 3]
    assert schedule.take() == Task(key=(0, 0), parts=((0, Whole()), (2, Whole())))


def test_a_group_holds_at_most_16_384_inputs():
    sizes = [1] * 40_000
    groups = [
        planned for planned in plan_tasks(sizes, [Indivisible()] * len(sizes), 1 << 30) if isinstance(planned, Task)
    ]
    assert [len(group.parts) for group in groups] == [16_384, 16_384, 7_232]
    assert [group.key for group in groups] == [(0, 0), (16_384, 0), (32_768, 0)]
