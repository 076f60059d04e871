"""Which task runs next, when a stage is done, and which error counts. Pure: no processes, no files, no callbacks.

Everything is ordered by `Key`. The lowest failing task decides, once all before it are done, and a limit on documents
is reached at the same task for any number of workers and any interleaving.

If damaged inputs are to be left out, that happens at the same moment, when the damage is the failure that decides: its
input and all that came of it are forgotten, as if it had not been an input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from tokshard.pipeline.failures import BadInputError, TooManyBadRecordsError
from tokshard.pipeline.tasks.bad_record_limit import BadRecordLimit
from tokshard.pipeline.tasks.decisions import Decision, Discard, Done, Failure, LeaveOut, Rerun, Run, Wait
from tokshard.pipeline.tasks.events import Event, Failed, Finished, Lost, Released
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task
from tokshard.pipeline.tasks.stage_state import StageState
from tokshard.pipeline.workspace.receipts import Receipt


class Schedule:
    """What to do next in one stage of a build. Callers report what was done and what happened.

    Args:
        tasks: in order.
        receipts: of tasks that are done already.
        limit: documents to write, or None for all.
        max_bad_records: None: any number.
        is_leaving_out: damaged inputs are left out; else they are failures.
        is_passing_damage: damaged inputs are failures, and the tasks after them run all the same.
        bad_inputs: inputs that were left out before.
    """

    def __init__(
        self,
        tasks: Sequence[Task | StreamTask],
        receipts: Iterable[Receipt],
        *,
        limit: int | None = None,
        max_bad_records: BadRecordLimit | None = None,
        is_leaving_out: bool = False,
        is_passing_damage: bool = False,
        bad_inputs: Collection[int] = (),
    ) -> None:
        self._limit, self._max_bad_records, self._is_leaving_out = limit, max_bad_records, is_leaving_out
        self._state = StageState(
            tasks,
            limit=limit,
            max_bad_records=max_bad_records,
            bad_inputs=bad_inputs,
            is_passing_damage=is_passing_damage,
        )
        self._rerunning: Key | None = None
        self._had_exact_room: set[Key] = set()
        self._losses: Counter[Key] = Counter()
        self._loss: Failure | None = None
        for receipt in receipts:
            self._state.finished(receipt)

    def decide(self) -> Decision:
        """What to do next. Changes nothing: until something happens, the answer stays the same."""
        state = self._state
        if self._loss is not None:
            return Done(self._loss)
        if state.stale:
            return Discard(tuple(state.stale))
        if self._rerunning is not None:
            return Wait()
        if state.front.is_limit_reached:
            return self._at_limit()
        task = state.next_task()
        return self._at_end() if task is None else self._run(task)

    def carried_out(self, decision: Decision) -> None:
        """Take in that a decision was carried out."""
        match decision:
            case Run(task=task):
                self._state.started(task)
            case Rerun(key=key, run=run):
                self._rerunning = key
                self._had_exact_room.add(key)
                self._state.restarted(key, run.task)
            case LeaveOut(damage):
                self._state.left_out(damage)
            case Discard(keys):
                for key in keys:
                    self._state.stale.pop(key, None)

    def happened(self, event: Event) -> None:
        """Take in what happened to a task."""
        match event:
            case Finished(receipt):
                self._state.finished(receipt)
            case Failed(key, error):
                self._state.failed(key, error)
            case Released(task):
                self._end_rerun(task)
                self._state.released(task)
            case Lost(task, error, max_losses):
                self._end_rerun(task)
                self._losses[task.key] += 1
                if is_read_once(task) or self._losses[task.key] > max_losses:
                    self._loss = (task.key, error)
                self._state.released(task, is_lost=True)

    def receipts_in_order(self) -> list[Receipt]:
        """All receipts that belong to the corpus, in order."""
        front, receipts = self._state.front, self._state.receipts
        last = front.key if front.is_limit_reached else None
        return [receipts[key] for key in receipts.sorted_keys() if last is None or key <= last]

    def receipts_before(self, key: Key) -> list[Receipt]:
        """Receipts of the tasks before a task, in order."""
        receipts = self._state.receipts
        return [receipts[done] for done in receipts.sorted_keys() if done < key]

    def waiting(self) -> list[Task | StreamTask]:
        """The tasks that neither are done nor under way nor have failed, in order."""
        return self._state.waiting()

    def failures(self) -> Mapping[Key, Exception]:
        """The failures of tasks and segments."""
        return self._state.failures

    def _run(self, task: Task | StreamTask) -> Run:
        state = self._state
        if isinstance(task, Task):
            return Run(task=task, max_documents=state.front.room)
        return Run(
            task=task,
            max_documents=state.front.room,
            done_segments=state.receipts.segments_of(task),
            num_waiting_streams=state.num_waiting_streams(),
        )

    def _at_end(self) -> Wait | Rerun | LeaveOut | Done:
        """What to do where no waiting task matters any more."""
        lowest = min(self._state.failures, default=None)
        if any(lowest is None or key <= lowest for key in self._state.running):
            return Wait()
        return Done(self._excess_at_end()) if lowest is None else self._at_failure(lowest)

    def _at_limit(self) -> Rerun | Done:
        front = self._state.front
        assert front.key is not None
        assert self._limit is not None
        room = self._limit - front.written_before
        if self._state.receipts[front.key].max_documents == room:
            return Done(self._excess_at_end())
        return self._rerun(front.key, room)

    def _at_failure(self, key: Key) -> Rerun | LeaveOut | Done:
        error, room = self._state.failures[key], self._state.front.room
        # what can be read once only is read in order by one worker, so its room was exact
        had_exact_room = is_read_once(self._state.plan.task_of(key)) or key in self._had_exact_room
        if room is not None and not had_exact_room and not isinstance(error, TooManyBadRecordsError):
            return self._rerun(key, room)
        if self._is_leaving_out and isinstance(error, BadInputError):
            return LeaveOut((error, *error.others))
        return Done((key, error))

    def _rerun(self, key: Key, room: int) -> Rerun:
        task = self._state.plan.task_of(key)
        assert task is not None
        done = self._state.receipts.segments_of(task) - {key[1]} if isinstance(task, StreamTask) else frozenset()
        return Rerun(key=key, run=Run(task=task, max_documents=room, done_segments=done))

    def _end_rerun(self, task: Task | StreamTask) -> None:
        if self._rerunning is not None and self._state.plan.task_of(self._rerunning) == task:
            self._rerunning = None

    def _excess_at_end(self) -> Failure | None:
        return None if self._max_bad_records is None else self._max_bad_records.check(self.receipts_in_order())


def is_read_once(task: Task | StreamTask | None) -> bool:
    """Whether a task reads an input that cannot be read again."""
    return isinstance(task, StreamTask) and task.is_here
