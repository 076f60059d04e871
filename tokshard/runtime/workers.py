"""Worker processes that read the steps of a rank in turn, and send them through pipes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import multiprocessing.process
import os
import pickle
import queue
import signal
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from tokshard.errors import LoaderError, PlanError, TokshardError
from tokshard.runtime.batches import Packed
from tokshard.runtime.masks import MaskedTokens
from tokshard.runtime.order.mixture import Mixture
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.source import TokenSource
from tokshard.runtime.steps import Ranks, packed_steps
from tokshard.runtime.stop import Stop

STOP_SECONDS = 5.0
"""A process that still hangs after this time is abandoned: a read from dead storage can survive SIGKILL."""

_SHARD_NAME_BYTES = 4096
_MESSAGE_BYTES = 1 << 20
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Job:
    """The steps to read from now on.

    Args:
        number: counts the jobs of a prefetcher, from 0.
        mixture: of the corpora.
        masked: documents that are out of the loss.
        ranks: which rows of a step are read.
        sample: global sample at which the first step begins.
        stop: where the pass ends.
    """

    number: int
    mixture: Mixture
    masked: MaskedTokens | None
    ranks: Ranks
    sample: int
    stop: Stop

    def steps(self, plan: StreamPlan, *, first: int = 0, stride: int = 1) -> Iterator[Packed]:
        """Its steps, or each `stride`-th of them from the `first` on."""
        return packed_steps(
            plan,
            self.mixture,
            self.ranks,
            self.sample,
            masked=self.masked,
            stop=self.stop,
            first=first,
            stride=stride,
        )


def start_method_of(given: str | None, sources: Sequence[TokenSource]) -> str:
    """How worker processes start: as asked for, or as suits the corpora.

    Raises:
        PlanError: this machine does not have it, or forked workers could not read a corpus.
    """
    methods = multiprocessing.get_all_start_methods()
    remote = next((source for source in sources if getattr(source, "is_remote", False)), None)
    if given is None:
        # a fork server may have the environment of long ago, and in it other credentials
        return "forkserver" if "forkserver" in methods and remote is None else "spawn"
    if given not in methods:
        raise PlanError(f"multiprocessing_context is {given!r:.100}", hint=f"give one of {', '.join(methods)}")
    if given == "fork" and remote is not None:
        raise PlanError(
            f"multiprocessing_context is 'fork', and {remote!r} is not on this machine: a forked process cannot reach "
            "a store that its parent has used",
            hint="leave multiprocessing_context out, or give 'forkserver' or 'spawn'",
        )
    return given


def check_pickles(plan: StreamPlan) -> None:
    """Refuse a plan that cannot be sent to a worker process.

    Raises:
        PlanError: names the part that does not pickle.
    """
    for part in (*plan.transforms, *plan.sources, plan):
        try:
            pickle.dumps(part)
        except Exception as error:
            raise PlanError(
                f"{part!r} does not pickle, so worker processes cannot have it: {error}",
                hint="define it in a module, as a function or a class, not as a lambda or in a function; or use "
                "num_workers=0",
            ) from error


def steps_of_workers(workers: Sequence[Worker], job: Job) -> Iterator[Packed]:
    """The steps of a job, from the workers in turn."""
    for worker in workers:
        worker.start(job)
    while True:
        for worker in workers:
            packed = worker.receive(job.number)
            if packed is None:
                return
            yield packed


class Worker:
    """One process, which makes each W-th step of a job.

    Args:
        plan: reads the rows; the process gets a copy.
        number, num_workers: which of the steps.
        start_method: ``fork``, ``spawn`` or ``forkserver``.
    """

    def __init__(self, plan: StreamPlan, number: int, num_workers: int, start_method: str) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self._answers, their_answers = multiprocessing.Pipe(duplex=False)
        their_jobs, self._jobs = multiprocessing.Pipe(duplex=False)
        _enlarge(self._answers)
        self._waiting: deque[tuple[int, Packed | BaseException | None]] = deque()
        self._reading = context.RawArray(ctypes.c_char, _SHARD_NAME_BYTES)
        inherited = (self._answers, self._jobs) if start_method == "fork" else ()
        self._process = context.Process(
            target=_worker_main,
            args=(their_jobs, their_answers, inherited, pickle.dumps(plan), number, num_workers, self._reading),
            name=f"tokshard-loader-{number}",
            daemon=True,
        )
        with _safe_path():
            self._process.start()
        their_answers.close()  # so that the pipe ends when the worker does
        their_jobs.close()
        self._number, self._sources = number, plan.sources

    def start(self, job: Job) -> None:
        """Drop earlier jobs and make the steps of this one."""
        with contextlib.suppress(OSError):  # a dead worker is reported when its answer is missed
            self._jobs.send(job)

    def receive(self, job: int) -> Packed | None:
        """The next step of a job; None after its last. Answers to earlier jobs are ignored."""
        while True:
            if not self._waiting:
                try:
                    self._waiting.extend(_loads(self._answers.recv_bytes()))
                except (EOFError, OSError):
                    raise self._death() from None
            number, answer = self._waiting.popleft()
            if number != job:
                continue
            if isinstance(answer, BaseException):
                raise answer
            packed: Packed | None = answer
            return packed

    def reading(self) -> str:
        """The shard that the worker touched last."""
        name: bytes = self._reading.value
        return name.decode(errors="replace")

    def kill(self) -> None:
        """Kill the process; it has nothing to clean up."""
        self._process.kill()

    def leave(self, seconds: float, *, may_close: bool) -> None:
        """Wait for a killed process to end, up to so many seconds.

        Args:
            may_close: whether the pipes can be closed, because no thread reads them.
        """
        self._process.join(seconds)
        if self._process.is_alive():  # or the interpreter would wait for it when it ends
            getattr(multiprocessing.process, "_children", set()).discard(self._process)
        if may_close:
            self._answers.close()
            self._jobs.close()

    def _death(self) -> LoaderError:
        self._process.join(STOP_SECONDS)
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


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Let child processes start without the current directory on their path.

    Python would look there first for `pickle` and all that a worker imports before it has the path of its parent, and
    the directory may hold someone else's data.
    """
    name = "PYTHONSAFEPATH"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _changed_shard(sources: Sequence[TokenSource]) -> str | None:
    """The shard whose truncation killed a worker: pages of a map are read long after it was touched, in any order."""
    found = (source.changed_shard() for source in sources if hasattr(source, "changed_shard"))
    return next((name for name in found if name), None)


def _worker_main(  # noqa: PLR0917 - the arguments of a process are positional
    jobs: Connection,
    answers: Connection,
    inherited: Sequence[Connection],
    pickled_plan: bytes,
    number: int,
    num_workers: int,
    reading: Any,
) -> None:
    # Ctrl-C and the SIGTERM of torchrun reach the whole group; the loop decides, and may still want batches
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for connection in inherited:
        connection.close()  # fork copied the other ends of the pipes, which would stay open
    # a thread takes the jobs: a job and batches that wait for each other in full pipes would wait for ever
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_take_jobs, args=(jobs, waiting), daemon=True).start()
    try:
        plan: StreamPlan = pickle.loads(pickled_plan)  # noqa: S301 - from our own process
    except TokshardError as error:  # a corpus cannot be opened
        with contextlib.suppress(OSError):
            while True:
                answers.send_bytes(_dumps([(waiting.get().number, error)]))

    def watch(shard: str) -> None:
        reading.value = shard.encode()[-_SHARD_NAME_BYTES + 1 :]

    for source in plan.sources:
        if hasattr(source, "touched"):
            source.touched.on_change = watch
    with contextlib.suppress(OSError):
        while True:
            _work(plan, waiting.get(), answers, waiting, number, num_workers)


def _work(  # noqa: PLR0917 - as above
    plan: StreamPlan,
    job: Job,
    answers: Connection,
    waiting: queue.SimpleQueue[Job],
    number: int,
    num_workers: int,
) -> None:
    """Send the steps of a job until it is over or another one comes, more and more of them per message."""
    steps = _answers(plan, job, number, num_workers)
    most = 1
    while waiting.empty():
        message = [(job.number, answer) for answer in _some(steps, most)]
        if not message:
            return
        answers.send_bytes(_dumps(message))
        most = 2 * most


def _some(steps: Iterator[Packed | BaseException | None], most: int) -> Iterator[Packed | BaseException | None]:
    """Up to `most` steps, and up to about a megabyte."""
    size = 0
    while most and size < _MESSAGE_BYTES:
        for answer in steps:
            if isinstance(answer, Packed):
                size += answer.tokens.nbytes
                yield replace(answer, tokens=answer.tokens.copy())  # the next step may overwrite them
            else:
                yield answer
            break
        else:
            return
        most -= 1


def _dumps(message: Sequence[tuple[int, Packed | BaseException | None]]) -> bytes:
    """A pickle followed by its arrays, uncopied and each aligned to 64 bytes."""
    buffers: list[pickle.PickleBuffer] = []
    parts = [memoryview(pickle.dumps(message, protocol=5, buffer_callback=buffers.append))]
    parts += [buffer.raw() for buffer in buffers]
    sizes = struct.pack(f"<{len(parts) + 1}q", len(parts), *(len(part) for part in parts))
    return b"".join(piece for part in (memoryview(sizes), *parts) for piece in (part, bytes(-len(part) % _ALIGNMENT)))


def _loads(content: bytes) -> list[tuple[int, Packed | BaseException | None]]:
    """A message of a worker; its arrays are views of the content."""
    (count,) = struct.unpack_from("<q", content)
    sizes = struct.unpack_from(f"<{count}q", content, 8)
    view = memoryview(content)
    position = 8 * (count + 1)
    parts = []
    for size in sizes:
        position += -position % _ALIGNMENT
        parts.append(view[position : position + size])
        position += size
    message: list[tuple[int, Packed | BaseException | None]] = pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301 - from our own process
    return message


def _enlarge(connection: Connection) -> None:
    """Enlarge a pipe to the size of a message, where the system allows it."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # the user's limit is reached: slower, not wrong
            fcntl.fcntl(connection.fileno(), fcntl.F_SETPIPE_SZ, _MESSAGE_BYTES)


def _take_jobs(connection: Connection, jobs: queue.SimpleQueue[Job]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            jobs.put(connection.recv())
    os._exit(0)  # the loop's process is gone; a read that hangs must not keep this one


def _answers(plan: StreamPlan, job: Job, number: int, num_workers: int) -> Iterator[Packed | BaseException | None]:
    """The steps of a job that one worker makes, and None after the last."""
    try:
        yield from job.steps(plan, first=number, stride=num_workers)
        yield None
    except TokshardError as error:
        yield error
    except Exception as error:  # noqa: BLE001 - a process edge
        failure = LoaderError(
            f"a loader worker failed: {type(error).__name__}: {error}",
            hint="run with num_workers=0 for the traceback; unless a transform failed, report it as a bug of tokshard",
        )
        yield failure
