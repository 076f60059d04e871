"""What a job reads and in which order. README.md explains the order; plan.py is the place to start.

The public names are imported when they are first used: only `StreamingLoader` and `StreamDataset` need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokshard.runtime.cursor import Cursor
    from tokshard.runtime.infilling import FillInTheMiddle
    from tokshard.runtime.loader import StreamDataset, StreamingLoader
    from tokshard.runtime.plan import Piece, Reading, StreamPlan
    from tokshard.runtime.transforms import Sample, SampleRandom

__all__ = [
    "Cursor",
    "FillInTheMiddle",
    "Piece",
    "Reading",
    "Sample",
    "SampleRandom",
    "StreamDataset",
    "StreamPlan",
    "StreamingLoader",
]

_HOMES = {
    "Cursor": "tokshard.runtime.cursor",
    "FillInTheMiddle": "tokshard.runtime.infilling",
    "Piece": "tokshard.runtime.plan",
    "Reading": "tokshard.runtime.plan",
    "Sample": "tokshard.runtime.transforms",
    "SampleRandom": "tokshard.runtime.transforms",
    "StreamDataset": "tokshard.runtime.loader",
    "StreamPlan": "tokshard.runtime.plan",
    "StreamingLoader": "tokshard.runtime.loader",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokshard.runtime' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
