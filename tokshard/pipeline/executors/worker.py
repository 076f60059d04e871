"""A worker process: takes tasks from a pipe, answers with progress, receipts and failures."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait

from tokshard.pipeline.executors.base import MakeRunner, Runner, TaskContext, Usage, cpu_seconds, peak_bytes
from tokshard.pipeline.executors.messages import BrokenSegment, EndOfSegment, Idle, RunSegment, TaskDone, portable
from tokshard.pipeline.failures import SegmentError
from tokshard.pipeline.sources.records import Chunk
from tokshard.pipeline.tasks.decisions import Run
from tokshard.pipeline.tasks.events import Failed
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task
from tokshard.pipeline.tasks.runner import TaskRunner
from tokshard.pipeline.workspace.receipts import Receipt

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # without it, modules in the current directory, which may be someone else's data, come before those of Python
    "PYTHONSAFEPATH": "1",
    # encodings come and go in megabytes: giving them back to the kernel each time costs a fifth of the throughput
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
}

# a server that has imported everything once forks workers from a process without threads: safe in a program that has
# some, and each worker costs milliseconds instead of the third of a second that the imports take
START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def worker_main(connection: Connection, make_runner: MakeRunner, context: TaskContext) -> None:
    """Run the tasks that the coordinator sends, until it closes the pipe or dies."""
    os.environ.update(ENVIRONMENT)  # a fork server of the caller's program was started without it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the coordinator decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    runner: Runner | None = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            message = connection.recv()
            # received whole, so that the thread that decompresses can continue with the next segment and worker
            segment = _SentSegment.receive(connection) if isinstance(message, RunSegment) else None
            try:
                if runner is None:  # here, because it may fail like the task itself
                    runner = make_runner(context, connection.send)
                for receipt in _receipts(runner, message, segment):
                    connection.send(TaskDone(receipt, Usage(cpu_seconds(), peak_bytes())))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise
            except SegmentError as failure:
                connection.send(Failed((message.task.key[0], failure.segment), portable(failure.error)))
            except Exception as error:  # noqa: BLE001 - a process edge
                connection.send(Failed(_key(message), portable(error)))
            connection.send(Idle())


def _key(message: Run | RunSegment) -> Key:
    return message.task.key if isinstance(message, Run) else (message.task.key[0], message.number)


def _receipts(runner: Runner, message: Run | RunSegment, segment: _SentSegment | None) -> Iterator[Receipt]:
    if isinstance(message, Run) and isinstance(message.task, Task):
        yield runner.run_task(message.task, message.max_documents)
        return
    assert isinstance(runner, TaskRunner), "only builds have streams"
    if isinstance(message, RunSegment):
        assert segment is not None
        yield runner.run_segment(
            message.task,
            message.number,
            message.previous,
            segment.chunks(),
            max_documents=message.max_documents,
            is_last=segment.is_last,
        )
    else:
        assert isinstance(message.task, StreamTask)
        yield from runner.run_stream(message.task, message.max_documents, message.done_segments)


class _SentSegment:
    """A segment of a stream that another process reads."""

    def __init__(self, chunks: list[Chunk], end: EndOfSegment | BrokenSegment) -> None:
        self._chunks, self._end = chunks, end

    @classmethod
    def receive(cls, connection: Connection) -> _SentSegment:
        """Receive all that follows a `RunSegment`."""
        chunks: list[Chunk] = []
        while not isinstance(part := connection.recv(), EndOfSegment | BrokenSegment):
            chunks.append(part)
        return cls(chunks, part)

    def chunks(self) -> Iterator[Chunk]:
        """The chunks in order, each forgotten when the next is asked for.

        Damage comes after them, as where the worker reads for itself: a bad record before it is the error that counts.
        """
        self._chunks.reverse()
        while self._chunks:
            yield self._chunks.pop()
        if isinstance(self._end, BrokenSegment):
            raise self._end.error

    def is_last(self) -> bool:
        """Whether the stream ends with this segment."""
        return isinstance(self._end, EndOfSegment) and self._end.is_last


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)  # a worker that outlives its build would write next to the workers of the next one
