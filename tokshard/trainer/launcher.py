"""The facts that a launcher gives this process: its rank, its GPU, and when to stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TextIO

from tokshard.errors import TokshardError, UsageError
from tokshard.wording import one_line, printable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):  # noqa: N818 - not an error
    """A rank received one of `STOP_SIGNALS`, its argument, which ends an evaluation on all ranks."""


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command for its exit code; an error is printed on stderr and has its own code, Ctrl-C gives 130."""
    with suppress(AttributeError, ValueError):  # there is no stdout, or it is closed
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # as stderr: no line is lost
    try:
        return command()
    except TokshardError as error:
        return show_error(error)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    finally:
        with suppress(AttributeError, ValueError):  # there is no stdout, or it is closed
            _drop_unwritten(sys.stdout)


def show_error(error: TokshardError) -> int:
    """Print an error on stderr; returns its exit code."""
    sys.stderr.write(f"error: {one_line(error.problem)}\nhint: {one_line(error.hint)}\n")
    return error.exit_code


def _drop_unwritten(stream: TextIO) -> None:
    """Drop what a full disk did not take: the interpreter would try again when it exits, and exit with 120."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def show(lines: Iterable[str]) -> int:
    """Print what a command found or did, as it comes; returns the exit code 0.

    Raises:
        TokshardError: stdout is full or closed. All lines were taken before, so the work is done.
    """
    unwritten: OSError | None = None
    for line in lines:
        try:
            sys.stdout.write(f"{printable(line)}\n")
            sys.stdout.flush()
        except OSError as error:
            unwritten = error
    if unwritten is not None:
        problem = f"standard output cannot be written: {unwritten.strerror}"
        raise TokshardError(problem, hint="make room, or send the output to another place")
    return 0


def rank_of(environment: Mapping[str, str]) -> int | None:
    """The rank that torchrun gave this process; None: it was started alone.

    Raises:
        UsageError: another launcher started it, or variables are missing or wrong.
    """
    if "RANK" in environment:
        if missing := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]:
            raise UsageError(f"RANK is set, {', '.join(missing)} not", hint="start the job with torchrun")
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
            if not (value := environment.get(name, "0")).isdecimal() or len(value) > 9:
                raise UsageError(f"{name} is {value!r:.60}, expected a number", hint="start the job with torchrun")
        return int(environment["RANK"])
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if (tasks := environment.get(name, "1")) not in ("", "0", "1"):
            raise UsageError(
                f"{name} is {tasks}, but RANK is not set: each of the {tasks} tasks would be a run of its own",
                hint=f"start one torchrun per node: srun --ntasks-per-node 1 torchrun ...; or unset {name} to train on "
                "one rank",
            )
    return None


def device_index(local_rank: int, num_devices: int) -> int:
    """The GPU of a rank. A launcher may show each task only its own GPU, which is then number 0.

    Raises:
        UsageError: there are fewer GPUs than ranks.
    """
    if local_rank < num_devices:
        return local_rank
    if num_devices == 1:
        return 0
    raise UsageError(
        f"LOCAL_RANK is {local_rank}, this process sees {num_devices} GPUs",
        hint="start as many ranks per node as it has GPUs, or set parallel.device=cpu",
    )


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT, so that the step in progress ends before the run stops.

    Further signals change nothing: a terminal or scheduler signals this process, and torchrun does it again, and kills
    what is left after ``--shutdown-timeout`` (30 s). Only the main thread can catch signals; others get an empty list.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, lambda caught, _: received.append(caught))
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
