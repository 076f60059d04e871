"""The first stage of ``--dedup exact``: each task leaves the sorted hashes of its texts.

The file of a task is a sequence of *runs* of at most `RUN_TEXTS` texts: for each distinct hash of the run, ascending,
the high and the low half and the place of its first text (three arrays of uint64, uint64, uint32), then the places of
the texts that repeat an earlier one of the run (uint32). A place counts the texts of the task that could become a
document.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from tokshard.format.arrays import table_batch
from tokshard.format.tables import SHARD_TABLE_SCHEMA
from tokshard.pipeline.sources.records import EMPTY, Records
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.planning import Key
from tokshard.pipeline.tasks.rejects import RejectsFile
from tokshard.pipeline.workspace.places import Workspace
from tokshard.pipeline.workspace.receipts import (
    OutputCounts,
    Progress,
    Receipt,
    SourceCounts,
    receipt_name,
    write_receipt,
)
from tokshard.store import written

RUN_TEXTS = 1 << 20
"""Texts that a task holds the hashes of: 16 MiB of hashes, and 60 MB at the peak while they are sorted."""

_HASH_BYTES = 16


def hashes_path(workspace: Workspace, key: Key) -> str:
    """The file of a task."""
    return f"{workspace.hashes}/{receipt_name(key)}.bin"


def hashes_bytes(runs: Sequence[tuple[int, int]]) -> int:
    """Size of the file of a task with these runs, each of so many distinct hashes and repeats."""
    return sum(20 * distinct + 4 * repeats for distinct, repeats in runs)


def text_hashes(texts: Sequence[str]) -> bytes:
    """16 bytes of BLAKE2b for each text, one after another; 1 CPU-second per GB, and 0.6 us per text."""
    return b"".join(hashlib.blake2b(text.encode(), digest_size=_HASH_BYTES).digest() for text in texts)


class TextHashers:
    """Makes a `HashingTask` for each task."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def begin(self, key: Key, sources: Sequence[int], cap: int | None) -> HashingTask:
        """A task to hash, as a context."""
        return HashingTask(self._context, key, sources, cap)


class HashingTask:
    """The texts of one task become a file of hashes and a receipt. It reads all, whatever the limit on documents."""

    is_full = False

    def __init__(self, context: WorkerContext, key: Key, sources: Sequence[int], cap: int | None) -> None:
        self._workspace, self._key, self._cap = context.workspace, key, cap
        self._counts = {index: SourceCounts(index=index) for index in sources}
        self._rejects = RejectsFile(context, key)
        self._hashes = bytearray()
        self._digest = hashlib.blake2b(digest_size=8)
        self._admitted = 0
        self._runs: list[tuple[int, int]] = []
        self._input_bytes = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._rejects)
        name = hashes_path(self._workspace, self._key)
        self._file: IO[bytes] = self._stack.enter_context(written(self._workspace.store, name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def take(self, index: int, records: Records) -> Progress:
        """Hash the texts of a chunk of an input, which makes no documents yet."""
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
        for start in range(0, len(records.texts), RUN_TEXTS):
            self._hashes += text_hashes(records.texts[start : start + RUN_TEXTS])
            if len(self._hashes) >= RUN_TEXTS * _HASH_BYTES:
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
            cap=self._cap,
            input_bytes=self._input_bytes,
            outputs=[OutputCounts(sources=list(self._counts.values()))],
            num_rejects=self._rejects.count,
            rejects_bytes=self._rejects.num_bytes,
            runs=self._runs,
            hashes=self._digest.hexdigest(),
        )
        no_shards = table_batch({name: [] for name in SHARD_TABLE_SCHEMA.names}, SHARD_TABLE_SCHEMA)
        write_receipt(self._workspace, receipt, [no_shards])
        return receipt

    def _flush(self) -> None:
        count = len(self._hashes) // _HASH_BYTES
        if not count:
            return
        high, low = np.frombuffer(bytes(self._hashes), "<u8").reshape(-1, 2).T
        order, is_repeat = sorted_repeats(high, low)
        first = order[~is_repeat]
        repeats = np.sort(order[is_repeat])
        places = [(chosen + self._admitted).astype("<u4") for chosen in (first, repeats)]
        for column in (high[first], low[first], *places):
            content = column.tobytes()
            self._file.write(content)
            self._digest.update(content)
        self._runs.append((len(first), len(repeats)))
        self._admitted += count
        self._hashes = bytearray()


def sorted_repeats(high: NDArray[Any], low: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The order that sorts hashes, equal ones as they came; and for each, so ordered, if it repeats the one before."""
    order = np.lexsort((low, high))
    high, low = high[order], low[order]
    is_repeat = np.zeros(len(order), np.bool_)
    is_repeat[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    return order, is_repeat
