"""What the programs of the loaders share: one way to measure a loader, and to keep what it reads for a ledger.

A program gives two functions. ``make(settings)`` writes the peer's own form of ``settings["tokens"]``, a numpy array of
ids with the offsets of its documents beside it. ``opened(settings, states)`` opens the peer's loader for one rank, from
the start or from the states that all ranks saved. The cases are then:

- ``make``: write it, and say how large it is.
- ``read``: the time to the first batch, tokens per second, what the state weighs, the time to resume.
- ``ledger``: write it, and run jobs with a fork for each rank, which keeps every id that it was given, and its state at
  the end.

Imports are over when a clock starts. Only the standard library and numpy are imported here.
"""

import functools
import json
import multiprocessing
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.peers.programs.common import CannotError, Settings, folder_bytes, main

WARM_UP_STEPS = 4


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A loader that is open.

    Args:
        batches: ends with the epoch.
        ids: the input ids of a batch, [rows, seq_len].
        state: what a checkpoint would hold after the batch that was taken last.
    """

    batches: Iterator[Any]
    ids: Callable[[Any], Any]
    state: Callable[[], Any]
    close: Callable[[], None] = _nothing


def run(
    make: Callable[[Settings], None],
    opened: Callable[[Settings, list[Any] | None], Opened],
    packages: Sequence[str],
) -> None:
    """Run the case that the command line names.

    Args:
        opened: gets the settings with ``rank``, ``world``, ``workers``, ``rows`` (of a global batch) and ``seq_len``.
    """
    main(
        {
            "make": lambda settings: _make(make, settings),
            "read": lambda settings: _read(opened, settings),
            "ledger": lambda settings: _ledger(make, opened, settings),
        },
        packages,
    )


def source(settings: Settings) -> tuple[Any, Any]:
    """The ids of the corpus, mapped, and the offsets of its documents: int64 [documents + 1]."""
    path = settings["tokens"]
    return np.load(path, mmap_mode="r"), np.load(path.removesuffix(".npy") + ".offsets.npy")


def documents(settings: Settings) -> Iterator[Any]:
    """The ids of each document, its delimiter included."""
    ids, offsets = source(settings)
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield ids[start:stop]


def rows(settings: Settings) -> Any:
    """The corpus cut into rows of `seq_len` ids; a rest that fills no row is left out."""
    ids, _ = source(settings)
    seq_len = settings["seq_len"]
    return ids[: len(ids) // seq_len * seq_len].reshape(-1, seq_len)


def files_of_rows(settings: Settings) -> Iterator[Any]:
    """The rows, so many at a time as go into a file of ``file_bytes``."""
    every = rows(settings)
    count = max(1, settings["file_bytes"] // every[0].nbytes)
    for first in range(0, len(every), count):
        yield every[first : first + count]


def _make(make: Callable[[Settings], None], settings: Settings) -> dict[str, Any]:
    make(settings)
    return {"stored_bytes": folder_bytes(settings["data"])}


def _read(opened: Callable[[Settings, list[Any] | None], Opened], settings: Settings) -> dict[str, Any]:
    settings = {"rank": 0, "world": 1} | settings
    started = time.perf_counter()
    loader = opened(settings, None)
    rows_of_first, seq_len = loader.ids(next(loader.batches)).shape
    first = time.perf_counter() - started
    if seq_len != settings["seq_len"]:
        raise CannotError(f"It gives rows of {seq_len} tokens.")
    for _ in range(WARM_UP_STEPS):
        next(loader.batches)
    batch_tokens = rows_of_first * seq_len
    steps, most = 0, max(1, settings["tokens_to_read"] // batch_tokens - WARM_UP_STEPS - 1)
    started = time.perf_counter()
    for _ in loader.batches:
        steps += 1
        if steps >= most or time.perf_counter() - started > settings["seconds"]:
            break
    seconds = time.perf_counter() - started
    found = {
        "first_batch_seconds": first,
        "tokens_per_second": steps * batch_tokens / seconds,
        "tokens_read": (1 + WARM_UP_STEPS + steps) * batch_tokens,
    }
    if not settings.get("has_resume", True):
        loader.close()
        return found
    try:
        state = loader.state()
    except CannotError as error:
        loader.close()
        return found | {"state_bytes": str(error)}
    loader.close()
    del loader
    found["state_bytes"] = state_bytes(state)
    started = time.perf_counter()
    try:
        again = opened(settings, [state])
        next(again.batches)
    except Exception as error:  # noqa: BLE001 - what it says is the result; its speed was measured before
        return found | {"resume_seconds": f"fails: {_last_line(str(error)) or type(error).__name__}"}
    found["resume_seconds"] = time.perf_counter() - started
    again.close()
    return found


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def state_bytes(state: Any) -> int:
    """As JSON, or as a pickle where that can't hold it."""
    try:
        return len(json.dumps(state))
    except TypeError:
        return len(pickle.dumps(state))


def _ledger(
    make: Callable[[Settings], None], opened: Callable[[Settings, list[Any] | None], Opened], settings: Settings
) -> dict[str, Any]:
    """Write the peer's form of the tokens, and run ``jobs``, each with settings of its own.

    All in forks of one process: what a peer imports takes longer than most jobs.

    Returns:
        ``refused``: by job, what the peer said when it did not go on, or None. A job that loads the ``states`` of one
        that did not go on says the same.
    """
    out = Path(settings["out"])
    if problem := _side_by_side([functools.partial(make, settings)], out / "make", settings["limit"]):
        sys.exit(problem)
    refused: dict[str, str | None] = {}
    for name, job in settings["jobs"].items():
        place = {"out": out / name} | ({"states": out / job["states"]} if "states" in job else {})
        refused[name] = refused.get(job.get("states", "")) or _job(opened, settings | job | place)
    return {"refused": refused}


def _job(opened: Callable[[Settings, list[Any] | None], Opened], settings: Settings) -> str | None:
    world = settings["world"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    os.environ |= {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [functools.partial(_rank, opened, settings | {"rank": rank}) for rank in range(world)]
    return _side_by_side(ranks, settings["out"], settings["limit"])


def _side_by_side(works: Sequence[Callable[[], None]], out: Path, limit: float) -> str | None:
    """Run each in a fork that has a log in this new folder; what one said that failed."""
    out.mkdir(parents=True)
    logs = [out / f"rank-{index}.log" for index in range(len(works))]
    fork = multiprocessing.get_context("fork")
    forks = [fork.Process(target=_logged, args=each) for each in zip(works, logs, strict=True)]
    for process in forks:
        process.start()
    for code, log in zip(_codes(forks, limit), logs, strict=True):
        if code < 0:
            return f"A rank had not ended after {limit} s."
        if code:
            return _last_line(log.read_text(encoding="utf-8", errors="replace")) or f"A rank ended with {code}."
    return None


def _logged(work: Callable[[], None], path: Path) -> None:
    with path.open("wb") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    try:
        work()
    except CannotError as error:
        sys.exit(str(error))


def _codes(forks: Sequence[BaseProcess], limit: float) -> list[int]:
    """The exit codes; all are killed when one fails or the time is over."""
    deadline = time.monotonic() + limit
    while any(process.is_alive() for process in forks):
        if time.monotonic() > deadline or any(process.exitcode for process in forks):
            time.sleep(1)  # the others may be about to fail by themselves, and say why
            for process in forks:
                process.kill()
        time.sleep(0.02)
    codes = [process.exitcode or 0 for process in forks]
    return [0 if code < 0 and any(other > 0 for other in codes) else code for code in codes]


def _rank(opened: Callable[[Settings, list[Any] | None], Opened], settings: Settings) -> None:
    """What a rank of a job does, as a launcher would start it."""
    out, rank = settings["out"], settings["rank"]
    os.environ |= {"RANK": str(rank), "GLOBAL_RANK": str(rank), "LOCAL_RANK": str(rank)}
    states = None
    if "states" in settings:
        states = [pickle.loads(path.read_bytes()) for path in sorted(settings["states"].glob("state-*.pickle"))]
    loader = opened(settings, states)
    read = []
    for batch in loader.batches:
        read.append(np.array(loader.ids(batch), np.int32).reshape(-1))
        if len(read) == settings["steps"]:
            (out / f"state-{rank:02}.pickle").write_bytes(pickle.dumps(loader.state()))
            break
    np.save(out / f"read-{rank}.npy", np.concatenate(read) if read else np.zeros(0, np.int32))
    loader.close()
