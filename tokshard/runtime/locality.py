"""How local the shuffle of a plan is: how long a window lasts, and whether what is read at a time fits into memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from tokshard.runtime.cursor import Cursor
from tokshard.runtime.order.parts import PlannedCorpus
from tokshard.runtime.order.tables import AHEAD
from tokshard.runtime.plan import StreamPlan
from tokshard.wording import bytes_text

MIN_WINDOW_STEPS = 16
"""A window that lasts fewer steps causes a warning: documents are shuffled only within their window."""


def steps_per_window(plan: StreamPlan, global_batch_size: int, cursor: Cursor | None = None) -> dict[str, float]:
    """Steps that read from one window, by corpus; with streams, from one window of each.

    Infinite where the whole corpus is one window, or its weight is 0.
    """
    return window_steps(plan, global_batch_size, _weights(plan, cursor))


def window_steps(plan: StreamPlan, global_batch_size: int, weights: Sequence[float]) -> dict[str, float]:
    """`steps_per_window` under any weights, one per corpus."""
    tokens = _tokens_per_step(plan, global_batch_size, weights)
    return {
        name: math.inf if corpus.num_windows == 1 or not count else _window_tokens(corpus) / count
        for name, corpus, count in zip(plan.names, plan.corpora, tokens, strict=True)
    }


def enough_window_blocks(corpus: PlannedCorpus, steps_per_window: float) -> int:
    """The `window_blocks` with which a window of a corpus lasts `MIN_WINDOW_STEPS` steps."""
    blocks = corpus.num_parts * corpus.shape.window_blocks
    return math.ceil(blocks * MIN_WINDOW_STEPS / steps_per_window)


def _window_tokens(corpus: PlannedCorpus) -> int:
    """Tokens of the windows that all streams read at a time."""
    return corpus.num_parts * corpus.shape.window_blocks * corpus.shape.block_tokens


def warn_of_short_windows(plan: StreamPlan, global_batch_size: int, *, stacklevel: int) -> None:
    """Warn of default windows that last fewer than `MIN_WINDOW_STEPS` steps.

    Args:
        stacklevel: of the line that the warning names, counted from the caller.
    """
    if not plan.has_default_windows:
        return  # the user chose their size
    few = {name: steps for name, steps in steps_per_window(plan, global_batch_size).items() if steps < MIN_WINDOW_STEPS}
    if few:
        name, steps = min(few.items(), key=lambda item: item[1])
        warnings.warn(
            f"a window of corpus {name!r} lasts {steps:.1f} steps: documents meet only those of so few steps; "
            f"window_blocks={enough_window_blocks(plan.corpora[plan.names.index(name)], steps)} makes it "
            f"{MIN_WINDOW_STEPS}, for 8 bytes per document of a window",
            stacklevel=stacklevel + 1,
        )


def needed_memory(plan: StreamPlan, world_size: int) -> int:
    """Bytes that a rank keeps in memory of corpora that are not mapped.

    Of each stream that it reads, these are the current window and what is announced ahead.

    Args:
        world_size: ranks that read the plan together.
    """
    return sum(
        corpus.source.kept_bytes(_kept_blocks(corpus, world_size), corpus.shape.block_tokens)
        for corpus, weight in zip(plan.corpora, _weights(plan, None), strict=True)
        if weight
    )


def _kept_blocks(corpus: PlannedCorpus, world_size: int) -> int:
    """Blocks of the current windows of a rank and of those ahead; fewer if the corpus has fewer."""
    # a rank whose rows are not those of whole streams reads a part of one more
    parts = min(corpus.num_parts, -(-corpus.num_parts // world_size) + (corpus.num_parts % world_size > 0))
    blocks = math.ceil((1 + AHEAD) * parts * corpus.shape.window_blocks)
    return min(blocks, -(-corpus.num_tokens // corpus.shape.block_tokens))


def warn_of_little_memory(plan: StreamPlan, world_size: int, *, stacklevel: int) -> None:
    """Warn if the windows of corpora that are not mapped do not fit into the memory of their cache.

    Args:
        stacklevel: of the line that the warning names, counted from the caller.
    """
    given = sum({id(source.counts): source.memory_bytes for source in plan.sources}.values())
    needed = needed_memory(plan, world_size)
    if needed > given:
        warnings.warn(
            f"the windows that are read and fetched at a time need {bytes_text(needed)} of memory, and "
            f"{bytes_text(given)} are allowed: the same blocks are fetched again and again; give "
            f"StreamPlan(..., cache=Cache(memory_bytes={-(-needed >> 28) << 28})), or memory_bytes in the mix",
            stacklevel=stacklevel + 1,
        )


def warn_of_windows(plan: StreamPlan, global_batch_size: int, world_size: int, *, stacklevel: int) -> None:
    """Warn of windows that are too short, or too large for the memory.

    Args:
        stacklevel: of the line that the warnings name, counted from the caller.
    """
    warn_of_short_windows(plan, global_batch_size, stacklevel=stacklevel + 1)
    warn_of_little_memory(plan, world_size, stacklevel=stacklevel + 1)


def _weights(plan: StreamPlan, cursor: Cursor | None) -> tuple[float, ...]:
    cursor = cursor or plan.cursor()
    return cursor.segments[cursor.num_started - 1].weights


def _tokens_per_step(plan: StreamPlan, global_batch_size: int, weights: Sequence[float]) -> list[float]:
    return [global_batch_size * plan.seq_len * weight / sum(weights) for weight in weights]
