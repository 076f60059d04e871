"""Work on the parts of a corpus, in this process or in several, with the results in the order of the parts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any, TypeVar

from tokshard.errors import TokshardError
from tokshard.forking import environment, not_started
from tokshard.format.corpus import Corpus
from tokshard.format.opening import open_corpus

Part = TypeVar("Part")
Result = TypeVar("Result")

_START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TASKS_PER_WORKER = 2


@contextlib.contextmanager
def in_order(
    corpus: Corpus, parts: Sequence[Part], work: Callable[[Corpus, Part], Iterable[Result]], *, workers: int
) -> Iterator[Iterator[Iterable[Result]]]:
    """The results of each part, in order, whatever the number of workers is.

    In this process they come as `work` makes them. Each of several processes holds the results of two parts at most.

    Args:
        work: is sent to the workers, as the parts are.
        workers: processes.

    Raises:
        TokshardError: a process cannot be started, or was killed.
    """
    workers = min(workers, len(parts))
    if workers <= 1:
        yield (work(corpus, part) for part in parts)
        return
    context = multiprocessing.get_context(_START_METHOD)
    with _starting():
        pool = ProcessPoolExecutor(workers, context, _begin, (corpus.location, corpus.num_generations - 1, work))
    try:
        yield _results(pool, parts, workers * _TASKS_PER_WORKER)
    except BrokenProcessPool as error:
        raise TokshardError(
            "a worker process was killed", hint="if memory ran out, give fewer --workers; run the same command again"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _results(pool: ProcessPoolExecutor, parts: Sequence[Any], most: int) -> Iterator[list[Any]]:
    ahead: deque[Future[list[Any]]] = deque()
    for part in parts:
        with _starting():
            ahead.append(pool.submit(_run, part))
        if len(ahead) == most:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM: a process that the pool is just starting would find its queues gone.

    Processes that are started meanwhile hold them back, too, until they `_begin`, and import nothing from the current
    directory, which may be someone else's data.

    Raises:
        TokshardError: no process can be started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        with environment({"PYTHONSAFEPATH": "1"}):
            yield
    except OSError as error:
        problem, hint = not_started(error)
        raise TokshardError(problem, hint=hint) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_here: list[tuple[Corpus, Callable[[Corpus, Any], Iterable[Any]]]] = []
"""Of a worker: its corpus, and its function."""


def _begin(location: str, generation: int, work: Callable[[Corpus, Any], Iterable[Any]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _here.append((open_corpus(location, generation=generation), work))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _run(part: Any) -> list[Any]:
    corpus, work = _here[0]
    return list(work(corpus, part))
