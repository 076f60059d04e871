"""The floor: `encode_batch` of `tokenizers` over texts in memory, with either major version, ids included."""

import multiprocessing
import multiprocessing.synchronize
import os
import time
from typing import Any

from benchmark.peers.programs.common import Settings, batches, encoder, files, main, texts

ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
START_SECONDS = 120
"""How long a process waits for the others."""

_together: dict[str, multiprocessing.synchronize.Barrier] = {}


def floor(settings: Settings) -> dict[str, float]:
    """Each process has one thread, one core and a share of the files, of which it encodes 4 MB a call.

    Reading the texts and loading the tokenizer are not in the time, which is that of the slowest process.
    """
    os.environ.update(ONE_THREAD)
    processes, paths = settings["processes"], files(settings["texts"])
    cores = sorted(os.sched_getaffinity(0))
    shares = [(settings["tokenizer"], paths[index::processes], cores[index % len(cores)]) for index in range(processes)]
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, _start, (context.Barrier(processes),)) as pool:
        found = pool.starmap(_encode, shares, chunksize=1)
    return {
        "work_seconds": max(each["seconds"] for each in found),
        "work_cpu_seconds": sum(each["cpu_seconds"] for each in found),
        "tokens": sum(each["tokens"] for each in found),
        "documents": sum(each["documents"] for each in found),
    }


def _start(barrier: multiprocessing.synchronize.Barrier) -> None:
    _together["start"] = barrier


def _encode(tokenizer: str, paths: list[str], core: int) -> dict[str, Any]:
    os.sched_setaffinity(0, {core})
    encode = encoder(tokenizer)
    work = list(batches(texts(paths)))
    encode(["first call"])  # sets up caches
    _together["start"].wait(START_SECONDS)
    started, cpu_started = time.perf_counter(), time.process_time()
    tokens = sum(len(ids) for batch in work for ids in encode(batch))
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "tokens": tokens,
        "documents": sum(map(len, work)),
    }


if __name__ == "__main__":
    main({"floor": floor}, ["tokenizers"])
