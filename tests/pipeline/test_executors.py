"""Worker processes: what a build leaves in the program that calls it, and what it says when they cannot be had."""

from __future__ import annotations

import errno
import gzip
import json
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from tests.pipeline.inputs import patch_chunk_bytes
from tests.pipeline.places import TEXTS, at, build, write
from tokshard.errors import BuildError, UsageError
from tokshard.format import names
from tokshard.pipeline.executors import processes, worker
from tokshard.pipeline.executors.base import RunUsage
from tokshard.pipeline.progress import StageStarted
from tokshard.pipeline.workspace.places import TOKENIZER

PROGRAM = """
import multiprocessing, os, sys
from multiprocessing import forkserver

def server():
    return forkserver._forkserver._forkserver_pid

def child(queue):
    queue.put({name: os.environ.get(name) for name in WATCHED})

WATCHED = ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS", "OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_")

if __name__ == "__main__":
    place, before = sys.argv[1], dict(os.environ)
    from tokshard.pipeline import build
    from tokshard.pipeline.estimate import estimate_build
    from tokshard.pipeline.options import BuildOptions
    from tokshard import build_corpus
    sources, options = [place + "/a.jsonl"], {"tokenizer": place + "/tok", "out": place + "/out", "workers": 2}
    estimate_build(sources, BuildOptions(**options))
    assert server() is None, "an estimate started a fork server"
    assert build_corpus(sources, **options, task_bytes=1 << 20).num_workers == 2
    assert server() is None, "a build left a fork server"
    prepare, build.prepare_workers = build.prepare_workers, None
    assert not build_corpus(sources, **options, task_bytes=1 << 20).is_new
    assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
    context = multiprocessing.get_context("forkserver")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert set(queue.get().values()) == {None}
    process.join()
    forked = os.fork()
    if not forked:  # the server of the parent is not its own
        build.prepare_workers = prepare
        assert build_corpus(sources, **options | {"out": place + "/forked"}, task_bytes=1 << 20).num_workers == 2
        os._exit(0)
    assert os.waitpid(forked, 0)[1] == 0
"""


def run_program(place: Path, text: str, *words: object) -> None:
    """Run a program in a place with a source of several tasks, as Python is called with these words."""
    line = b'{"text": "some text of a document"}\n'
    (place / "a.jsonl").write_bytes(line * ((3 << 20) // len(line)))
    (place / "program.py").write_text(text)
    ours = ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment["PYTHONPATH"] = str(Path(worker.__file__).parents[3])
    command = [sys.executable, *map(str, words)]
    with (place / "program.py").open() as program:
        done = subprocess.run(
            command, stdin=program, capture_output=True, text=True, check=False, env=environment, cwd=place
        )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_build_leaves_the_program_that_calls_it_as_it_was(place):
    run_program(place, PROGRAM, "program.py", place)


UNGUARDED = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from tokshard import build_corpus

os.chdir(sys.argv.pop())
os.mkdir("once")
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
sys.argv.clear()
before = dict(os.environ), sys.modules["__main__"].__spec__

def build(number):
    options = {"tokenizer": "tok", "out": f"out-{number}", "workers": 2, "task_bytes": 1 << 20}
    return build_corpus("a.jsonl", **options).num_workers

with ThreadPoolExecutor(3) as pool:
    assert list(pool.map(build, range(3))) == [2, 2, 2]
assert (dict(os.environ), sys.modules["__main__"].__spec__) == before
assert forkserver._forkserver._forkserver_pid is None, "the builds left a fork server"
assert build(3) == 2
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_file", [True, False])
def test_a_program_without_a_guard_may_build_in_several_threads_and_ignore_its_children(place, is_file):
    run_program(place, UNGUARDED, "program.py" if is_file else "-", ".")


def test_a_daemonic_process_builds_alone_and_refuses_workers(place, monkeypatch):
    monkeypatch.setitem(vars(multiprocessing.current_process())["_config"], "daemon", True)
    patch_chunk_bytes(monkeypatch, 64)
    with pytest.raises(UsageError, match="workers is 2, and this is a daemonic process") as caught:
        build(place, workers=2, task_bytes=64)
    assert caught.value.hint.startswith("give workers=1")
    assert (build(place, workers=None, task_bytes=64) / "manifest.json").is_file()


def test_workers_that_cannot_be_started_are_named_with_the_next_step(place, monkeypatch):
    refused = Mock(side_effect=ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
    monkeypatch.setattr(multiprocessing.get_context(worker.START_METHOD).Process, "start", refused)
    patch_chunk_bytes(monkeypatch, 64)
    with pytest.raises(BuildError, match="worker 0 cannot be started: ConnectionRefusedError") as caught:
        build(place, workers=2, task_bytes=64)
    assert caught.value.hint.startswith("run the same command again: finished tasks are kept")


def test_a_limit_of_processes_is_not_said_to_be_the_temporary_directory(place, monkeypatch):
    full = Mock(side_effect=BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"))
    monkeypatch.setattr(forkserver, "ensure_running", full)
    patch_chunk_bytes(monkeypatch, 64)
    with pytest.raises(BuildError, match=r"worker processes cannot be started: .*temporarily unavailable") as caught:
        build(place, workers=2, task_bytes=64)
    assert caught.value.hint == "raise the limits of the system (ulimit), or give --workers 1"


def test_the_cpu_seconds_of_a_build_are_also_those_of_its_workers(place, monkeypatch):
    monkeypatch.setattr("tokshard.pipeline.commit.cpu_time", lambda: 0.0)  # of this process alone
    monkeypatch.setattr("tokshard.pipeline.build.RunUsage", partial(RunUsage, cpu_before=0.0))
    patch_chunk_bytes(monkeypatch, 64)
    build(place, workers=2, task_bytes=64)
    assert json.loads((place / "out" / names.REPORT).read_bytes())["cpu_seconds"] > 0


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 takes a shorter directory by itself")
def test_a_temporary_directory_with_a_long_path_is_named_with_the_next_step(place):
    folder = place / ("long" * 20)
    folder.mkdir()
    (place / "a.jsonl").write_bytes(b'{"text": "one of many"}\n' * 50_000)  # more than one task, or no worker is needed
    words = ["build", str(place / "a.jsonl"), "--tokenizer", str(place / "tok"), "--out", str(place / "out")]
    command = [sys.executable, "-m", "tokshard", *words, "--workers", "2", "--task-bytes", "64"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"worker processes cannot be started in the temporary directory {folder}" in done.stderr
    assert "hint: set TMPDIR to a short path" in done.stderr


def _die_in_the_middle_of_a_message(connection: Connection, *_: Any, number: int = signal.SIGKILL) -> None:
    connection.recv()  # what it leaves unread would be another error
    os.write(connection.fileno(), struct.pack("!i", 1_000) + b"half of it")
    os.kill(os.getpid(), number)


REAL_TIME = pytest.mark.skipif(sys.platform != "linux", reason="has no real-time signals")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), pytest.param(40, "signal 40", marks=REAL_TIME)]
)
def test_a_worker_that_dies_while_it_sends_a_message_is_a_worker_that_died(place, monkeypatch, number, name):
    monkeypatch.setattr(processes, "worker_main", partial(_die_in_the_middle_of_a_message, number=number))
    patch_chunk_bytes(monkeypatch, 64)
    with pytest.raises(BuildError, match=f"was killed by {name} while it read"):
        build(place, workers=2, task_bytes=64)


def test_a_worker_that_dies_without_a_task_is_missed_by_nobody(monkeypatch):
    executor = processes.ProcessExecutor(Mock(), Mock(), Mock(), num_workers=2)
    monkeypatch.setattr(executor, "_death", lambda _: BuildError("it died", hint=""))
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    executor._workers = [processes._WorkerProcess(number=0, process=Mock(sentinel=ours), connection=ours)]
    assert list(executor.events()) == []
    assert executor.has_room()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_tokenizer_that_is_damaged_under_a_build_is_the_error_and_not_the_end_of_a_worker(
    place, monkeypatch, workers, name
):
    damage = at(StageStarted, lambda report: report.build.workspace.store.put(TOKENIZER, b"not a tokenizer"))
    lines = (place / "a.jsonl").read_bytes()
    (place / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    patch_chunk_bytes(monkeypatch, 64)
    with pytest.raises(BuildError, match=r"tokenizer\.json cannot be read or is damaged"):
        build(place, place / name, workers=workers, task_bytes=64, observer=damage)


@pytest.mark.slow
@pytest.mark.parametrize("wait", [0.0, 0.1, 0.3])
def test_an_interruption_while_the_server_of_workers_starts_shows_no_traceback_and_leaves_no_process(place, wait):
    write(place / "a.jsonl", TEXTS * 2_000)
    words = ["build", "a.jsonl", "--tokenizer", "tok", "--out", "out", "--workers", "2", "--task-bytes", "4096B"]
    command = [sys.executable, "-m", "tokshard", *words]
    with subprocess.Popen(command, cwd=place, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        started = psutil.Process(process.pid)
        while not (servers := [one for one in started.children() if "forkserver" in " ".join(one.cmdline())]):
            time.sleep(0.002)
        time.sleep(wait)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=240)
    assert (process.returncode, said.splitlines()[-2:]) == (
        130,
        ["interrupted", "hint: run the same command to continue"],
    )
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(servers, timeout=10)
    assert alive == []
