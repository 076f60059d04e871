"""The first stage of ``--dedup exact``: each task leaves the sorted hashes of its texts.

The file of a task is a sequence of *parts* of at most `PART_TEXTS` texts each: a run of rows (see `sorted_rows`) with
the high and the low half of each distinct hash of the part and the place of its first text, then the places of the
texts that repeat an earlier one of the part (uint32). A place counts the texts of the task that could be documents.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.format.arrays import table_batch
from tokshard.format.files import HashingFile
from tokshard.format.tables import WRITTEN_SHARD_SCHEMA
from tokshard.interop.tokens.batches import TokenBatch
from tokshard.pipeline.sources.records import EMPTY, Records
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.planning import Key
from tokshard.pipeline.tasks.rejects import RejectsFile
from tokshard.pipeline.tasks.sorted_rows import Run, RunWriter, read_parts, run_bytes
from tokshard.pipeline.workspace.places import Workspace
from tokshard.pipeline.workspace.receipts import (
    OutputCounts,
    Progress,
    Receipt,
    SourceCounts,
    receipt_name,
    write_receipt,
)
from tokshard.store import Store, written

PART_TEXTS = 1 << 20
"""Texts that a task holds the hashes of: 16 MiB of hashes, and 100 MB at the peak while they are sorted."""

ROW_WIDTH = 3
"""High and low half of the hash, and the place."""

_HASH_BYTES = 16


def hashes_path(workspace: Workspace, key: Key) -> str:
    """The file of a task of one of the stages that sort."""
    return f"{workspace.hashes}/{receipt_name(key)}.bin"


def hashes_bytes(parts: Sequence[tuple[int, int]]) -> int:
    """Size of the file of a task with these parts, each of so many distinct hashes and repeats."""
    return sum(run_bytes(distinct, ROW_WIDTH) + 4 * repeats for distinct, repeats in parts)


def hash_runs(name: str, parts: Sequence[tuple[int, int]], base: int) -> list[Run]:
    """The runs of the file of a task.

    Args:
        base: of their places.
    """
    runs, offset, file_bytes = [], 0, hashes_bytes(parts)
    for distinct, repeats in parts:
        runs.append(Run(name=name, file_bytes=file_bytes, offset=offset, count=distinct, width=ROW_WIDTH, base=base))
        offset += run_bytes(distinct, ROW_WIDTH) + 4 * repeats
    return runs


def read_repeats(store: Store, name: str, parts: Sequence[tuple[int, int]]) -> NDArray[np.uint32]:
    """The places of the texts of a task that repeat an earlier one of the same part: uint32, ascending.

    Raises:
        BuildError: the file cannot be read.
    """
    places, offset = [], 0
    for distinct, repeats in parts:
        offset += run_bytes(distinct, ROW_WIDTH)
        places.append((offset, 4 * repeats))
        offset += 4 * repeats
    if not any(repeats for _, repeats in parts):
        return np.empty(0, np.uint32)
    return np.frombuffer(b"".join(read_parts(store, name, places)), "<u4")


def no_shards() -> pa.RecordBatch:
    """The shards of a task that writes none, for its receipt."""
    return table_batch({name: [] for name in WRITTEN_SHARD_SCHEMA.names}, WRITTEN_SHARD_SCHEMA)


def text_hashes(texts: Sequence[str]) -> bytes:
    """16 bytes of BLAKE2b for each text, one after another; 1 CPU-second per GB, and 0.6 us per text."""
    return b"".join(hashlib.blake2b(text.encode(), digest_size=_HASH_BYTES).digest() for text in texts)


class TextHashers:
    """Makes a `HashingTask` for each task."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def begin(self, key: Key, sources: Sequence[int], max_documents: int | None) -> HashingTask:
        """A task to hash, as a context."""
        return HashingTask(self._context, key, sources, max_documents)


class HashingTask:
    """The texts of one task become a file of hashes and a receipt. It reads all, whatever the limit on documents."""

    is_full = False

    def __init__(self, context: WorkerContext, key: Key, sources: Sequence[int], max_documents: int | None) -> None:
        self._workspace, self._key, self._max_documents = context.workspace, key, max_documents
        self._counts = {index: SourceCounts(index=index) for index in sources}
        self._rejects = RejectsFile(context, key)
        self._hashes = bytearray()
        self._admitted = 0
        self._parts: list[tuple[int, int]] = []
        self._input_bytes = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._rejects)
        name = hashes_path(self._workspace, self._key)
        self._file = HashingFile(self._stack.enter_context(written(self._workspace.store, name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def take(self, index: int, records: Records | TokenBatch) -> Progress:
        """Hash the texts of a chunk of an input, which makes no documents yet."""
        assert isinstance(records, Records), "duplicates are only looked for among texts"
        counts = self._counts[index]
        if records.bad:
            self._rejects.add(index, counts.records_read, records.bad)
        reasons = [*(reason for _, reason in records.passed_over), *(record.reason for record in records.bad)]
        for reason in reasons:
            counts.left_out[reason] = counts.left_out.get(reason, 0) + 1
        if num_empty := records.count - len(records.texts) - len(reasons):
            counts.left_out[EMPTY] = counts.left_out.get(EMPTY, 0) + num_empty
        counts.records_read += records.count
        counts.documents += len(records.texts)
        self._input_bytes += records.input_bytes
        for start in range(0, len(records.texts), PART_TEXTS):
            self._hashes += text_hashes(records.texts[start : start + PART_TEXTS])
            if len(self._hashes) >= PART_TEXTS * _HASH_BYTES:
                self._flush()
        bad = records.bad
        example = f"{bad[0].reason}: {bad[0].detail}" if bad else ""
        return Progress(records.input_bytes, 0, 0, records.count, len(bad), example)

    def finish(self, *, previous: int | None, is_last: bool) -> Receipt:
        """Publish hashes and rejects, and last the receipt."""
        self._flush()
        self._rejects.publish()
        self._stack.close()
        receipt = Receipt(
            key=self._key,
            previous=previous,
            is_last=is_last,
            max_documents=self._max_documents,
            input_bytes=self._input_bytes,
            outputs=[OutputCounts(sources=list(self._counts.values()))],
            num_rejects=self._rejects.count,
            rejects_bytes=self._rejects.num_bytes,
            parts=self._parts,
            hashes=self._file.digest().hex(),
        )
        write_receipt(self._workspace, receipt, [no_shards()])
        return receipt

    def _flush(self) -> None:
        count = len(self._hashes) // _HASH_BYTES
        if not count:
            return
        high, low = np.frombuffer(bytes(self._hashes), "<u8").reshape(-1, 2).T
        order, is_repeat = sorted_repeats(high, low)
        first = order[~is_repeat]
        repeats = (np.sort(order[is_repeat]) + self._admitted).astype("<u4")
        rows = np.stack([high[first], low[first], (first + self._admitted).astype(np.uint64)], axis=1)
        writer = RunWriter(self._file)
        writer.append(rows)
        writer.finish()
        self._file.write(repeats.tobytes())
        self._parts.append((len(first), len(repeats)))
        self._admitted += count
        self._hashes = bytearray()


def sorted_repeats(high: NDArray[Any], low: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The order that sorts hashes, equal ones as they came; and for each, so ordered, if it repeats the one before."""
    order = np.argsort(high, kind="stable")
    is_repeat, is_equal_high = _repeats(high, low, order)
    if is_repeat.sum() != is_equal_high.sum():  # two hashes with the same high half: by chance, once in 10^9 texts
        order = np.lexsort((low, high))
        is_repeat, _ = _repeats(high, low, order)
    return order, is_repeat


def _repeats(
    high: NDArray[Any], low: NDArray[Any], order: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For each hash in this order, whether it is equal to the one before, and whether its high half is."""
    is_equal_high, is_repeat = np.zeros(len(order), np.bool_), np.zeros(len(order), np.bool_)
    high = high[order]
    is_equal_high[1:] = high[1:] == high[:-1]
    low = low[order]
    is_repeat[1:] = is_equal_high[1:] & (low[1:] == low[:-1])
    return is_repeat, is_equal_high
