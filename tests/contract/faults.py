"""Builds that are killed, fail or dawdle at a chosen step on disk.

A *step* is a call that changes something in the output directory or makes it durable: a file opened for writing, fsync,
replace, unlink, mkdir, rmdir. All processes of a build count their steps in one file, so that a build of one worker
can be stopped before or after every one of them, and a build of several at any.

A `Launcher` is a process that has imported everything and forks once per build, so that a build of one worker costs
little more than its work. Chunks are small, so that a few kilobytes make many tasks.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import errno
import fcntl
import io
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
CHUNK_BYTES = 512
_SETUP = "TOKSHARD_TEST_FAULT"
_WHAT_A_FULL_DISK_REFUSES = frozenset({"open", "fsync", "mkdir"})


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one build.

    Args:
        at: the step at which it happens, counted from 1 over all processes; 0: at none.
        on: instead: the first step that this regular expression finds, in its kind, a space and its path.
        is_after: it happens when that step is done, rather than before.
        act: ``kill`` all processes; ``orphan``: kill the coordinator alone; ``error``: the step fails once; ``full``:
            from this step on nothing more fits on the disk; ``SIGINT`` (to all), ``SIGTERM`` (to the coordinator).
        lingers: seconds that the process at which it happened sleeps then.
        pauses: seconds that a process sleeps before a step.
        pause_share: of the steps before which it does; if not all, a tenth of that time up to all of it.
        pause_on: a pause is made only before steps that this expression finds.
        in_coordinator: pauses are made there too, rather than in workers alone.
        seed: of the pauses.
        outlives: seconds that a worker lives on when its coordinator is gone, as one may that gets no CPU.
    """

    at: int = 0
    on: str = ""
    is_after: bool = False
    act: str = "kill"
    lingers: float = 0.0
    pauses: float = 0.0
    pause_share: float = 1.0
    pause_on: str = ""
    in_coordinator: bool = False
    seed: int = 0
    outlives: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a build ended. Workers may outlive it.

    Args:
        exit_code: negative for the signal that killed it.
        group: process group of all its processes.
    """

    exit_code: int
    errors: str
    group: int
    log: Path

    @property
    def steps(self) -> list[str]:
        """What was done to which path, in order."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def wait(self) -> None:
        """Wait for all its processes to be gone."""
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.killpg(self.group, 0)
                time.sleep(0.01)


@dataclass
class Launcher:
    """Runs builds, each in a fork of a process that has everything imported. A context."""

    directory: Path
    _count: int = 0
    _server: Any = field(default=None, repr=False)

    def __enter__(self) -> Self:
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._server = subprocess.Popen(
            [sys.executable, "-c", "from tests.contract import faults; faults.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # arrow's pool of threads and a fork go together badly
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()

    def build(self, sources: Sequence[str], out: Path, *options: str, fault: Fault | None = None) -> Outcome:
        """Run one build to its end, whatever that is."""
        return self.run("build", *sources, "--quiet", *options, out=out, fault=fault)

    def run(self, command: str, *arguments: str, out: Path, fault: Fault | None = None) -> Outcome:
        """Run a command that writes into `out` to its end, whatever that is."""
        self._count += 1
        here = self.directory / str(self._count)
        here.mkdir(parents=True)
        setup = {**asdict(fault or Fault()), "out": str(out), "log": str(here / "steps")}
        words = [command, *arguments, "--out", str(out), "--debug"]
        request = {"arguments": words, "setup": setup, "errors": str(here / "errors")}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        errors = (here / "errors").read_text()
        return Outcome(exit_code=answer["exit_code"], errors=errors, group=answer["pid"], log=here / "steps")


def kills(steps: Sequence[str]) -> list[Fault]:
    """A kill at every moment of a build at which the disk looks different to what comes later.

    That is before every step that changes something, which fsync does not; after a file was opened, when it is empty;
    and after the last step.
    """
    found = []
    for at, step in enumerate(steps, 1):
        if not step.startswith("fsync "):
            found.append(Fault(at=at))
        if step.startswith("open ") or at == len(steps):
            found.append(Fault(at=at, is_after=True))
    return found


def is_refused(step: str) -> bool:
    """Whether a full disk refuses a step."""
    return step.partition(" ")[0] in _WHAT_A_FULL_DISK_REFUSES


def serve() -> None:
    """The process of a `Launcher`."""
    import tokshard.cli.build  # with all that it imports, before the first fork
    import tokshard.cli.copy  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        if not (pid := os.fork()):
            _become(request)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(json.dumps({"pid": pid, "exit_code": os.waitstatus_to_exitcode(status)}) + "\n")
        sys.stdout.flush()


def _become(request: dict[str, Any]) -> None:
    import tokshard.pipeline.prepare
    from tokshard.cli.main import main

    code: Any = 70
    try:
        os.setsid()
        output = os.open(request["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ[_SETUP] = json.dumps({**request["setup"], "coordinator": os.getpid()})
        install()
        preload = multiprocessing.set_forkserver_preload
        multiprocessing.set_forkserver_preload = lambda names: preload([*names, __name__])
        tokshard.pipeline.prepare.MIN_TASK_BYTES = 0  # the server that workers are forked from starts at once
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["tokshard", *request["arguments"]]
        try:
            main()
        except SystemExit as end:
            code = end.code
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def install() -> None:
    """Have this process, and every worker of the build that it coordinates, do what the environment says."""
    from tokshard.pipeline.copying import planning as copy_planning
    from tokshard.pipeline.sources import columns, decompress, delimited, lines, plain_text, records, tar
    from tokshard.pipeline.tasks import duplicates, hashing, planning, sorted_rows

    # so small that a few dozen texts need every step of the search for duplicates, most of several tasks
    hashing.PART_TEXTS = 5
    sorted_rows.FENCE_ROWS, sorted_rows.SLICE_ROWS = 2, 32
    duplicates.FAN_IN, duplicates.MAX_DROP_FILES = 4, 2
    copy_planning.TASK_TOKENS, copy_planning.FAN_OUT = 1, 2
    copy_planning.BUCKET_BYTES, copy_planning.DEAL_BYTES = 1 << 10, 1 << 9
    for module in (columns, decompress, delimited, lines, plain_text, records, tar, planning):
        module.CHUNK_BYTES = CHUNK_BYTES  # type: ignore[attr-defined]
    _Steps(json.loads(os.environ[_SETUP])).install()


class _Steps:
    """Counts the steps of this process together with those of the others, and does what is to happen."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.out, self.log, self.coordinator = setup.pop("out"), setup.pop("log"), setup.pop("coordinator")
        self.fault = Fault(**setup)
        self.open, self.write, self.close = os.open, os.write, os.close
        self.lock = fcntl.flock

    def install(self) -> None:
        open_file = io.open

        def stepping_open(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wax+"):
                return open_file(file, mode, *arguments, **options)
            with self.step("open", os.fspath(file)):
                return open_file(file, mode, *arguments, **options)

        def stepping_fsync(descriptor: int) -> None:
            # it is counted and no more: a process that is killed loses nothing that it wrote, and a disk takes its time
            with self.step("fsync", _path_of(descriptor)):
                pass

        io.open = stepping_open  # type: ignore[assignment]
        builtins.open = stepping_open
        os.fsync = stepping_fsync
        os.open = self._stepping("open", os.open, lambda _, flags: bool(flags & os.O_CREAT))
        for name in ("unlink", "remove", "mkdir", "rmdir"):
            setattr(os, name, self._stepping(name, getattr(os, name)))
        for name in ("replace", "rename"):
            setattr(os, name, self._stepping(name, getattr(os, name)))
        self._outlive()

    def _stepping(
        self, kind: str, original: Callable[..., Any], is_step: Callable[..., bool] = lambda *_: True
    ) -> Callable[..., Any]:
        def stepping(path: Any, *arguments: Any, **options: Any) -> Any:
            if not is_step(path, *arguments[:1]):
                return original(path, *arguments, **options)
            place = os.fspath(path)
            if options.get("dir_fd") is not None:
                place = os.path.join(_path_of(options["dir_fd"]), place)
            to = f" -> {os.fspath(arguments[0])}" if kind in ("replace", "rename") else ""
            with self.step(kind, place + to):
                return original(path, *arguments, **options)

        return stepping

    @contextlib.contextmanager
    def step(self, kind: str, path: str) -> Iterator[None]:
        if not str(path).startswith(self.out):
            yield
            return
        self._pause(f"{kind} {path}")
        number, is_first = self._count(f"{kind} {path}\n")
        is_here = is_first if self.fault.on else number == self.fault.at
        if is_here and not self.fault.is_after:
            self._happen(path)
        if self.fault.act == "full" and 0 < self.fault.at <= number and kind in _WHAT_A_FULL_DISK_REFUSES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        try:
            yield
        finally:
            if is_here and self.fault.is_after:
                self._happen(path)

    def _count(self, line: str) -> tuple[int, bool]:
        """The number of this step, and whether it is the first on the path that the fault waits for."""
        descriptor = self.open(self.log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self.lock(descriptor, fcntl.LOCK_EX)
            self.write(descriptor, line.encode())
            size = os.lseek(descriptor, 0, os.SEEK_CUR)
            *before, this, _ = os.pread(descriptor, size, 0).decode().split("\n")
            on = self.fault.on
            is_first = bool(on and re.search(on, this)) and not any(re.search(on, earlier) for earlier in before)
            return len(before) + 1, is_first
        finally:
            self.close(descriptor)

    def _happen(self, path: str) -> None:
        match self.fault.act:
            case "kill":
                os.killpg(os.getpgid(0), signal.SIGKILL)
            case "orphan":
                os.kill(self.coordinator, signal.SIGKILL)
            case "error":
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            case "SIGINT":
                os.killpg(os.getpgid(0), signal.SIGINT)
            case "SIGTERM":
                os.kill(self.coordinator, signal.SIGTERM)
        time.sleep(self.fault.lingers)

    def _pause(self, step: str) -> None:
        fault = self.fault
        if not fault.pauses or not re.search(fault.pause_on, step):
            return
        if os.getpid() == self.coordinator and not fault.in_coordinator:
            return
        rng = random.Random(f"{fault.seed} {os.getpid()} {time.monotonic_ns()}")
        if fault.pause_share == 1:
            time.sleep(fault.pauses)
        elif rng.random() < fault.pause_share:
            time.sleep(rng.uniform(0.1, 1) * fault.pauses)

    def _outlive(self) -> None:
        """Let workers notice late that their coordinator is gone."""
        from tokshard.pipeline.executors import worker

        def die_late() -> None:
            parent = multiprocessing.parent_process()
            assert parent is not None
            wait([parent.sentinel])
            time.sleep(self.fault.outlives)
            os._exit(1)

        if self.fault.outlives:
            worker._die_with_parent = die_late


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


if _SETUP in os.environ:  # this is a process that workers are forked from
    install()
