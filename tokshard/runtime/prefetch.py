"""Batches made ahead of the training loop: in a thread, or in worker processes behind one.

A request says which rows a batch has, so workers know nothing of cursors, weights or ranks: they turn rows into
`Packed`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import multiprocessing.connection
import pickle
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokshard.errors import LoaderError, TokshardError
from tokshard.runtime.packing import Packed
from tokshard.runtime.plan import Rows, StreamPlan
from tokshard.runtime.windows import TokenSource

_SHARD_NAME_BYTES = 4096
_STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Result:
    value: Any
    error: BaseException | None


class Prefetcher:
    """Makes batches in the order in which they were requested.

    Args:
        plan: reads the rows.
        finish: turns what was read into what the loop gets; called in the thread.
        num_workers: processes that read; 0: the thread itself does.
        timeout_seconds: how long the loop waits for one batch.
        start_method: of the processes: ``fork``, ``spawn`` or ``forkserver``.
    """

    def __init__(
        self,
        plan: StreamPlan,
        finish: Callable[[Packed], Any],
        *,
        num_workers: int,
        timeout_seconds: float,
        start_method: str,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._requests: queue.SimpleQueue[tuple[int, Rows] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._outstanding = 0
        self._stale = 0
        self._plan = plan
        self._workers = [_Worker(plan, number, start_method) for number in range(num_workers)]
        self._thread = threading.Thread(
            target=_run,
            args=(self._requests, self._results, None if num_workers else plan, self._workers, finish),
            name="tokshard-prefetch",
            daemon=True,
        )
        self._thread.start()
        # also when the loader is forgotten without close, or the interpreter ends
        self._finalizer = weakref.finalize(self, _stop, self._requests, self._thread, self._workers)

    def request(self, rows: Rows) -> None:
        """Ask for one more batch."""
        number = next(self._numbers)
        if self._workers:
            with contextlib.suppress(OSError):  # a dead worker is reported when its answer is missed
                self._workers[number % len(self._workers)].connection.send(rows)
        self._requests.put((number, rows))
        self._outstanding += 1

    def forget(self) -> None:
        """The batches that were asked for are not wanted any more."""
        self._stale = self._outstanding

    @property
    def num_outstanding(self) -> int:
        """Batches that were asked for, are wanted and not taken."""
        return self._outstanding - self._stale

    @property
    def num_ready(self) -> int:
        """Batches that can be taken at once, those not wanted included."""
        return self._results.qsize()

    def take(self) -> Any:
        """The next wanted batch.

        Raises:
            LoaderError: a worker died, or no batch came in time.
            CorpusError: a shard is missing or damaged.
        """
        while True:
            try:
                result = self._results.get(timeout=self._timeout_seconds)
            except queue.Empty:
                raise self._timed_out() from None
            self._outstanding -= 1
            if self._stale:
                self._stale -= 1
                continue
            if result.error is not None:
                self.close()
                raise result.error
            return result.value

    def close(self) -> None:
        """Stop thread and workers."""
        self._finalizer()

    def _timed_out(self) -> LoaderError:
        if self._workers:
            reading = [worker.reading() for worker in self._workers]
        else:
            reading = [getattr(source, "reading", None) or "" for source in self._plan.sources]
        self.close()
        shards = ", ".join(sorted({name for name in reading if name})) or "no shard yet"
        return LoaderError(
            f"no batch came for {self._timeout_seconds:g} s; the last reads were in {shards}",
            hint="check that storage, or raise timeout_seconds",
        )


def _run(
    requests: queue.SimpleQueue[tuple[int, Rows] | None],
    results: queue.SimpleQueue[_Result],
    plan: StreamPlan | None,
    workers: list[_Worker],
    finish: Callable[[Packed], Any],
) -> None:
    while (request := requests.get()) is not None:
        number, rows = request
        try:
            packed = workers[number % len(workers)].receive() if plan is None else plan.pack(rows)
            results.put(_Result(finish(packed), None))
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: the loop raises it
            results.put(_Result(None, error))


def _stop(
    requests: queue.SimpleQueue[tuple[int, Rows] | None], thread: threading.Thread, workers: list[_Worker]
) -> None:
    for worker in workers:
        worker.stop()
    requests.put(None)
    if thread is not threading.current_thread():
        thread.join(_STOP_SECONDS)


class _Worker:
    def __init__(self, plan: StreamPlan, number: int, start_method: str) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self.connection, theirs = multiprocessing.Pipe()
        self._reading = context.RawArray(ctypes.c_char, _SHARD_NAME_BYTES)
        inherited = self.connection if start_method == "fork" else None
        self._process = context.Process(
            target=_worker_main,
            args=(theirs, inherited, plan, self._reading),
            name=f"tokshard-loader-{number}",
            daemon=True,
        )
        self._process.start()
        theirs.close()  # so that the pipe ends when the worker does
        self._number, self._sources = number, plan.sources

    def receive(self) -> Packed:
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(answer, BaseException):
            raise answer
        packed: Packed = answer
        return packed

    def reading(self) -> str:
        """The shard that the worker touched last."""
        name: bytes = self._reading.value
        return name.decode(errors="replace")

    def stop(self) -> None:
        self._process.terminate()
        self._process.join(_STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.connection.close()

    def _death(self) -> LoaderError:
        self._process.join(_STOP_SECONDS)
        code = self._process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        where = f"it last read {self.reading() or 'no shard'}"
        if code == -signal.SIGBUS and (cut := _changed_shard(self._sources)):
            where = f"{cut} is not as long as its manifest says"
        return LoaderError(
            f"loader worker {self._number} (pid {self._process.pid}) {how}; {where}",
            hint="SIGKILL often means that memory ran out, SIGBUS that a shard was cut while it was mapped "
            "(CorpusSource(..., access='pread') survives that)",
        )


def _changed_shard(sources: Sequence[TokenSource]) -> str | None:
    """The shard whose cut killed a worker. Pages of a map are read long after the shard was touched, in any order."""
    found = (source.changed_shard() for source in sources if hasattr(source, "changed_shard"))
    return next((name for name in found if name), None)


def _worker_main(connection: Any, inherited: Any, plan: StreamPlan, reading: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the loop decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if inherited is not None:
        inherited.close()  # fork copied the other end of the pipe, which would keep it open for ever
        plan = pickle.loads(pickle.dumps(plan))  # noqa: S301 - a thread may have held a lock of the plan at the fork

    def watch(shard: str) -> None:
        reading.value = shard.encode()[-_SHARD_NAME_BYTES + 1 :]

    for source in plan.sources:
        if hasattr(source, "on_shard"):
            source.on_shard = watch
    with contextlib.suppress(EOFError, OSError):
        while True:
            rows = connection.recv()
            try:
                answer: Any = plan.pack(rows)
            except TokshardError as error:
                answer = error
            except Exception as error:  # noqa: BLE001 - a process edge
                answer = LoaderError(
                    f"a loader worker failed: {type(error).__name__}: {error}",
                    hint="this is a bug in tokshard: run with num_workers=0 for the traceback and report it",
                )
            connection.send(answer)
