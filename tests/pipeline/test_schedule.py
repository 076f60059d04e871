"""The schedule reaches the outcome of a run in order, whatever runs when, ends when, and was done before."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokshard.errors import BadSourceError, BuildError
from tokshard.pipeline.failures import BadInputError
from tokshard.pipeline.sources.division import Indivisible, Whole
from tokshard.pipeline.tasks.bad_record_limit import BadRecordLimit
from tokshard.pipeline.tasks.decisions import Discard, Done, LeaveOut, Rerun, Run, Wait
from tokshard.pipeline.tasks.events import Failed, Finished, Lost, Released
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task, plan_tasks
from tokshard.pipeline.tasks.schedule import Schedule
from tokshard.pipeline.workspace.receipts import OutputCounts, Receipt, SourceCounts

DOCUMENT, LEFT_OUT, FAILURE, DAMAGE = "d", "-", "!", "~"
"""What a record becomes; reading stops at a failure and at damage."""


DEATH = BuildError("worker 0 was killed by SIGKILL", hint="run the same command again")


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
            max_documents=cap,
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
    is_lost: bool = False


@dataclass
class Executors:
    """Workers that take tasks and end them in any order that `choose` says, and die now and then, as real ones do."""

    work: Work
    schedule: Schedule
    num_workers: int
    choose: st.DataObject
    receipts: dict[Key, Receipt] = field(default_factory=dict)
    bad_inputs: set[int] = field(default_factory=set)
    running: list[tuple[Task | StreamTask, Key, int | None]] = field(default_factory=list)
    streams: dict[StreamTask, Reading] = field(default_factory=dict)
    lost: set[Key] = field(default_factory=set)

    def run(self) -> Done:
        while True:
            decision = self.schedule.decide()
            assert decision == self.schedule.decide(), "to decide changes nothing"
            match decision:
                case Done():
                    return decision
                case Discard(keys):
                    for key in keys:
                        self.receipts.pop(key, None)
                    self.schedule.carried_out(decision)
                case LeaveOut(damage):
                    self.bad_inputs |= {found.source for found in damage}
                    self.schedule.carried_out(decision)
                case Rerun(key=key):
                    self.running.clear()
                    self.streams.clear()
                    self.receipts.pop(key, None)
                    self.schedule.carried_out(decision)
                    self._start(decision.run)
                case Run() | Wait():
                    self._step(decision)

    def _step(self, decision: Run | Wait) -> None:
        stream = next((stream for stream, reading in self.streams.items() if self._can_start(reading)), None)
        can_start = len(self.running) < self.num_workers and (stream is not None or isinstance(decision, Run))
        if can_start and (not self.running or self.choose.draw(st.booleans(), label="start another")):
            if stream is not None:
                self._read(stream)
            else:
                assert isinstance(decision, Run)
                self.schedule.carried_out(decision)
                self._start(decision)
        else:
            assert self.running, "nothing runs, nothing can start, and it is not over"
            place = self.choose.draw(st.integers(0, len(self.running) - 1), label="which ends")
            self._end(*self.running.pop(place))

    def _can_start(self, reading: Reading) -> bool:
        return bool(reading.keys) and not (reading.is_whole and reading.num_running)

    def _start(self, run: Run) -> None:
        if isinstance(run.task, Task):
            self.running.append((run.task, run.task.key, run.max_documents))
            return
        keys = [key for key in self.work.keys_of(run.task) if key[1] not in run.done_segments]
        self.streams[run.task] = Reading(keys, self.choose.draw(st.booleans(), label="whole"), run.max_documents)
        self._read(run.task)

    def _read(self, stream: StreamTask) -> None:
        reading = self.streams[stream]
        reading.num_running += 1
        self.running.append((stream, reading.keys.pop(0), reading.cap))

    def _end(self, task: Task | StreamTask, key: Key, cap: int | None) -> None:
        reading = self.streams[task] if isinstance(task, StreamTask) else None
        can_die = task.key not in self.lost  # a task that is lost twice is an error
        if can_die and self.choose.draw(st.sampled_from([False, False, False, True]), label="worker dies"):
            self.lost.add(task.key)
            if reading is None:
                self.schedule.happened(Lost(task, DEATH))
            else:
                reading.keys, reading.is_lost = [], True
                self._retire(task, reading)
            return
        result = self.work.run(key, cap)
        if isinstance(result, Exception):
            self.schedule.happened(Failed(key, result))
        else:
            self.receipts[key] = result
            self.schedule.happened(Finished(result))
        if reading is None:
            self.schedule.happened(Released(task))
            return
        if isinstance(result, Exception):
            reading.keys = []
        elif reading.is_whole and reading.cap is not None:
            reading.cap -= result.documents
            reading.keys = reading.keys if reading.cap > 0 else []
        self._retire(task, reading)

    def _retire(self, stream: StreamTask, reading: Reading) -> None:
        reading.num_running -= 1
        if not reading.keys and not reading.num_running:
            del self.streams[stream]
            self.schedule.happened(Lost(stream, DEATH) if reading.is_lost else Released(stream))


def outcome_of(executors: Executors, done: Done) -> Outcome:
    """What the pipeline makes of a schedule that is done."""
    if done.failure is not None:
        return [], done.failure[1].args
    keys = [receipt.key for receipt in executors.schedule.receipts_in_order()]
    return [(key, executors.receipts[key].documents, executors.receipts[key].input_bytes) for key in keys], None


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
    executors = Executors(work, Schedule(work.tasks, [], limit=limit), num_workers, choose)
    assert outcome_of(executors, executors.run()) == run_in_order(work, limit)


def kill_after(executors: Executors, num_ends: int) -> None:
    """Run until so many tasks have ended, or to the end."""
    original, left = executors._end, num_ends

    def end(*arguments):
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        original(*arguments)

    executors._end = end
    with contextlib.suppress(KeyboardInterrupt):
        executors.run()


@settings(max_examples=300)
@given(case=cases, kills=st.lists(st.integers(0, 6), max_size=3), choose=st.data())
def test_a_build_that_was_killed_and_run_again_reaches_the_same_outcome(case, kills, choose):
    work, limit = case
    receipts: dict[Key, Receipt] = {}
    for num_ends in kills:
        num_workers = choose.draw(st.integers(1, 3))
        schedule = Schedule(work.tasks, receipts.values(), limit=limit)
        kill_after(Executors(work, schedule, num_workers, choose, receipts), num_ends)
    executors = Executors(work, Schedule(work.tasks, receipts.values(), limit=limit), 2, choose, receipts)
    assert outcome_of(executors, executors.run()) == run_in_order(work, limit)


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
    schedule = Schedule(work.tasks, [], limit=limit, is_leaving_out=True)
    executors = Executors(work, schedule, num_workers, choose)
    outcome = outcome_of(executors, executors.run())
    assert (executors.bad_inputs, outcome) == run_in_order_without_damage(work, limit)


@settings(max_examples=300)
@given(case=damaged_cases(), num_ends=st.integers(0, 8), choose=st.data())
def test_leaving_out_damaged_inputs_continues_after_a_kill(case, num_ends, choose):
    work, limit = case
    receipts: dict[Key, Receipt] = {}
    schedule = Schedule(work.tasks, [], limit=limit, is_leaving_out=True)
    killed = Executors(work, schedule, choose.draw(st.integers(1, 3)), choose, receipts)
    kill_after(killed, num_ends)
    bad = killed.bad_inputs
    schedule = Schedule(work.tasks, list(receipts.values()), limit=limit, is_leaving_out=True, bad_inputs=bad)
    executors = Executors(work, schedule, 2, choose, receipts, bad)
    outcome = outcome_of(executors, executors.run())
    assert (executors.bad_inputs, outcome) == run_in_order_without_damage(work, limit)


@given(case=cases, choose=st.data())
def test_no_task_starts_after_the_limit_or_behind_a_failure(case, choose):
    work, limit = case
    schedule = Schedule(work.tasks, [], limit=limit)
    executors = Executors(work, schedule, 3, choose)
    original = executors._start

    def start(run):
        assert run.max_documents is None or run.max_documents > 0
        assert not any(key < run.task.key for key in schedule._state.failures)
        original(run)

    executors._start = start
    executors.run()


# the same in examples that can be read


def task(first: int) -> Task:
    return Task(key=(first, 0), parts=((first, Whole()),))


def start(schedule: Schedule) -> Run:
    """Start what the schedule wants to run next."""
    run = schedule.decide()
    assert isinstance(run, Run)
    schedule.carried_out(run)
    return run


def restart(schedule: Schedule) -> tuple[Key, int | None]:
    """Run again what the schedule wants to run again."""
    rerun = schedule.decide()
    assert isinstance(rerun, Rerun)
    schedule.carried_out(rerun)
    return rerun.key, rerun.run.max_documents


def test_a_failure_past_the_limit_does_not_count():
    work = Work([task(0), task(1)], {(0, 0): "dd", (1, 0): "d!"})
    schedule = Schedule(work.tasks, [], limit=3)
    assert [start(schedule).task, start(schedule).task] == work.tasks
    schedule.happened(
        Failed((1, 0), RecordError())
    )  # it was given room for 3, and met the failure after its first document
    schedule.happened(Released(work.tasks[1]))
    assert schedule.decide() == Wait()
    schedule.happened(Finished(work.run((0, 0), 3)))
    schedule.happened(Released(work.tasks[0]))
    assert restart(schedule) == ((1, 0), 1)
    assert schedule.decide() == Wait()
    schedule.happened(Finished(work.run((1, 0), 1)))
    schedule.happened(Released(work.tasks[1]))
    assert schedule.decide() == Done()
    assert [receipt.key for receipt in schedule.receipts_in_order()] == [(0, 0), (1, 0)]


def test_a_task_that_read_past_the_last_wanted_document_runs_again():
    work = Work([task(0), task(1)], {(0, 0): "dd", (1, 0): "d--"})
    schedule = Schedule(work.tasks, [work.run((0, 0), 3), work.run((1, 0), 3)], limit=3)
    assert restart(schedule) == ((1, 0), 1)


def test_a_task_whose_worker_was_lost_runs_again():
    work = Work([task(0), task(1)], {(0, 0): "d", (1, 0): "d"})
    schedule = Schedule(work.tasks, [])
    assert [start(schedule).task, start(schedule).task] == work.tasks
    schedule.happened(Lost(work.tasks[0], DEATH))
    assert start(schedule).task == work.tasks[0]


def test_a_task_that_costs_a_second_worker_ends_the_build_at_once():
    tasks = [task(0), task(1)]
    schedule = Schedule(tasks, [])
    for _ in tasks:
        start(schedule)
    schedule.happened(Lost(tasks[1], DEATH))
    assert start(schedule).task == tasks[1]
    schedule.happened(Lost(tasks[1], DEATH))
    assert schedule.decide() == Done(((1, 0), DEATH))


def test_an_executor_may_allow_a_task_more_losses():
    schedule = Schedule([task(0)], [])
    for _ in range(3):
        start(schedule)
        schedule.happened(Lost(task(0), DEATH, max_losses=3))
    start(schedule)
    schedule.happened(Lost(task(0), DEATH, max_losses=3))
    assert schedule.decide() == Done(((0, 0), DEATH))


def test_an_input_that_can_be_read_once_only_is_not_tried_again():
    stream = StreamTask(key=(0, 0), is_here=True)
    schedule = Schedule([stream], [])
    start(schedule)
    schedule.happened(Lost(stream, DEATH))
    assert schedule.decide() == Done(((0, 0), DEATH))


def test_the_lowest_failure_decides_once_all_before_it_are_done():
    tasks = [task(0), task(1), task(2)]
    schedule = Schedule(tasks, [])
    for _ in tasks:
        start(schedule)
    schedule.happened(Failed((2, 0), RecordError("third")))
    schedule.happened(Released(tasks[2]))
    assert schedule.decide() == Wait()
    second = RecordError("second")
    schedule.happened(Failed((1, 0), second))
    schedule.happened(Released(tasks[1]))
    assert schedule.decide() == Wait()
    schedule.happened(Finished(Work(tasks, {(0, 0): "d"}).run((0, 0), None)))
    schedule.happened(Released(tasks[0]))
    assert schedule.decide() == Done(((1, 0), second))


@pytest.mark.parametrize("limit", [None, 5])
def test_a_build_without_tasks_is_over_at_once(limit):
    schedule = Schedule([], [], limit=limit)
    assert (schedule.decide(), schedule.receipts_in_order()) == (Done(), [])


def test_bad_records_after_the_document_that_reaches_the_limit_do_not_count():
    work = Work([task(0), task(1)], {(0, 0): "d", (1, 0): "d--"})
    schedule = Schedule(work.tasks, [work.run((0, 0), 2)], limit=2, max_bad_records=BadRecordLimit(count=1))
    start(schedule)
    schedule.happened(Finished(msgspec.structs.replace(work.run((1, 0), 2), num_rejects=2)))
    assert restart(schedule) == ((1, 0), 1)


def test_damaged_inputs_that_are_found_together_are_left_out_together():
    group = Task(key=(0, 0), parts=tuple((index, Whole()) for index in range(4)))
    schedule = Schedule([group], [], is_leaving_out=True)
    start(schedule)
    other = BadInputError(3, BadSourceError("damaged", hint="leave it out"))
    damage = BadInputError(1, other.error, (other,))
    schedule.happened(Failed((0, 0), damage))
    schedule.happened(Released(group))
    assert schedule.decide() == LeaveOut((damage, other))
    schedule.carried_out(LeaveOut((damage, other)))
    assert start(schedule).task == Task(key=(0, 0), parts=((0, Whole()), (2, Whole())))


def test_a_group_holds_at_most_16_384_inputs():
    sizes = [1] * 40_000
    groups = [
        planned for planned in plan_tasks(sizes, [Indivisible()] * len(sizes), 1 << 30) if isinstance(planned, Task)
    ]
    assert [len(group.parts) for group in groups] == [16_384, 16_384, 7_232]
    assert [group.key for group in groups] == [(0, 0), (16_384, 0), (32_768, 0)]
