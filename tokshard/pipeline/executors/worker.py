"""A worker process: takes tasks from a pipe, answers with progress, receipts and failures."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tokshard.pipeline.executors.base import Failed, Usage, cpu_seconds, peak_bytes
from tokshard.pipeline.executors.messages import BrokenSegment, EndOfSegment, Idle, RunSegment, TaskDone, portable
from tokshard.pipeline.failures import SegmentError
from tokshard.pipeline.sources.records import Chunk
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.planning import Key, Task
from tokshard.pipeline.tasks.runner import TaskRunner
from tokshard.pipeline.tasks.schedule import Run
from tokshard.pipeline.workspace.receipts import Receipt

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # encodings come and go in megabytes: giving them back to the kernel each time costs a fifth of the throughput
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
}

# a server that has imported everything once forks workers from a process without threads: safe in a program that has
# some, and each worker costs milliseconds instead of the third of a second that the imports take
START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def worker_main(connection: Connection, context: WorkerContext) -> None:
    """Run what the coordinator sends, until it closes the pipe or dies."""
    os.environ.update(ENVIRONMENT)  # a server that the caller's program started does not have it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the coordinator decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        message = connection.recv()
        try:
            runner = TaskRunner(context, connection.send)
        except Exception as error:  # noqa: BLE001 - a process edge
            connection.send(Failed(_key(message), portable(error)))
            return
        while True:
            try:
                for receipt in _receipts(connection, runner, message):
                    connection.send(TaskDone(receipt, Usage(cpu_seconds(), _server_cpu_seconds(), peak_bytes())))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise
            except SegmentError as failure:
                connection.send(Failed((message.task.key[0], failure.segment), portable(failure.error)))
            except Exception as error:  # noqa: BLE001 - a process edge
                connection.send(Failed(_key(message), portable(error)))
            connection.send(Idle())
            message = connection.recv()


def _key(message: Run | RunSegment) -> Key:
    return message.task.key if isinstance(message, Run) else (message.task.key[0], message.number)


def _receipts(connection: Connection, runner: TaskRunner, message: Run | RunSegment) -> Iterator[Receipt]:
    if isinstance(message, RunSegment):
        yield _run_segment(connection, runner, message)
    elif isinstance(message.task, Task):
        yield runner.run_task(message.task, message.max_documents)
    else:
        yield from runner.run_stream(message.task, message.max_documents, message.done_segments)


def _run_segment(connection: Connection, runner: TaskRunner, message: RunSegment) -> Receipt:
    # received whole, so that the thread that decompresses can continue with the next segment and the next worker
    chunks: list[Chunk] = []
    while not isinstance(part := connection.recv(), EndOfSegment | BrokenSegment):
        chunks.append(part)
    end = part
    return runner.run_segment(
        message.task,
        message.number,
        message.previous,
        _consumed(chunks, end),
        max_documents=message.max_documents,
        is_last=lambda: isinstance(end, EndOfSegment) and end.is_last,
    )


def _consumed(chunks: list[Chunk], end: EndOfSegment | BrokenSegment) -> Iterator[Chunk]:
    """The chunks in order, each forgotten when the next is asked for.

    Damage comes after them, as where the worker reads for itself: a bad record before it is the error that counts.
    """
    chunks.reverse()
    while chunks:
        yield chunks.pop()
    if isinstance(end, BrokenSegment):
        raise end.error


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)  # a worker that outlives its build would write next to the workers of the next one


def _server_cpu_seconds() -> float:
    """CPU time of the parent, if that is a fork server and the system has /proc."""
    if START_METHOD != "forkserver":
        return 0.0
    try:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    user, system = int(fields[11]), int(fields[12])  # after the name: state is field 0, utime field 11
    return (user + system) / os.sysconf("SC_CLK_TCK")
