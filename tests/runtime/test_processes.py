"""Threads, forked children, signals and storage that never answers: a loader says so, and harms nothing of others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest

from tests.contract.small import reads_that_hang
from tests.ranks import forked, worst_of
from tests.runtime.disk import write
from tests.runtime.loaders import dataloader, expected_rows, one_corpus, rows_of, state_after, take, two_corpora
from tests.runtime.sources import ListSource
from tokshard.errors import LoaderError
from tokshard.forking import cached_property
from tokshard.runtime import NumpyLoader, prefetch
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamDataset, StreamingLoader


class WaitingSource(ListSource):
    """A source that reads only while a gate is open."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.gate, self.is_reading = threading.Event(), threading.Event()

    is_in_memory = False

    def read(self, starts: Any, lengths: Any, out: Any, at: Any) -> None:
        self.is_reading.set()
        assert self.gate.wait(60)
        super().read(starts, lengths, out, at)


@pytest.fixture
def waiting() -> Iterator[WaitingSource]:
    source = WaitingSource([9, 4, 30])
    yield source
    source.gate.set()


def waiting_loader(source: WaitingSource) -> StreamingLoader:
    plan = StreamPlan(source, seq_len=6, block_tokens=24, window_blocks=2)
    return StreamingLoader(plan, global_batch_size=2, prefetch_factor=1)


# threads


def test_a_second_thread_is_refused_while_the_first_waits_for_a_batch_and_the_first_gets_it(
    waiting: WaitingSource,
) -> None:
    loader = waiting_loader(waiting)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(next(iter(loader))))
    thread.start()
    assert waiting.is_reading.wait(60)
    for use in (
        lambda: next(iter(loader)),
        lambda: loader.skip(2),
        lambda: loader.set_weights({"corpus": 1}),
        lambda: loader.load_state_dict(loader.state_dict()),
    ):
        with pytest.raises(LoaderError, match="used by two threads at once") as caught:
            use()
        assert caught.value.hint
    assert loader.stats()["samples"] == 0  # looking is for every thread
    waiting.gate.set()
    thread.join(60)
    assert rows_of(found) == expected_rows(loader.plan, range(2))
    assert rows_of(take(loader, 1)) == expected_rows(loader.plan, range(2, 4))  # one thread after the other is fine
    loader.close()


def test_a_state_taken_by_another_thread_is_of_before_or_after_a_batch_and_loses_none() -> None:
    loader = StreamingLoader(two_corpora(), global_batch_size=2)
    for number in range(40):  # as many as make the state shorter when it is saved
        take(loader, 1)
        loader.set_weights({"a": 1 + number, "b": 1})
    before = loader.cursor
    loader.state_dict()
    assert loader.cursor is before
    loader.close()


def test_a_loader_that_another_thread_closes_wakes_the_one_that_waits(
    waiting: WaitingSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "STOP_SECONDS", 0.05)
    loader = waiting_loader(waiting)
    found: list[str] = []

    def read() -> None:
        try:
            next(iter(loader))
        except LoaderError as error:
            found.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    assert waiting.is_reading.wait(60)
    loader.close()
    thread.join(30)
    assert found == ["the loader was closed while a batch was awaited"]


def test_ctrl_c_while_a_change_waits_for_the_thread_leaves_no_batch_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    source = ListSource([5, 9, 30, 12, 7] * 40)
    other = StreamPlan(source, seq_len=4, block_tokens=32, window_blocks=2)
    loader, state = NumpyLoader(StreamPlan(source, seq_len=4), global_batch_size=2), state_after(other, 100)
    changes = (lambda: loader.skip(98), loader.plan), (lambda: loader.load_state_dict(state), other)
    for change, plan in changes:
        take(loader, 1)
        with monkeypatch.context() as patch:
            patch.setattr(prefetch.Prefetch, "close", interrupted)
            with pytest.raises(KeyboardInterrupt):
                change()
        assert rows_of(take(loader, 1)) == expected_rows(plan, range(100, 102))
    loader.close()


def test_a_loader_whose_thread_cannot_be_started_says_what_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    loader = NumpyLoader(two_corpora(), global_batch_size=2)
    for _ in range(2):
        with pytest.raises(LoaderError, match="no batches can be made ahead: can't start new thread") as caught:
            next(iter(loader))
        assert caught.value.hint.endswith("or give prefetch_factor=0")


# forked children


def in_child(check: Any) -> None:
    """Run a check in a forked child, which ends as a forgotten one would: with what runs at the end of Python."""

    def run() -> None:
        check()
        util._run_finalizers()  # type: ignore[attr-defined]

    assert worst_of([forked(run, seconds=30)]) == 0


def test_what_is_made_ahead_ends_with_the_item_that_is_under_way_when_it_is_closed() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            time.sleep(0.2 if number else 0)
            yield number

    ahead = prefetch.Prefetch(items, depth=8, timeout_seconds=60, reading=str)
    assert ahead.next() == 0
    assert ahead.close()
    assert len(made) <= 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_may_close_and_read_on_alone_and_leaves_the_parent_its_thread() -> None:
    plan = two_corpora()
    loader = StreamingLoader(plan, global_batch_size=2)
    batches = iter(loader)
    next(batches)

    def check() -> None:
        for use in (lambda: next(batches), lambda: next(iter(loader)), lambda: loader.skip(2)):
            with pytest.raises(LoaderError, match=f"process {os.getppid()} reads from this loader"):
                use()
        loader.close()
        assert rows_of(take(loader, 1)) == expected_rows(loader.plan, range(2, 4))
        loader.close()

    in_child(check)
    in_child(lambda: None)
    assert rows_of([next(batches) for _ in range(40)]) == expected_rows(plan, range(2, 82))
    loader.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_what_a_thread_of_its_parent_was_computing() -> None:
    held, done = threading.Event(), threading.Event()

    class Slow:
        @cached_property
        def value(self) -> int:
            if threading.current_thread() is thread:
                held.set()
                done.wait(60)
            return 7

    thread = threading.Thread(target=lambda: Slow().value)
    thread.start()
    assert held.wait(60)

    def check() -> None:
        slow = Slow()
        assert slow.value == slow.value == vars(slow)["value"] == 7

    in_child(check)
    done.set()
    thread.join()


# signals


LOOP = """
import multiprocessing, os, signal, sys, threading, time
from torch.utils.data import DataLoader
from tests.runtime.loaders import expected_rows, rows_of, two_corpora
from tokshard.runtime import StreamDataset, belong_to_the_loop

def loader_of(plan, method="spawn"):
    dataset = StreamDataset(plan, global_batch_size=2)
    return DataLoader(
        dataset, batch_size=None, sampler=dataset.sampler, num_workers=2, worker_init_fn=belong_to_the_loop,
        multiprocessing_context=method,
    )
"""
SIGNALLED = """
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as a trainer, which decides when to stop
    plan = two_corpora()
    batches = iter(loader_of(plan, sys.argv[1]))
    rows = [row for _ in range(2) for row in rows_of([next(batches)])]
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for number in (signal.SIGINT, signal.SIGTERM):
        for send in (lambda: os.killpg(0, number), lambda: [os.kill(one.pid, number) for one in workers]):
            try:
                send()
                os.kill(os.getpid(), number)
                time.sleep(60)
            except KeyboardInterrupt:
                pass
            time.sleep(0.3)
            rows += [row for _ in range(10) for row in rows_of([next(batches)])]
    assert rows == expected_rows(plan, range(84))
    assert workers == multiprocessing.active_children()
    del batches
    assert not multiprocessing.active_children()
    print("done")
"""


def started(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOOP + program, *words],
        capture_output=True,
        text=True,
        timeout=100,
        start_new_session=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=pytest.mark.soak)])
def test_workers_leave_ctrl_c_and_sigterm_to_the_loop_and_end_with_it(method: str) -> None:
    done = started(SIGNALLED, method)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


KILLED = ["kill while workers start", "kill"]
ENDED = """
if __name__ == "__main__":
    if sys.argv[1] == "kill while workers start":
        threading.Thread(target=lambda: next(iter(loader_of(two_corpora()))), daemon=True).start()
        while len(multiprocessing.active_children()) < 2:
            time.sleep(0.001)
    else:
        batches = iter(loader_of(two_corpora()))
        next(batches)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    if sys.argv[1] != "return":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow  # each worker imports torch
@pytest.mark.parametrize("end", ["return", *(pytest.param(end, marks=pytest.mark.soak) for end in KILLED)])
def test_no_worker_outlives_a_loop_that_is_killed_or_left(end: str) -> None:
    done = started(ENDED, end)
    assert done.returncode == (0 if end == "return" else -signal.SIGKILL), done.stderr
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(is_running(pid) for pid in workers):
        time.sleep(0.05)
    assert not [pid for pid in workers if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_seconds_in_which_a_job_is_suspended_do_not_count_as_waiting_for_a_batch() -> None:
    source = WaitingSource([5, 9, 30, 12, 7] * 8)
    loader = StreamingLoader(StreamPlan({"corpus": source}, seq_len=8), global_batch_size=4, timeout_seconds=3)
    # it waits for two seconds of its own, and is stopped for five in between
    suspend = f"sleep 0.7; kill -STOP {os.getpid()}; sleep 5; kill -CONT {os.getpid()}; sleep 0.3"
    job = subprocess.Popen(["sh", "-c", suspend])
    threading.Thread(target=lambda: (job.wait(), source.gate.set()), daemon=True).start()
    started = time.monotonic()
    assert len(take(loader, 2)) == 2
    assert time.monotonic() - started > 5
    loader.close()


def test_a_read_that_hangs_is_an_error_that_names_the_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write(tmp_path / "corpus", ListSource([9, 4, 30, 1, 12, 3] * 5), shard_tokens=60)
    source = CorpusSource(corpus, access="pread")
    shard = corpus / source.corpus.shards[2].name
    monkeypatch.setattr(prefetch, "STOP_SECONDS", 0.05)  # what reads comes back when the test is over
    loader = NumpyLoader(
        StreamPlan(source, seq_len=8, block_tokens=32, window_blocks=3), global_batch_size=2, timeout_seconds=1
    )
    started = time.monotonic()
    with (
        reads_that_hang(shard.name),
        pytest.raises(LoaderError, match=f"no batch came for 1 s; the last reads were in .*{shard}"),
    ):
        take(loader, 1000)
    assert time.monotonic() - started < 60, "the read takes 100 s"


# loops of a DataLoader


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_second_loop_of_dataloader_workers_is_refused_unless_the_first_was_a_whole_pass(is_persistent: bool) -> None:
    plan = one_corpus(epochs=2)
    whole = expected_rows(plan, range(plan.num_samples or 0))
    loader = dataloader(
        StreamDataset(plan, global_batch_size=4),
        num_workers=2,
        persistent_workers=is_persistent,
        multiprocessing_context="fork",
    )
    for _ in range(2):
        assert [row for row in rows_of(list(loader)) if row["sample_index"] >= 0] == whole
    next(iter(loader))
    with pytest.raises(LoaderError, match="a second loop over a StreamDataset does not continue the first"):
        list(loader)


def test_a_state_loaded_in_a_loop_without_workers_counts_from_the_next_batch() -> None:
    dataset = StreamDataset(two_corpora(), global_batch_size=4)
    batches = iter(dataloader(dataset))
    rows = rows_of([next(batches), next(batches)])
    dataset.sampler.load_state_dict(state_after(dataset.plan, 100))
    rows += rows_of([next(batches)])
    batches = iter(dataloader(dataset))
    dataset.sampler.load_state_dict(state_after(dataset.plan, 40))
    rows += rows_of([next(batches)])
    skipped = [*range(8), *range(100, 104), *range(40, 44)]
    assert [row["sample_index"] for row in rows] == skipped


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_state_loaded_while_workers_have_steps_under_way_is_refused_and_one_after_the_loop_is_right() -> None:
    dataset = StreamDataset(two_corpora(), global_batch_size=4)
    state = state_after(dataset.plan, 100)
    loader = dataloader(dataset, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    for _ in range(2):
        with pytest.raises(LoaderError, match="while the workers of a loop have steps under way") as caught:
            dataset.sampler.load_state_dict(state)
        assert "before iter(dataloader)" in caught.value.hint
        next(batches)
    del batches
    dataset.sampler.load_state_dict(state)
    batches = iter(loader)
    assert [next(batches)["sample_index"].tolist() for _ in range(3)] == [
        [*range(start, start + 4)] for start in (100, 104, 108)
    ]
