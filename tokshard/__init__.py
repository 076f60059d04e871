"""tokshard: raw text becomes tokenized Arrow shards, and shards become training batches.

The public names are imported when they are first used, so ``import tokshard`` costs a few milliseconds and never
imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokshard.version import __version__

if TYPE_CHECKING:
    from tokshard.errors import TokshardError
    from tokshard.format.corpus import Corpus
    from tokshard.format.opening import open_corpus
    from tokshard.interop.export.export import export_corpus
    from tokshard.pipeline.build import build_corpus, copy_corpus, import_corpus, select_corpus


__all__ = [
    "Corpus",
    "TokshardError",
    "__version__",
    "build_corpus",
    "copy_corpus",
    "export_corpus",
    "import_corpus",
    "open_corpus",
    "select_corpus",
]

_HOMES = {
    "Corpus": "tokshard.format.corpus",
    "TokshardError": "tokshard.errors",
    "build_corpus": "tokshard.pipeline.build",
    "copy_corpus": "tokshard.pipeline.build",
    "export_corpus": "tokshard.interop.export.export",
    "import_corpus": "tokshard.pipeline.build",
    "open_corpus": "tokshard.format.opening",
    "select_corpus": "tokshard.pipeline.build",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokshard' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
