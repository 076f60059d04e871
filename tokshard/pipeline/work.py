"""The loop of every stage: `work` runs the tasks that left no receipt and decides nothing, `settle` judges.

An executor is below this loop: it says who runs a task. An array is above it: it says which tasks are mine. So local
processes, Ray and jobs, builds, imports and copies, hashing, writing and shuffling all go through here.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import chain

from tokshard import errors
from tokshard.errors import BadRecordError, TokshardError
from tokshard.pipeline.encode.passing import OUT_OF_VOCABULARY
from tokshard.pipeline.executors.base import Ended, Executor, MakeExecutor, WorkerUsage
from tokshard.pipeline.judge import Judge
from tokshard.pipeline.options import SKIP, parse_bad_record_limit
from tokshard.pipeline.progress import InputLeftOut, Observer, StageEnded, StageStarted
from tokshard.pipeline.request import Build
from tokshard.pipeline.sources.records import MISSING_TEXT, TOO_LONG
from tokshard.pipeline.tasks.planning import AnyTask, StepTask, StreamTask, Task
from tokshard.pipeline.tasks.running import Stage, TaskRunner
from tokshard.pipeline.tasks.writing import read_rejects
from tokshard.pipeline.workspace.receipts import (
    Key,
    Receipt,
    delete_receipt,
    files_there,
    promised_files,
    read_receipts,
    receipt_keys,
    rejects_folder,
)

_SHARED_STREAMS = 6
"""One process reads and writes as fast as about six encode. With fewer streams than that, and fewer than there are
workers, the chunks of one stream at a time go to all workers; else each worker takes a whole stream."""


class UnfinishedStageError(Exception):
    """Tasks of a stage have no receipt, and this process is not to run them.

    Args:
        missing: those tasks, in order.
    """

    def __init__(self, stage: Stage, missing: Sequence[AnyTask]) -> None:
        super().__init__(stage, missing)
        self.stage, self.missing = stage, missing


def judge_of(build: Build, stage: Stage, tasks: Sequence[AnyTask] | None = None) -> Judge:
    """The judge of a stage, before any receipt.

    Args:
        tasks: the share of a job, whose bad records are left to the commit to judge; default: all.
    """
    return Judge(
        tasks=stage.tasks if tasks is None else tasks,
        limit=stage.limit,
        max_bad_records=parse_bad_record_limit(build.options.max_bad_records) if tasks is None else None,
        is_leaving_out=build.is_leaving_out,
        left_out=dict(stage.left_out),
    )


def valid_receipts(build: Build, stage: Stage, tasks: Sequence[AnyTask]) -> Iterator[Receipt]:
    """The receipts of some tasks that hold; void ones are deleted, so that their tasks run again.

    A receipt is void if the data that the task read have changed, or if a file that it promises is missing.
    """
    store = build.workspace.store
    known = {task.key[0] if isinstance(task, StreamTask) else task.key: task for task in tasks}
    keys = [key for key in receipt_keys(store, stage.name) if key in known or key[0] in known]
    if not keys:
        return
    there, shards = files_there(store, stage.name), [output.shard_sizes() for output in build.outputs]
    for receipt in read_receipts(store, stage.name, keys):
        task = known.get(receipt.key) or known[receipt.key[0]]
        files = promised_files(stage.name, receipt) if stage.has_files else {}
        has_files = files.items() <= there.items() and all(
            output.shards.items() <= found.items() for output, found in zip(receipt.outputs, shards, strict=False)
        )
        if has_files and _is_up_to_date(stage, task, receipt) and not _is_of_other_policy(build, task, receipt):
            yield receipt
        else:
            delete_receipt(store, stage.name, receipt.key)


def _is_up_to_date(stage: Stage, task: AnyTask, receipt: Receipt) -> bool:
    """Whether a task would read the same again. A group has left out all of its inputs that are known to be damaged."""
    if receipt.failure is None and receipt.inputs_digest != (
        task.inputs_digest if isinstance(task, StepTask) else stage.inputs_digest
    ):
        return False
    inputs = task.inputs if isinstance(task, Task) and task.is_group and stage.left_out else ()
    return all(index in receipt.left_out for index in inputs if index in stage.left_out)


def _is_of_other_policy(build: Build, task: AnyTask, receipt: Receipt) -> bool:
    """Whether a task failed on something that is now left out: a bad record, or one damaged input of a group."""
    kind = None if receipt.failure is None else receipt.failure.kind
    is_group = isinstance(task, Task) and task.is_group
    is_record_skipped = build.options.on_bad_record == SKIP
    return (kind == "record" and is_record_skipped) or (kind == "input" and build.is_leaving_out and is_group)


def work(
    build: Build,
    stage: Stage,
    tasks: Sequence[AnyTask],
    judge: Judge,
    executor: Executor,
    *,
    observer: Observer,
) -> None:
    """Run the tasks of a share that left no receipt. Starts no more once a limit or a failure makes them pointless.

    Args:
        tasks: those without a receipt, in the order in which they are to begin.
        judge: the judge of the share; it takes in every receipt.

    Raises:
        BuildError: something failed that need not fail again, such as a disk, or a worker that died twice.
    """
    mapped, run_shared = _shared(tasks, executor), executor.run_shared
    waiting = deque(task for task in tasks if task not in mapped)
    running: dict[Key, AnyTask] = {}
    losses: Counter[Key] = Counter()
    while True:
        while waiting and executor.has_room():
            task = waiting.popleft()
            if not judge.is_pointless(task) and not _is_done_by_another(build, stage, task, judge):
                running[task.key] = task
                executor.submit(judge.next_run(task))
        # running tasks may be pointless, but their workers cannot prepare the chunks of a stream
        left = chain(waiting, chain(running.values(), mapped) if running else ())
        if all(map(judge.is_pointless, left)):
            break
        for event in executor.events():
            if isinstance(event, Receipt):
                _take(build, judge, event, observer)
                continue
            del running[event.task.key]
            waiting.extendleft(_to_try_again(event, losses))
    for task in mapped:
        for receipt in (
            run_shared(judge.next_run(task)) if run_shared is not None and not judge.is_pointless(task) else ()
        ):
            _take(build, judge, receipt, observer)


def _take(build: Build, judge: Judge, receipt: Receipt, observer: Observer) -> None:
    """Pass a receipt to the judge, and report it."""
    known = set(judge.left_out)
    judge.add(receipt)
    for index in sorted(judge.left_out.keys() - known):
        observer(InputLeftOut(build.inputs[index].location, judge.left_out[index]))
    observer(receipt)


def _to_try_again(event: Ended, losses: Counter[Key]) -> list[AnyTask]:
    """The task that has ended, if its worker died: it may succeed elsewhere."""
    key, error = event.task.key, event.error
    losses[key] += error is not None
    if error is not None and losses[key] > event.max_losses:
        raise error
    return [] if error is None else [event.task]


def _shared(tasks: Sequence[AnyTask], executor: Executor) -> list[AnyTask]:
    """The streams that are read here, one after another, while all workers encode their chunks."""
    streams: list[AnyTask] = (
        [task for task in tasks if isinstance(task, StreamTask)] if executor.run_shared is not None else []
    )
    is_few = len(streams) < min(executor.num_workers, _SHARED_STREAMS)
    return streams if is_few else []


def _is_done_by_another(build: Build, stage: Stage, task: AnyTask, judge: Judge) -> bool:
    """Whether another job of an array has left the receipt of a task meanwhile, which then is judged."""
    if not build.is_array or isinstance(task, StreamTask):
        return False
    found = list(read_receipts(build.workspace.store, stage.name, [task.key]))
    for receipt in found:
        judge.add(receipt)
    return bool(found)


def settle(build: Build, stage: Stage, judge: Judge) -> Judge:
    """Judge a stage by its receipts: the result of a run without workers, failures and jobs.

    A task runs again for one reason only: the limit on documents may fall in it, or before its failure, and only now
    its exact room is known.

    Args:
        judge: the judge of all tasks, with the receipts that are there.

    Raises:
        TokshardError: the lowest failure, in the user's words.
        UnfinishedStageError: a receipt is missing.
    """
    runner = None
    while (run := judge.rerun) is not None:
        runner = runner or TaskRunner(build, stage, lambda _: None)
        delete_receipt(build.workspace.store, stage.name, (run.task.key[0], run.task.key[1] + run.num_done))
        for receipt in runner.run(run):
            judge.add(receipt)
    if judge.failure is not None:
        raise user_error(build, stage.name, judge)
    if not judge.is_done:
        raise UnfinishedStageError(stage, list(judge.missing()))
    return judge


def judged_on_disk(build: Build, stage: Stage) -> Judge:
    """The judge of a whole stage with all existing receipts."""
    judge = judge_of(build, stage)
    for receipt in valid_receipts(build, stage, stage.tasks):
        judge.add(receipt)
    return judge


def run_share(build: Build, stage: Stage, judge: Judge, run: BuildRun) -> None:
    """Run a judge's tasks that left no receipt. Tasks that failed before are tried again: the file may be back.

    Args:
        judge: the judge of the share, before any receipt.

    Raises:
        TokshardError: as `work`.
    """
    done = []
    for receipt in valid_receipts(build, stage, judge.tasks):
        if receipt.failure is None:
            judge.add(receipt)
            done.append(receipt.without_details())
        else:
            delete_receipt(build.workspace.store, stage.name, receipt.key)
    run.observer(StageStarted(build=build, name=stage.name, tasks=judge.tasks, done=done))
    try:
        run.tasks(build, stage, list(judge.missing()), judge)
    finally:
        run.observer(StageEnded())


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRun:
    """How this run of a build runs the tasks of all stages, and where it reports them.

    Args:
        usage: the cost of all workers, added up.
    """

    make_executor: MakeExecutor
    observer: Observer
    usage: WorkerUsage = field(default_factory=WorkerUsage)

    def tasks(self, build: Build, stage: Stage, tasks: Sequence[AnyTask], judge: Judge) -> None:
        """Run some tasks with an executor of their own, then those stopped by a failure that was left out later."""
        while tasks:
            with self.make_executor(build, stage, len(tasks), self.observer) as executor:
                work(build, stage, tasks, judge, executor, observer=self.observer)
            tasks = list(judge.missing())
            self.usage.add(executor.usage)


def run_stage(build: Build, stage: Stage, run: BuildRun) -> Judge:
    """Run a whole stage by this process and its workers, and judge it.

    Raises:
        TokshardError: as `work` and `settle`.
    """
    judge = judge_of(build, stage)
    run_share(build, stage, judge, run)
    while True:
        try:
            return settle(build, stage, judge)
        except UnfinishedStageError as error:  # a task that ran again wrote fewer documents, so a limit falls later
            run.tasks(build, stage, error.missing, judge)


_REPAIRS = {
    MISSING_TEXT: "check --text-field",
    TOO_LONG: "allow longer documents with --max-document-bytes",
    OUT_OF_VOCABULARY: "give the tokenizer that made the ids with --tokenizer",
}


def user_error(build: Build, stage: str, judge: Judge, *, is_share: bool = False) -> TokshardError:
    """The failure that a judge found, as the user should see it.

    Args:
        stage: name of the stage.
        is_share: the judge does not know all that was read before.
    """
    found, store, allowed = judge.failure, build.workspace.store, judge.max_bad_records
    assert found is not None
    if found.failure is None:
        assert allowed is not None
        hint = (
            f"they are listed in {store.where(rejects_folder(stage))}; repair the sources, or allow more "
            "with --max-bad-records"
        )
        if isinstance(allowed, Fraction):
            return BadRecordError(
                f"{judge.bad:,} of the first {judge.records:,} records are bad ({judge.bad / judge.records:.2%}), "
                f"and --max-bad-records allows {float(100 * allowed):g}%",
                hint=hint,
            )
        before = judge.bad - found.num_rejects
        first = next(itertools.islice(read_rejects(store, stage, found.key), allowed - before, None))
        place = _place(build, judge, found.key, first["source"], first["record"])
        return BadRecordError(
            f"{place}: {first['reason']}: {first['detail']}; this is bad record {allowed + 1:,}, "
            f"and --max-bad-records allows {allowed:,}",
            hint=hint,
        )
    failure = found.failure
    if failure.kind == "record":
        repair = _REPAIRS.get(failure.reason) if build.config.chat is None else None
        place = _place(build, None if is_share else judge, found.key, failure.source, failure.record)
        return BadRecordError(
            f"{place}: {failure.reason}: {failure.problem}",
            hint=f"{repair or 'repair the record'}, or leave out such records with --on-bad-record skip",
        )
    kind = getattr(errors, failure.error, errors.SourceError)
    return kind(failure.place + failure.problem, hint=failure.hint)


def _place(build: Build, judge: Judge | None, key: Key, index: int, record: int) -> str:
    """The place of a record in its input, from its number within a task.

    Args:
        judge: has counted the tasks before it; None if there is none.
    """
    source = build.inputs[index]
    unit = "line" if source.format == "jsonl" else "record"
    if judge is None:
        return f"{source.location}, {unit} {record + 1} of the part that task {key[0]}-{key[1]} reads"
    return f"{source.location}, {unit} {judge.records_before(key, index) + record + 1}"
