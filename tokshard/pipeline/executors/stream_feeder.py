"""One stream for many workers: a thread reads and decompresses it, and hands each segment to a free worker."""

from __future__ import annotations

import contextlib
import queue
import threading
from multiprocessing.connection import Connection

from tokshard.errors import TokshardError
from tokshard.pipeline.executors.messages import (
    BrokenSegment,
    EndOfSegment,
    FeederEnded,
    FeederFailed,
    RunSegment,
    SegmentReady,
    portable,
)
from tokshard.pipeline.failures import SegmentError
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.decisions import Run
from tokshard.pipeline.tasks.planning import StreamTask
from tokshard.pipeline.tasks.runner import Segment, open_segments


class StreamFeeder:
    """Reads one stream in a thread. It offers each segment, then waits until it is given a worker for it.

    Args:
        number: its name in its messages.
        events: where its messages go; shared by several feeders, like `lock`.

    Attributes:
        offered: the segment that waits for a worker, if there is one.
        is_ended: nothing more comes: the stream ended, a segment failed, or a worker died.
        loss: the error to show if the stream is not tried again; None while no worker died.
    """

    def __init__(
        self, context: WorkerContext, run: Run, *, number: int, events: Connection, lock: threading.Lock
    ) -> None:
        assert isinstance(run.task, StreamTask)
        self._context, self._run, self._number = context, run, number
        self._events, self._lock = events, lock
        self._workers: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.task: StreamTask = run.task
        self.offered: int | None = None
        self.is_ended = False
        self.loss: TokshardError | None = None

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def give(self, worker: Connection) -> None:
        """Have the offered segment sent to a worker."""
        self.offered = None
        self._workers.put(worker)

    def stop(self) -> None:
        """Offer no more segments. One that is being sent is sent to its end."""
        self.offered, self.is_ended = None, True
        self._workers.put(None)

    def _read(self) -> None:
        segment = None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, OSError):
            try:
                for segment in open_segments(self._context, self.task):
                    if segment.number in self._run.done_segments:
                        segment.skip()
                    elif not self._feed(segment):
                        break
            except SegmentError as failure:
                self._send(FeederFailed(self._number, failure.segment, portable(failure.error)))
            except (BrokenPipeError, ConnectionResetError):
                return  # the worker died, which the coordinator sees for itself
            except Exception as error:  # noqa: BLE001 - the edge of a thread
                self._send(FeederFailed(self._number, 0 if segment is None else segment.number, portable(error)))
            self._send(FeederEnded(self._number))

    def _feed(self, segment: Segment) -> bool:
        """Send one segment to a worker; False if nothing can follow it."""
        self._send(SegmentReady(self._number, segment.number))
        worker = self._workers.get()
        if worker is None:
            return False
        worker.send(RunSegment(self.task, segment.number, segment.previous, self._run.max_documents))
        try:
            for chunk in segment.chunks:
                worker.send(chunk)
            end = EndOfSegment(segment.is_last())
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # noqa: BLE001 - the worker reports it, after the records before it
            worker.send(BrokenSegment(portable(error)))
            return False
        worker.send(end)
        return True

    def _send(self, event: SegmentReady | FeederFailed | FeederEnded) -> None:
        with self._lock:
            self._events.send(event)
