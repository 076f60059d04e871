"""The samples that a job reads, and their order. ORDER.md specifies it, README.md explains it. Start with plan.py.

The public names are imported when they are first used. Only those of `tensors.py` need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokshard.runtime.bytes.cache import Cache
    from tokshard.runtime.bytes.corpus import CorpusSource
    from tokshard.runtime.bytes.source import DocumentSpan, SpansIn, TokenSource
    from tokshard.runtime.cursor import Cursor
    from tokshard.runtime.loader import NumpyLoader
    from tokshard.runtime.plan import StreamPlan
    from tokshard.runtime.rows.expand import expand
    from tokshard.runtime.rows.transforms import Sample, SampleRandom
    from tokshard.runtime.tensors import StreamDataset, StreamingLoader, belong_to_the_loop
    from tokshard.runtime.trace import Occurrence, Piece

__all__ = [
    "Cache",
    "CorpusSource",
    "Cursor",
    "DocumentSpan",
    "NumpyLoader",
    "Occurrence",
    "Piece",
    "Sample",
    "SampleRandom",
    "SpansIn",
    "StreamDataset",
    "StreamPlan",
    "StreamingLoader",
    "TokenSource",
    "belong_to_the_loop",
    "expand",
]

_HOMES = {
    "Cache": "tokshard.runtime.bytes.cache",
    "CorpusSource": "tokshard.runtime.bytes.corpus",
    "Cursor": "tokshard.runtime.cursor",
    "DocumentSpan": "tokshard.runtime.bytes.source",
    "NumpyLoader": "tokshard.runtime.loader",
    "Occurrence": "tokshard.runtime.trace",
    "Piece": "tokshard.runtime.trace",
    "Sample": "tokshard.runtime.rows.transforms",
    "SampleRandom": "tokshard.runtime.rows.transforms",
    "SpansIn": "tokshard.runtime.bytes.source",
    "StreamDataset": "tokshard.runtime.tensors",
    "StreamPlan": "tokshard.runtime.plan",
    "StreamingLoader": "tokshard.runtime.tensors",
    "TokenSource": "tokshard.runtime.bytes.source",
    "belong_to_the_loop": "tokshard.runtime.tensors",
    "expand": "tokshard.runtime.rows.expand",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokshard.runtime' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        needs = f"{name} needs PyTorch, which is not installed: pip install 'tokshard[torch]' (NumpyLoader needs none)"
        raise ModuleNotFoundError(needs, name="torch") from None


def __dir__() -> list[str]:
    return sorted(__all__)
