"""What tests reach into other rooms for: modules that they import, sizes that they shrink, functions that they replace.

All of it is named here and nowhere else, so that a change of the package's inside changes one module of the tests. A
name that has gone is an error: a size that is not shrunk would leave one task where a test wants twenty.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tokshard.store import PosixStore

Set = Callable[[Any, str, Any], None]
"""`setattr`, or the method of a `pytest.MonkeyPatch`, which undoes it."""

_CHUNKED = ("columns", "decompress", "delimited", "lines", "records")
_SIZES: Mapping[str, tuple[str, ...]] = {
    "chunk_bytes": (
        *(f"tokshard.pipeline.sources.{module}.CHUNK_BYTES" for module in _CHUNKED),
        "tokshard.pipeline.tasks.planning.CHUNK_BYTES",
    ),
    "segment_tasks": ("tokshard.pipeline.tasks.planning.SEGMENT_TASKS",),
    "part_texts": ("tokshard.pipeline.tasks.duplicates.PART_TEXTS",),
    "fence_rows": ("tokshard.pipeline.tasks.duplicates.FENCE_ROWS",),
    "hash_fan_out": ("tokshard.pipeline.tasks.duplicates.HASH_FAN_OUT",),
    "hash_rows": ("tokshard.pipeline.tasks.duplicates.BUCKET_ROWS",),
    "fan_in": tuple(
        f"tokshard.pipeline.{module}.FAN_IN" for module in ("stages", "tasks.exchange", "tasks.duplicates")
    ),
    "max_drop_files": ("tokshard.pipeline.stages.MAX_DROP_FILES",),
    "copy_task_tokens": ("tokshard.pipeline.tasks.planning.TASK_TOKENS",),
    "copy_fan_out": ("tokshard.pipeline.tasks.exchange.FAN_OUT",),
    "copy_bucket_bytes": ("tokshard.pipeline.tasks.shuffle.BUCKET_BYTES",),
    "copy_deal_bytes": ("tokshard.pipeline.tasks.exchange.DEAL_BYTES",),
    "copy_slice_tokens": (
        "tokshard.pipeline.tasks.shuffle.SLICE_TOKENS",
        "tokshard.pipeline.sources.corpora.SLICE_TOKENS",
    ),
    "short_tokens": ("tokshard.pipeline.tasks.exchange.SHORT_TOKENS",),
    "import_batch_bytes": ("tokshard.interop.tokens.located.BATCH_BYTES", "tokshard.interop.tokens.flat.BATCH_BYTES"),
    "import_piece_bytes": ("tokshard.interop.tokens.samples._PIECE",),
    "import_documents": ("tokshard.interop.tokens.located._DOCUMENTS_AT_ONCE",),
    "batch_tokens": ("tokshard.format.writer.MAX_BATCH_TOKENS",),
    "ordinal_stride": (
        "tokshard.format.writer.ORDINAL_STRIDE",
        "tokshard.format.shard_table.ORDINAL_STRIDE",
        "tokshard.runtime.bytes.places.ORDINAL_STRIDE",
    ),
    "hash_stride": (
        "tokshard.format.stride_hashes.HASH_STRIDE",
        "tokshard.runtime.bytes.places.HASH_STRIDE",
        "tokshard.runtime.bytes.ranged.HASH_STRIDE",
    ),
    "whole_table_bytes": ("tokshard.format.tables._WHOLE_BYTES",),
    "view_rows": (
        "tokshard.format.kept._RANGES_AT_ONCE",
        "tokshard.format.kept._FEWEST_AT_ONCE",
        "tokshard.inspect.verify.view_check._ROWS_AT_ONCE",
        "tokshard.runtime.bytes.view._SORTED_FROM",
    ),
    "join_rows": ("tokshard.pipeline.sources.joined.MAX_ROWS",),
    "view_masked": ("tokshard.format.view._MASKED_BELOW",),
    "view_joined": ("tokshard.runtime.bytes.view._JOINED_DOCUMENTS",),
    "dealt_rows": ("tokshard.runtime.rows.steps._MAX_DEALT_ROWS",),
    "memory_seconds": ("tokshard.inspect.plan.bench._MEMORY_SECONDS",),
}
"""The sizes that can be shrunk, and where each is looked up."""

TINY: Mapping[str, int] = {
    # a few dozen texts need every step of the search for duplicates, most of several tasks
    "part_texts": 5,
    "fence_rows": 2,
    "hash_fan_out": 4,
    "hash_rows": 32,
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

MERGES: Mapping[str, int] = {
    "part_texts": 3,
    "fence_rows": 2,
    "hash_fan_out": 2,
    "hash_rows": 4,
    "fan_in": 2,
    "max_drop_files": 1,
    "copy_fan_out": 3,
}
"""Sizes with which a few texts need every step of the search for duplicates."""

RECEIPT = r"\.tokshard-build/[\w-]+/receipts/"
"""A pattern of the paths of receipts."""

PROMISED = r"(^|/)(receipts/|rejects/|files/|shard-)"
"""A pattern of the paths of what an unfinished build goes by when it continues."""

HASHES = r"open .*/\.[0-9]{7}-[0-9]{6}\.bin"
"""A pattern of the step with which a task begins to write down hashes."""

MERGED_HASHES = r"replace .*/(find|hash-\d+|find-\d+)/files/"
"""A pattern of the step with which a task of the search for duplicates puts its file in place."""

PREPARES = r"open .*/\.tokenizer\.json"
"""A pattern of a step of a job that prepares a build for the others."""

LOCK = ".tokshard-build/lock"
"""The file whose holder writes into a directory, and says there who it is."""

BEGINS = r"replace .*/build\.json$"
"""A pattern of the step after which a directory holds a build."""

FILES_OF = {"hash": "hash/files", "find": "find/files"}
"""Folders of the hashes of texts, and of what the search for duplicates has found, by stage."""

REJECTS, RECEIPTS = "write/rejects", "write/receipts"
"""Folders of the bad records and the receipts of tasks that write."""

_COMMANDS = (
    "tokshard.cli.build",
    "tokshard.cli.build_run",
    "tokshard.cli.commit",
    "tokshard.cli.recipe",
    "tokshard.cli.status",
)
_OF_TRAINERS = (
    "tokenizers",
    "torch._dynamo",
    "torch.utils.data",
    "tokshard.run_files.torch_checkpoints",
    "tokshard.runtime.tensors",
    "tokshard.trainer.loop",
)
_LAZILY_IMPORTED = ("pyarrow.compute", "pyarrow.dataset", "pyarrow.feather", "pyarrow.fs", "pyarrow.parquet")


def shrink(set_attribute: Set = setattr, **sizes: float) -> None:
    """Set sizes of the package, in this process and in workers that are forked from it.

    Args:
        sizes: names of `_SIZES`. With small chunks, a stream has as many segments as other inputs have tasks.
    """
    if "chunk_bytes" in sizes:
        sizes.setdefault("segment_tasks", 1)
    for name, value in sizes.items():
        for place in _SIZES[name]:
            _set(set_attribute, place, value)


def on_disk(set_attribute: Set, **methods: Callable[..., Any]) -> None:
    """Replace methods of the store of files on this machine: `get`, `put`, `open`, `read`, ..."""
    for name, method in methods.items():
        assert hasattr(PosixStore, name), f"PosixStore.{name} is gone: say in {__file__} what took its place"
        set_attribute(PosixStore, name, method)


def options_of_build_recipes() -> Mapping[str, Any]:
    """The options of `tokshard build` that a recipe may have, by their keys."""
    build, recipe = (importlib.import_module(f"tokshard.cli.{name}") for name in ("build", "recipe"))
    found: Mapping[str, Any] = recipe.options_of_recipes(build.build)
    return found


def without_the_library_of_pages(set_attribute: Set) -> None:
    """Pages are written without the library that draws, which is large."""
    _set(set_attribute, "tokshard.inspect.page.page.plotly_source", lambda: "/* the library */")


def import_commands(*more: str) -> None:
    """Import all that a build, an import, a copy or a status may import while it runs, and more commands."""
    for module in (*_COMMANDS, *(f"tokshard.cli.{name}" for name in more), *_LAZILY_IMPORTED):
        _module(module)


def import_trainer() -> None:
    """Import what programs that train, and most other commands and examples of the pages, import while they run."""
    import_commands("inspect", "trace")
    for module in _OF_TRAINERS:
        _module(module)


def start_the_server_of_workers() -> None:
    """Worker processes are forked from a server, which imports what builds need."""
    _module("tokshard.pipeline.executors.worker").prepare_workers()


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


@contextlib.contextmanager
def reads_that_hang(file_name: str) -> Iterator[None]:
    """Reads of a file in a directory do not come back before the block ends."""
    over, read = threading.Event(), _module("tokshard.store.posix").PosixStore.read

    def hang(store: Any, name: str, *arguments: Any, **options: Any) -> Any:
        if name == file_name:
            over.wait(100)
        return read(store, name, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokshard.store.posix.PosixStore.read", hang)
        yield
        over.set()


@contextlib.contextmanager
def rows_of_views() -> Iterator[list[int]]:
    """How many rows of the tables of views are read, a number for each time."""
    numbers, read = [], _get("tokshard.format.kept.Ascending").__getitem__

    def counted(column: Any, rows: Any) -> Any:
        numbers.append(len(rows))
        return read(column, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokshard.format.kept.Ascending.__getitem__", counted)
        yield numbers


@contextlib.contextmanager
def when_a_status_has_read_what_was_asked_for(call: int, act: Callable[[], object]) -> Iterator[None]:
    """Do something at the moment after a status has read, for the first or another time, which build it is about."""
    place = "tokshard.pipeline.status.load_request"
    load, calls = _get(place), itertools.count(1)

    def load_request(*arguments: Any) -> Any:
        found = load(*arguments)
        if next(calls) == call:
            act()
        return found

    with pytest.MonkeyPatch.context() as patch:
        _set(patch.setattr, place, load_request)
        yield
    assert next(calls) > call


def _get(place: str) -> Any:
    module, _, name = place.rpartition(".")
    return getattr(_module(module), name)


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


FACES: Mapping[str, str] = {
    "tokshard.cli.main": "runs a command line in this process",
    "tokshard.format.loss": "the columns of loss spans and weights",
    "tokshard.format.manifest": "the manifest of a corpus, as values",
    "tokshard.format.names": "the names of the files of a corpus",
    "tokshard.format.opening": "opens a corpus, and reads its manifest alone",
    "tokshard.format.schema": "the limits and the version of the format",
    "tokshard.inspect.plan.run": "opens the plan of a job as the commands do",
    "tokshard.inspect.verify.verification": "verifies a corpus",
    "tokshard.run_files.checkpoint_directory": "the checkpoints of the trainer",
    "tokshard.run_files.model_shape": "the sizes of a model",
    "tokshard.run_files.recipe": "the recipe of a run",
    "tokshard.run_files.saved_state": "finds the state of a loader in a checkpoint of any kind",
    "tokshard.run_files.torch_checkpoints": "reads checkpoints of torch",
    "tokshard.runtime.order.mixture": "the shares of a mixture, which promise 6 bounds",
    "tokshard.runtime.plan": "the plan, under its home",
    "tokshard.runtime.tensors": "the loader, under its home",
    "tokshard.trainer.loop": "trains",
}
"""The inner modules that tests of other rooms may import, and why. `tests/architecture/test_coupling.py` checks it."""
