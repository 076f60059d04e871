"""The receipts of a stage that hold: their files are there, and what they were made by still applies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.duplicates import merge_bytes
from tokshard.pipeline.tasks.hashing import hashes_bytes, hashes_path
from tokshard.pipeline.tasks.planning import Key, StreamTask, Task
from tokshard.pipeline.tasks.rejects import rejects_path
from tokshard.pipeline.workspace.places import Stage, Workspace
from tokshard.pipeline.workspace.receipts import Receipt, read_receipts, receipt_name, receipt_path, receipts_of
from tokshard.store import Store, present


def valid_receipts(
    context: WorkerContext,
    bad_inputs: Collection[int],
    *,
    tasks: Iterable[Task | StreamTask] | None = None,
    is_discarding: bool = True,
) -> Iterator[Receipt]:
    """The receipts of a stage, without their sources.

    Those that left out other duplicates than `context.drops`, are about an input that was left out since, or promise
    a file that is gone or has another size are discarded: their tasks run again.

    Args:
        tasks: whose receipts are looked at; None: all.
        is_discarding: False if those that do not hold stay where they are.
    """
    workspace = context.workspace
    drops = "" if context.drops is None else context.drops.digest
    shards_there = [output.shard_sizes() for output in context.outputs]
    others_there = _sizes(workspace.store, workspace.rejects, workspace.hashes)
    for receipt, shards in read_receipts(workspace, None if tasks is None else _belongs_to(tasks)):
        is_wanted = receipt.drops == drops and not any(index in bad_inputs for index in receipt.inputs)
        if is_wanted and _has_its_files(workspace, receipt, shards, shards_there, others_there):
            yield receipt.without_sources()
        elif is_discarding:
            discard_receipt(workspace, receipt.key)


def _belongs_to(tasks: Iterable[Task | StreamTask]) -> Callable[[Key], bool]:
    keys, streams = set[Key](), set[int]()
    for task in tasks:
        if isinstance(task, StreamTask):
            streams.add(task.key[0])
        else:
            keys.add(task.key)
    return lambda key: key in keys or key[0] in streams


def valid_merges(workspace: Workspace, tasks: Iterable[Task]) -> Iterator[Receipt]:
    """The receipts of tasks that merge: of those that were done, from the same rows, and whose file is there."""
    there = present(workspace.store, workspace.receipts)
    done = [task for task in tasks if task.merge is not None and f"{receipt_name(task.key)}.arrow" in there]
    sizes = _sizes(workspace.store, workspace.hashes)
    for task, (receipt, _) in zip(done, receipts_of(workspace, [task.key for task in done]), strict=True):
        assert task.merge is not None
        num_bytes = merge_bytes(task.merge, receipt.rows)
        if receipt.merge == task.merge.digest and sizes.get(hashes_path(workspace, task.key)) == num_bytes:
            yield receipt
        else:
            discard_receipt(workspace, task.key)


def _has_its_files(
    workspace: Workspace,
    receipt: Receipt,
    shards: Sequence[pa.RecordBatch],
    shards_there: Sequence[Mapping[str, int]],
    others_there: Mapping[str, int],
) -> bool:
    """Whether shards, rejects and hashes of a task are there, with the sizes that its receipt says."""
    key = receipt.key
    if receipt.num_rejects and others_there.get(rejects_path(workspace, key)) != receipt.rejects_bytes:
        return False
    if workspace.stage is Stage.HASHING:
        return others_there.get(hashes_path(workspace, key)) == hashes_bytes(receipt.parts)
    return all(
        there.get(name) == num_bytes
        for rows, there in zip(shards, shards_there, strict=True)
        for name, num_bytes in zip(rows.column("name").to_pylist(), rows.column("num_bytes").to_pylist(), strict=True)
    )


def _sizes(store: Store, *folders: str) -> dict[str, int]:
    """The files in some folders, with their sizes: one request for many, where a look at each would cost one each."""
    return {entry.name: entry.size for folder in folders for entry in store.list(folder)}


def discard_receipt(workspace: Workspace, key: Key) -> None:
    """Forget that a task was done."""
    workspace.store.delete(receipt_path(workspace, key), rejects_path(workspace, key))
