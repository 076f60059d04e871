"""Corpora on disk and in a store, small enough for tests and with as many units as large ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.small import shrink
from tests.corpora import TINY_TOKENIZER, Source, loss_metadata, write_corpus
from tests.runtime.sources import ListSource, SpannedSource
from tests.store.memory import SCHEME, MemoryStore
from tokshard.format.loss import LOSS_COLUMNS
from tokshard.store import STORES_BY_SCHEME, files_below, open_store

LARGE_VOCABULARY = TINY_TOKENIZER.replace(b'"three": 3', b'"three": 99999')
ACCESS = ["mmap", "pread"]


@contextmanager
def small_units(*, batch_tokens: int, stride: int) -> Iterator[pytest.MonkeyPatch]:
    """Record batches and strides of few tokens, so that a small corpus has many; and a store in memory."""
    with pytest.MonkeyPatch.context() as patch:
        hash_stride = 2 * (stride // 4 + 1)
        shrink(patch.setattr, batch_tokens=batch_tokens, ordinal_stride=stride, hash_stride=hash_stride)
        patch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
        yield patch


def write(directory: Path, memory: ListSource, *, wide: bool = False, **options: Any) -> Path:
    """A corpus of the documents of a source, with its loss spans and their weights."""
    metadata: dict[str, list[Any]] = {}
    if isinstance(memory, SpannedSource):
        metadata, options["columns"] = loss_metadata(memory.target_weights), LOSS_COLUMNS
    source = Source(documents=memory.documents(), metadata=metadata)
    return write_corpus(directory, sources=[source], tokenizer=LARGE_VOCABULARY if wide else TINY_TOKENIZER, **options)


def stored(directory: Path) -> str:
    """A copy of a corpus in the store in memory."""
    uri = f"{SCHEME}:/{directory}"
    for name in files_below(open_store(directory), ""):
        open_store(uri).put(name, (directory / name).read_bytes())
    return uri
