"""The receipts of a stage that hold: those whose files are there, and that were made by what still applies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import pyarrow as pa

from tokshard.pipeline.commit import shard_sizes
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.hashing import hashes_bytes, hashes_path
from tokshard.pipeline.tasks.planning import Key
from tokshard.pipeline.tasks.rejects import rejects_path
from tokshard.pipeline.workspace.places import Stage, Workspace
from tokshard.pipeline.workspace.receipts import Receipt, read_receipts, receipt_path


def valid_receipts(context: WorkerContext, bad_inputs: Collection[int]) -> Iterator[Receipt]:
    """The receipts of a stage, without their sources.

    Those that left out other duplicates than `context.drops`, are about an input that was left out since, or promise
    a file that is gone or has another size are discarded: their tasks run again.
    """
    workspace = context.workspace
    drops = "" if context.drops is None else context.drops.digest
    sizes = [shard_sizes(output.store) for output in context.outputs]
    for receipt, shards in read_receipts(workspace):
        is_wanted = receipt.drops == drops and not any(index in bad_inputs for index in receipt.inputs)
        if is_wanted and _has_its_files(workspace, receipt, shards, sizes):
            yield receipt.without_sources()
        else:
            discard_receipt(workspace, receipt.key)


def _has_its_files(
    workspace: Workspace, receipt: Receipt, shards: Sequence[pa.RecordBatch], sizes: Sequence[Mapping[str, int]]
) -> bool:
    """Whether shards, rejects and hashes of a task are there and as long as its receipt says."""
    if receipt.num_rejects and not _has_size(workspace, rejects_path(workspace, receipt.key), receipt.rejects_bytes):
        return False
    if workspace.stage is Stage.HASHING:
        return _has_size(workspace, hashes_path(workspace, receipt.key), hashes_bytes(receipt.runs))
    return all(
        found.get(name) == num_bytes
        for rows, found in zip(shards, sizes, strict=True)
        for name, num_bytes in zip(rows.column("name").to_pylist(), rows.column("num_bytes").to_pylist(), strict=True)
    )


def _has_size(workspace: Workspace, name: str, num_bytes: int) -> bool:
    try:
        return workspace.store.stat(name).size == num_bytes
    except OSError:
        return False


def discard_receipt(workspace: Workspace, key: Key) -> None:
    """Forget that a task was done."""
    workspace.store.delete(receipt_path(workspace, key), rejects_path(workspace, key))
