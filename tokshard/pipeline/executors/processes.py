"""Running the tasks of a build: in this process, or in spawned workers.

A worker is given tasks over a pipe and answers with progress, receipts and failures. A stream (an input that can only
be read from its start) goes to one worker as a whole while there are streams for everyone; else a thread here
decompresses it and hands its segments to whichever worker is free, so that one big file uses all cores. Text
crosses processes, ids never do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tokshard.errors import BuildError, TokshardError
from tokshard.pipeline.failures import SegmentError, TaskError
from tokshard.pipeline.sources.records import Chunk
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task
from tokshard.pipeline.tasks.runner import TaskRunner, open_segments
from tokshard.pipeline.tasks.schedule import Schedule
from tokshard.pipeline.workspace.receipts import Progress, Receipt

_WORKER_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # encodings come and go in megabytes: giving them back to the kernel each time costs a fifth of the throughput
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
}
_STOP_SECONDS = 5.0

# a server that has imported everything once forks workers from a process without threads: safe in a program that has
# some, and each worker costs milliseconds instead of the third of a second that the imports take
_START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


@dataclass(slots=True)
class Usage:
    """What a build cost.

    Args:
        cpu_seconds: of all workers, start-up included.
        server_cpu_seconds: of the process that they are forked from, where that can be read.
        peak_worker_bytes: resident memory of the largest worker at its peak.
    """

    cpu_seconds: float = 0.0
    server_cpu_seconds: float = 0.0
    peak_worker_bytes: int = 0

    def __add__(self, other: Usage) -> Usage:
        """What two stages cost; the server outlives the first, so its time is that of the second."""
        return Usage(
            cpu_seconds=self.cpu_seconds + other.cpu_seconds,
            server_cpu_seconds=max(self.server_cpu_seconds, other.server_cpu_seconds),
            peak_worker_bytes=max(self.peak_worker_bytes, other.peak_worker_bytes),
        )


OnProgress = Callable[[Progress], None]


def run_inline(context: WorkerContext, schedule: Schedule, on_progress: OnProgress) -> Usage:
    """Run everything in this process, in order."""
    runner = TaskRunner(context, on_progress)
    while schedule.goes_on():
        task = schedule.take()
        if task is None:
            break
        try:
            if isinstance(task, Task):
                schedule.finished(runner.run_task(task, schedule.cap))
            else:
                runner.run_stream(task, schedule.cap, schedule.done_segments(task), schedule.finished)
        except SegmentError as failure:
            schedule.failed((task.key[0], failure.segment), failure.error)
        except Exception as error:  # noqa: BLE001 - the lowest failing task decides, not the first
            schedule.failed(task.key, error)
        schedule.released(task)
    return Usage(peak_worker_bytes=_peak_bytes())


def run_workers(context: WorkerContext, schedule: Schedule, on_progress: OnProgress, *, num_workers: int) -> Usage:
    """Run everything in spawned worker processes.

    Raises:
        BuildError: a worker died, or none can be started.
    """
    pool = _Pool(context, schedule, on_progress)
    try:
        pool.start(num_workers)
        return pool.run()
    finally:
        pool.close()


def prepare_workers() -> None:
    """Start to import what workers need, in a process from which they are forked."""
    if _START_METHOD == "forkserver":
        from multiprocessing import forkserver

        multiprocessing.set_forkserver_preload([__name__])
        with _environment(_WORKER_ENVIRONMENT):
            forkserver.ensure_running()


@contextlib.contextmanager
def leaving_the_program_alone() -> Iterator[None]:
    """Undo at the end what a build changes in the program that calls it: its environment, and the fork server.

    A server that runs already is the program's own, and stays.
    """
    from multiprocessing import forkserver

    server: Any = vars(forkserver)["_forkserver"]  # it has no public way to stop it
    was_running, preload = server._forkserver_pid is not None, server._preload_modules  # noqa: SLF001
    with _environment({"TOKENIZERS_PARALLELISM": "false"}):
        try:
            yield
        finally:
            if not was_running and server._forkserver_pid is not None:  # noqa: SLF001
                server._stop()  # noqa: SLF001
                server._preload_modules = preload  # noqa: SLF001


# messages: what the coordinator sends to a worker


@dataclass(frozen=True, slots=True)
class _RunTask:
    task: Task
    cap: int | None


@dataclass(frozen=True, slots=True)
class _RunStream:
    task: StreamTask
    cap: int | None
    done: frozenset[int]


@dataclass(frozen=True, slots=True)
class _RunSegment:
    """Followed by chunks, then `_EndOfSegment` or `_BrokenSegment`."""

    task: StreamTask
    number: int
    previous: int | None
    cap: int | None


@dataclass(frozen=True, slots=True)
class _EndOfSegment:
    is_last: bool


@dataclass(frozen=True, slots=True)
class _BrokenSegment:
    """Nothing follows the chunks that were sent, because the input is damaged or gone."""

    error: Exception


# messages: what a worker answers


@dataclass(frozen=True, slots=True)
class _Failed:
    key: Key
    error: Exception


@dataclass(frozen=True, slots=True)
class _Done:
    """A receipt, and what the worker cost until then: the last one may be the last thing that is heard of it."""

    receipt: Receipt
    usage: Usage


@dataclass(frozen=True, slots=True)
class _Idle:
    pass


def _worker_main(connection: Connection, context: WorkerContext) -> None:
    os.environ.update(_WORKER_ENVIRONMENT)  # a server that the caller's program started has not got it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the coordinator decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            runner = TaskRunner(context, connection.send)
        except Exception as error:  # noqa: BLE001 - a process edge
            connection.send(_Failed((0, 0), _portable(error)))
            return
        while True:
            connection.send(_Idle())
            _obey(connection, runner, connection.recv())


def _obey(connection: Connection, runner: TaskRunner, message: Any) -> None:
    try:
        if isinstance(message, _RunTask):
            _send_receipt(connection, runner.run_task(message.task, message.cap))
        elif isinstance(message, _RunStream):
            runner.run_stream(message.task, message.cap, message.done, partial(_send_receipt, connection))
        else:
            _run_segment(connection, runner, message)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except SegmentError as failure:
        connection.send(_Failed((message.task.key[0], failure.segment), _portable(failure.error)))
    except Exception as error:  # noqa: BLE001 - a process edge
        key = (message.task.key[0], message.number) if isinstance(message, _RunSegment) else message.task.key
        connection.send(_Failed(key, _portable(error)))


def _run_segment(connection: Connection, runner: TaskRunner, message: _RunSegment) -> None:
    # taken in whole, so that the thread that decompresses can go on to the next segment and the next worker
    chunks: list[Chunk] = []
    while not isinstance(part := connection.recv(), _EndOfSegment | _BrokenSegment):
        chunks.append(part)
    end = part
    receipt = runner.run_segment(
        message.task,
        message.number,
        message.previous,
        _consumed(chunks, end),
        cap=message.cap,
        is_last=lambda: isinstance(end, _EndOfSegment) and end.is_last,
    )
    _send_receipt(connection, receipt)


def _send_receipt(connection: Connection, receipt: Receipt) -> None:
    connection.send(_Done(receipt, Usage(_cpu_seconds(), _server_cpu_seconds(), _peak_bytes())))


def _consumed(chunks: list[Chunk], end: _EndOfSegment | _BrokenSegment) -> Iterator[Chunk]:
    """The chunks in order, each forgotten when the next is asked for.

    Damage comes after them, as where the worker reads for itself: a bad record before it is the error that counts.
    """
    chunks.reverse()
    while chunks:
        yield chunks.pop()
    if isinstance(end, _BrokenSegment):
        raise end.error


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)  # a worker that outlives its build would write beside the next one


def _portable(error: Exception) -> Exception:
    """The error as it can cross processes."""
    if isinstance(error, TokshardError | TaskError):
        return error
    return BuildError(
        f"a worker failed: {type(error).__name__}: {error}",
        hint="this is a bug in tokshard: run again with --workers 1 --debug and report what it prints",
    )


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _server_cpu_seconds() -> float:
    """CPU time of the parent, if that is a fork server and the system has /proc."""
    if _START_METHOD != "forkserver":
        return 0.0
    try:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    user, system = int(fields[11]), int(fields[12])  # after the name: state is field 0, utime field 11
    return (user + system) / os.sysconf("SC_CLK_TCK")


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024


# the coordinator


@dataclass(slots=True, eq=False)
class _Worker:
    number: int
    process: Any
    connection: Connection
    task: Task | StreamTask | None = None
    feeder: _Feeder | None = None
    is_ready: bool = False
    usage: Usage = field(default_factory=Usage)


class _Feeder:
    """A thread that reads one stream and sends each of its segments to the worker it is given.

    It announces a segment through `events`, then waits for a worker in `workers`; None there ends it.
    """

    def __init__(
        self, context: WorkerContext, task: StreamTask, done: frozenset[int], events: Connection, lock: threading.Lock
    ) -> None:
        self.task = task
        self.workers: queue.SimpleQueue[tuple[Connection, int | None] | None] = queue.SimpleQueue()
        self.is_exhausted = False
        self.offer: tuple[int, int | None] | None = None
        self._context, self._done, self._events, self._lock = context, done, events, lock
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.workers.put(None)

    def _run(self) -> None:
        number = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, OSError):
            try:
                for segment in open_segments(self._context, self.task):
                    number = segment.number
                    if number in self._done:
                        segment.skip()
                        continue
                    self._tell(("offer", self.task.key[0], number, segment.previous))
                    given = self.workers.get()
                    if given is None:
                        return
                    worker, cap = given
                    worker.send(_RunSegment(self.task, number, segment.previous, cap))
                    try:
                        for chunk in segment.chunks:
                            worker.send(chunk)
                        end: _EndOfSegment | _BrokenSegment = _EndOfSegment(segment.is_last())
                    except (BrokenPipeError, ConnectionResetError):
                        raise
                    except Exception as error:  # noqa: BLE001 - the worker says it in its turn
                        worker.send(_BrokenSegment(_portable(error)))
                        break
                    worker.send(end)
            except SegmentError as failure:
                self._tell(("failed", self.task.key[0], failure.segment, _portable(failure.error)))
            except (BrokenPipeError, ConnectionResetError):
                return  # the worker died, which the coordinator sees for itself
            except Exception as error:  # noqa: BLE001 - the edge of a thread
                self._tell(("failed", self.task.key[0], number, _portable(error)))
            self._tell(("exhausted", self.task.key[0]))

    def _tell(self, event: tuple[Any, ...]) -> None:
        with self._lock:  # several feeders share the pipe
            self._events.send(event)


class _Pool:
    def __init__(self, context: WorkerContext, schedule: Schedule, on_progress: OnProgress) -> None:
        self._context, self._schedule, self._on_progress = context, schedule, on_progress
        self._events, self._events_in = multiprocessing.Pipe(duplex=False)
        self._events_lock = threading.Lock()
        self._feeders: dict[int, _Feeder] = {}
        self._workers: list[_Worker] = []

    def start(self, num_workers: int) -> None:
        try:
            for number in range(num_workers):
                self._workers.append(self._spawn(number))
        except (EOFError, OSError) as error:  # the process that they are forked from was killed, or nothing forks
            raise BuildError(
                f"worker {len(self._workers)} cannot be started: {type(error).__name__}: {error}",
                hint="run the same command again: finished tasks are kept; if memory ran out, try fewer --workers",
            ) from error

    def run(self) -> Usage:
        while self._schedule.goes_on():
            self._assign()
            by_handle: dict[Any, _Worker] = {}
            for worker in self._workers:
                by_handle[worker.connection] = worker
                by_handle[worker.process.sentinel] = worker
            for handle in wait([self._events, *by_handle]):
                if handle is self._events:
                    self._hear_feeder(self._events.recv())
                elif isinstance(handle, Connection):
                    self._hear_worker(by_handle[handle])
                elif not by_handle[handle].connection.poll():  # else hear its last words first
                    raise self._death(by_handle[handle])
        return Usage(
            cpu_seconds=sum(worker.usage.cpu_seconds for worker in self._workers),
            server_cpu_seconds=max(worker.usage.server_cpu_seconds for worker in self._workers),
            peak_worker_bytes=max(worker.usage.peak_worker_bytes for worker in self._workers),
        )

    def close(self) -> None:
        for feeder in self._feeders.values():
            feeder.stop()
        for worker in self._workers:
            worker.process.terminate()
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(_STOP_SECONDS)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._context.workspace.clear_partial()

    def _spawn(self, number: int) -> _Worker:
        ours, theirs = multiprocessing.Pipe()
        process: Any = multiprocessing.get_context(_START_METHOD).Process(  # type: ignore[attr-defined]
            target=_worker_main, args=(theirs, self._context), name=f"tokshard-worker-{number}", daemon=True
        )
        with _environment(_WORKER_ENVIRONMENT):
            process.start()
        theirs.close()  # so that the pipe ends when the worker does
        return _Worker(number=number, process=process, connection=ours)

    def _assign(self) -> None:
        """Give work to every worker that waits for it."""
        for worker in self._workers:
            if worker.is_ready and not self._give(worker):
                return

    def _give(self, worker: _Worker) -> bool:
        """Give a worker something; False if there is nothing to give now."""
        while True:
            offers = [feeder for feeder in self._feeders.values() if feeder.offer is not None]
            for feeder in sorted(offers, key=lambda feeder: feeder.task.key):
                assert feeder.offer is not None
                number = feeder.offer[0]
                if self._schedule.is_wanted((feeder.task.key[0], number)):
                    feeder.offer = None
                    worker.feeder, worker.task, worker.is_ready = feeder, feeder.task, False
                    feeder.workers.put((worker.connection, self._schedule.cap))
                    return True
            task = self._schedule.peek()
            if task is None:
                return False
            if isinstance(task, StreamTask) and (
                task.is_here or self._schedule.num_pending_streams() < len(self._workers)
            ):
                busy = {worker.feeder for worker in self._workers}
                if any(feeder.offer is None and feeder not in busy for feeder in self._feeders.values()):
                    return False  # a feeder that is between segments will offer one soon
                self._feed(task)
                continue
            self._schedule.take()
            worker.task, worker.is_ready = task, False
            message = (
                _RunTask(task, self._schedule.cap)
                if isinstance(task, Task)
                else _RunStream(task, self._schedule.cap, self._schedule.done_segments(task))
            )
            try:
                worker.connection.send(message)
            except (BrokenPipeError, ConnectionResetError):
                raise self._death(worker) from None
            return True

    def _feed(self, task: StreamTask) -> None:
        self._schedule.take()
        done = self._schedule.done_segments(task)
        feeder = _Feeder(self._context, task, done, self._events_in, self._events_lock)
        self._feeders[task.key[0]] = feeder
        feeder.start()

    def _hear_feeder(self, event: tuple[Any, ...]) -> None:
        kind, index, *rest = event
        feeder = self._feeders[index]
        if kind == "offer":
            feeder.offer = (rest[0], rest[1])
            self._retire(feeder)
        elif kind == "failed":
            self._schedule.failed((index, rest[0]), rest[1])
        else:
            feeder.is_exhausted = True
            self._retire(feeder)

    def _hear_worker(self, worker: _Worker) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._death(worker) from None
        if isinstance(message, Progress):
            self._on_progress(message)
        elif isinstance(message, _Done):
            worker.usage = message.usage
            self._schedule.finished(message.receipt)
        elif isinstance(message, _Failed):
            self._schedule.failed(message.key, message.error)
        else:
            worker.is_ready = True
            self._release(worker)

    def _release(self, worker: _Worker) -> None:
        feeder, task = worker.feeder, worker.task
        worker.feeder, worker.task = None, None
        if feeder is not None:
            self._retire(feeder)
        elif task is not None:
            self._schedule.released(task)

    def _retire(self, feeder: _Feeder) -> None:
        """Let a stream go when it is read to its end and no worker is on a segment of it."""
        busy = any(worker.feeder is feeder for worker in self._workers)
        stuck = feeder.offer is not None and not self._schedule.is_wanted((feeder.task.key[0], feeder.offer[0]))
        if not busy and (feeder.is_exhausted or stuck):
            feeder.stop()
            self._feeders.pop(feeder.task.key[0], None)
            self._schedule.released(feeder.task)

    def _death(self, worker: _Worker) -> BuildError:
        worker.process.join(_STOP_SECONDS)
        code = worker.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        what = ""
        if worker.task is not None:
            first = self._context.inputs[worker.task.key[0]]
            what = f" while it read {first.location}"
        memory = "; SIGKILL often means that memory ran out: try fewer --workers" if code == -signal.SIGKILL else ""
        return BuildError(
            f"worker {worker.number} (pid {worker.process.pid}) {how}{what}",
            hint=f"run the same command again: finished tasks are kept{memory}",
        )


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables for a child that is started inside; spawned processes read them before they load any library."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
