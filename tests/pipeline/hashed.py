"""What tasks that hash leave behind, made up."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokshard.format.files import HashingFile
from tokshard.pipeline.tasks.hashing import hashes_path, no_shards
from tokshard.pipeline.tasks.sorted_rows import RunWriter
from tokshard.pipeline.workspace.places import Workspace
from tokshard.pipeline.workspace.receipts import OutputCounts, Receipt, write_receipt
from tokshard.store import written


def leave_hashes(workspace: Workspace, index: int, hashes: NDArray[np.uint64]) -> Receipt:
    """The file and the receipt of the task with this number, whose texts have these hashes: uint64 [n, 2]."""
    order = np.argsort(hashes[:, 0], kind="stable")
    rows = np.column_stack([hashes[order], order.astype(np.uint64)])
    _, first = np.unique(rows[:, 0], return_index=True)
    repeats = np.setdiff1d(order, order[first]).astype("<u4")
    with written(workspace.store, hashes_path(workspace, (index, 0))) as file:
        hashing = HashingFile(file)
        writer = RunWriter(hashing)
        writer.append(rows[first])
        writer.finish()
        hashing.write(repeats.tobytes())
        digest = hashing.digest().hex()
    receipt = Receipt(
        key=(index, 0),
        previous=None,
        is_last=True,
        max_documents=None,
        input_bytes=0,
        outputs=[OutputCounts(sources=[])],
        num_rejects=0,
        parts=[(len(first), len(repeats))],
        hashes=digest,
    )
    write_receipt(workspace, receipt, [no_shards()])
    return receipt
