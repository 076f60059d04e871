"""Threads that fetch: order, errors, and how they end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from tokshard.runtime.bytes.fetchers import Fetchers


def fetching_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "tokshard-fetch"}


def test_tasks_run_side_by_side_and_answer_or_raise() -> None:
    fetchers, together = Fetchers(4), threading.Barrier(4)

    def meet(number: int) -> int:
        together.wait(60)
        return number

    def fail() -> None:
        raise OSError("gone")

    tasks = [fetchers.start(lambda number=number: meet(number), is_urgent=False) for number in range(4)]  # type: ignore[misc]
    assert [task.result() for task in tasks] == [0, 1, 2, 3]
    with pytest.raises(OSError, match="gone"):
        fetchers.start(fail, is_urgent=True).result()
    assert fetchers.start(lambda: 5, is_urgent=True).result() == 5, "a failure ends no thread"


def test_where_no_more_threads_can_be_started_a_task_waits_for_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fetchers, is_open = Fetchers(4), threading.Event()
    fetchers.start(lambda: is_open.wait(60), is_urgent=True)
    monkeypatch.setattr(threading.Thread, "start", start)
    task = fetchers.start(lambda: 5, is_urgent=True)
    is_open.set()
    assert task.result(60) == 5


def test_what_is_waited_for_comes_before_what_is_read_ahead() -> None:
    fetchers, is_open, order = Fetchers(1), threading.Event(), list[str]()
    fetchers.start(lambda: is_open.wait(60), is_urgent=False)
    ahead = [fetchers.start(lambda name=name: order.append(name), is_urgent=False) for name in "abc"]  # type: ignore[misc]
    urgent = fetchers.start(lambda: order.append("urgent"), is_urgent=True)
    fetchers.hurry(ahead[2])
    is_open.set()
    for task in (*ahead, urgent):
        task.result()
    assert order == ["urgent", "c", "a", "b"], "and each of them once"


def test_threads_are_only_as_many_as_there_is_work_and_end_with_their_owner() -> None:
    fetchers, begun, is_open = Fetchers(8), threading.Event(), threading.Event()
    before = fetching_threads()  # of other tests, which may end meanwhile
    assert [fetchers.start(lambda: 1, is_urgent=True).result() for _ in range(20)] == [1] * 20
    assert len(fetching_threads() - before) == 1, "one task at a time"
    running = fetchers.start(lambda: begun.set() or is_open.wait(60), is_urgent=True)
    assert begun.wait(60), "what no thread has taken yet ends with its owner"
    waiting = [fetchers.start(lambda: is_open.wait(60), is_urgent=True) for _ in range(20)]
    del fetchers
    gc.collect()
    is_open.set()
    assert running.result()
    with pytest.raises(CancelledError):
        waiting[-1].result()
    until = time.monotonic() + 60
    while fetching_threads() - before and time.monotonic() < until:
        time.sleep(0.01)
    assert not fetching_threads() - before


HANGING = """
import threading, time
from tokshard.runtime.bytes import fetchers
fetchers._EXIT_SECONDS = 0.2
threads = fetchers.Fetchers(2)
threads.start(lambda: time.sleep(1000), is_urgent=True)
time.sleep(0.1)
print("over")
"""


@pytest.mark.slow
def test_a_read_that_hangs_does_not_keep_the_interpreter_from_ending() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=240, cwd=root, check=False
    )
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
