"""A worker process as its coordinator sees it: started, given a task, stopped, or found dead."""

from __future__ import annotations

import multiprocessing
import signal
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from tokshard.errors import BuildError
from tokshard.pipeline.executors.base import MakeRunner, TaskContext, Usage
from tokshard.pipeline.executors.stream_feeder import StreamFeeder
from tokshard.pipeline.executors.surroundings import environment
from tokshard.pipeline.executors.worker import ENVIRONMENT, START_METHOD, worker_main
from tokshard.pipeline.tasks.planning import StreamTask, Task

_STOP_SECONDS = 5.0


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerProcess:
    """A running worker.

    Attributes:
        task: what it was given and has not ended.
        feeder: the reader of the stream, if it was given one segment of it.
        usage: what it has cost, as of the last task that it finished.
    """

    number: int
    process: Any
    connection: Connection
    task: Task | StreamTask | None = None
    feeder: StreamFeeder | None = None
    usage: Usage = field(default_factory=Usage)

    def terminate(self) -> None:
        """Ask it to stop; `join` waits until it has."""
        self.process.terminate()
        self.connection.close()

    def join(self) -> None:
        """Wait until it has stopped; kill it if that takes long."""
        self.process.join(_STOP_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def bury(self, context: TaskContext) -> BuildError:
        """Release what is left of a worker that died, and say how it died."""
        self.process.join(_STOP_SECONDS)
        self.process.kill()  # if only its pipe was closed
        self.connection.close()
        code = self.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        what = "" if self.task is None else f" while it {context.purpose(self.task)}"
        memory = "; SIGKILL often means that memory ran out: try fewer --workers" if code == -signal.SIGKILL else ""
        return BuildError(
            f"worker {self.number} (pid {self.process.pid}) {how}{what}",
            hint=f"run the same command again: finished tasks are kept{memory}",
        )


class WorkerPool:
    """The workers of one executor. They are started one by one, when there is a task for them.

    Attributes:
        running: those that were started and have not stopped.
        usage: the cost of those that have stopped.
    """

    def __init__(self, context: TaskContext, make_runner: MakeRunner, *, num_workers: int) -> None:
        self._context, self._make_runner, self._num_workers = context, make_runner, num_workers
        self._num_started = 0
        self.running: list[WorkerProcess] = []
        self.usage = Usage()

    def has_free(self) -> bool:
        """Whether a worker has no task, or one more may be started."""
        return len(self.running) < self._num_workers or any(worker.task is None for worker in self.running)

    def take_free(self) -> WorkerProcess:
        """A worker without a task; one is started if all have one.

        Raises:
            BuildError: no worker can be started.
        """
        for worker in self.running:
            if worker.task is None:
                return worker
        worker = start_worker(self._context, self._make_runner, self._num_started)
        self._num_started += 1
        self.running.append(worker)
        return worker

    def bury(self, worker: WorkerProcess) -> BuildError:
        """Remove a worker that died, and say how it died."""
        self.running.remove(worker)
        self.usage += worker.usage
        return worker.bury(self._context)

    def stop(self) -> None:
        """Stop all workers."""
        for worker in self.running:
            worker.terminate()
        for worker in self.running:
            worker.join()
            self.usage += worker.usage
        self.running.clear()


def start_worker(context: TaskContext, make_runner: MakeRunner, number: int) -> WorkerProcess:
    """Start a worker.

    Raises:
        BuildError: the process cannot be started.
    """
    ours, theirs = multiprocessing.Pipe()
    process: Any = multiprocessing.get_context(START_METHOD).Process(  # type: ignore[attr-defined]
        target=worker_main, args=(theirs, make_runner, context), name=f"tokshard-worker-{number}", daemon=True
    )
    try:
        with environment(ENVIRONMENT):
            process.start()
    except (EOFError, OSError) as error:  # the fork server was killed, or the system allows no more processes
        ours.close()
        raise BuildError(
            f"worker {number} cannot be started: {type(error).__name__}: {error}",
            hint="run the same command again: finished tasks are kept; if memory ran out, try fewer --workers",
        ) from error
    finally:
        theirs.close()  # so that the pipe ends when the worker does
    return WorkerProcess(number=number, process=process, connection=ours)
