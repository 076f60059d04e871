"""How local the shuffle of a plan is: how long a window lasts, and how many blocks a step reads from."""

from __future__ import annotations

import math
import warnings

from tokshard.runtime.cursor import Cursor
from tokshard.runtime.plan import StreamPlan

MIN_WINDOW_STEPS = 16
"""A window that lasts fewer steps causes a warning: documents are shuffled only within their window."""


def steps_per_window(plan: StreamPlan, global_batch_size: int, cursor: Cursor | None = None) -> dict[str, float]:
    """Steps that read from one window, by corpus.

    Infinite where the whole corpus is one window, or its weight is 0.
    """
    window_tokens = plan.shape.window_blocks * plan.shape.block_tokens
    tokens = _tokens_per_step(plan, global_batch_size, cursor)
    return {
        name: math.inf if corpus.num_windows == 1 or not count else window_tokens / count
        for name, corpus, count in zip(plan.names, plan.corpora, tokens, strict=True)
    }


def blocks_per_step(plan: StreamPlan, global_batch_size: int, cursor: Cursor | None = None) -> dict[str, float]:
    """Random blocks that a step reads from, by corpus. Makes the table of one window of each.

    This is the expected number of blocks of a window that are hit by as many random draws as the step has pieces.
    """
    found = {}
    per_step = _tokens_per_step(plan, global_batch_size, cursor)
    for name, corpus, tokens in zip(plan.names, plan.corpora, per_step, strict=True):
        window = corpus.window(0, 0)
        table = corpus.table(window)
        blocks, draws = len(table.block_starts), table.num_pieces * tokens / (window.stop - window.start)
        found[name] = blocks * -math.expm1(draws * math.log1p(-1 / blocks)) if blocks > 1 else float(bool(tokens))
    return found


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
            f"window_blocks={math.ceil(plan.shape.window_blocks * MIN_WINDOW_STEPS / steps)} makes it "
            f"{MIN_WINDOW_STEPS}, for 8 bytes per document of a window",
            stacklevel=stacklevel + 1,
        )


def _tokens_per_step(plan: StreamPlan, global_batch_size: int, cursor: Cursor | None) -> list[float]:
    cursor = cursor or plan.cursor()
    weights = cursor.segments[cursor.num_started - 1].weights
    return [global_batch_size * plan.seq_len * weight / sum(weights) for weight in weights]
