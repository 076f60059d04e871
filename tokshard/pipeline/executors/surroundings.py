"""What a build changes in the program that calls it while workers are started, and how that is undone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

from tokshard.pipeline.executors.worker import ENVIRONMENT, START_METHOD, worker_main


def prepare_workers() -> None:
    """Start the process that workers are forked from, so that it imports what they need in the meantime."""
    if START_METHOD == "forkserver":
        from multiprocessing import forkserver

        multiprocessing.set_forkserver_preload([worker_main.__module__])
        with environment(ENVIRONMENT):
            forkserver.ensure_running()


@contextlib.contextmanager
def leaving_the_program_alone() -> Iterator[None]:
    """Restore at the end what a build changes in the program that calls it: the environment and the fork server.

    A server that was running before is the program's own, and stays.
    """
    from multiprocessing import forkserver

    server: Any = vars(forkserver)["_forkserver"]  # no public function stops it
    was_running, preload = server._forkserver_pid is not None, server._preload_modules  # noqa: SLF001
    with environment({"TOKENIZERS_PARALLELISM": "false"}):
        try:
            yield
        finally:
            if not was_running and server._forkserver_pid is not None:  # noqa: SLF001
                server._stop()  # noqa: SLF001
                server._preload_modules = preload  # noqa: SLF001


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started inside: they have to be there before any import."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
