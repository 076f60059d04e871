"""Runs tasks in worker processes of this machine, and the chunks of a stream in all of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from tokshard.errors import BuildError
from tokshard.pipeline.encode.documents import ChunkResult
from tokshard.pipeline.executors.base import Ended, Event, OnProgress, WorkerUsage, peak_bytes
from tokshard.pipeline.executors.worker import START_METHOD, starting_worker, worker_main
from tokshard.pipeline.request import Build
from tokshard.pipeline.sources.records import Chunk
from tokshard.pipeline.tasks.planning import AnyTask, Run, StepTask
from tokshard.pipeline.tasks.running import Stage, TaskRunner
from tokshard.pipeline.workspace.receipts import Progress, Receipt

_STOP_SECONDS = 5.0
_CHUNKS_PER_WORKER = 2
"""One that it prepares, and the next one."""


@dataclass(slots=True, eq=False)
class _ChunkJob:
    """A chunk of a stream on its way through a worker.

    Attributes:
        prepared: its result; None until it is known.
        losses: number of workers that died with it.
    """

    segment: int
    chunk: Chunk
    prepared: ChunkResult | None = None
    losses: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class _WorkerProcess:
    """A running worker.

    Attributes:
        task: the task that it runs.
        jobs: chunks without an answer, the oldest first.
        usage: its cost, as last reported.
    """

    number: int
    process: Any
    connection: Connection
    task: AnyTask | None = None
    jobs: deque[_ChunkJob] = field(default_factory=deque)
    usage: WorkerUsage = field(default_factory=WorkerUsage)


class ProcessExecutor:
    """An `Executor` that starts worker processes when there is work for them.

    Args:
        num_workers: the most processes at a time.
    """

    def __init__(self, build: Build, stage: Stage, on_progress: OnProgress, *, num_workers: int) -> None:
        self._build, self._stage, self._on_progress = build, stage, on_progress
        self._workers: list[_WorkerProcess] = []
        self._num_started = 0
        self.num_workers = num_workers
        self.usage = WorkerUsage(num_workers=num_workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all workers, and remove their unfinished files."""
        for worker in self._workers:
            worker.process.terminate()
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(_STOP_SECONDS)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            self.usage.add(worker.usage)
        self._workers.clear()
        self._build.workspace.run.discard_spooled()

    def has_room(self) -> bool:
        """Whether a worker is free or may be started."""
        return len(self._workers) < self.num_workers or any(worker.task is None for worker in self._workers)

    def submit(self, run: Run) -> None:
        """Give a task to a free worker.

        Raises:
            BuildError: no worker can be started.
        """
        worker = next((worker for worker in self._workers if worker.task is None), None) or self._start()
        worker.task = run.task
        self._send(worker, run)

    def events(self) -> Iterator[Event]:
        """The reports of the workers."""
        for worker, message in self._messages():
            if isinstance(message, Receipt):
                yield message
                continue
            task, worker.task = worker.task, None
            if task is not None:  # a free worker may die, too
                yield Ended(task, message if isinstance(message, BuildError) else None)

    def run_shared(self, run: Run) -> Iterator[Receipt]:
        """Run a stream in this process while all workers prepare its chunks."""
        self.usage.add(WorkerUsage(peak_bytes=peak_bytes()))
        runner = TaskRunner(self._build, self._stage, self._on_progress)
        return runner.run(run, self._prepared)

    def _prepared(self, chunks: Iterable[tuple[int, Chunk]]) -> Iterator[tuple[int, ChunkResult]]:
        """The results of the chunks of a stream, in order. Damage is raised after the chunks before it."""
        source: Iterator[tuple[int, Chunk]] | None = iter(chunks)
        jobs: deque[_ChunkJob] = deque()
        damage: Exception | None = None
        while True:
            while source is not None and len(jobs) < _CHUNKS_PER_WORKER * self.num_workers:
                try:
                    jobs.append(_ChunkJob(*next(source)))
                except StopIteration:
                    source = None
                except Exception as error:  # noqa: BLE001 - it is raised below
                    source, damage = None, error
                else:
                    self._prepare(jobs[-1])
            if not jobs:
                if damage is not None:
                    raise damage
                return
            while jobs[0].prepared is None:
                self._hear_chunks()
            job = jobs.popleft()
            assert job.prepared is not None
            yield job.segment, job.prepared

    def _prepare(self, job: _ChunkJob) -> None:
        """Send a chunk to the worker with the fewest chunks."""
        worker = min(self._workers, key=lambda one: len(one.jobs), default=None)
        if worker is None or (worker.jobs and len(self._workers) < self.num_workers):
            worker = self._start()
        worker.jobs.append(job)
        self._send(worker, job.chunk)

    def _hear_chunks(self) -> None:
        for worker, message in self._messages():
            if isinstance(message, BuildError):
                for job in worker.jobs:
                    job.losses += 1
                    if job.losses > 1:
                        raise message
                    self._prepare(job)
            elif not isinstance(message, WorkerUsage):
                worker.jobs.popleft().prepared = message

    def _messages(self) -> Iterator[tuple[_WorkerProcess, Any]]:
        """The next messages of workers; waits for at least one. A dead worker yields an error with the cause."""
        by_handle: dict[Any, _WorkerProcess] = {}
        for worker in self._workers:
            by_handle[worker.connection] = worker
            by_handle[worker.process.sentinel] = worker
        for handle in wait(list(by_handle)):
            worker = by_handle[handle]
            if worker not in self._workers or (handle is not worker.connection and worker.connection.poll()):
                continue  # it was found dead before in this loop, or its last messages are received first
            try:
                message = worker.connection.recv() if handle is worker.connection else None
            except (EOFError, OSError):  # also "end of file during message": it was killed while it sent one
                message = None
            if isinstance(message, WorkerUsage):
                worker.usage = message
            if message is None:
                self._workers.remove(worker)
                self.usage.add(worker.usage)
                yield worker, self._death(worker)
            elif isinstance(message, Progress):
                self._on_progress(message)
            elif isinstance(message, Exception):
                raise message
            else:
                yield worker, message

    def _send(self, worker: _WorkerProcess, message: Run | Chunk) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died, which `_messages` sees as well
            worker.connection.send(message)

    def _start(self) -> _WorkerProcess:
        """Start a worker.

        Raises:
            BuildError: the process cannot be started.
        """
        number, self._num_started = self._num_started, self._num_started + 1
        ours, theirs = multiprocessing.Pipe()
        process: Any = multiprocessing.get_context(START_METHOD).Process(  # type: ignore[attr-defined]
            target=worker_main,
            args=(theirs, self._build, replace(self._stage, tasks=())),
            name=f"tokshard-worker-{number}",
            daemon=True,
        )
        try:
            with starting_worker():
                process.start()
        except (EOFError, OSError) as error:  # the fork server was killed, or the system allows no more processes
            ours.close()
            raise BuildError(
                f"worker {number} cannot be started: {type(error).__name__}: {error}",
                hint="run the same command again: finished tasks are kept; if memory ran out, try fewer --workers",
            ) from error
        finally:
            theirs.close()  # so that the pipe ends when the worker does
        self._workers.append(_WorkerProcess(number=number, process=process, connection=ours))
        return self._workers[-1]

    def _death(self, worker: _WorkerProcess) -> BuildError:
        """Release the resources of a dead worker, and return how it died."""
        worker.process.join(_STOP_SECONDS)
        worker.process.kill()  # if only its pipe was closed
        worker.connection.close()
        code = worker.process.exitcode
        names = {one.value: one.name for one in signal.Signals}  # real-time signals have none
        is_killed = code is not None and code < 0
        how = f"was killed by {names.get(-code, f'signal {-code}')}" if is_killed else f"exited with {code}"
        task = worker.task
        what = "" if task is None else f" while it {self._purpose(task)}"
        memory = "; SIGKILL often means that memory ran out: try fewer --workers" if code == -signal.SIGKILL else ""
        return BuildError(
            f"worker {worker.number} (pid {worker.process.pid}) {how}{what}",
            hint=f"run the same command again: finished tasks are kept{memory}",
        )

    def _purpose(self, task: AnyTask) -> str:
        """A description of a worker's work on a task, in the past tense."""
        if isinstance(task, StepTask):
            return "worked on files of this build"
        return f"read {self._build.inputs[task.key[0]].location}"
