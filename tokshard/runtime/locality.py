"""How local the shuffle of a plan is: how long a window lasts, and whether the current windows fit into memory."""

from __future__ import annotations

import math

from tokshard.numbers import ceil_div
from tokshard.runtime.cursor import Cursor
from tokshard.runtime.order.pieces import AHEAD
from tokshard.runtime.order.windows import CorpusOrder
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows import steps
from tokshard.wording import bytes_text

MIN_WINDOW_STEPS = 16
"""A window that lasts fewer steps causes a warning: documents are shuffled only within their window."""


def steps_per_window(plan: StreamPlan, global_batch_size: int, cursor: Cursor | None = None) -> dict[str, float]:
    """`tokshard.runtime.rows.steps.steps_per_window` by the names of the corpora."""
    step_tokens = global_batch_size * plan.seq_len
    return dict(zip(plan.names, steps.steps_per_window(plan.corpora, _weights(plan, cursor), step_tokens), strict=True))


def enough_window_blocks(corpus: CorpusOrder, steps_per_window: float) -> int:
    """The `window_blocks` with which a window of a corpus lasts `MIN_WINDOW_STEPS` steps."""
    blocks = corpus.num_parts * corpus.shape.window_blocks
    return math.ceil(blocks * MIN_WINDOW_STEPS / steps_per_window)


def needed_memory(plan: StreamPlan, world_size: int) -> int:
    """Bytes of corpora that a rank keeps in memory because they are not mapped.

    For each stream that it reads, it keeps the current window and the blocks announced ahead.

    Args:
        world_size: ranks that read the plan together.
    """
    return sum(
        corpus.source.kept_bytes(_kept_blocks(corpus, world_size), corpus.block_room)
        for corpus, weight in zip(plan.corpora, _weights(plan, None), strict=True)
        if weight
    )


def _kept_blocks(corpus: CorpusOrder, world_size: int) -> int:
    """Blocks of a rank's current windows and of the windows ahead; fewer if the corpus has fewer."""
    # a rank whose rows are not whole streams reads a part of one more stream
    parts = min(corpus.num_parts, ceil_div(corpus.num_parts, world_size) + (corpus.num_parts % world_size > 0))
    blocks = math.ceil((1 + AHEAD) * parts * corpus.shape.window_blocks)
    return min(blocks, ceil_div(corpus.num_tokens, corpus.shape.block_tokens))


def warning_of_windows(plan: StreamPlan, global_batch_size: int, cursor: Cursor | None = None) -> str | None:
    """A warning if default windows are too short for the weights."""
    name, steps = min(steps_per_window(plan, global_batch_size, cursor).items(), key=lambda item: item[1])
    if not plan.has_default_windows or steps >= MIN_WINDOW_STEPS:  # or the user chose their size
        return None
    enough = enough_window_blocks(plan.corpora[plan.names.index(name)], steps)
    return (
        f"a window of corpus {name!r} lasts {steps:.1f} steps: documents are shuffled only within so few steps; a run "
        f"that starts with window_blocks={enough} has {MIN_WINDOW_STEPS}, for 9 bytes per document of a window"
    )


def warnings_of_windows(plan: StreamPlan, global_batch_size: int, world_size: int) -> list[str]:
    """Warnings about default windows that are too short, and windows that are too large for the memory."""
    found = [warning] if (warning := warning_of_windows(plan, global_batch_size)) else []
    given = sum({id(source.counts): source.memory_bytes for source in plan.sources}.values())
    needed = needed_memory(plan, world_size)
    if needed > given:
        found.append(
            f"the current windows and the windows fetched ahead need {bytes_text(needed)} of memory, and "
            f"{bytes_text(given)} are allowed: the same blocks are fetched again and again; give the mix, or "
            f"Cache(...) of the plan, memory_bytes={-(-needed >> 28) << 28}"
        )
    return found


def _weights(plan: StreamPlan, cursor: Cursor | None) -> tuple[float, ...]:
    cursor = cursor or plan.cursor()
    return cursor.segments[cursor.num_started - 1].weights
