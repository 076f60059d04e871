"""Commands that are killed, stopped, slowed or crossed at a chosen step on disk.

A *step* is a call that changes something in the output directory or makes it durable: a file opened for writing, fsync,
replace, unlink, mkdir, rmdir; where it is asked for, also a file opened for reading. All processes of a command count
their steps in one file, so that a build of one worker can be stopped before or after every one of them, and a build of
several at any.

A `Launcher` is a process that has imported everything and forks once per command, so that a build of one worker costs
little more than its work. Its sizes are `small.TINY`, so that a few kilobytes make many tasks.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import errno
import fcntl
import io
import json
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from tests.contract import small

ROOT = Path(__file__).parents[2]
_SETUP = "TOKSHARD_TEST_FAULT"
_WHAT_A_FULL_DISK_REFUSES = frozenset({"open", "fsync", "mkdir"})
_LONGEST_WAIT = 30.0
"""Seconds after which something that was waited for is not coming."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one command.

    Args:
        at: the step at which it happens, counted from 1 over all processes; 0: at none.
        on: instead: the first steps that this regular expression finds, in their kind, a space and their path.
        times: how many of these steps.
        is_after: it happens when that step is done, rather than before.
        act: ``kill`` all processes; ``orphan``: kill the coordinator alone; ``die``: kill the process at that step
            alone; ``error``: the step fails; ``full``: from this step on nothing more fits on the disk; ``SIGINT`` (to
            all), ``SIGTERM`` (to the coordinator); ``SIGSTOP`` (to the process at that step); ``hold``: nothing but
            that it `lingers`; ``run``: it runs `command`; ``clock``: from there on the wall clock of that process is
            off by `jumps`.
        command: a command of the shell.
        jumps: seconds, below 0 to the past.
        error: the name of the error of a step that fails.
        lingers: seconds that the process at which it happened sleeps then.
        outlives: seconds that a worker lives on when its coordinator is gone, as one may that gets no CPU.
        reads: opening a file of the output directory to read it is a step, too.
    """

    at: int = 0
    on: str = ""
    times: int = 1
    is_after: bool = False
    act: str = "kill"
    command: str = ""
    jumps: float = 0.0
    error: str = "EIO"
    lingers: float = 0.0
    outlives: float = 0.0
    reads: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended. Workers may outlive it.

    Args:
        exit_code: negative for the signal that killed it.
        errors: all that it printed.
        group: process group of all its processes.
    """

    exit_code: int
    errors: str
    group: int
    log: Path

    @property
    def steps(self) -> list[str]:
        """What was done to which path, in order."""
        return _steps(self.log)

    def wait(self) -> None:
        """Wait for all its processes to be gone."""
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.killpg(self.group, 0)
                time.sleep(0.01)


@dataclass(kw_only=True)
class Running:
    """A command under way."""

    launcher: Launcher
    number: int
    here: Path
    pid: int

    @property
    def steps(self) -> list[str]:
        """What was done so far to which path, in order."""
        return _steps(self.here / "steps")

    def end(self) -> Outcome:
        """Wait for its end, whatever that is."""
        exit_code = self.launcher.exit_code(self.number)
        errors = (self.here / "errors").read_text()
        return Outcome(exit_code=exit_code, errors=errors, group=self.pid, log=self.here / "steps")

    def kill(self) -> None:
        """End all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def has_ended(self) -> bool:
        """Whether its first process is gone."""
        return self.launcher.has_ended(self.number)

    def until_stopped(self) -> None:
        """Wait until its first process was stopped by a signal."""
        process = psutil.Process(self.pid)
        deadline = time.monotonic() + _LONGEST_WAIT
        while (status := process.status()) != psutil.STATUS_STOPPED:
            assert status != psutil.STATUS_ZOMBIE, (self.here / "errors").read_text()
            assert time.monotonic() < deadline, "it was not stopped"
            time.sleep(0.002)

    def resume(self) -> None:
        """Let a process that was stopped continue, if it does not already."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)


def _steps(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


@dataclass
class Launcher:
    """Runs commands, each in a fork of a process that has everything imported. A context.

    Args:
        directory: where it keeps its notes; it may be removed between two commands.
        has_torch: it has imported the trainer, too, on which each program would spend seconds.
        sizes: sizes of the package that are made smaller, in what may meet a fault.
    """

    directory: Path
    has_torch: bool = False
    sizes: Mapping[str, int] = field(default_factory=lambda: dict(small.TINY))
    _count: int = 0
    _server: Any = field(default=None, repr=False)
    _ended: dict[int, int] = field(default_factory=dict, repr=False)
    _running: dict[int, int] = field(default_factory=dict, repr=False)

    def __enter__(self) -> Self:
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._server = subprocess.Popen(
            [sys.executable, "-c", f"from tests.contract import faults; faults.serve({self.has_torch})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # arrow's pool of threads and a fork go together badly
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.kill()  # a forked worker that another test left may hold its input open
        self._server.wait()

    def start(
        self,
        words: Sequence[str],
        *,
        out: Path,
        fault: Fault | Sequence[Fault] | None = None,
        stdin: bytes = b"",
        ray_address: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Running:
        """Start a program that may meet a fault.

        Args:
            words: all of it: a command of tokshard, a script, or ``python -m`` and a module.
            out: where its steps are.
            stdin: what a pipe brings as its standard input.
            ray_address: a cluster to which the process is connected before; its workers have the sizes, too.
            environment: variables that are set before.
        """
        faults = [fault] if isinstance(fault, Fault) else list(fault or [Fault()])
        setup = {"faults": list(map(asdict, faults)), "out": str(out), "sizes": self.sizes}
        return self._begin(words, stdin, setup=setup, ray_address=ray_address, environment=environment or {})

    def run(self, words: Sequence[str], directory: Path, *, seconds: int = 60) -> str:
        """Run a program without faults, and return what it printed.

        Args:
            words: as of `start`.
            directory: where it runs.
            seconds: it is killed after so many, with the processes that it has started.
        """
        running = self._begin(words, b"", directory=str(directory), seconds=seconds)
        ended = running.end()
        running.kill()
        assert ended.exit_code == 0, f"{words}\n{ended.errors}"
        return ended.errors

    def _begin(self, words: Sequence[str], stdin: bytes, **options: Any) -> Running:
        self._count += 1
        here = self.directory / str(self._count)
        here.mkdir(parents=True)
        (here / "stdin").write_bytes(stdin)
        request = {"number": self._count, "words": list(words), "here": str(here), **options}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        while "pid" not in (answer := self._answer()):
            pass
        self._running[self._count] = answer["pid"]
        return Running(launcher=self, number=self._count, here=here, pid=answer["pid"])

    def exit_code(self, number: int) -> int:
        """Wait for the end of a command."""
        while number not in self._ended:
            self._answer()
        return self._ended[number]

    def has_ended(self, number: int) -> bool:
        """Whether a command has ended."""
        while select.select([self._server.stdout], [], [], 0)[0]:
            self._answer()
        return number in self._ended

    def _answer(self) -> dict[str, int]:
        answer: dict[str, int] = json.loads(self._server.stdout.readline())
        if "exit_code" in answer:
            self._ended[answer["number"]] = answer["exit_code"]
            del self._running[answer["number"]]
        return answer


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


def serve(has_torch: bool) -> None:
    """The process of a `Launcher`: forks for every request, and says how each ended."""
    small.import_commands()
    if has_torch:
        small.import_trainer()
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking)
    numbers: dict[int, int] = {}
    rest = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 1 << 10)
            while (ended := _ended_child()) is not None:
                pid, status = ended
                if pid in numbers:
                    _say(number=numbers.pop(pid), exit_code=os.waitstatus_to_exitcode(status))
        if 0 in ready:
            content = os.read(0, 1 << 20)
            if not content:
                return
            *requests, rest = (rest + content).split(b"\n")
            for request in map(json.loads, requests):
                if not (pid := os.fork()):
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.close(woken)
                    os.close(waking)
                    _become(request)
                numbers[pid] = request["number"]
                _say(number=request["number"], pid=pid)


def _ended_child() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _say(**answer: int) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _become(request: dict[str, Any]) -> None:
    code: Any = 70
    try:
        os.setsid()
        here = Path(request["here"])
        os.chdir(request.get("directory", "."))
        signal.alarm(request.get("seconds", 0))
        output = os.open(here / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.dup2(os.open(here / "stdin", os.O_RDONLY), 0)
        os.environ |= request.get("environment", {})
        if setup := request.get("setup"):
            os.environ[_SETUP] = json.dumps({**setup, "log": str(here / "steps"), "coordinator": os.getpid()})
            install()
            if _num_workers(request["words"]) != 1:
                _start_fork_server()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with _connected(request.get("ray_address", "")):
            code = _run(request["words"])
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(words: list[str]) -> int:
    """Run a program in this process; its exit code."""
    from tokshard.cli.main import main

    sys.argv = words
    try:
        if words[0] == "tokshard":
            main()
        elif words[:2] == ["python", "-m"]:
            sys.argv = words[2:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _num_workers(words: Sequence[str]) -> int:
    return int(words[words.index("--workers") + 1]) if "--workers" in words else 1


def _start_fork_server() -> None:
    """Have workers forked from a fork of this process: to import all again would take half a second."""
    from multiprocessing import forkserver, util

    spawn = util.spawnv_passfds

    def fork(path: Any, words: Sequence[Any], passed: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        try:
            kept = sorted({0, 1, 2, *passed})
            for before, after in zip(kept, [*kept[1:], 1 << 12], strict=True):
                os.closerange(before + 1, after)
            exec(words[-1])  # what an interpreter would be started with
        finally:
            os._exit(0)

    util.spawnv_passfds = fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    """This process connected to a Ray cluster, whose workers have the same sizes."""
    if not address:
        yield
        return
    import ray

    environment = {
        "env_vars": {_SETUP: os.environ[_SETUP], "PYTHONPATH": str(ROOT)},
        "worker_process_setup_hook": f"{__name__}.shrink_here",
    }
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", runtime_env=environment)
    try:
        yield
    finally:
        ray.shutdown()


def shrink_here() -> None:
    """Give this process the sizes that the environment says."""
    small.shrink(**json.loads(os.environ[_SETUP])["sizes"])


def install() -> None:
    """Have this process, and every worker of the build that it coordinates, do what the environment says."""
    shrink_here()
    setup = json.loads(os.environ[_SETUP])
    del setup["sizes"]
    _Steps(**setup).install()


class _Steps:
    """Counts the steps of this process together with those of the others, and does what is to happen."""

    def __init__(self, *, out: str, log: str, coordinator: int, faults: Sequence[dict[str, Any]]) -> None:
        self.out, self.log, self.coordinator = out, log, coordinator
        self.faults = [Fault(**fault) for fault in faults]
        self.open, self.write, self.close = os.open, os.write, os.close
        self.lock = fcntl.flock
        self.num_seen, self.bytes_seen = 0, 0
        self.num_found = [0 for _ in self.faults]

    def install(self) -> None:
        open_file = io.open
        reads = any(fault.reads for fault in self.faults)

        def stepping_open(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            is_read = not set(mode) & set("wax+")
            if isinstance(file, int) or (is_read and not reads):
                return open_file(file, mode, *arguments, **options)
            with self.step("read" if is_read else "open", os.fspath(file)):
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
        if reads:
            self._count_arrow_reads()
        for fault in self.faults:
            if fault.outlives:
                small.outlive(fault.outlives)

    def _count_arrow_reads(self) -> None:
        import pyarrow as pa

        pa.memory_map = self._stepping("read", pa.memory_map)

    def _stepping(
        self, kind: str, original: Callable[..., Any], is_step: Callable[..., bool] = lambda *_: True
    ) -> Callable[..., Any]:
        def stepping(path: Any, *arguments: Any, **options: Any) -> Any:
            if not is_step(path, *arguments[:1]):
                return original(path, *arguments, **options)
            place = os.fsdecode(path)
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
        number, found = self._count(f"{kind} {path}")
        here = [
            fault
            for fault, num_found in zip(self.faults, found, strict=True)
            if (0 < num_found <= fault.times if fault.on else number == fault.at)
        ]
        for fault in here:
            if not fault.is_after:
                self._happen(fault, path)
        for fault in self.faults:
            if fault.act == "full" and 0 < fault.at <= number and kind in _WHAT_A_FULL_DISK_REFUSES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        try:
            yield
        finally:
            for fault in here:
                if fault.is_after:
                    self._happen(fault, path)

    def _count(self, step: str) -> tuple[int, list[int]]:
        """The number of this step; and for each fault, which of the steps that it waits for this is; 0: none."""
        descriptor = self.open(self.log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self.lock(descriptor, fcntl.LOCK_EX)
            self._look(descriptor)
            self.write(descriptor, f"{step}\n".encode())
            before = list(self.num_found)
            self._look(descriptor)
            found = [after if after > earlier else 0 for earlier, after in zip(before, self.num_found, strict=True)]
            return self.num_seen, found
        finally:
            self.close(descriptor)

    def _look(self, descriptor: int) -> None:
        """Take in the steps that were made since."""
        size = os.fstat(descriptor).st_size
        new = os.pread(descriptor, size - self.bytes_seen, self.bytes_seen).decode().splitlines()
        self.bytes_seen = size
        self.num_seen += len(new)
        for index, fault in enumerate(self.faults):
            if fault.on:
                self.num_found[index] += sum(re.search(fault.on, step) is not None for step in new)

    def _happen(self, fault: Fault, path: str) -> None:
        acts: Mapping[str, Callable[[], object]] = {
            "kill": lambda: os.killpg(os.getpgid(0), signal.SIGKILL),
            "orphan": lambda: os.kill(self.coordinator, signal.SIGKILL),
            "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "SIGINT": lambda: os.killpg(os.getpgid(0), signal.SIGINT),
            "SIGTERM": lambda: os.kill(self.coordinator, signal.SIGTERM),
            "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "run": lambda: subprocess.run(["sh", "-c", fault.command], check=True),
            "clock": lambda: _set_clock(fault.jumps),
        }
        if fault.act == "error":
            number = getattr(errno, fault.error)
            raise OSError(number, os.strerror(number), path)
        if fault.act in acts:
            acts[fault.act]()
        time.sleep(fault.lingers)


def _set_clock(seconds: float) -> None:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")
