"""The Ray cluster that a build runs on: the connection, and the CPUs of all nodes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import ray
from ray.util.client import ray as ray_client

from tokshard.errors import UsageError
from tokshard.forking import environment
from tokshard.pipeline.progress import Note, Observer
from tokshard.wording import first_line

AUTO, LOCAL = "auto", "local"
"""Addresses."""
_CONNECT_SECONDS = 10.0
_TRIES = "RAY_gcs_server_port_wait_time_s"
"""How often Ray asks for a cluster, for 40 s each time; by default 20 times."""


def num_cpus() -> int:
    """CPUs of all nodes of the cluster now."""
    return int(ray.cluster_resources().get("CPU", 0))


@contextlib.contextmanager
def connected(address: str, *, num_workers: int | None, observer: Observer) -> Iterator[None]:
    """Connect to a cluster, unless the program is connected already; then leave the connection as it is.

    Args:
        address: ``local`` to start Ray on this machine, ``auto`` for the cluster on this machine or in RAY_ADDRESS, or
            HOST:PORT.
        num_workers: CPUs of a cluster started here.

    Raises:
        UsageError: there is no such cluster, or the program is connected to one already and another address is given.
    """
    if ray.is_initialized():
        if address != AUTO:
            raise UsageError(
                f"ray is {address!r}, and this program has called ray.init already",
                hint="leave the address at auto to use the cluster that the program is connected to",
            )
        _refuse_client(ray_client.is_connected())
        yield
        return
    _refuse_client(address.startswith("ray://") or os.environ.get("RAY_ADDRESS", "").startswith("ray://"))
    variables = dict(os.environ)
    try:
        _start(address, num_workers)
        if not num_cpus():
            observer(Note("no node of the cluster has a CPU for tasks yet: the build waits for one"))
        yield
    finally:
        ray.shutdown()
        for name in os.environ.keys() - variables.keys():  # which Ray sets for this process
            del os.environ[name]
        os.environ.update(variables)


def _refuse_client(is_client: bool) -> None:
    if is_client:
        raise UsageError(
            "a build cannot be driven through Ray Client (ray://)",
            hint="run the command on the cluster: ray job submit --address http://HEAD:8265 -- tokshard build ...",
        )


def _start(address: str, num_workers: int | None) -> None:
    known: dict[str, Any] = {"num_cpus": num_workers} if address == LOCAL else {}
    with contextlib.ExitStack() as stack:
        # Ray lets workers import from the current directory, which may be someone else's data
        stack.enter_context(contextlib.chdir(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.enter_context(environment({"RAY_USAGE_STATS_ENABLED": "0", _TRIES: os.environ.get(_TRIES, "1")}))
        stack.enter_context(interrupted_at_end())
        host, _, port = (os.environ.get("RAY_ADDRESS", "") if address == AUTO else address).rpartition(":")
        try:
            if host and port.isdigit():  # Ray waits even if nobody listens
                socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=False if address == LOCAL else None,
                **known,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise UsageError(
                f"Ray cannot be reached at --ray {address}: {first_line(error)}",
                hint=_HINTS.get(address, "check with 'ray status' on that machine that the cluster runs"),
            ) from error


_HINTS = {
    AUTO: "run the command on a node of a cluster ('ray start --head' starts one), or give its --ray",
    LOCAL: "run 'ray start --head' to see why Ray cannot start on this machine",
}


@contextlib.contextmanager
def interrupted_at_end() -> Iterator[None]:
    """Defer Ctrl-C until the context ends; a second one interrupts at once. Ray's handler of SIGTERM is removed.

    A terminal sends Ctrl-C to all processes. A process that Ray has forked, but that does not run its program yet,
    would print a traceback. In this process, Ctrl-C during a fork would be lost.
    """
    handler, owner = signal.getsignal(signal.SIGINT), os.getpid()
    terminated = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    is_interrupted = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        if is_interrupted and os.getpid() == owner:
            handler(number, frame)
        is_interrupted = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.signal(signal.SIGTERM, terminated)
        if is_interrupted:
            signal.raise_signal(signal.SIGINT)
