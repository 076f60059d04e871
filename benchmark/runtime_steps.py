"""What the runtime benchmark measures in a fresh process, one step each.

    python -m benchmark.runtime_steps first CORPUS...
    python -m benchmark.runtime_steps first --synthetic TOKENS --document-tokens N --sample G
    python -m benchmark.runtime_steps state --corpora N --changes N
    python -m benchmark.runtime_steps memory CORPUS... --hop-tokens N

Each prints one line of JSON. Imports are over when a clock starts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.runtime.sources import PeriodicSource
from tokshard.inspect.plan.bench import take_steps
from tokshard.runtime.loader import NumpyLoader
from tokshard.runtime.plan import StreamPlan

if TYPE_CHECKING:
    from tokshard.runtime.tensors import StreamingLoader

SEQ_LEN = 4_096
BATCH_SIZE = 8
BATCH_TOKENS = SEQ_LEN * BATCH_SIZE
_POLL_SECONDS = 0.002
_HOPS = 6
_STEPS_OF_A_HOP = 8
_STATE_REPEATS = 20  # more than a state keeps changes of weights, so that it is shortened in between


def first(arguments: argparse.Namespace) -> dict[str, Any]:
    """From the names of the corpora to the first batch."""
    started = time.perf_counter()
    plan = StreamPlan(_corpora(arguments), seq_len=SEQ_LEN, seed=17)
    with closing(_loader(plan)) as loader:
        loader.skip(arguments.sample)
        next(iter(loader))
        return {"seconds": time.perf_counter() - started}


def state(arguments: argparse.Namespace) -> dict[str, Any]:
    """Save and load after so many changes of the weights, a step apart."""
    sources = {str(number): PeriodicSource(10**9 + number) for number in range(arguments.corpora)}
    plan = StreamPlan(sources, seq_len=SEQ_LEN, seed=17)
    weights = [{name: 1 + (index + int(name)) % 7 for name in sources} for index in range(7)]
    with closing(_loader(plan)) as loader:
        started = time.perf_counter()
        for change in range(arguments.changes):
            loader.set_weights(weights[change % 7])
            loader.skip(BATCH_SIZE)
        changed = time.perf_counter() - started
        saves, loads = [], []
        for _ in range(_STATE_REPEATS):
            loader.set_weights(weights[0])
            loader.skip(BATCH_SIZE)
            started = time.perf_counter()
            saved = loader.state_dict()
            saves.append(time.perf_counter() - started)
            with closing(_loader(plan)) as other:
                started = time.perf_counter()
                other.load_state_dict(saved)
                loads.append(time.perf_counter() - started)
    return {
        "save_seconds": statistics.median(saves),
        "load_seconds": statistics.median(loads),
        "longest_save_seconds": max(saves),
        "longest_load_seconds": max(loads),
        "change_seconds": changed / max(1, arguments.changes),
        "state_bytes": len(json.dumps(saved)),
    }


def memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """The most that this process held, without torch, while it read the start of one window after another."""
    # windows as large as those of a single corpus are by default, whatever the number of corpora
    plan = StreamPlan(_corpora(arguments), seq_len=SEQ_LEN, seed=17, window_blocks=1_024)
    peaks: dict[str, int] = {}
    is_over = threading.Event()
    with closing(NumpyLoader(plan, global_batch_size=BATCH_SIZE)) as loader:
        batches = iter(loader)
        next(batches)
        status = Path("/proc/self/status")

        def watch() -> None:
            while not is_over.is_set():
                for line in status.read_text(encoding="utf-8").splitlines():
                    name, _, value = line.partition(":")
                    if name in ("RssAnon", "RssFile", "VmHWM"):
                        peaks[name] = max(peaks.get(name, 0), 1024 * int(value.split()[0]))
                time.sleep(_POLL_SECONDS)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for _ in range(_HOPS):  # more than the windows that a corpus keeps
                take_steps(batches, num_steps=_STEPS_OF_A_HOP)
                loader.skip(arguments.hop_tokens // BATCH_TOKENS * BATCH_SIZE)
        finally:
            is_over.set()
            watcher.join()
    return {"own_bytes": peaks["RssAnon"], "mapped_bytes": peaks["RssFile"], "peak_bytes": peaks["VmHWM"]}


def _corpora(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.synthetic:
        return {"synthetic": PeriodicSource(arguments.synthetic, arguments.document_tokens)}
    return {str(number): path for number, path in enumerate(arguments.corpus)}


def _loader(plan: StreamPlan) -> StreamingLoader:
    from tokshard.runtime.tensors import StreamingLoader

    return StreamingLoader(plan, global_batch_size=BATCH_SIZE, dp_rank=0, dp_world_size=1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.runtime_steps")
    parser.add_argument("step", choices=("first", "state", "memory"))
    parser.add_argument("corpus", nargs="*")
    parser.add_argument("--synthetic", type=int, default=0)
    parser.add_argument("--document-tokens", type=int, default=1_000)
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--corpora", type=int, default=1)
    parser.add_argument("--changes", type=int, default=5_000)
    parser.add_argument("--hop-tokens", type=int, default=1 << 28)
    arguments = parser.parse_args()
    step = {"first": first, "state": state, "memory": memory}[arguments.step]
    sys.stdout.write(json.dumps(step(arguments)) + "\n")


if __name__ == "__main__":
    main()
