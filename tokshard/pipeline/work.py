"""The loop of every stage: `work` runs the tasks that left no receipt and decides nothing, `settle` judges.

An executor is below this loop: it says who runs a task. An array is above it: it says which tasks are mine. So local
processes, Ray and jobs, builds, imports and copies, hashing, writing and shuffling all go through here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from tokshard.pipeline.executors.base import Executor, Lost, MakeExecutor, Usage
from tokshard.pipeline.judge import Judge, parse_bad_record_limit
from tokshard.pipeline.messages import user_error
from tokshard.pipeline.progress import InputLeftOut, Observer, StageEnded, StageStarted
from tokshard.pipeline.request import Build
from tokshard.pipeline.tasks.planning import AnyTask, Run, StepTask, StreamTask, Task
from tokshard.pipeline.tasks.running import Stage, TaskRunner
from tokshard.pipeline.workspace.receipts import (
    Key,
    Receipt,
    delete_receipt,
    files_there,
    promised_files,
    read_receipts,
    receipt_keys,
)

_MAPPED_STREAMS = 6
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
        tasks: the share of a job, which leaves it to the commit to count bad records; default: all.
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

    A receipt is void if what the task read has changed since, or if a file that it promises is not there.
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
        if has_files and _is_up_to_date(stage, task, receipt):
            yield receipt
        else:
            delete_receipt(store, stage.name, receipt.key)


def _is_up_to_date(stage: Stage, task: AnyTask, receipt: Receipt) -> bool:
    """Whether a task would read the same again. A group has left out all of its inputs that are known to be damaged."""
    if receipt.failure is None and receipt.made_of != (task.made_of if isinstance(task, StepTask) else stage.made_of):
        return False
    inputs = task.inputs if isinstance(task, Task) and task.is_group and stage.left_out else ()
    return all(index in receipt.left_out for index in inputs if index in stage.left_out)


def work(
    build: Build,
    stage: Stage,
    tasks: Sequence[AnyTask],
    judge: Judge,
    executor: Executor,
    *,
    observer: Observer,
) -> None:
    """Run the tasks of a share that left no receipt. Starts no more where a limit or a failure makes them pointless.

    Args:
        tasks: those without a receipt, in the order in which they are to begin.
        judge: the judge of the share; it takes in every receipt.

    Raises:
        BuildError: something failed that need not fail again, such as a disk, or a worker that died twice.
    """
    mapped, run_mapped = _mapped(tasks, executor), executor.run_mapped
    waiting = deque(task for task in tasks if task not in mapped)
    running: dict[Key, AnyTask] = {}
    losses: Counter[Key] = Counter()
    while True:
        while waiting and executor.has_room():
            task = waiting.popleft()
            if not judge.is_over(task) and not _is_done_by_another(build, stage, task, judge):
                running[task.key] = task
                executor.submit(_run(task, judge))
        # what still runs may be pointless, but a worker that runs it cannot prepare the chunks of a stream
        left = chain(waiting, chain(running.values(), mapped) if running else ())
        if all(map(judge.is_over, left)):
            break
        for event in executor.events():
            if isinstance(event, Receipt):
                _take(build, judge, event, observer)
                continue
            task = running.pop(event.task.key)
            if isinstance(event, Lost):
                losses[task.key] += 1
                waiting.appendleft(event.checked(losses[task.key]))
    for task in mapped:
        for receipt in run_mapped(_run(task, judge)) if run_mapped is not None and not judge.is_over(task) else ():
            _take(build, judge, receipt, observer)


def _take(build: Build, judge: Judge, receipt: Receipt, observer: Observer) -> None:
    """Have a receipt judged, and report it."""
    known = set(judge.left_out)
    judge.add(receipt)
    for index in judge.left_out.keys() - known:
        observer(InputLeftOut(build.inputs[index].location, judge.left_out[index]))
    observer(receipt)


def _run(task: AnyTask, judge: Judge) -> Run:
    return Run(task=task, max_documents=judge.room, num_done=judge.num_done(task))


def _mapped(tasks: Sequence[AnyTask], executor: Executor) -> list[AnyTask]:
    """The streams that are read here, one after another, while all workers encode their chunks."""
    streams = [task for task in tasks if isinstance(task, StreamTask)] if executor.run_mapped is not None else []
    is_few = len(streams) < min(executor.num_workers, _MAPPED_STREAMS)
    return [task for task in streams if task.is_here or is_few]


def _is_done_by_another(build: Build, stage: Stage, task: AnyTask, judge: Judge) -> bool:
    """Whether another job of an array has left the receipt of a task meanwhile, which then is judged."""
    if not build.is_array or isinstance(task, StreamTask):
        return False
    found = list(read_receipts(build.workspace.store, stage.name, [task.key]))
    for receipt in found:
        judge.add(receipt)
    return bool(found)


def settle(build: Build, stage: Stage, judge: Judge) -> Judge:
    """Judge a stage by its receipts: what a run without workers, failures and jobs would have come to.

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
    """The judge of a whole stage with all receipts that are there."""
    judge = judge_of(build, stage)
    for receipt in valid_receipts(build, stage, stage.tasks):
        judge.add(receipt)
    return judge


def run_share(build: Build, stage: Stage, judge: Judge, run: RunsTasks) -> None:
    """Run the tasks of a judge that left no receipt. Those that failed before are tried again: the file may be back.

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
class RunsTasks:
    """How this run of a build runs the tasks of all stages, and where it reports them.

    Args:
        usage: what the workers cost, added up.
    """

    make_executor: MakeExecutor
    observer: Observer
    usage: Usage = field(default_factory=Usage)

    def tasks(self, build: Build, stage: Stage, tasks: Sequence[AnyTask], judge: Judge) -> None:
        """Run some tasks, by an executor of their own; and those that a failure stopped which was left out later."""
        while tasks:
            with self.make_executor(build, stage, len(tasks), self.observer) as executor:
                work(build, stage, tasks, judge, executor, observer=self.observer)
            tasks = list(judge.missing())
            self.usage.add(executor.usage)


def run_stage(build: Build, stage: Stage, run: RunsTasks) -> Judge:
    """Run a whole stage by this process and its workers, and judge it.

    Raises:
        TokshardError: as `work` and `settle`.
    """
    judge = judge_of(build, stage)
    run_share(build, stage, judge, run)
    while True:
        try:
            return settle(build, stage, judge)
        except UnfinishedStageError as error:  # a task that ran again gave less than it had, and a limit falls later
            run.tasks(build, stage, error.missing, judge)
