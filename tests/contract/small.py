"""What the tests of promises reach into the package for: sizes that they shrink, and functions that they replace.

All of it is named here and nowhere else, so that a change of the package's inside changes one module of the tests. A
name that has gone is an error: a size that is not shrunk would leave one task where a test wants twenty.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

Set = Callable[[Any, str, Any], None]
"""`setattr`, or the method of a `pytest.MonkeyPatch`, which undoes it."""

_CHUNKED = ("columns", "decompress", "delimited", "lines", "records", "tar")
_SIZES: Mapping[str, tuple[str, ...]] = {
    "chunk_bytes": (
        *(f"tokshard.pipeline.sources.{module}.CHUNK_BYTES" for module in _CHUNKED),
        "tokshard.pipeline.tasks.planning.CHUNK_BYTES",
    ),
    "part_texts": ("tokshard.pipeline.tasks.hashing.PART_TEXTS",),
    "fence_rows": ("tokshard.pipeline.tasks.sorted_rows.FENCE_ROWS",),
    "slice_rows": ("tokshard.pipeline.tasks.sorted_rows.SLICE_ROWS",),
    "fan_in": ("tokshard.pipeline.tasks.duplicates.FAN_IN",),
    "max_drop_files": ("tokshard.pipeline.tasks.duplicates.MAX_DROP_FILES",),
    "copy_task_tokens": ("tokshard.pipeline.tasks.planning.TASK_TOKENS",),
    "copy_fan_out": ("tokshard.pipeline.tasks.shuffle.FAN_OUT",),
    "copy_bucket_bytes": ("tokshard.pipeline.tasks.shuffle.BUCKET_BYTES",),
    "copy_deal_bytes": ("tokshard.pipeline.tasks.shuffle.DEAL_BYTES",),
    "copy_slice_tokens": (
        "tokshard.pipeline.tasks.shuffle.SLICE_TOKENS",
        "tokshard.pipeline.sources.corpora.SLICE_TOKENS",
    ),
    "short_tokens": ("tokshard.pipeline.tasks.shuffle.SHORT_TOKENS",),
    "import_batch_bytes": ("tokshard.interop.tokens.located.BATCH_BYTES", "tokshard.interop.tokens.flat.BATCH_BYTES"),
    "import_documents": ("tokshard.interop.tokens.located._DOCUMENTS_AT_ONCE",),
    "batch_tokens": ("tokshard.format.writer.MAX_BATCH_TOKENS",),
    "share_records": ("tokshard.pipeline.judge.MIN_RECORDS",),
}
"""The sizes that can be shrunk, and where each is looked up."""

TINY: Mapping[str, int] = {
    # a few dozen texts need every step of the search for duplicates, most of several tasks
    "part_texts": 5,
    "fence_rows": 2,
    "slice_rows": 32,
    "fan_in": 4,
    "max_drop_files": 2,
    # and a copy of them several tasks, a shuffle several levels
    "copy_task_tokens": 1,
    "copy_fan_out": 2,
    "copy_bucket_bytes": 1 << 10,
    "copy_deal_bytes": 1 << 9,
    "chunk_bytes": 512,
}
"""Sizes with which a few kilobytes make many tasks."""

MERGES: Mapping[str, int] = {"part_texts": 3, "fence_rows": 2, "slice_rows": 4, "fan_in": 2, "max_drop_files": 1}
"""Sizes with which a few texts need every step of the search for duplicates."""

RECEIPT = r"\.tokshard-build/[\w-]+/receipts/"
"""A pattern of the paths of receipts."""

PROMISED = r"(^|/)(receipts/|rejects/|files/|shard-)"
"""A pattern of the paths of what an unfinished build goes by when it continues."""

HASHES = r"open .*/\.[0-9]{7}-[0-9]{6}\.bin"
"""A pattern of the step with which a task begins to write down hashes."""

SEARCHES = r"mkdir .*/(find|join-1)/"
"""A pattern of a step that the search for duplicates makes first."""

MERGED_HASHES = r"replace .*/(find|join-\d+)/files/"
"""A pattern of the step with which a task of the search for duplicates puts its file in place."""

PREPARES = r"open .*/\.tokenizer\.json"
"""A pattern of a step of a job that prepares a build for the others."""

BEGINS = r"replace .*/build\.json$"
"""A pattern of the step after which a directory holds a build."""

HASHED, FOUND = "hash/files", "find/files"
"""Folders of the hashes of texts, and of what the search for duplicates has found."""

REJECTS, RECEIPTS = "write/rejects", "write/receipts"
"""Folders of the bad records and the receipts of tasks that write."""

_COMMANDS = (
    "tokshard.cli.build",
    "tokshard.cli.commit",
    "tokshard.cli.copy",
    "tokshard.cli.import_",
    "tokshard.cli.status",
)
_LAZILY_IMPORTED = ("pyarrow.compute", "pyarrow.dataset", "pyarrow.feather", "pyarrow.fs", "pyarrow.parquet")


def shrink(set_attribute: Set = setattr, **sizes: int) -> None:
    """Set sizes of the package, in this process and in workers that are forked from it.

    Args:
        sizes: names of `_SIZES`.
    """
    for name, value in sizes.items():
        for place in _SIZES[name]:
            _set(set_attribute, place, value)


def import_commands() -> None:
    """Import all that a build, an import, a copy or a status may import while it runs."""
    for module in (*_COMMANDS, *_LAZILY_IMPORTED):
        _module(module)


def outlive(seconds: float, set_attribute: Set = setattr) -> None:
    """Let workers notice so many seconds late that their coordinator is gone."""

    def die_late() -> None:
        time.sleep(seconds)
        os._exit(1)

    _set(set_attribute, "tokshard.pipeline.executors.worker.end_with_coordinator", die_late)


@contextlib.contextmanager
def stopped_before_the_corpus(error: BaseException) -> Iterator[None]:
    """Builds raise an error when all of their tasks are done, before the corpus is put together."""

    def stop(*_: object, **__: object) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        _set(patch.setattr, "tokshard.pipeline.build.commit", stop)
        yield


def _set(set_attribute: Set, place: str, value: Any) -> None:
    module, _, name = place.rpartition(".")
    found = _module(module)
    assert hasattr(found, name), f"{place} is gone: say in {__file__} what took its place"
    set_attribute(found, name, value)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise AssertionError(f"{name} is gone: say in {__file__} what took its place") from error
