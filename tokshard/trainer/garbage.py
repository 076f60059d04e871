"""Python's garbage collector, run on all ranks after the same steps, so that none waits for another one's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY_STEPS = 50


@contextmanager
def collected_between_steps() -> Iterator[None]:
    """Inside, only `collect_after` collects garbage; objects that exist already are not checked again."""
    was_on = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def collect_after(step: int) -> None:
    """Collect garbage if it is time to."""
    if step % EVERY_STEPS == 0:
        gc.collect()
