"""One way to read one set of corpora, once."""

import gc
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmark import page_cache
from benchmark.runtime_steps import BATCH_SIZE, BATCH_TOKENS, SEQ_LEN
from tokshard.inspect.plan.bench import Steps, endless, take_steps
from tokshard.runtime.loader import narrow_batches
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.expand import expand
from tokshard.runtime.rows.recycling import Recycler
from tokshard.runtime.rows.steps import RankRows
from tokshard.runtime.tensors import StreamingLoader

INPUT_IDS, IN_PROCESS, THREAD = "input_ids alone", "in process", "thread"
COMPACT, COMPACT_THREAD = "compact", "compact, thread"
EXPANDED = "compact, expanded"
MODES = (INPUT_IDS, IN_PROCESS, COMPACT, EXPANDED, THREAD, COMPACT_THREAD)

_WARM_UP_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a run of steps cost.

    Args:
        cpu_seconds: of this process.
        cached: part of the shards that was in the page cache before; None where that was not looked at.
    """

    steps: Steps
    cpu_seconds: float
    cached: float | None = None

    @property
    def cpu_seconds_per_billion(self) -> float:
        return self.cpu_seconds / self.steps.num_tokens * 1e9

    @property
    def pause(self) -> float:
        """The longest step against the median."""
        return self.steps.longest_seconds / self.steps.median_seconds


def make_plan(corpora: list[Path]) -> StreamPlan:
    return StreamPlan({str(number): path for number, path in enumerate(corpora)}, seq_len=SEQ_LEN, seed=17)


def read(corpora: list[Path], mode: str, *, num_tokens: int, is_cold: bool = False) -> Reading:
    """Read so many tokens, in the middle of which a window of the first corpus ends and the next begins.

    Args:
        is_cold: drop the shards from the page cache first.
    """
    cached = None
    if is_cold:
        gc.collect()  # what is mapped stays in the cache, so nothing of an earlier plan may be left
        files = shards(corpora)
        page_cache.drop(files)
        cached = page_cache.share(files)
    plan = make_plan(corpora)
    start = _start(plan, num_tokens)
    if mode == INPUT_IDS:
        return _take(input_ids_only(plan, start), num_tokens, cached)
    is_compact = mode in (COMPACT, EXPANDED, COMPACT_THREAD)
    ahead = 0 if mode in (IN_PROCESS, COMPACT, EXPANDED) else 4
    loader = _loader(plan, compact=is_compact, prefetch_factor=ahead)
    loader.load_state_dict(_state(plan, start))
    with closing(loader):
        batches = endless(loader)
        return _take(map(expand, batches) if mode == EXPANDED else batches, num_tokens, cached)


def input_ids_only(plan: StreamPlan, start: int) -> Iterator[dict[str, Any]]:
    """The batches of a plan without labels and positions."""
    ranks = RankRows(global_batch_size=BATCH_SIZE)
    recycler = Recycler(2)
    for narrow in narrow_batches(plan, ranks, plan.cursor().advanced(start)):
        input_ids = recycler.empty((BATCH_SIZE, SEQ_LEN))
        np.copyto(input_ids, narrow.tokens)
        yield {"input_ids": torch.from_numpy(input_ids)}


def shards(corpora: list[Path]) -> list[Path]:
    return sorted(path for corpus in corpora for path in corpus.glob("shard-*"))


def _loader(plan: StreamPlan, **options: Any) -> StreamingLoader:
    return StreamingLoader(plan, global_batch_size=BATCH_SIZE, dp_rank=0, dp_world_size=1, **options)


def _state(plan: StreamPlan, sample: int) -> dict[str, Any]:
    loader = _loader(plan)
    loader.skip(sample)
    return loader.state_dict()


def _start(plan: StreamPlan, num_tokens: int) -> int:
    """The sample from which on a run of `num_tokens` has the end of the first corpus' first window in its middle."""
    shape, source = plan.shape, plan.sources[0]
    has_windows = source.num_tokens // shape.block_tokens > shape.window_blocks
    first_window = shape.block_tokens * shape.window_blocks if has_windows else source.num_tokens
    weights = plan.cursor().segments[0].weights
    start = first_window * sum(weights) / weights[0] - num_tokens / 2
    return max(0, int(start) // BATCH_TOKENS * BATCH_SIZE)


def _take(batches: Iterator[Any], num_tokens: int, cached: float | None) -> Reading:
    take_steps(batches, num_steps=_WARM_UP_STEPS if cached is None else 1)
    cpu = time.process_time()
    steps = take_steps(batches, num_steps=max(1, num_tokens // BATCH_TOKENS))
    return Reading(steps=steps, cpu_seconds=time.process_time() - cpu, cached=cached)
